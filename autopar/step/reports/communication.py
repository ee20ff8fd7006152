"""Report how the communication of a whole step is scheduled."""

from __future__ import annotations

from autopar.runtime.localize import LocalPrograms
from autopar.scheduling.programs.communication import Communication
from autopar.scheduling.programs.order import Order
from autopar.step.compiling.compiled_step import MicroBatch, StepUpdate


def running(micro: MicroBatch, update: StepUpdate, microbatches: int) -> dict[str, tuple[LocalPrograms, int]]:
    """Return the programs that a step runs, by name, in order, and how often each runs.

    They are the low-precision copies, the first micro-batch with the counts of all, the inner micro-batches, and the
    last one joined with the update. Where anything crosses the end of a step, the rotated step, ``turn``, replaces the
    first and the last one. It counts as one micro-batch, because the first runs its begin, and the last its end.
    """
    programs: dict[str, tuple[LocalPrograms, int]] = {}
    if update.crossing:
        first_step = {"copy": (micro.copy[1], 0)} if micro.copy is not None else {}
        inner = {"inner": (micro.local, microbatches - 1)} if microbatches > 1 else {}
        return {**first_step, "turn": (update.last[1], 1), **inner}
    if micro.copy is not None:
        programs["copy"] = micro.copy[1], 1
    others = microbatches - 1
    if micro.first is not None and others:
        programs["first"] = micro.first[1], 1
        others -= 1
    if others:
        programs["inner"] = micro.local, others
    return programs | {"last": (update.last[1], 1)}


def communication_of(micro: MicroBatch, update: StepUpdate, microbatches: int, in_order: bool = True) -> Communication:
    """Return the report of a step. ``in_order``: as of ``Communication.of``."""
    programs = running(micro, update, microbatches)
    return Communication.of(
        {name: (_order(local), times) for name, (local, times) in programs.items()},
        in_order=in_order,
        notes=(update.note,) if update.note else (),
    )


def order_text(micro: MicroBatch, update: StepUpdate) -> str:
    """Return all lines of a step, as text that ranks compare."""
    programs = running(micro, update, 3)
    return "\n".join(f"{name}:\n{_order(local).text}" for name, (local, _) in programs.items())


def _order(local: LocalPrograms) -> Order:
    assert local.order is not None
    return local.order
