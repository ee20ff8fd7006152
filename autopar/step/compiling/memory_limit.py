"""Search the plan of a step again if its explicit programs need more memory than the search has counted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from autopar.model.compiled import Compiler
from autopar.model.planner import may_exceed, with_reserve
from autopar.step.compiling.compile_update import compile_update
from autopar.step.compiling.compiled_step import MicroBatch, StepUpdate
from autopar.step.compiling.ending import Updating
from autopar.step.compiling.update import Trained
from autopar.step.options import StepOptions
from autopar.step.reports.memory import StepMemory, memory_of_step, with_copies
from autopar.step.runs import lowered_of


def memory_of_programs(
    micro: MicroBatch, update: StepUpdate, options: StepOptions, rank: int, on_cpu: bool
) -> StepMemory:
    """Return the memory of a step on one rank. ``on_cpu``: whether the ranks are on CPU."""
    lowered = lowered_of(*update.last, rank, update.states, options.count, options.offload)
    memory = memory_of_step(update.last[1][rank], lowered, options.count, options.offload, on_cpu)
    if micro.copy is None or update.crossing:
        return memory
    program, local = micro.copy
    return with_copies(memory, local[rank], lowered_of(program, local, rank, (), options.count), on_cpu)


def trained_of(micro: MicroBatch, updates: Mapping[str, Updating]) -> list[Trained]:
    """Return how the parameters of a micro-batch are updated, before they move."""
    return [
        Trained(name, type, micro.gradients[name], micro.states[name], *updates[name], group=0)
        for name, type in micro.parameters.items()
        if name in updates
    ]


def within_memory(
    compile: Callable[[Compiler], MicroBatch],
    compiler: Compiler,
    updates: Mapping[str, Updating],
    options: StepOptions,
    on_cpu: bool,
) -> MicroBatch:
    """Return the programs of a micro-batch whose step keeps the limit of memory. All ranks come to the same plan.

    Args:
        compile: makes the programs of the micro-batch.
        updates: how the parameters are updated; of others only the micro-batch is searched within the limit.

    Raises:
        MemoryLimitError: no plan was found that fits.
    """
    while True:
        micro = compile(compiler)
        found = micro.found
        if found is None or not may_exceed(found, compiler.planner) or not updates.keys() >= micro.parameters.keys():
            return micro
        update = compile_update(compiler, trained_of(micro, updates), micro, options)
        peak = memory_of_programs(micro, update, options, 0, on_cpu).peak
        again = with_reserve(found, compiler.planner, peak)
        if again is None:
            return micro
        compiler = replace(compiler, planner=again)
