"""Reshard: insert transfers wherever a value and its use disagree about Layout or dtype."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, get_args

from torch import fx

from autopar.costs.machine import Machine
from autopar.errors import shown
from autopar.ir import transfers
from autopar.ir.computed_again import computed_again
from autopar.ir.edit import Value
from autopar.ir.nodes import operands, record_of
from autopar.ir.program import Program
from autopar.ir.record import Record, Requirement, TensorType, ValueType
from autopar.passes.manager import Pass
from autopar.plan.shared_transfers import narrows, views_of_reduced
from autopar.search.transfer_prices.chains import Chain, Hop
from autopar.search.transfer_prices.once import once
from autopar.search.transfer_prices.sharing import path_of, union
from autopar.torch_private import inputs_of
from autopar.transitions import transitions
from autopar.transitions.by_levels import cheapest_way
from autopar.transitions.chain import TransferStep

Mode = Literal["batched", "per-reshard", "sync"]  # when to commit
MODES: tuple[Mode, ...] = get_args(Mode)


@dataclass(frozen=True)
class Reshard(Pass):
    """Insert the cheapest transfers before each use that needs another Layout or dtype than the value has.

        mm_1 : f32[32/dp 64] +tp = mm(relu, t_1)                    mm_1 : f32[32/dp 64] +tp = mm(relu, t_1)
        y : f32[32/dp 64] = gelu(mm_1 as [32/dp 64])        →       mm_1_tp : f32[32/dp 64] = all_reduce(mm_1, tp)
                                                                    y : f32[32/dp 64] = gelu(mm_1_tp)

    A pending value is reduced once: uses that need other Layouts of it get these from the reduced one, so that all of
    them read the same bits.

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
            views = views_of_reduced(program)
            for view, record in views.items():
                edit.annotate(view, type=record.type, uses=record.uses)
            mismatches = disagreements(program, self.machine, views)
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
    program: Program, machine: Machine | None = None, changed: Mapping[fx.Node, Record] = {}
) -> Iterator[tuple[fx.Node, int, fx.Node, list[Call], fx.Node, str]]:
    """Yield every use that disagrees with its value.

    Each comes as user, operand index, value, the transfers, the node that they precede, and their phase. The transfers
    of results of the forward are at the end of the forward, those of other results at the end of the program.

    Args:
        machine: as of ``Reshard``.
        changed: nodes → the records that they are about to have.
    """

    def of(node: fx.Node) -> Record:
        return changed.get(node) or record_of(node)

    output = program.output
    about = record_of(output)
    begins = next((record_of(node).phase for node in program.nodes if node.op == "call_function"), "forward")
    results = [
        (k, value, need, result.kind != "grad" and record_of(value).phase == "forward" and begins != "update")
        for k, (value, need, result) in enumerate(zip(operands(output), about.uses, about.results, strict=True))
    ]
    uses: list[_Use] = []
    phase, ended = "forward", False
    for user in program.nodes:
        if user.op != "call_function" and user is not output:
            continue
        record = of(user)
        if not ended and (user is output or record.phase != "forward"):
            ended = True
            uses += [
                _Use(output, k, value, of(value).type, need, user, "forward")
                for k, value, need, early in results
                if early
            ]
        if user is output:
            break
        phase, needs, values = record.phase, record.uses, inputs_of(user)
        if len(values) != len(needs):  # an operand is read twice, or the user is a transfer and requires nothing
            values = operands(user)[: len(needs)]
        for k, value in enumerate(values):
            need = needs[k]
            if need is None:
                continue
            have = of(value).type
            if have.__class__ is TensorType and have.layout is need.layout and have.dtype is need.dtype:
                continue  # most uses agree, and this check is faster than a call
            uses.append(_Use(user, k, value, have, need, user, phase))
    phase = "backward" if phase == "forward" else phase  # a backward may have no ops, if its gradients are tangents
    uses += [
        _Use(output, k, value, of(value).type, need, output, phase) for k, value, need, early in results if not early
    ]
    known = _Known(machine)
    reduced = _reduced_once(program, uses, known)
    for use in uses:
        calls = reduced.get((use.value, use.phase, use.need))
        if calls is None:
            calls = known.calls(use.have, use.need)
        if calls:
            yield use.user, use.position, use.value, calls, use.before, use.phase


