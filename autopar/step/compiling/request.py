"""Hold what decides the programs of a micro-batch beside its compiler. The cache makes its key of the same record."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from autopar.model.inputs import CallInputs
from autopar.step.compiling.ending import Updating
from autopar.step.options import StepOptions


@dataclass(frozen=True)
class MicroRequest:
    """A micro-batch that is to be compiled.

    Attributes:
        call: its inputs.
        options: of the step.
        trained: the names of the optimizer's parameters.
        updates: how they are updated, which counts where the plan is searched.
        cut: the names of the inputs that are cut into micro-batches.
        notes: lines that are added to the report.
        same_numbers: whether several micro-batches must have the numbers of the whole batch.
    """

    call: CallInputs
    options: StepOptions
    trained: Sequence[str]
    updates: Mapping[str, Updating]
    cut: Collection[str]
    notes: Sequence[str] = ()
    same_numbers: bool = False
