"""Compare the sum of measured durations with the time of a real training step on one process.

A Llama, four layers by default, is trained by AdamW on a mesh of one rank with one thread. Its step is profiled, and
run. Predicted is the sum over the ops of the last micro-batch and the update, one after the other: by the profile, and
by the figures of the machine. Measured is the median step: by the clock, and the time that the processor worked for it,
which is what the clock would show if no other program ran.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import statistics
import time

import torch
from profilers import positive
from step_rivals import LENGTH, VOCABULARY

import autopar
from autopar import Mesh, Program
from autopar.costs.durations import Durations, durations
from autopar.ir.value_names import sums_in
from autopar.optimizers import IN_PLACE
from autopar.step.train_step import TrainStep

PROFILES_ITSELF = True


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--layers", type=positive, default=4)
    parser.add_argument("--hidden", type=positive, default=256)
    parser.add_argument("--rows", type=positive, default=4)
    parser.add_argument("--steps", type=positive, default=30)


def run(options: argparse.Namespace) -> str:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _report(options)
    finally:
        torch.set_num_threads(threads)


def _report(options: argparse.Namespace) -> str:
    step, batch = trained(options)
    step.capture(**batch)
    begin = time.perf_counter()
    profile = step.measure()
    took = time.perf_counter() - begin
    last = step._current().placed["last"].program
    by_profile, by_machine = (durations(last, source, zeros=sums_in(last)) for source in (profile, profile.machine))
    clock, processor = steps_of(step, batch, options.steps)
    lines = [
        str(profile),
        f"{len(profile.rows)} distinct of {len(by_profile.seconds):,} calls, timed in {took:.1f} s",
        "",
        f"{'':24} {'a step':>12} {'of processor':>12}",
    ]
    rows = [
        ("measured, processor", processor), ("measured, clock", clock),
        ("by the profile", total(last, by_profile)), ("by the machine", total(last, by_machine)),
    ]  # fmt: skip
    lines += [f"{name:24} {seconds * 1e3:9.1f} ms {seconds / processor:12.2f}" for name, seconds in rows]
    return "\n".join([*lines, ""])


def trained(options: argparse.Namespace) -> tuple[TrainStep, dict[str, torch.Tensor]]:
    """A Llama on a mesh of one rank, and a batch."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=options.hidden, intermediate_size=options.hidden * 43 // 16, num_hidden_layers=options.layers,
        num_attention_heads=4, vocab_size=VOCABULARY, max_position_embeddings=LENGTH, use_cache=False,
    )  # fmt: skip
    parallel = autopar.parallelize(LlamaForCausalLM(config), Mesh(dp=1), "ddp")
    step = parallel.train_step(torch.optim.AdamW(parallel.parameters(), lr=1e-4))
    ids = torch.randint(VOCABULARY, (options.rows, LENGTH))
    return step, {"input_ids": ids, "labels": ids}


def total(program: Program, found: Durations) -> float:
    """The seconds of a step; the updates of all parameters are one kernel."""
    updates = [node.name for node in program.nodes if node.op == "call_function" and node.target in IN_PLACE]
    return sum(found.seconds.values()) - sum(found.seconds[name] for name in updates) + found.together(updates)


def steps_of(step: TrainStep, batch: dict[str, torch.Tensor], count: int) -> tuple[float, float]:
    """The median seconds of a step, by the clock and of the processor, without the first steps and without ``gc``."""
    for _ in range(3):
        step(**batch)
    gc.collect()
    gc.disable()
    try:
        clock, processor = [time.perf_counter()], [time.process_time()]
        for _ in range(count):
            step(**batch)
            clock.append(time.perf_counter())
            processor.append(time.process_time())
    finally:
        gc.enable()
    by_clock, by_processor = (
        statistics.median(end - start for start, end in itertools.pairwise(marks)) for marks in (clock, processor)
    )
    return by_clock, by_processor