class _Use(NamedTuple):
    """A use of a value, which may disagree with it; its transfers come before a node, in a phase."""

    user: fx.Node
    position: int
    value: fx.Node
    have: ValueType
    need: Requirement | None
    before: fx.Node
    phase: str


def _reduced_once(
    program: Program, uses: Sequence[_Use], known: _Known
) -> dict[tuple[fx.Node, str, Requirement | None], list[Call]]:
    """Return the transfers before the uses of values that would be reduced in several ways.

    A value that the backward computes again is reduced like the first one, because it is the same value.
    """
    pending: dict[fx.Node, dict[tuple[Requirement, str], None]] = {}
    for use in uses:
        type = use.have
        if use.need is not None and isinstance(type, TensorType) and type.layout is not None and type.attr.pending:
            pending.setdefault(use.value, {})[use.need, use.phase] = None
    same: dict[object, list[fx.Node]] = {}
    numbers = computed_again(program, pending)
    for value in pending:
        same.setdefault((numbers.get(value, value), record_of(value).type), []).append(value)
    found: dict[tuple[fx.Node, str, Requirement | None], list[Call]] = {}
    for values in same.values():
        needs = list(dict.fromkeys(need for value in values for need in pending[value]))
        if len({need for need, _ in needs}) < 2:
            continue
        chains = known.once(record_of(values[0]).type, needs)
        found |= {
            (value, phase, need): calls
            for (need, phase), calls in zip(needs, chains, strict=True)
            for value in values
            if (need, phase) in pending[value]
        }
    return found


class _Known:
    """Caches the transfers of disagreements.

    The layers of a model have the same disagreements, mostly with the same Layout objects. So a disagreement is looked
    up by the identity of its objects first, and only then compared by value.
    """

    def __init__(self, machine: Machine | None) -> None:
        self._machine = machine
        self._alike: set[tuple[int, int]] = set()  # pairs of attributes that are equal
        self._calls: dict[tuple[object, ...], list[Call]] = {}
        self._once: dict[object, list[list[Call]]] = {}

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
                yield _call(step)

    def once(self, have: ValueType, needs: Sequence[tuple[Requirement, str]]) -> list[list[Call]]:
        """Return the transfers from a pending value to what uses in phases require, of which each axis has one sum."""
        assert isinstance(have, TensorType)
        key = have, tuple(needs)
        if key not in self._once:
            steps: dict[tuple[TensorType, Hop], TransferStep] = {}

            def find(here: TensorType, there: TensorType) -> Chain:
                chain = []
                for step in transitions(here, there, self._machine):
                    paid = step.bytes if self._machine is None else cheapest_way(step, here, self._machine)[0]
                    fewer = step.function is transfers.cast and narrows(here, step.type)
                    chain.append(Hop(step.function, step.type, paid, fewer))
                    steps[here, chain[-1]] = step
                    here = step.type
                return tuple(chain)

            def price(chains: Sequence[Chain]) -> tuple[int, int]:
                paths = [path_of(chain, phase) for chain, (_, phase) in zip(chains, needs, strict=True)]
                return union(paths), len({path[: k + 1] for path in paths for k in range(len(path))})

            goals = [TensorType(have.shape, need.dtype, need.layout) for need, _ in needs]
            self._once[key] = found = []
            for chain in once(find, have, goals, price):
                types = have, *(hop.state for hop in chain)
                found.append([_call(steps[row]) for row in zip(types, chain, strict=False)])
        return self._once[key]


def _call(step: TransferStep) -> Call:
    (_, *args), kwargs = transfers.call(step.function, None, dict(step.arguments))
    return step.function, tuple(args), kwargs, step.type
