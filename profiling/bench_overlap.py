"""Measure schedules of communication against computation: makespans, how far from the bound, and on an emulated wire.

Known figures: PaddlePaddle's two examples, and ByteScheduler's. Published: one bandwidth, fitted on the baseline of a
row, predicts ByteScheduler's rate; its two sizes were chosen among seven pairs on these rows. Data parallelism: a step
from its first gradient to the end of the next forward, six models on networks with two start-up costs; ByteScheduler's
sizes are tuned by grid and by 15 trials. Tensor and data parallelism: one stream, random seconds, 24 steps a row.
Programs: the last micro-batch of a Llama of four layers merged with its update, on prices of a CPU, with communication
scaled to a share of computation. The wire: ``overlap_wire``.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import overlap_wire
from overlap_steps import MODELS, PUBLISHED, Published, data_parallel, networks, push_and_pull, tensor_parallel
from tables import Row, printed

from autopar.scheduling import ByteScheduler, Line, Op, Part, schedule, simulate
from autopar.scheduling.bounds import bound
from autopar.scheduling.list_scheduling import arrange
from autopar.scheduling.longest_tail import LongestTail

LINES = [arrange, bound, LongestTail.found]
WAITED = [
    Op("reduce", "dp", 4.0),
    Op("wait", "compute", 0.0, ("reduce",)),
    Op("first", "compute", 2.0),
    Op("second", "compute", 2.0),
]
LATE = [*(Op(f"op{i}", "compute", 2.0) for i in (1, 2, 3)), Op("comm", "dp", 4.0, ("op3",))]
SIZES = ByteScheduler(4 * 2**20, 16 * 2**20, fused=False)  # of the published table
STARTUPS = (0.0, 0.06)  # of a mean all-reduce
MEAN = 0.75  # seconds of an all-reduce of ``tensor_parallel``
LAYERS, DRAWS = (4, 8, 16), 8
SHARES = (2 / 3, 1.0)  # communication of computation
PROGRAMS: dict[str, tuple[dict[str, int], str, dict[str, Any]]] = {  # title → mesh, plan, options of the step
    "tp=2": ({"tp": 2}, "megatron", {}),
    "dp=2 tp=2": ({"dp": 2, "tp": 2}, "megatron", {}),
    "dp=2 tp=2, sp": ({"dp": 2, "tp": 2}, "megatron+sp", {}),
    "dp=4, zero=3": ({"dp": 4}, "ddp", {"zero": 3}),
    "dp=4": ({"dp": 4}, "ddp", {}),
}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS))


# -- known figures -----------------------------------------------------------------------------------------------------


def contrived(streams: int, piece: int | None) -> list[Op]:
    """ByteScheduler's example: three layers of forward = backward = 2, and tensors of 3, 6 and 3."""
    ops = [Op("backward3", "compute", 2.0)]
    ops += [Op(f"backward{k}", "compute", 2.0, (f"backward{k + 1}",)) for k in (2, 1)]
    pulls: dict[int, list[str]] = {}
    for layer, size in ((3, 3), (2, 6), (1, 3)):
        count = size // (piece or size)
        for n in range(count):
            push, pull, bytes = f"push{layer}.{n}", f"pull{layer}.{n}", size // count
            ops.append(Op(push, "push", size / count, (f"backward{layer}",), bytes=bytes))
            if streams == 2:
                ops.append(Op(pull, "pull", size / count, (push,), bytes=bytes))
            pulls.setdefault(layer, []).append(pull if streams == 2 else push)
    for layer in (1, 2, 3):
        before = f"forward{layer - 1}" if layer > 1 else "backward1"
        ops.append(Op(f"forward{layer}", "compute", 2.0, (before, *pulls[layer])))
    return ops


