"""Add the prices of the transfers of values to a factor graph, each shared transfer once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np

from autopar.ir import transfers
from autopar.search.problem.groups import groups_of
from autopar.search.problem.problem import Reader, Value
from autopar.search.solver.factor_graph import FactorGraph
from autopar.search.transfer_prices.chains import Chain, Chains, State
from autopar.search.transfer_prices.once import reduction, through
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
    _alternates: dict[object, Alternates] = field(default_factory=dict)
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
        made = self._alternates.get(key)
        if made is None:
            needed = list(dict.fromkeys(state for states, _, _ in uses for state in states))
            starts = self._starts(value.type.shape, options, [states for states, _, _ in uses], others)
            place = {state: number for number, state in enumerate(needed)}
            each = [Use(np.array([place[state] for state in states]), *rest) for states, *rest in uses]
            tree = tree_of([self._from(value.type.shape, start, needed) for start in starts])
            made = alternates(tree, each, share, kept, computed=value.computed)
            for k, start in enumerate(starts):
                if start.owner is not None:
                    own = np.array(
                        [start.begins in self._ways(value.type.shape, start.home, [s]) for s in uses[start.owner][0]]
                    )
                    made.rest[start.owner][made.home == k] += np.where(own, 0.0, self.penalty)
            homes = np.array([options.index(start.home) for start in starts])
            made = self._alternates[key] = made._replace(home=homes[made.home])
        if len(made.home) == len(options):
            return False
        variable = self.graph.add_variable(f"{value.name}'", made.paid)
        self.order.append(self.order[value.variable] + 0.5)
        labels = {reader.block for reader in readers}
        self.labels.append(labels.pop() if len(labels) == 1 else self.labels[value.variable])
        self.graph.add_edge(value.variable, variable, left, made.home, self.equal(len(options)))
        pairs = np.arange(len(made.home))
        for (states, right), reader, rest in zip(numbered, readers, made.rest, strict=True):
            if (forbidden := self._moves(value, options, states)) is not None:
                rest = rest + forbidden[made.home]
            self.graph.add_edge(variable, reader.variable, pairs, right, rest)
        return True

    def _starts(self, shape, options: Sequence[State], uses: Sequence[Sequence[State]], others) -> list[_Start]:
        """Return the homes, and the ways in which pending ones may be reduced before several uses.

        A way is one of those of a use, its owner. With other uses, in other groups, it may be theirs.
        """
        starts = []
        for home in options:
            starts.append(_Start(home))
            if not home[0].pending:
                continue
            owned: dict[tuple[Chain, int | None], None]
            if others:
                owned = dict.fromkeys((begins, None) for states in others for begins in self._ways(shape, home, states))
            else:
                owned = {
                    (begins, k): None for k, states in enumerate(uses) for begins in self._ways(shape, home, states)
                }
            if len({begins for begins, _ in owned}) > 1:
                whole = self.chains.chain(shape, home, (home[0].without_pending(), home[1]))
                starts += [_Start(home, begins, k) for begins, k in {(whole, None): None, **owned}]
        return starts

    def _ways(self, shape: tuple[int, ...], home: State, states: Sequence[State]) -> dict[Chain, None]:
        """Return the ways in which the cheapest transfers to some states reduce a home."""
        chains = (self.chains.chain(shape, home, state) for state in states)
        return {begins: None for chain in chains if (begins := reduction(chain))}

    def _from(self, shape: tuple[int, ...], start: _Start, states: Sequence[State]) -> list[Chain]:
        find = partial(self.chains.chain, shape)
        if not start.begins:
            return [find(start.home, state) for state in states]
        return through(find, start.home, states, start.begins)

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
                starts = self._starts(shape, options, [states], others)
                tree = tree_of([self._from(shape, start, states) for start in starts])
                every = charges(tree, use, share, kept, computed=value.computed)
                table = np.full((len(options), len(states)), np.inf)
                np.minimum.at(table, [options.index(start.home) for start in starts], every)
            self._tables[key] = table
        return table


class _Start(NamedTuple):
    """The home of a value, or a way in which a pending one is reduced before several uses, one of which owns it."""

    home: State
    begins: Chain = ()
    owner: int | None = None


def _numbered(states: Sequence[State]) -> tuple[list[State], np.ndarray]:
    """Return the different states, and the number of each."""
    numbers: dict[State, int] = {}
    return [*dict.fromkeys(states)], np.array([numbers.setdefault(state, len(numbers)) for state in states])
