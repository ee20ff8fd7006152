"""Measure schedules on the emulated wire: real gloo processes, paced computing, transfers that take their price.

Each case is a training step of a small Llama on an invented machine. Ops are paced by its figures, which are longer
than the ops really take here. The bandwidth is such that communication takes a given share of computation. The same
figures decide the order. Policies run one after the other in the same processes.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.multiprocessing as multiprocessing
from step_rivals import fsdp2
from torch import distributed, nn

import autopar
from autopar.costs.durations import durations
from autopar.costs.machine import Link, Machine
from autopar.runtime.wire.clock import now
from autopar.scheduling.programs.functions import is_collective

OP_SECONDS, FLOPS = 450e-6, 1.33e9  # the least seconds of an op; operations a second
LATENCY = 60e-6
ROUNDS, STEPS, WARM = 2, 5, 2
TODAY = "today"


@dataclass(frozen=True)
class Case:
    """One row.

    Attributes:
        axes: the mesh.
        share: the seconds of communication, relative to those of computation.
        policies: name → options of the step.
        rivals: names of other systems that are measured beside.
        slow: a factor of the machine's times, where more processes share the cores.
    """

    title: str
    axes: dict[str, int]
    plan: str
    share: float
    policies: dict[str, dict[str, Any]]
    options: dict[str, Any] = field(default_factory=dict)
    rivals: tuple[str, ...] = ()
    slow: float = 1.0

    @property
    def ranks(self) -> int:
        return autopar.Mesh(self.axes).size


ORDERS: dict[str, dict[str, Any]] = {TODAY: {"overlap": TODAY}, "longest-tail": {"overlap": "longest-tail"}}
ACROSS: dict[str, dict[str, Any]] = {"longest-tail, across": {"overlap": "longest-tail", "across": True}}
CASES = {
    "dp": Case("dp=2, communication = compute", {"dp": 2}, "ddp", 1.0, {**ORDERS, **ACROSS}, rivals=("DDP",), slow=2),
    "tp": Case("tp=2, communication = 2/3 of compute", {"tp": 2}, "megatron", 2 / 3, ORDERS),
    "dp tp": Case("dp=2 tp=2, communication = 2/3", {"dp": 2, "tp": 2}, "megatron", 2 / 3, ORDERS, slow=2.5),
    "zero": Case(
        "dp=2, zero=3, communication = compute", {"dp": 2}, "ddp", 1.0, ORDERS, {"zero": 3}, rivals=("FSDP2",), slow=2
    ),
}


def machine(bandwidth: float, slow: float, op_seconds: float = OP_SECONDS) -> Machine:
    """A machine on which views are free, and products and launches take time: an op takes ``op_seconds`` at least."""
    link = Link(LATENCY * slow, bandwidth)
    memory = Link(op_seconds * slow, 1e15)
    return Machine("paced", "cpu", 64, link, link, memory, (("f32", FLOPS / slow), ("f64", FLOPS / slow)))


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=128, intermediate_size=344, num_hidden_layers=4, num_attention_heads=4, vocab_size=256,
        max_position_embeddings=64, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(256, (8, 64), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


def made(case: Case, on: Machine, options: dict[str, Any]) -> Any:
    """A step of the case, not captured yet."""
    parallel = autopar.parallelize(llama(), autopar.Mesh(case.axes), case.plan, machine=on)
    return parallel.train_step(torch.optim.SGD(parallel.parameters(), lr=1e-2), **case.options, **options)


def bandwidth_of(case: Case) -> float:
    """The bytes a second with which communication takes the case's share of computation."""
    probe = machine(1e9, case.slow)
    probe = replace(probe, inside=Link(0.0, 1e9), outside=Link(0.0, 1e9))
    step = made(case, probe, {"overlap": TODAY})
    step.capture(**batch())
    program = step._current().update.last[0]
    seconds = durations(program, probe).seconds
    sent = sum(seconds[node.name] for node in program.nodes if node.op == "call_function" and is_collective(node))
    return 1e9 * sent / (case.share * (sum(seconds.values()) - sent))


class Paced(nn.Module):
    """A layer whose forward and backward take as long as its product on a machine, whatever they really take.

    Args:
        attends: whether its input, ``[rows, sequence, width]``, is what an attention has made, whose two products, and
            five in the backward, count as well.
    """

    def __init__(self, layer: nn.Linear, pacer: Any, on: Machine, attends: bool = False) -> None:
        super().__init__()
        self.layer, self.pacer, self.on, self.attends = layer, pacer, on, attends

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight: Any = self.layer.weight
        piece = weight.to_local() if hasattr(weight, "to_local") else weight  # of a DTensor
        multiplied = 2 * x.numel() // x.shape[-1] * piece.numel()
        product = multiplied / self.on.flops(torch.float32) + self.on.memory.latency
        attention = 2 * x.numel() * x.shape[-2] / self.on.flops(torch.float32) if self.attends else 0.0
        self.pacer.begin()
        y = self.layer(x)
        self.pacer.computed(product + 2 * attention)
        # its backward runs before that of the layer: the gradient of the weight comes after the time of both products
        return _Delay.apply(y, self.pacer, 2 * product + 5 * attention)