def known() -> str:
    reduce, wait, first, second = ((Part(op.name, 0, 0),) for op in WAITED)
    late = [Line("compute", first), Line("compute", second), Line("start", reduce), Line("wait", reduce),
            Line("compute", wait)]  # fmt: skip
    unit = ByteScheduler(1, 1)
    found = [
        ("all-reduce 4 and its wait, op 2, op 2, enqueued: communication first", 8,
         schedule(WAITED, "communication-first").makespan),
        ("the same, computation first", 4, schedule(WAITED, "compute-first").makespan),
        ("on a CPU: start, op, op, wait", 4, schedule(WAITED, issue="direct").makespan),
        ("on a CPU: op, op, start, wait", 8, simulate(WAITED, late, "direct").makespan),
        ("2, 2, 2 → communication 4: in program order", 10, schedule(LATE, "program").makespan),
        ("the same, longest tail", 6, schedule(LATE).makespan),
        ("ByteScheduler's example, push and pull: FIFO", 26, schedule(contrived(2, None), "program").makespan),
        ("the same, ByteScheduler, P = C = 1", 18, schedule(contrived(2, 1), unit).makespan),
        ("the same, longest tail", 18, schedule(contrived(2, 1)).makespan),
        ("ByteScheduler's example, one all-reduce: FIFO", 20, schedule(contrived(1, None), "program").makespan),
        ("the same, ByteScheduler, P = C = 1", 17, schedule(contrived(1, None), unit).makespan),
        ("the same, longest tail", 17, schedule(contrived(1, None)).makespan),
    ]  # fmt: skip
    rows = ((title, f"{aim}", f"{seconds:g}") for title, aim, seconds in found)
    return printed("Known figures", ("", "published", "found"), rows)


# -- ByteScheduler's table ---------------------------------------------------------------------------------------------


def rate(row: Published, ops: list[Op], policy: str | ByteScheduler) -> float:
    """Images a second."""
    return row.gpus / schedule(ops, policy).makespan


def fitted(row: Published) -> float:
    """The bandwidth with which whole tensors, first in first out, reach the baseline."""
    low, high = 1e8, 1e13
    for _ in range(50):
        middle = (low * high) ** 0.5
        if rate(row, push_and_pull(row, middle), "program") < row.base:
            low = middle
        else:
            high = middle
    return high


def published() -> str:
    def rows() -> Iterator[Row]:
        for row in PUBLISHED:
            ops = push_and_pull(row, fitted(row), SIZES.partition)
            found = rate(row, ops, SIZES)
            yield (f"{row.model}, {row.gpus} GPUs", f"{row.base:.0f}", f"{row.scheduled:.0f}", f"{found:.0f}",
                   f"{found / row.scheduled - 1:+.1%}", f"{rate(row, ops, 'longest-tail'):.0f}",
                   f"{row.linear:.0f}")  # fmt: skip

    columns = ("images a second", "baseline", "ByteScheduler", "simulated", "difference", "longest tail", "linear")
    return printed(
        "Published, push and pull; the bandwidth fitted on the baseline, P = 4 MiB, C = 16 MiB chosen on these rows",
        columns,
        rows(),
    )


# -- data parallelism --------------------------------------------------------------------------------------------------


def plain() -> str:
    from autopar.scheduling.tuning import bayesian, grid

    worst = [0.0, 0.0, 0.0]

    def rows() -> Iterator[Row]:
        for model in MODELS:
            for title, network in networks():
                ops = data_parallel(model, network)
                made = schedule(ops, startup=network.startup)
                best = grid(ops, startup=network.startup).schedule
                trials = bayesian(ops, startup=network.startup).schedule
                today = schedule(ops, "today", startup=network.startup)
                found = made.ratio, made.makespan / best.makespan, trials.makespan / best.makespan
                worst[:] = map(max, worst, found)
                share = sum(op.seconds for op in ops if not op.computes) / sum(op.seconds for op in ops if op.computes)
                yield (model, title, f"{share:.2f}", f"{today.ratio:.3f}", f"{best.ratio:.3f}", f"{found[0]:.3f}",
                       f"{found[1]:.4f}", f"{found[2]:.3f}")  # fmt: skip

    columns = ("model", "network", "communication", "today", "ByteScheduler", "longest tail", "/ ByteScheduler",
               "15 trials / grid")  # fmt: skip
    table = printed("Data parallelism, of the bound; ByteScheduler fused and tuned by grid", columns, rows())
    return table + "".join(
        f"{what}: at most {value:.4f}, aim {aim} {'met' if value <= aim else 'missed'}\n"
        for what, value, aim in zip(
            ("longest tail / bound", "longest tail / ByteScheduler", "15 trials / grid"), worst, (1.04, 1.005, 1.02),
            strict=True,
        )
    )  # fmt: skip


