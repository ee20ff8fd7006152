"""Add the prices of the transfers of values to a factor graph, each shared transfer once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from autopar.ir import transfers
from autopar.search.problem.groups import groups_of
from autopar.search.problem.problem import Reader, Value
from autopar.search.solver.factor_graph import FactorGraph
from autopar.search.transfer_prices.chains import Chains, State
from autopar.search.transfer_prices.heads import heads_of
from autopar.search.transfer_prices.sharing import Alternates, Use, alternates, charges
from autopar.search.transfer_prices.trees import tree_of

COLLECTIVES = {function for function, transfer in transfers.BY_FUNCTION.items() if transfer.collective}


@dataclass
class Payments:
    """What pays for the transfers of values.

    Attributes:
        graph: gets the prices, and variables for what several readers of a value share.
        order, labels: of its variables, as of ``Problem``.
        penalty: nanoseconds, of what is forbidden.
    """

    graph: FactorGraph
    chains: Chains
    order: list[float]
    labels: list[str]
    penalty: float
    _alternates: dict[object, tuple[Alternates, np.ndarray]] = field(default_factory=dict)
    _tables: dict[object, np.ndarray] = field(default_factory=dict)
    _moving: dict[object, np.ndarray] = field(default_factory=dict)

    def equal(self, count: int) -> np.ndarray:
        """Return the table that forbids two different states."""
        return np.where(np.eye(count, dtype=bool), 0.0, self.penalty)

    def add_costs(self, variable: int, costs: np.ndarray) -> None:
        """Add to the costs of the states of a variable."""
        self.graph.costs[variable] = self.graph.intern(self.graph.costs[variable] + costs)

    def pay(self, value: Value) -> None:
        """Add the prices of all transfers of a value."""
        options, left = _numbered(value.states)
        groups = groups_of(value)
        for readers, share, kept in groups:
            numbered = [_numbered(reader.states) for reader in readers]
            others = [] if len(groups) == 1 else [reader.states for reader in value.readers]
            if len(readers) > 1 and self._pay_once(value, options, left, readers, numbered, share, kept, others):
                continue
            for (states, right), reader in zip(numbered, readers, strict=True):
                table = self._table(value, options, states, reader, share, kept, others)
                if (forbidden := self._moves(value, options, states)) is not None:
                    table = table + forbidden
                if reader.variable == value.variable:
                    self.add_costs(value.variable, table[left, right])
                else:
                    self.graph.add_edge(value.variable, reader.variable, left, right, table)

    def _pay_once(self, value: Value, options, left, readers, numbered, share, kept, others) -> bool:
        """Add a variable for what the readers share; ``False`` if they cannot share anything."""
        uses = [(tuple(states), r.phase, value.turns(r)) for (states, _), r in zip(numbered, readers, strict=True)]
        key = (value.type.shape, tuple(options), tuple(uses), value.computed, share, kept, tuple(others))
        if key not in self._alternates:
            find = partial(self.chains.chain, value.type.shape)
            heads = heads_of(find, options, [states for states, _, _ in uses], others)
            needed = list(dict.fromkeys(state for states, _, _ in uses for state in states))
            place = {state: number for number, state in enumerate(needed)}
            each = [Use(np.array([place[state] for state in states]), *rest) for states, *rest in uses]
            tree = tree_of(heads.chains(find, needed))
            made = alternates(tree, each, share, kept, computed=value.computed)
            for rest, (states, _, _) in zip(made.rest, uses, strict=True):
                waits = np.array([[head.waits.get(state, 0.0) for state in states] for head in heads.heads])
                rest += np.floor(waits * min(share, kept) * 2**20)[made.home] / 2**20
            self._alternates[key] = made, heads.table(kept, self.penalty)
        made, ways = self._alternates[key]
        if len(made.home) == len(options):
            return False
        variable = self.graph.add_variable(f"{value.name}'", made.paid)
        self.order.append(self.order[value.variable] + 0.5)
        labels = {reader.block for reader in readers}
        self.labels.append(labels.pop() if len(labels) == 1 else self.labels[value.variable])
        self.graph.add_edge(value.variable, variable, left, made.home, ways)
        pairs = np.arange(len(made.home))
        for (states, right), reader, rest in zip(numbered, readers, made.rest, strict=True):
            if (forbidden := self._moves(value, options, states)) is not None:
                rest = rest + forbidden[made.home]
            self.graph.add_edge(variable, reader.variable, pairs, right, rest)
        return True

    def _moves(self, value: Value, options: Sequence[State], states: Sequence[State]) -> np.ndarray | None:
        """Return the penalties of transitions that communicate, for a parameter that moves in the update alone."""
        if not value.stays:
            return None
        key = (value.type.shape, tuple(options), tuple(states))
        if key not in self._moving:
            chain = lambda have, need: self.chains.chain(value.type.shape, have, need)  # noqa: E731
            moves = [[any(hop.function in COLLECTIVES for hop in chain(h, n)) for n in states] for h in options]
            self._moving[key] = np.where(np.array(moves), self.penalty, 0.0)
        return self._moving[key]

    def _table(self, value: Value, options, states, reader: Reader, share: float, kept: float, others) -> np.ndarray:
        """Return the nanoseconds of the transfers from each home to each state that a reader needs."""
        shape = value.type.shape
        how = value.computed, reader.phase, value.turns(reader)
        key = (shape, tuple(options), tuple(states), share, kept, how, tuple(others))
        table = self._tables.get(key)
        if table is None:
            if share == kept == 1.0:
                table = self.chains.prices(shape, options, states).astype(np.float64)
            else:
                use = Use(np.arange(len(states)), reader.phase, value.turns(reader))
                find = partial(self.chains.chain, shape)
                heads = heads_of(find, options, [states], others)
                tree = tree_of([[find(head.state, state) for state in states] for head in heads.heads])
                every = charges(tree, use, share, kept, computed=value.computed)
                ways = heads.table(kept, self.penalty)
                table = np.min(ways[:, :, None] + every, axis=1)
            self._tables[key] = table
        return table


def _numbered(states: Sequence[State]) -> tuple[list[State], np.ndarray]:
    """Return the different states, and the number of each."""
    numbers: dict[State, int] = {}
    return [*dict.fromkeys(states)], np.array([numbers.setdefault(state, len(numbers)) for state in states])
