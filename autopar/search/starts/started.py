"""Place a program as starting points say, and compare with what a search found: a start may be cheaper.

It can be if the search has no proof, or if the start has a layout that the search does not try (``README.md`` says
which). A start is placed greedily, as a plan of its own would be, except that additions keep their order.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from autopar.costs.machine import Machine
from autopar.costs.program_price import price, price_of_ops
from autopar.errors import AutoparError
from autopar.ir import transfers
from autopar.ir.layout import UNDECIDED, WHOLE, DistAttr, largest
from autopar.ir.nodes import is_getitem, name_of, operands, record_of, tensor_type
from autopar.ir.program import Program
from autopar.ir.record import TensorType
from autopar.plan.boundary import OPEN, Boundary, UserConstraints, filled
from autopar.report.progress import doing
from autopar.search.memory.usage import usage_of
from autopar.search.problem.ending import Ending
from autopar.search.problem.optimizer_states import cheapest_state, cheapest_states, chosen_layouts
from autopar.search.problem.problem import Problem
from autopar.search.problem.strategies import shrinks
from autopar.search.starts.copied import Copied, Inside, Types, Uses, layouts_of
from autopar.search.transfer_prices.classes import UNREAD

COLLECTIVES = {function for function, transfer in transfers.BY_FUNCTION.items() if transfer.collective}

Starts = Iterable[tuple[str, Mapping[str, DistAttr]]]


class Greedy(Protocol):
    """The passes that place a program without a search, and those that insert transfers."""

    def peak(self, placed: Program, machine: Machine) -> int:
        """Return the bytes of the first rank at the peak of the program, by its liveness."""

    def placed(self, boundary: Boundary, machine: Machine, *, strict: bool) -> Copied:
        """Return a placed copy of the program, in which ops are expanded where their dims are split."""

    def explicit(self, placed: Program, machine: Machine) -> Program:
        """Return an explicit copy of a placed program."""


@dataclass(frozen=True)
class Start:
    """A starting point on the program.

    Attributes:
        types, uses, inside: as of a plan that was found.
        nanoseconds: its price.
        states: the assignment that it is, if it is one of those that the search tries.
        bytes: what a rank uses at the peak; ``None`` where memory has no limit.
        optimizer_states: parameter → the layout of the optimizer's state, where it is chosen.
    """

    name: str
    types: Types
    uses: Uses
    nanoseconds: int
    states: np.ndarray | None
    bytes: int | None
    optimizer_states: Mapping[str, DistAttr] = field(default_factory=dict)
    inside: Inside = field(default_factory=dict)


@dataclass(frozen=True)
class Comparison:
    """What starts are compared with.

    Attributes:
        exact: whether no assignment of the problem is cheaper than what was found.
        deadline: of ``time.monotonic``, after which no further start is placed.
        room: the bytes that a rank may use; ``None`` if memory has no limit.
    """

    problem: Problem
    boundary: Boundary
    machine: Machine
    greedy: Greedy
    strict: bool
    ending: Ending | None
    exact: bool
    deadline: float
    room: float | None = None

    def cheapest(self, starts: Starts, below: float) -> Start | None:
        """Return the cheapest start that costs less than ``below`` nanoseconds; ``None`` if there is none.

        Starts that do not meet the constraints of the user, that cannot be placed or that do not fit are left out.
        """
        best: Start | None = None
        for name, layouts in starts:
            if time.monotonic() > self.deadline:
                break
            if self.exact and self._tried(layouts):
                continue
            try:
                with doing(f"search, beside the preset {name}"):
                    start = self._priced(name, layouts, below if best is None else best.nanoseconds)
            except AutoparError:
                continue
            if start is not None and (start.bytes is None or start.bytes <= (self.room or 0)):
                best = start
        return best

    def _tried(self, layouts: Mapping[str, DistAttr]) -> bool:
        """Return whether the search has tried the homes of a start and its splits of results, with all strategies."""
        mesh = self.boundary.mesh
        for node in self.boundary.program.nodes:
            if node.name not in layouts or node.op == "output":
                continue
            attr = self._with_user(node.name, layouts[node.name])
            if node.op != "call_function":
                if attr not in self.problem.homes[self.problem.variables[node]]:
                    return False
            elif not all(
                shrinks(size, axes, mesh) for size, axes in attr.parts(tensor_type(node).shape) if UNDECIDED not in axes
            ):
                return False
        return True

    def _with_user(self, name: str, attr: DistAttr) -> DistAttr:
        """Return the layout of a value in a start, with the dims that the user decides."""
        asked = self.boundary.constraints.get(name)
        if asked is None:
            return attr
        shape = tensor_type(self.boundary.program.node(name)).shape
        closed = DistAttr(tuple(WHOLE if dim == OPEN else dim for dim in attr.dims))
        return filled(asked, closed).normalize(shape, self.boundary.mesh)

    def _priced(self, name: str, layouts: Mapping[str, DistAttr], below: float) -> Start | None:
        """Return a start with its price; ``None`` if it is not below, or does not meet the constraints of the user."""
        nodes = {node.name: node for node in self.boundary.program.nodes}
        wanted = {value: self._with_user(value, attr) for value, attr in layouts.items() if value in nodes}
        for value, asked in self.boundary.constraints.items():
            if value not in wanted and OPEN in asked.dims:
                wanted[value] = self._with_user(value, DistAttr.replicated(len(asked.dims)))
        constraints = UserConstraints({**self.boundary.constraints, **wanted}, {})
        boundary = replace(self.boundary, constraints=constraints)
        placed = self.greedy.placed(boundary, self.machine, strict=self.strict)
        read = layouts_of(self.boundary.program, placed)
        types, uses, inside = read.types, read.uses, read.inside
        if not self._allowed(types, uses):
            return None
        states = self._states(types, uses) if read.alike else None
        if states is not None:
            nanoseconds, chosen = self.problem.explicit_price(states.tolist()), chosen_layouts(self.problem, states)
            inside = self.problem.inside(states.tolist())
        else:
            chosen = self._layouts_of_states(types)
            ended = self._ended(types, chosen)
            least = price_of_ops(placed.program, self.machine) * self.problem.microbatches + ended
            if least >= below:  # transfers only make it dearer
                return None
            once = price(self.greedy.explicit(placed.program, self.machine), self.machine).nanoseconds
            nanoseconds = once * self.problem.microbatches + ended
        if nanoseconds >= below:
            return None
        bytes = None
        if self.room is not None and states is not None:
            bytes = usage_of(self.problem, states.tolist(), self.ending).bytes
        elif self.room is not None:
            bytes = self.greedy.peak(placed.program, self.machine) + self._kept(types, chosen)
        return Start(name, types, uses, nanoseconds, states, bytes, chosen, inside)

    def _allowed(self, types: Types, uses: Uses) -> bool:
        """Return whether homes and reads are as the user wants them, and parameters stay that must not move."""
        for node, type in types.items():
            if not isinstance(type, TensorType) or is_getitem(node):
                continue
            asked = self.boundary.decided(node) if node.op == "call_function" else None
            value = self.problem.value(node)
            if asked is None and not value.stays:
                continue
            for user in node.users:
                for operand, need in zip(operands(user), uses[user], strict=True):
                    if operand is not node or need is None:
                        continue
                    attr = need.placed.attr
                    if asked is not None and user.op != "output":
                        if filled(asked, attr).normalize(type.shape, self.boundary.mesh) != attr:
                            return False
                    elif value.stays:
                        hops = self.problem.chains.chain(type.shape, (type.attr, type.dtype), (attr, need.dtype))
                        if any(hop.function in COLLECTIVES for hop in hops):
                            return False
        return True

    def _states(self, types: Types, uses: Uses) -> np.ndarray | None:
        """Return the assignment that has these layouts; ``None`` if the problem has none."""
        problem = self.problem
        states = np.zeros(len(problem.graph.costs), dtype=np.int64)
        numbers: dict[int, dict[object, int]] = {}
        for node, variable in problem.variables.items():
            if variable in problem.homes:
                type = types[node]
                assert isinstance(type, TensorType)
                options: list = problem.homes[variable]
                chosen: object = type.attr
            else:
                options = problem.placed[variable]
                parts = types[node] if isinstance(types[node], tuple) else (types[node],)
                gives = tuple(None if part is None else part.attr for part in parts)  # type: ignore[union-attr]
                chosen = tuple(UNREAD if need is None else need.placed.attr for need in uses[node]), gives
            known = numbers.get(id(options))
            if known is None:
                keys = options if variable in problem.homes else [(option.needs, option.gives) for option in options]
                known = numbers[id(options)] = {key: k for k, key in enumerate(keys)}
            if chosen not in known:
                return None
            states[variable] = known[chosen]
        states = cheapest_states(problem, states)
        if uses[problem.program.output] != problem.required_results(states.tolist()):
            return None
        return states if all(fits[states[variable]] for variable, fits in problem.allowed) else None

    def _layouts_of_states(self, types: Types) -> dict[str, DistAttr]:
        """Return the cheapest layouts of the optimizer's states, where they are chosen, in the homes of a start."""
        found = {}
        for parameter, state in self.problem.chosen_states.items():
            home, sum_ = types[parameter], types[state.sum]
            assert isinstance(home, TensorType) and isinstance(sum_, TensorType)
            name, layouts = name_of(parameter), list(dict.fromkeys((*state.layouts, home.attr)))
            chosen = cheapest_state(self.problem, name, home, home.attr, sum_.attr, sum_.dtype, layouts)
            found[name] = layouts[chosen]
        return found

    def _kept(self, types: Types, chosen: Mapping[str, DistAttr]) -> int:
        """Return the bytes of what the optimizer keeps, in the homes of a start, and of further micro-batches."""
        if self.ending is None:
            return 0
        total, mesh = 0, self.boundary.mesh
        for node in self.boundary.program.placeholders:
            type, record = types[node], record_of(node)
            assert isinstance(type, TensorType)
            if record.role == "input":
                total += (self.ending.microbatches - 1) * largest(type.attr, type.shape, mesh) * type.dtype.itemsize
            elif record.role == "param":
                layout = chosen.get(name_of(node)) or self.ending.state_of(type.attr, type.shape)
                kept = [*self.ending.states.get(name_of(node), ())]
                if name_of(node) in self.ending.kept:
                    kept.append(replace(type, dtype=self.ending.kept[name_of(node)]))
                total += sum(largest(layout, type.shape, mesh) * held.dtype.itemsize for held in kept)
        return total

    def _ended(self, types: Types, chosen: Mapping[str, DistAttr]) -> int:
        """Return the nanoseconds of the update, in the homes of a start. ``chosen``: layouts of optimizer's states."""
        if self.ending is None:
            return 0
        total, chains = 0.0, self.problem.chains
        for sum_, parameter in self.boundary.sums.items():
            type = types[sum_]
            assert isinstance(type, TensorType)
            if parameter is None:
                total += float(self.ending.of_loss(chains, type, [type.attr])[0])
                continue
            home, name = types[parameter], name_of(parameter)
            assert isinstance(home, TensorType)
            state = chosen.get(name) or self.ending.state_of(home.attr, home.shape)
            total += self.ending.price(chains, name, home, home.attr, state, type.attr, type.dtype)
        return int(total)
