"""Measure pipelined steps on four gloo processes: memory, times on the emulated wire, overhead, and torch beside it.

Each function is called on all ranks, and returns what the first one found. ``measured`` starts the processes.
"""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from pipeline_models import RATE, Blocks, Llama, rival
from ranks import on_ranks, together
from torch import distributed

import autopar
from autopar.costs.machine import Link, Machine
from autopar.examples.peak import peak_bytes
from autopar.pipeline import PipelineSchedule
from autopar.runtime.running import functions
from autopar.runtime.running.slots import SlotRunner
from autopar.runtime.wire.clock import now
from autopar.step import step_compiler

RANKS = 4
MIB = 2**20
HIDDEN, ROWS = 64, 4096  # a boundary tensor of 1 MiB
PRODUCT = 12e-3  # the least seconds of an op on the paced machine: long beside what Python takes for a line
LATENCY = 60e-6
SHARE = 0.25  # of a message, relative to a forward of one layer
WARM, STEPS = 1, 3


def measured(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function on all ranks of new processes; what rank 0 returns."""
    return on_ranks(RANKS, function, *args, wire=paced() if function is on_wire else None)


def uncaptured(model: Any, microbatches: int, policy: str, **options: Any) -> Any:
    """A step that has not been captured."""
    parallel = autopar.parallelize(model, autopar.Mesh(pp=RANKS), {}, **options)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=RATE)
    return parallel.train_step(optimizer, microbatches=microbatches, schedule=policy)


def stepped(model: Any, given: dict[str, torch.Tensor], microbatches: int, policy: str, **options: Any) -> Any:
    """A captured step."""
    step = uncaptured(model, microbatches, policy, **options)
    step.capture(**given)
    return step


# -- memory ------------------------------------------------------------------------------------------------------------


def peaks(policy: str, microbatches: Sequence[int], layers: int, kept: bool = False) -> list[Any]:
    """For each number of micro-batches: the bytes that the first step makes on each rank, those that are predicted,
    the bytes of an activation on each stage, and the micro-batches that each rank keeps at once.

    Args:
        kept: whether the sends of gradients are kept to the end.
    """
    rows = []
    for count in microbatches:
        torch.manual_seed(0)
        given = Blocks.batch(ROWS * count, HIDDEN)
        with held_gradients() if kept else contextlib.nullcontext():
            step = stepped(Blocks(layers, HIDDEN), given, count, policy)
        predicted = [step.memory(rank).made for rank in range(RANKS)]
        memory = step.pipeline.simulate().memory
        gc.collect()  # what is freed while a step is measured would count as negative
        found = together(peak_bytes(lambda step=step, given=given: step(**given)))
        rows.append((found, predicted, memory.sizes.activation, memory.live))
        del step
        gc.collect()
    return rows


def peaks_of_torch(microbatches: Sequence[int], layers: int) -> list[list[int]]:
    """The bytes that the first step of torch's Schedule1F1B makes on each rank."""
    rows = []
    for count in microbatches:
        torch.manual_seed(0)
        given = Blocks.batch(ROWS * count, HIDDEN)
        step = rival(Blocks(layers, HIDDEN), "1f1b", given, count)
        gc.collect()
        rows.append(together(peak_bytes(step)))
        del step
        gc.collect()
    return rows


@contextlib.contextmanager
def held_gradients() -> Iterator[None]:
    """Make schedules that keep each send of a gradient to the end of the step."""
    made = step_compiler.schedule_of

    def schedule_of(*args: Any) -> PipelineSchedule:
        schedule = made(*args)
        rows = tuple(
            tuple(replace(slot, free=tuple(send for send in slot.free if send.of != "B")) for slot in row)
            for row in schedule.slots
        )
        return replace(schedule, slots=rows).known_right()

    with mock.patch.object(step_compiler, "schedule_of", schedule_of):
        yield


# -- times -------------------------------------------------------------------------------------------------------------


def paced() -> Machine:
    """A machine on which each op takes as long, and views take nothing."""
    seconds = SHARE * 2 * PRODUCT - LATENCY
    link = Link(LATENCY, HIDDEN * HIDDEN * 4 / seconds)
    return Machine("paced", "cpu", 64, link, link, Link(PRODUCT, 1e15), (("f32", 1e15), ("f64", 1e15)))


@contextlib.contextmanager
def slots_between(begin: Callable[[], float], end: Callable[[float], None]) -> Iterator[None]:
    """Call ``begin`` before the first slot of each step, and ``end`` with its result behind the last one."""
    run, wait = SlotRunner.run, SlotRunner.end
    begun: dict[int, float] = {}

    def timed(slots: SlotRunner, slot: Any) -> Any:
        if id(slots) not in begun:
            begun[id(slots)] = begin()
        yield from run(slots, slot)

    def ended(slots: SlotRunner) -> Any:
        yield from wait(slots)
        end(begun.pop(id(slots)))

    with mock.patch.object(SlotRunner, "run", timed), mock.patch.object(SlotRunner, "end", ended):
        yield


def on_wire(policies: dict[str, int], microbatches: Sequence[int]) -> list[tuple[str, int, float, float, float]]:
    """Policy, micro-batches, seconds of the slots, seconds as simulated, and how late computing was.

    Args:
        policies: name → stages of a rank.
    """
    rows = []
    spans: list[tuple[float, float]] = []
    with slots_between(lambda: (distributed.barrier(), now())[1], lambda begun: spans.append((begun, now()))):
        for count in microbatches:
            for policy, chunks in policies.items():
                torch.manual_seed(0)
                given = Blocks.batch(HIDDEN * count, HIDDEN)
                step = stepped(Blocks(RANKS * chunks, HIDDEN), given, count, policy, machine=paced())
                wire = autopar.runtime.wire.emulate.present()
                spans.clear()
                for _ in range(WARM + STEPS):
                    wire.reset()
                    step(**given)
                late = max(together(wire.report().share_late))
                each = together(list(spans))
                seconds = [
                    max(rank[k][1] for rank in each) - min(rank[k][0] for rank in each)
                    for k in range(WARM, WARM + STEPS)
                ]
                rows.append((policy, count, statistics.median(seconds), step.pipeline.simulate().makespan, late))
    return rows


def overhead(policy: str, microbatches: int) -> list[tuple[int, float, float]]:
    """For each rank: its slots, and the CPU milliseconds of a slot of its thread, beside its functions and in all."""
    loops, inside = list[float](), [0.0]
    call = functions._LoweredPart.__call__

    def begin() -> float:
        inside[0] = 0.0
        return time.thread_time()

    def end(begun: float) -> None:
        whole = time.thread_time() - begun
        loops.append((whole - inside[0], whole))

    def counted(function: Any, boxed: list[Any], *more: Any) -> Any:
        begun = time.thread_time()
        values = yield from call(function, boxed, *more)
        inside[0] += time.thread_time() - begun
        return values

    torch.manual_seed(0)
    given = Blocks.batch(8 * microbatches, 8)
    step = stepped(Blocks(RANKS, 8), given, microbatches, policy)
    with slots_between(begin, end), mock.patch.object(functions._LoweredPart, "__call__", counted):
        for _ in range(12):
            step(**given)
    slots = [row[distributed.get_rank()] for row in step.pipeline.schedule.slots]
    count = sum(bool(slot.tasks) for slot in slots)
    own, whole = (statistics.median(seconds) / count * 1e3 for seconds in zip(*loops[2:], strict=True))
    return together((count, own, whole))


MODELS: dict[str, Callable[[], tuple[Any, Callable[[int], dict[str, torch.Tensor]]]]] = {
    "blocks": lambda: (Blocks(8, 512), lambda count: Blocks.batch(256 * count, 512)),
    "llama": lambda: (Llama(), lambda count: Llama.batch(4 * count)),
}


def beside_torch(name: str, policy: str, microbatches: int, rounds: int) -> tuple[list[float], list[float], float]:
    """Seconds of our steps and of torch's, in alternating pairs; and how far the losses are apart."""
    torch.manual_seed(0)
    model, batch = MODELS[name]()
    given = batch(microbatches)
    theirs = rival(model, policy, given, microbatches)
    step = stepped(model, given, microbatches, policy)
    systems: list[Callable[[], torch.Tensor]] = [lambda: step(**given), theirs]
    losses = [[float(system()) for _ in range(2)] for system in systems]
    apart = max(abs(a - b) for a, b in zip(*losses, strict=True))
    found: list[list[float]] = [[], []]
    for k in range(rounds):
        for which in (0, 1) if k % 2 else (1, 0):
            distributed.barrier()
            begun = now()
            systems[which]()
            distributed.barrier()
            found[which].append(now() - begun)
    return found[0], found[1], apart
