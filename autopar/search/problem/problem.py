"""Hold the choice of a plan as a factor graph, with the meaning of its variables.

A variable is the strategy of an op, the home of a placeholder, or the alternate of a value that several ops read.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import numpy as np
import torch
from torch import fx

from autopar.ir.layout import DistAttr
from autopar.ir.mesh import Mesh
from autopar.ir.nodes import element_of, is_getitem, name_of, operands, tensor_type
from autopar.ir.program import Program
from autopar.ir.record import Requirement, TensorType, requirement_of
from autopar.plan.boundary import gradient_sums
from autopar.plan.shared_transfers import is_view, reduces
from autopar.search.problem.ending import Ending
from autopar.search.problem.index_places import price_of_places
from autopar.search.problem.strategies import Placed, StepLayouts
from autopar.search.solver.factor_graph import FactorGraph
from autopar.search.solver.solver import Answer
from autopar.search.transfer_prices.chains import Chain, Chains, State
from autopar.search.transfer_prices.classes import UNREAD
from autopar.search.transfer_prices.once import once
from autopar.search.transfer_prices.sharing import Path, path_of, union


@dataclass(frozen=True)
class Reader:
    """One use of a value.

    Attributes:
        variable: decides the use.
        states: what the use needs, for each state of that variable.
        phase: of the transfers before the use.
        block: path of the reader's block, or "".
        turning: whether the reader is in the block with which the forward ends.
    """

    variable: int
    states: tuple[State, ...]
    phase: str
    block: str
    turning: bool = False


@dataclass
class Value:
    """One tensor of the program.

    Attributes:
        variable: of the op or placeholder that makes it.
        states: its state for each state of that variable.
        readers: its uses; its own variable decides in which layout it is returned.
        computed: whether an op makes it, so that narrowing casts of it are kept for the backward.
        parameter: whether it is a parameter.
        stays: whether it may not move to another rank before it is read.
    """

    name: str
    type: TensorType
    variable: int
    states: tuple[State, ...]
    computed: bool = True
    parameter: bool = False
    stays: bool = False
    readers: list[Reader] = field(default_factory=list)

    def paths(self, chains: Chains, states: Sequence[int], reduced: Collection[int] = ()) -> list[Path]:
        """Return the transfers before each reader of an assignment, with what shares them.

        Args:
            reduced: variables of views that read reduced values.
        """
        have = _state(self.states[states[self.variable]], self.variable in reduced)
        needs = [_state(reader.states[states[reader.variable]], reader.variable in reduced) for reader in self.readers]

        def shared(found: Sequence[Chain]) -> list[Path]:
            return [
                path_of(chain, reader.phase, computed=self.computed, turning=self.turns(reader))
                for chain, reader in zip(found, self.readers, strict=True)
            ]

        find = partial(chains.chain, self.type.shape)
        return shared(once(find, have, needs, lambda found: union(shared(found))))

    def turns(self, reader: Reader) -> bool:
        """Return whether a gather before a reader is shared by the forward and the backward."""
        return self.parameter and (reader.phase == "forward" or reader.turning)


def _state(state: State, reduced: bool) -> State:
    return (state[0].without_pending(), state[1]) if reduced else state


def _need(value: Value, view: Value, states: Sequence[int]) -> State:
    """Return the state in which a view reads its value."""
    reader = next(reader for reader in value.readers if reader.variable == view.variable)
    return reader.states[states[reader.variable]]


@dataclass(frozen=True)
class ChosenState:
    """The layout of the optimizer's state of a parameter, where it is chosen.

    Attributes:
        variable: decides it.
        layouts: for each state of that variable.
        sum: the sum of the gradients.
    """

    variable: int
    layouts: Sequence[DistAttr]
    sum: fx.Node


@dataclass
class Problem:
    """The factor graph of a program.

    Attributes:
        variables: op or placeholder → its variable.
        placed: variable of an op → its strategies.
        prices: variable of an op → the nanoseconds of each strategy.
        opened: variable of an op with opened strategies → the phase of the op.
        homes: variable of a placeholder → its possible attributes.
        values: (node, index of the result) → the value.
        results: of the output: the value, the variable of the placeholder whose home is required (or ``None``: the
            value's own state), and the dtype.
        order: variable → where it stands in the program.
        labels: variable → the path of its block, or "".
        allowed: pairs of a variable and the states of it that a constraint allows.
        late: whether the time limit came before all prices of transfers were known.
        pairs: how many pairs of states there are between which values may move, with those that were left out.
        floor: if states were left out, nanoseconds that plans with one of them take at least; else ``None``.
        microbatches: how often the program runs in a step.
        ending: what ends the step, if the program is a micro-batch.
        endings: the variable of a parameter (``None`` for the loss), that of the sum of its gradients, and the
            nanoseconds of the update for each pair of states, once in a step. Where the layout of the optimizer's
            state is chosen too, the pairs are of it and of the sum, and of the parameter and of it.
        chosen_states: parameter → the layout of the optimizer's state, where it is chosen.
    """

    program: Program
    mesh: Mesh
    chains: Chains
    graph: FactorGraph = field(default_factory=FactorGraph)
    variables: dict[fx.Node, int] = field(default_factory=dict)
    placed: dict[int, list[Placed]] = field(default_factory=dict)
    prices: dict[int, np.ndarray] = field(default_factory=dict)
    opened: dict[int, str] = field(default_factory=dict)
    homes: dict[int, list[DistAttr]] = field(default_factory=dict)
    values: dict[tuple[fx.Node, int], Value] = field(default_factory=dict)
    results: list[tuple[Value, int | None, tuple[State, ...], torch.dtype]] = field(default_factory=list)
    order: list[float] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    allowed: list[tuple[int, np.ndarray]] = field(default_factory=list)
    late: bool = False
    pairs: int = 0
    floor: float | None = None
    microbatches: int = 1
    ending: Ending | None = None
    endings: list[tuple[int | None, int, np.ndarray]] = field(default_factory=list)
    chosen_states: dict[fx.Node, ChosenState] = field(default_factory=dict)

    def bounded(self, answer: Answer) -> Answer:
        """Return an answer with the bound of all plans, where states were left out."""
        return answer if self.floor is None else replace(answer, bound=min(self.floor, answer.bound, answer.cost))

    def value(self, node: fx.Node) -> Value:
        return self.values[element_of(node) if is_getitem(node) else (node, 0)]

    @property
    def least_of_ops(self) -> float:
        """What the ops of one micro-batch cost at least, in nanoseconds."""
        return sum(float(prices.min()) for prices in self.prices.values())

    def required_results(self, states: Sequence[int]) -> tuple[Requirement, ...]:
        """Return what the output requires of each result."""
        return tuple(
            requirement_of(
                self.mesh, own[states[value.variable]][0] if home is None else self.homes[home][states[home]], dtype
            )
            for value, home, own, dtype in self.results
        )

    def explicit_price(self, states: Sequence[int]) -> int:
        """Return the nanoseconds of the step of an assignment, with each shared transfer paid once.

        It is that of the explicit program, or that of all micro-batches and the update.
        """
        total = sum(int(prices[states[variable]]) for variable, prices in self.prices.items())
        reduced = self.views_of_reduced(states)
        for value in self.values.values():
            total += union(value.paths(self.chains, states, reduced))
        return (total + self.places(states)) * self.microbatches + self.ended(states)

    def views_of_reduced(self, states: Sequence[int]) -> set[int]:
        """Return the variables of the views that read reduced values: what ``reshard`` does with an assignment."""
        roots: dict[int, int] = {}  # id of a view → that of the first value
        found: set[int] = set()
        views = [row for row in self._views if all(value.states[states[value.variable]][0].pending for value in row)]
        waiting = [(view, value) for view, value in views if _need(value, view, states)[0].pending]
        if not waiting:
            return found
        for view, value in waiting:
            roots[id(view)] = roots.get(id(value), id(value))
        members = {id(value): value for row in waiting for value in row}
        reduced = {
            key
            for key, value in members.items()
            for reader in value.readers
            for have, need in [(value.states[states[value.variable]], reader.states[states[reader.variable]])]
            if reduces(have[0].pending, need[0].pending) and need[0] != UNREAD
        }
        ways: dict[int, int] = {}
        for key in reduced:
            ways[roots.get(key, key)] = ways.get(roots.get(key, key), 0) + 1
        lifted: set[int] = set()
        for view, value in reversed(waiting):
            if ways.get(roots[id(view)], 0) > 1 and (id(view) in reduced or id(view) in lifted):
                found.add(view.variable)
                lifted.add(id(value))
        return found

    @cached_property
    def _views(self) -> list[tuple[Value, Value]]:
        """The views and casts of values, with the values."""
        return [
            (self.values[node, 0], self.value(operands(node)[0]))
            for node in self.program.nodes
            if (node, 0) in self.values and is_view(node)
        ]

    def inside(self, states: Sequence[int]) -> dict[fx.Node, tuple[StepLayouts, ...]]:
        """Return op → the layouts of its expansion, of the ops that an assignment expands."""
        found = {}
        for node, variable in self.variables.items():
            if variable in self.opened:
                inside = self.placed[variable][states[variable]].inside
                if inside is not None:
                    found[node] = inside.steps
        return found

    def places(self, states: Sequence[int]) -> int:
        """Return the nanoseconds of what numbers the indices of dims that are split in expansions."""
        used = []
        for variable, phase in self.opened.items():
            inside = self.placed[variable][states[variable]].inside
            if inside is not None:
                used += [(phase, places) for places in inside.places]
        return price_of_places(self.chains, used)

    def ended(self, states: Sequence[int]) -> int:
        """Return the nanoseconds of the update of an assignment."""
        if not self.late:
            return sum(
                int(table[0 if left is None else states[left], states[right]]) for left, right, table in self.endings
            )
        if self.ending is None:
            return 0
        total = 0
        for sum_, parameter in gradient_sums(self.program).items():
            type, attr = tensor_type(sum_), self.homes[self.variables[sum_]][states[self.variables[sum_]]]
            if parameter is None:
                total += int(self.ending.of_loss(self.chains, type, [attr])[0])
                continue
            name, own = name_of(parameter), tensor_type(parameter)
            home, state = (
                self.homes[self.variables[parameter]][states[self.variables[parameter]]],
                self.state_of(parameter, states),
            )
            total += self.ending.price(self.chains, name, own, home, state, attr, type.dtype)
        return total

    def state_of(self, parameter: fx.Node, states: Sequence[int]) -> DistAttr:
        """Return the layout of the optimizer's state of a parameter."""
        assert self.ending is not None
        chosen, variable = self.chosen_states.get(parameter), self.variables[parameter]
        if chosen is not None:
            return chosen.layouts[states[chosen.variable]]
        return self.ending.state_of(self.homes[variable][states[variable]], tensor_type(parameter).shape)
