"""Report how the communication of a whole step is scheduled."""

from __future__ import annotations

from autopar.runtime.localize import LocalPrograms
from autopar.scheduling.programs.communication import Communication
from autopar.scheduling.programs.order import Order
from autopar.step.compiling.compiled_step import CompiledMicro, MicroBatch, StepUpdate


def communication_of(micro: MicroBatch, update: StepUpdate, microbatches: int, in_order: bool = True) -> Communication:
    """Return the report of a step. ``in_order``: as of ``Communication.of``."""
    programs = micro.running(update, microbatches)
    return Communication.of(
        {name: (_order(local), times) for name, (local, times) in programs.items()},
        in_order=in_order,
        notes=(update.note,) if update.note else (),
    )


def order_text(micro: CompiledMicro, update: StepUpdate) -> str:
    """Return all lines of a step, as text that ranks compare."""
    programs = micro.running(update, 3)
    return "\n".join(f"{name}:\n{_order(local).text}" for name, (local, _) in programs.items())


def _order(local: LocalPrograms) -> Order:
    assert local.order is not None
    return local.order
