"""Reshard: insert transfers wherever a value and its use disagree about Layout or dtype."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

from torch import fx

from autopar.costs.machine import Machine
from autopar.errors import shown
from autopar.ir import transfers
from autopar.ir.edit import Value
from autopar.ir.nodes import operands, record_of
from autopar.ir.program import Program
from autopar.ir.record import Requirement, TensorType, ValueType
from autopar.passes.manager import Pass
from autopar.torch_private import inputs_of
from autopar.transitions import transitions

Mode = Literal["batched", "per-reshard", "sync"]  # when to commit
MODES: tuple[Mode, ...] = get_args(Mode)


@dataclass(frozen=True)
class Reshard(Pass):
    """Insert the cheapest transfers before each use that needs another Layout or dtype than the value has.

        mm_1 : f32[32/dp 64] +tp = mm(relu, t_1)                    mm_1 : f32[32/dp 64] +tp = mm(relu, t_1)
        y : f32[32/dp 64] = gelu(mm_1 as [32/dp 64])        →       mm_1_tp : f32[32/dp 64] = all_reduce(mm_1, tp)
                                                                    y : f32[32/dp 64] = gelu(mm_1_tp)

    Attributes:
        mode: when to commit: once (``batched``), after each use (``per-reshard``) or after each operation (``sync``).
            All give the same program; the last two exist to measure how much the first saves.
        machine: the machine whose nanoseconds are to be few; without one the worst rank receives the fewest bytes.
    """

    name: ClassVar[str] = "reshard"
    takes: ClassVar[str] = "placed"
    gives: ClassVar[str] = "explicit"

    mode: Mode = "batched"
    machine: Machine | None = None

    def run(self, program: Program) -> None:
        if self.mode not in MODES:
            raise ValueError(f"no mode {shown(self.mode)}; modes are {', '.join(MODES)}")
        with program.edit(sync=self.mode == "sync") as edit:
            mismatches = disagreements(program, self.machine)
            for user, index, value, steps, before, phase in mismatches if self.mode == "batched" else list(mismatches):
                moved: Value = value
                for function, args, kwargs, type in steps:
                    moved = edit.insert(function, (moved, *args), kwargs, before=before, type=type, phase=phase)
                edit.replace_use(user, value, moved, index=index)
                if self.mode == "per-reshard":
                    edit.commit()


Call = tuple[Any, tuple[Any, ...], dict[str, Any], TensorType]  # function, arguments after the value, result
_NONE: list[Call] = []


def disagreements(
    program: Program, machine: Machine | None = None
) -> Iterator[tuple[fx.Node, int, fx.Node, list[Call], fx.Node, str]]:
    """Yield every use that disagrees with its value.

    Each comes as user, operand index, value, the transfers, the node that they precede, and their phase. The transfers
    of results of the forward are at the end of the forward, those of other results at the end of the program.
    """
    output = program.output
    about = record_of(output)
    begins = next((record_of(node).phase for node in program.nodes if node.op == "call_function"), "forward")
    results = [
        (k, value, need, result.kind != "grad" and record_of(value).phase == "forward" and begins != "update")
        for k, (value, need, result) in enumerate(zip(operands(output), about.uses, about.results, strict=True))
    ]
    find = _Known(machine).calls
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
        if len(values) != len(needs):  # an operand is read twice, or the user is a transfer and requires nothing
            values = operands(user)[: len(needs)]
        for k, value in enumerate(values):
            need = needs[k]
            if need is None:
                continue
            have = record_of(value).type
            if have.__class__ is TensorType and have.layout is need.layout and have.dtype is need.dtype:
                continue  # most uses agree, and this check is faster than a call
            if calls := find(have, need):
                yield user, k, value, calls, user, phase
    phase = "backward" if phase == "forward" else phase  # a backward may have no ops, if its gradients are tangents
    for k, value, need, early in results:
        if not early and (calls := find(record_of(value).type, need)):
            yield output, k, value, calls, output, phase


class _Known:
    """Caches the transfers of disagreements.

    The layers of a model have the same disagreements, mostly with the same Layout objects. So a disagreement is looked
    up by the identity of its objects first, and only then compared by value.
    """

    def __init__(self, machine: Machine | None) -> None:
        self._machine = machine
        self._alike: set[tuple[int, int]] = set()  # pairs of attributes that are equal
        self._calls: dict[tuple[object, ...], list[Call]] = {}

    def calls(self, have: ValueType, need: Requirement | None) -> list[Call]:
        """Return the transfers from a value's type to a use's requirement, ready to be inserted; none if they agree."""
        if need is None or not isinstance(have, TensorType):
            return _NONE
        layout, required = have.layout, need.layout
        if layout is None or required is None:
            return [*self._new(have, need)]  # raises
        same = layout.mesh is required.mesh and have.dtype is need.dtype
        if same and layout.attr is required.attr:
            return _NONE
        attrs = id(layout.attr), id(required.attr)
        if same and attrs in self._alike:
            return _NONE
        key = (attrs, id(layout.mesh), id(required.mesh), have.dtype, need.dtype, have.shape)
        calls = self._calls.get(key)
        if calls is None:
            calls = self._calls[key] = [*self._new(have, need)]
            if layout.attr == required.attr:
                self._alike.add(attrs)
        return calls

    def _new(self, have: TensorType, need: Requirement) -> Iterator[Call]:
        if (have.layout, have.dtype) != (need.layout, need.dtype):
            for step in transitions(have, TensorType(have.shape, need.dtype, need.layout), self._machine):
                (_, *args), kwargs = transfers.call(step.function, None, dict(step.arguments))
                yield step.function, tuple(args), kwargs, step.type
