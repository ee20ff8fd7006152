"""Search the cheapest layouts inside the expansion of an op, for given layouts of its operands and results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from autopar.capture.decompose.expanded import ARANGE, arguments, refs
from autopar.capture.decompose.subgraph import Ref, Subgraph, SubgraphOp
from autopar.costs.machine import Machine
from autopar.costs.op_prices import VIEWS, OpPrices
from autopar.ir.layout import Dim, DistAttr, largest
from autopar.ir.mesh import Mesh
from autopar.ir.record import TensorType
from autopar.rules.binding import bind
from autopar.rules.strategies import Bound
from autopar.search.problem.cuts import CutSearch
from autopar.search.problem.index_places import INDEX
from autopar.search.problem.payments import Payments
from autopar.search.problem.problem import Reader, Value
from autopar.search.problem.strategies import Inside, Placed, Places, StepLayouts, strategies
from autopar.search.solver.factor_graph import FactorGraph
from autopar.search.solver.solver import solve
from autopar.search.transfer_prices.chains import Chains
from autopar.search.transfer_prices.classes import UNREAD
from autopar.search.transfer_prices.sharing import union

PENALTY = 2.0**33  # nanoseconds, of what is forbidden
INSIDE = "inside"  # the phase of the transfers between the ops of an expansion
CACHED = 1024  # the most lists of strategies that are kept

Parts = tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True)
class Call:
    """One call of an op that can be opened; calls with the same key have the same opened strategies."""

    key: Any
    bound: Bound = field(compare=False)
    opened: frozenset[str] = field(compare=False)
    expansion: Subgraph = field(compare=False)
    types: Sequence[TensorType] = field(compare=False)


@lru_cache(maxsize=8)
def _chains(mesh: Mesh, machine: Machine) -> Chains:
    return Chains(mesh, machine)


@lru_cache(maxsize=CACHED)
def _all(bound: Bound, mesh: Mesh, parts: Parts) -> list[Placed]:
    """Return the strategies of an op of an expansion."""
    return strategies(bound, mesh, dict(parts))


class Expanded:
    """The factor graph of an expansion, whose operands and results have given layouts.

    Attributes:
        variables: step → its variable; what numbers indices has none.
    """

    def __init__(self, call: Call, mesh: Mesh, machine: Machine, wanted: Sequence[Placed],
                 aligned: bool = False) -> None:  # fmt: skip
        self.call, self.mesh, self.machine, self.steps = call, mesh, machine, call.expansion.steps
        self.chains, self.graph = _chains(mesh, machine), FactorGraph()
        self.order: list[float] = []
        self.labels: list[str] = []
        self.bounds = [self._bind(step) for step in self.steps]
        self.variables: dict[int, int] = {}
        self.placed: list[list[Placed]] = []
        self.prices: list[np.ndarray] = []
        self.values: dict[Ref, Value] = {}
        self.read = {-ref.step - 1 for step in self.steps for ref in refs(step) if ref.step < 0}
        parts = self._parts()
        self.splits = _splits(call.bound, wanted[0]) if aligned else None
        needed = [{placed.needs[k] for placed in wanted} for k in range(len(call.types))]
        for k, step in enumerate(self.steps):
            if step.target is not ARANGE:
                self._add(k, step, parts[k], needed)
        if not all(self.placed):
            return  # an op inside reads no operand as it is needed: weights of classes, of which each rank has a part
        payments = Payments(self.graph, self.chains, self.order, self.labels, PENALTY)
        for value in self.values.values():
            payments.pay(value)

    def _type(self, ref: Ref) -> TensorType:
        if ref.step < 0:
            return self.call.types[-ref.step - 1]
        type = self.steps[ref.step].type
        part = type if ref.part is None else type[ref.part]  # type: ignore[index]
        assert isinstance(part, TensorType)
        return part

    def _bind(self, step: SubgraphOp) -> Bound:
        args, kwargs = arguments(step, self._type)
        return bind(step.target, args, kwargs, step.type if isinstance(step.type, tuple) else (step.type,))

    def _parts(self) -> list[dict[str, tuple[int, ...]]]:
        """Return the parts of the factors of each step, which follow from those of the op."""
        search, call = CutSearch(), self.call
        numbers: dict[Ref, int] = {Ref(-k - 1): k for k in range(len(call.types))}
        number = lambda ref: numbers.setdefault(ref, len(numbers))  # noqa: E731
        results = [None if ref is None else number(ref) for ref in call.expansion.results]
        search.add(-1, call.bound, range(len(call.types)), results)
        for factor, sizes in call.key[-1]:
            search.cut(-1, factor, sizes)
        for k, (step, bound) in enumerate(zip(self.steps, self.bounds, strict=True)):
            made = [number(ref) for ref in _results(k, step)]
            search.add(k, bound, [number(ref) for ref in refs(step)], made)
        search.run()
        return [search.of(k, bound) for k, bound in enumerate(self.bounds)]

    def _add(self, k: int, step: SubgraphOp, parts: Mapping[str, tuple[int, ...]], needed: Sequence[set]) -> None:
        bound, read = self.bounds[k], refs(step)
        placed = [
            each
            for each in _all(bound, self.mesh, tuple(sorted(parts.items())))
            if all(ref.step >= 0 or need in needed[-ref.step - 1] for ref, need in zip(read, each.needs, strict=True))
            and (self.splits is None or _is_aligned(bound, each, self.splits))
        ]
        types = step.type if isinstance(step.type, tuple) else (step.type,)
        dtypes = [self._type(ref).dtype for ref in read]
        prices = OpPrices(bound, self.mesh, dtypes, [None if t is None else t.dtype for t in types], self.machine)
        variable = self.graph.add_variable(str(k), [prices.price(dict(each.split)) for each in placed])
        self.variables[k] = variable
        self.placed.append(placed)
        self.prices.append(self.graph.costs[variable])
        self.order.append(float(k))
        self.labels.append("")
        for part, made in enumerate(_results(k, step)):
            if types[part] is not None:
                type = self._type(made)
                states = tuple((attr, type.dtype) for each in placed if (attr := each.gives[part]) is not None)
                self.values[made] = Value(str(k), type, variable, states)
        for position, (ref, dtype) in enumerate(zip(read, dtypes, strict=True)):
            if ref in self.values:
                reader = Reader(variable, tuple((each.needs[position], dtype) for each in placed), INSIDE, "")
                if reader not in self.values[ref].readers:
                    self.values[ref].readers.append(reader)

    def solved(self, placed: Placed) -> list[tuple[Placed, int]]:
        """Return the cheapest plan inside for the needs and gives of a strategy, with its nanoseconds.

        A result that no op inside can give as the rule says may have any other layout: each is a strategy of its own.
        There may be no plan.
        """
        if not all(self.placed):
            return []
        fits = [np.ones(len(each), dtype=bool) for each in self.placed]
        for k, variable in self.variables.items():
            for position, ref in enumerate(refs(self.steps[k])):
                if ref.step < 0:
                    need = placed.needs[-ref.step - 1]
                    some = [each.needs[position] == need for each in self.placed[variable]]
                    fits[variable] &= np.array(some, dtype=bool)
        choices = [fits]
        for result, give in zip(self.call.expansion.results, placed.gives, strict=True):
            if result is None or result not in self.values:
                return []
            variable, part = self.values[result].variable, result.part or 0
            gives = [each.gives[part] for each in self.placed[variable]]
            natural = [_with(some, variable, [g == give for g in gives]) for some in choices]
            if not any(some[variable].any() for some in natural):
                natural = [
                    _with(some, variable, [g == other for g in gives])
                    for some in choices
                    for other in dict.fromkeys(g for g, ok in zip(gives, some[variable].tolist(), strict=True) if ok)
                ]
            choices = natural
        found = [self._cheapest(placed, some) for some in choices if all(each.any() for each in some)]
        return [each for each in found if each is not None]

    def _cheapest(self, placed: Placed, fits: Sequence[np.ndarray]) -> tuple[Placed, int] | None:
        kept = [np.nonzero(each)[0] for each in fits]
        kept += [np.arange(len(costs)) for costs in self.graph.costs[len(fits) :]]
        graph = FactorGraph(self.graph.intern)
        for name, costs, some in zip(self.graph.names, self.graph.costs, kept, strict=True):
            graph.add_variable(name, costs[some])
        for (i, j), edge in self.graph.edges.items():
            graph.add_edge(i, j, edge.left[kept[i]], edge.right[kept[j]], edge.table)
        answer = solve(graph, self.order, self.labels)
        if answer.cost >= PENALTY:
            return None
        states = [int(some[state]) for some, state in zip(kept, answer.states.tolist(), strict=True)]
        total = sum(int(prices[state]) for prices, state in zip(self.prices, states, strict=False))
        for value in self.values.values():
            total += union(value.paths(self.chains, states))
        steps = [self._layouts(k, states) for k in range(len(self.steps))]
        needs = tuple(need if k in self.read else UNREAD for k, need in enumerate(placed.needs))
        gives = tuple(
            None if ref is None else steps[ref.step].gives[ref.part or 0] for ref in self.call.expansion.results
        )
        inside = Inside(tuple(steps), self._places(steps), self._bytes(steps))
        return Placed(placed.split, needs, gives, inside), total

    def _layouts(self, k: int, states: Sequence[int]) -> StepLayouts:
        if k not in self.variables:
            return StepLayouts((), (DistAttr.replicated(1),))
        each = self.placed[self.variables[k]][states[self.variables[k]]]
        return StepLayouts(each.needs, each.gives)

    def _places(self, steps: Sequence[StepLayouts]) -> tuple[Places, ...]:
        found: dict[Places, None] = {}
        for k, step in enumerate(self.steps):
            for position, ref in enumerate(refs(step)):
                if ref.step >= 0 and self.steps[ref.step].target is ARANGE:
                    made = OpPrices(self.bounds[ref.step], None, [], [INDEX], self.machine).price({})
                    need = steps[k].needs[position]
                    found[Places(self._type(ref).shape[0], made, need)] = None
        return tuple(found)

    def _bytes(self, steps: Sequence[StepLayouts]) -> int:
        """Return the bytes of the values that only the expansion has, at its peak."""
        last = {ref.step: k for k, step in enumerate(self.steps) for ref in refs(step) if ref.step >= 0}
        results = {ref.step for ref in self.call.expansion.results if ref is not None}
        held, peak = dict[int, int](), 0
        for k, step in enumerate(self.steps):
            if k not in results and self.bounds[k].rule.op not in VIEWS:
                rows = zip(_results(k, step), steps[k].gives, strict=True)
                held[k] = sum(
                    largest(give, self._type(ref).shape, self.mesh) * self._type(ref).dtype.itemsize
                    for ref, give in rows
                    if give is not None
                )
            peak = max(peak, sum(held.values()))
            held = {step: bytes for step, bytes in held.items() if last.get(step, k) > k}
        return peak


def _splits(bound: Bound, placed: Placed) -> dict[int, set[Dim | None]]:
    """Return size of a factor → how the factors of this size are split; ``None`` if one is whole."""
    found: dict[int, set[Dim | None]] = {}
    for factor, size in bound.sizes.items():
        found.setdefault(size, set()).add(dict(placed.split).get(factor))
    return found


def _is_aligned(bound: Bound, placed: Placed, splits: Mapping[int, set[Dim | None]]) -> bool:
    """Return whether a strategy splits each factor as one of its size is split, unless it needs it whole."""
    own = dict(placed.split)
    return all(
        factor not in own if factor in bound.whole else own.get(factor) in splits.get(size, {None})
        for factor, size in bound.sizes.items()
    )


def _results(k: int, step: SubgraphOp) -> list[Ref]:
    return [Ref(k, part) for part in range(len(step.type))] if isinstance(step.type, tuple) else [Ref(k)]


def _with(fits: Sequence[np.ndarray], variable: int, more: Sequence[bool]) -> list[np.ndarray]:
    """Return which states fit if only some of one variable do."""
    return [each & np.array(more, dtype=bool) if number == variable else each for number, each in enumerate(fits)]