# -- tensor and data parallelism ---------------------------------------------------------------------------------------


def mixed() -> str:
    def rows() -> Iterator[Row]:
        for share, aim in zip(STARTUPS, (1.09, 1.15), strict=True):
            startup = share * MEAN
            steps = [tensor_parallel(random.Random(k), layers, startup) for layers in LAYERS for k in range(DRAWS)]
            for policy in ("today", ByteScheduler(200_000, 800_000), "longest-tail"):
                ratios = [schedule(ops, policy, startup=startup).ratio for ops in steps]
                is_ours = policy == "longest-tail"
                verdict = f"<= {aim} {'met' if max(ratios) <= aim else 'missed'}" if is_ours else ""
                name = policy if isinstance(policy, str) else "ByteScheduler"
                yield f"{share:.0%}", name, f"{statistics.mean(ratios):.3f}", f"{max(ratios):.3f}", verdict

    columns = ("start-up cost", "policy", "mean", "worst", "aim")
    return printed("Tensor and data parallelism on one stream, of the bound", columns, rows())


# -- programs ----------------------------------------------------------------------------------------------------------


def program_of(axes: dict[str, int], plan: str, options: dict[str, Any]) -> list[Op]:
    """The ops of a training step of a Llama with four layers."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import autopar
    from autopar.costs.durations import durations
    from autopar.scheduling.programs.functions import functions_of, program_ops

    config = LlamaConfig(
        hidden_size=256, intermediate_size=688, num_hidden_layers=4, num_attention_heads=4, vocab_size=1000,
        max_position_embeddings=128, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    parallel = autopar.parallelize(LlamaForCausalLM(config), autopar.Mesh(**axes), plan)
    step = parallel.train_step(torch.optim.AdamW(parallel.parameters(), lr=1e-4), **options)
    ids = torch.randint(1000, (8, 128))
    step.capture({"input_ids": ids, "labels": ids})
    last = step._current().update.last[0]
    return program_ops(last, *functions_of(last, whole=True), durations(last, "cpu").seconds)


def scaled(ops: list[Op], share: float) -> list[Op]:
    """The ops with communication that takes a share of the seconds of computation."""
    computes = sum(op.seconds for op in ops if op.computes)
    factor = share * computes / sum(op.seconds for op in ops if not op.computes)
    return [op if op.computes else dataclasses.replace(op, seconds=op.seconds * factor) for op in ops]


def programs() -> str:
    def rows() -> Iterator[Row]:
        for title, case in PROGRAMS.items():
            ops = program_of(*case)
            for share in SHARES:
                these = scaled(ops, share)
                today, first, made = (schedule(these, name) for name in ("today", "compute-first", "longest-tail"))
                yield (title, str(len(ops)), f"{share:.2f}", f"{today.ratio:.3f}", f"{first.ratio:.3f}",
                       f"{made.ratio:.3f}", f"{today.makespan / made.makespan:.2f}")  # fmt: skip

    columns = ("Llama, 4 layers", "ops", "communication", "today", "compute-first", "longest tail", "faster than today")
    return printed("Programs, of the bound, enqueued, without start-up cost", columns, rows())


# -- on the emulated wire ----------------------------------------------------------------------------------------------


def wire() -> str:
    columns = ("case", "order", "ms", "simulated", "/ simulated", "× today", "losses apart", "late", "MB/s")
    title = "On the emulated wire: gloo processes, paced computation; medians of 10 steps"
    return printed(title, columns, iter(overlap_wire.rows(list(overlap_wire.CASES))))


PARTS: dict[str, Callable[[], str]] = {
    "known": known, "published": published, "data": plain, "tensor": mixed, "programs": programs, "wire": wire,
}  # fmt: skip


def run(options: argparse.Namespace) -> str:
    return "\n".join(PARTS[name]() for name in options.only)
