"""Search the plan of a step again if its explicit programs need more memory than the search has counted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from autopar.ir.streams import Ranks
from autopar.model.compiled import Compiler
from autopar.model.planner import may_exceed, with_reserve
from autopar.runtime.lowering.lower import Lowered
from autopar.runtime.running.functions import LoweredFunctions, Lowering, PlacedProgram
from autopar.step.compiling.compile import compile_micro
from autopar.step.compiling.compile_update import compile_update
from autopar.step.compiling.compiled_step import CompiledMicro, MicroBatch, StepUpdate
from autopar.step.compiling.ending import Updating
from autopar.step.compiling.request import MicroRequest
from autopar.step.compiling.update import Trained
from autopar.step.options import StepOptions
from autopar.step.reports.memory import StepMemory, memory_of_step, with_copies


def memory_of_programs(
    micro: MicroBatch, update: StepUpdate, options: StepOptions, rank: int, on_cpu: bool
) -> StepMemory:
    """Return the memory of a step on one rank. ``on_cpu``: whether the ranks are on CPU."""
    last = PlacedProgram(*update.last, written=update.states)
    lowered = lowered_of(last, rank, zeros=options.count == 1, offload=options.offload)
    memory = memory_of_step(update.last[1][rank], lowered, options.count, options.offload, on_cpu)
    if micro.copy is None or update.crossing:
        return memory
    copies = lowered_of(PlacedProgram(*micro.copy), rank, zeros=False)
    return with_copies(memory, micro.copy[1][rank], copies, on_cpu)


def lowered_of(placed: PlacedProgram, rank: int, *, zeros: bool, offload: bool = False) -> Lowered:
    """Return the function of a rank for all of a program, for inspection: it has no process groups.

    ``zeros``: whether the sums begin in it.
    """
    functions = LoweredFunctions(placed, rank, Lowering(_Groups(), torch.device("cpu"), offloaded=offload))
    return functions.lowered(functions.nodes_of("whole"), zeros)


class _Groups(dict[Ranks | tuple[Ranks, str], str]):
    """Gives each set of ranks the name of a group that does not exist."""

    def __missing__(self, key: Ranks | tuple[Ranks, str]) -> str:
        return "group"


def trained_of(micro: CompiledMicro, updates: Mapping[str, Updating]) -> list[Trained]:
    """Return how the parameters of a micro-batch are updated, before they move."""
    return [
        Trained(name, type, micro.gradients[name], micro.states[name], *updates[name], group=0)
        for name, type in micro.parameters.items()
        if name in updates
    ]


def within_memory(compiler: Compiler, request: MicroRequest, on_cpu: bool) -> MicroBatch:
    """Return the programs of a micro-batch whose step keeps the limit of memory. All ranks come to the same plan.

    Of parameters that the request has no update for, only the micro-batch is searched within the limit. Errors are
    those of ``compile_micro``, too.

    Raises:
        MemoryLimitError: no plan was found that fits.
    """
    updates, options = request.updates, request.options
    while True:
        micro = compile_micro(compiler, request)
        found = micro.found
        if found is None or not may_exceed(found, compiler.planner) or not updates.keys() >= micro.parameters.keys():
            return micro
        update = compile_update(compiler, trained_of(micro, updates), micro, options)
        peak = memory_of_programs(micro, update, options, 0, on_cpu).peak
        again = with_reserve(found, compiler.planner, peak)
        if again is None:
            return micro
        compiler = replace(compiler, planner=again)
