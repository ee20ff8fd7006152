"""Reshard: every disagreement between a value and its use becomes transfers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx

from autopar.errors import shown
from autopar.ir import transfers
from autopar.ir.edit import Value
from autopar.ir.nodes import operands, record_of
from autopar.ir.program import Program
from autopar.ir.record import Requirement, TensorType, ValueType
from autopar.passes.manager import Pass
from autopar.torch_private import inputs_of
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
            raise ValueError(f"no mode {shown(self.mode)}; modes are {', '.join(MODES)}")
        with program.edit(sync=self.mode == "sync") as edit:
            found = disagreements(program)
            for user, index, value, steps, before, phase in found if self.mode == "batched" else list(found):
                moved: Value = value
                for function, args, kwargs, type in steps:
                    moved = edit.insert(function, (moved, *args), kwargs, before=before, type=type, phase=phase)
                edit.replace_use(user, value, moved, index=index)
                if self.mode == "per-reshard":
                    edit.commit()


Call = tuple[Any, tuple[Any, ...], dict[str, Any], TensorType]  # function, arguments behind the value, result
_NONE: list[Call] = []


def disagreements(program: Program) -> Iterator[tuple[fx.Node, int, fx.Node, list[Call], fx.Node, str]]:
    """Every use that needs what its value is not: user, operand index, value, its transfers, where they go, their phase.

    Results of the forward are re-laid where the forward ends, the others where the program ends.
    """
    output = program.output
    about = record_of(output)
    begins = next((record_of(node).phase for node in program.nodes if node.op == "call_function"), "forward")
    results = [
        (k, value, need, result.kind != "grad" and record_of(value).phase == "forward" == begins)
        for k, (value, need, result) in enumerate(zip(operands(output), about.uses, about.results, strict=True))
    ]
    find = _Known().calls
    phase, ended = "forward", False
    for user in program.nodes:
        if user.op != "call_function" and user is not output:
            continue
        record = record_of(user)
        if not ended and (user is output or record.phase != "forward"):
            ended = True
            for k, value, need, early in results:
                if early and (calls := find(record_of(value).type, need)):
                    yield output, k, value, calls, user, "forward"
        if user is output:
            break
        phase, needs, values = record.phase, record.uses, inputs_of(user)
        if len(values) != len(needs):  # some operand is read twice, or it is a transfer and takes what it is given
            values = operands(user)[: len(needs)]
        for k, value in enumerate(values):
            need = needs[k]
            if need is None:
                continue
            have = record_of(value).type
            if have.__class__ is TensorType and have.layout is need.layout and have.dtype is need.dtype:
                continue  # most uses agree plainly, and are not worth a call
            if calls := find(have, need):
                yield user, k, value, calls, user, phase
    phase = "backward" if phase == "forward" else phase  # of a backward that has no ops: its gradients are tangents
    for k, value, need, early in results:
        if not early and (calls := find(record_of(value).type, need)):
            yield output, k, value, calls, output, phase


class _Known:
    """The transfers of the disagreements met so far.

    A model's layers disagree alike, and what a value is and what is needed are mostly the same objects: so these are
    looked up by identity first, and only then compared.
    """

    def __init__(self) -> None:
        self._alike: set[tuple[int, int]] = set()  # pairs of attributes that are equal
        self._calls: dict[tuple[object, ...], list[Call]] = {}

    def calls(self, have: ValueType, need: Requirement | None) -> list[Call]:
        """Those from what a value is to what a use needs, ready to be inserted; none where they agree."""
        if need is None or not isinstance(have, TensorType):
            return _NONE
        mine, asked = have.layout, need.layout
        if mine is None:
            return [*self._new(have, need)]  # refused
        same = mine.mesh is asked.mesh and have.dtype is need.dtype
        if same and mine.attr is asked.attr:
            return _NONE
        attrs = id(mine.attr), id(asked.attr)
        if same and attrs in self._alike:
            return _NONE
        key = (attrs, id(mine.mesh), id(asked.mesh), have.dtype, need.dtype, have.shape)
        calls = self._calls.get(key)
        if calls is None:
            calls = self._calls[key] = [*self._new(have, need)]
            if mine.attr == asked.attr:
                self._alike.add(attrs)
        return calls

    def _new(self, have: TensorType, need: Requirement) -> Iterator[Call]:
        if (have.layout, have.dtype) != (need.layout, need.dtype):
            for step in transitions(have, TensorType(have.shape, need.dtype, need.layout)):
                (_, *args), kwargs = transfers.call(step.function, None, dict(step.arguments))
                yield step.function, tuple(args), kwargs, step.type