class _Delay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, pacer: Any, seconds: float) -> torch.Tensor:
        ctx.pacer, ctx.seconds = pacer, seconds
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.pacer.begin()
        ctx.pacer.computed(ctx.seconds)
        return gradient, None, None


def paced(model: nn.Module, pacer: Any, on: Machine) -> nn.Module:
    """The model with paced products; other ops take what they really take."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                setattr(module, name, Paced(child, pacer, on, attends=name == "o_proj"))
    return model


RIVALS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "DDP": nn.parallel.DistributedDataParallel,
    "FSDP2": lambda model: fsdp2(model, distributed.get_world_size()),
}


def rival(name: str, case: Case, on: Machine, wire: Any) -> Callable[[], Any]:
    """A step of another system on this rank's rows."""
    model = RIVALS[name](paced(llama(), wire.pacer, on))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    rank = distributed.get_rank()
    own = {name: value.chunk(case.ranks)[rank] for name, value in batch().items()}

    def step() -> torch.Tensor:
        loss = model(**own).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        whole = loss.detach().clone()
        distributed.all_reduce(whole)
        return whole / case.ranks

    return step


def _rank(rank: int, case: Case, store: str, bandwidth: float, results: Any) -> None:
    torch.set_num_threads(1)
    on = machine(bandwidth, case.slow)
    wire = autopar.emulate(on.inside.latency, bandwidth, links="axis", pace=on)
    distributed.init_process_group(init_method=f"file://{store}", rank=rank, world_size=case.ranks)
    steps: dict[str, Callable[[], Any]] = {}
    finishing: dict[str, Callable[[], Any]] = {}
    predicted: dict[str, float] = {}
    for name, options in case.policies.items():
        step = made(case, on, options)
        step.capture(**batch())
        predicted[name] = step.communication.makespan
        steps[name] = lambda step=step: step(**batch())
        finishing[name] = step.finish
    for name in case.rivals:
        steps[name] = rival(name, case, on, wire)
    found: dict[str, list[float]] = {name: [] for name in steps}
    losses: dict[str, list[float]] = {name: [] for name in steps}
    late: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(ROUNDS):
        for name, step in steps.items():  # several steps one after the other, so that they may cross their end
            distributed.barrier()
            for k in range(WARM + STEPS):
                wire.reset()
                begun = now()
                losses[name].append(float(step()))
                if k >= WARM:
                    found[name].append(now() - begun)
                    late[name].append(wire.report().share_late)
            finishing.get(name, distributed.barrier)()
    if rank == 0:
        results.put((found, predicted, losses, late))
    distributed.barrier()
    distributed.destroy_process_group()


def measured(case: Case) -> Any:
    """Seconds, predicted seconds, losses and late shares by policy, on rank 0 of new processes."""
    bandwidth = bandwidth_of(case)
    results = multiprocessing.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        given = (case, os.path.join(folder, "store"), bandwidth, results)
        processes = multiprocessing.spawn(_rank, given, case.ranks, join=False)
        found = results.get()
        while not processes.join():
            pass
    return bandwidth, *found


def rows(names: Sequence[str]) -> list[tuple[str, ...]]:
    lines = []
    for name in names:
        case = CASES[name]
        bandwidth, found, predicted, losses, late = measured(case)
        before = statistics.median(found[TODAY])
        for policy, seconds in found.items():
            middle = statistics.median(seconds)
            equal = max(abs(a - b) for a, b in zip(losses[policy], losses[TODAY], strict=True))
            share = statistics.median(late[policy])
            simulated = predicted.get(policy)
            lines.append((
                case.title, policy, f"{middle * 1e3:.1f}", f"{simulated * 1e3:.1f}" if simulated else "",
                f"{middle / simulated:.3f}" if simulated else "", f"{before / middle:.3f}", f"{equal:.1e}",
                f"{share:.1%}" + " void" * (share > 0.02), f"{bandwidth / 1e6:.1f}",
            ))  # fmt: skip
    return lines


if __name__ == "__main__":
    import sys

    for row in rows(sys.argv[1:] or list(CASES)):
        print(*row, sep=" | ")
