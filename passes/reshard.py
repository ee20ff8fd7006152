"""Reshard: every disagreement between a value and its use becomes transfers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from autopar import transfers
from autopar.edit import Value
from autopar.passes.manager import Pass
from autopar.program import Program, operands, record_of
from autopar.record import Requirement, TensorType
from autopar.transitions import transitions

MODES = ("batched", "per-reshard", "sync")


@dataclass(frozen=True)
class Reshard(Pass):
    """Insert the cheapest transfers in front of each use that needs another Layout or dtype than the value has.

        mm_1 : f32[32/dp 64] +tp = mm(relu, t_1)                    mm_1 : f32[32/dp 64] +tp = mm(relu, t_1)
        y : f32[32/dp 64] = gelu(mm_1 as [32/dp 64])        →       mm_1_tp : f32[32/dp 64] = all_reduce(mm_1, tp)
                                                                    y : f32[32/dp 64] = gelu(mm_1_tp)

    Attributes:
        mode: when to commit: once (``batched``), after each use (``per-reshard``) or after each operation (``sync``).
            All give the same program; the last two exist to measure what the first saves.
    """

    name: ClassVar[str] = "reshard"
    takes: ClassVar[str] = "placed"
    gives: ClassVar[str] = "explicit"

    mode: str = "batched"

    def run(self, program: Program) -> None:
        if self.mode not in MODES:
            raise ValueError(f"no mode {self.mode!r}; modes are {', '.join(MODES)}")
        with program.edit(sync=self.mode == "sync") as edit:
            for user, index, value, need, before, phase in list(uses_in_order(program)):
                have = record_of(value).type
                if need is None or not isinstance(have, TensorType) or (need.layout, need.dtype) == (have.layout, have.dtype):
                    continue
                moved: Value = value
                for step in transitions(have, TensorType(have.shape, need.dtype, need.layout)):
                    args, kwargs = transfers.call(step.function, moved, dict(step.arguments))
                    moved = edit.insert(step.function, args, kwargs, before=before, phase=phase)
                edit.replace_use(user, value, moved, index=index)
                if self.mode == "per-reshard":
                    edit.commit()


def uses_in_order(program: Program) -> Iterator[tuple[fx.Node, int, fx.Node, Requirement | None, fx.Node, str]]:
    """Every use: user, operand index, value, requirement, where its transfers go, and their phase.

    Results of the forward are re-laid where the forward ends, the others where the program ends.
    """
    output = program.output
    about = record_of(output)
    results = [
        (k, value, need, result.kind != "grad" and record_of(value).phase == "forward")
        for k, (value, need, result) in enumerate(zip(operands(output), about.uses, about.results, strict=True))
    ]
    end = first_after_forward(program)
    phase = "forward"
    for user in program.nodes:
        if user is end:
            yield from ((output, k, value, need, end, "forward") for k, value, need, early in results if early)
        if user.op == "call_function":
            phase = record_of(user).phase
            for k, (value, need) in enumerate(zip(operands(user), record_of(user).uses, strict=False)):
                yield user, k, value, need, user, phase
    phase = "backward" if phase == "forward" else phase  # of a backward that has no ops: its gradients are tangents
    yield from ((output, k, value, need, output, phase) for k, value, need, early in results if not early)


def first_after_forward(program: Program) -> fx.Node:
    """The first op behind the forward, before which returned values are re-laid; the output where there is none."""
    return next(n for n in program.nodes if n.op == "output" or (n.op == "call_function" and record_of(n).phase != "forward"))

