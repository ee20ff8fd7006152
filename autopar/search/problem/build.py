"""Build the factor graph of a traced program: strategies, homes, and the prices of ops and transfers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from torch import fx

from autopar.capture.blocks import block_of, blocks, is_parameter, module_paths
from autopar.costs.machine import Machine
from autopar.costs.op_prices import OpPrices
from autopar.ir import transfers
from autopar.ir.layout import DistAttr, layout_of
from autopar.ir.nodes import element_of, is_getitem, name_of, operands, record_of, tensor_type
from autopar.plan.boundary import Boundary, required_dtypes
from autopar.plan.ops_without_rule import usable_rule
from autopar.plan.shared_transfers import computed, turning_block
from autopar.report.progress import doing
from autopar.rules.binding import drawn_alike, splits_in_common
from autopar.rules.strategies import Bound
from autopar.search.problem.constrained_reads import allowed_states
from autopar.search.problem.cuts import CutSearch
from autopar.search.problem.dearer import refuse_dearer
from autopar.search.problem.ending import Ending
from autopar.search.problem.index_places import PAIR, share_of
from autopar.search.problem.narrowing import is_wide, narrow, pairs_of
from autopar.search.problem.opened import Opened, OpenedStrategies, charge_pair
from autopar.search.problem.optimizer_states import follows_home, follows_sum, layouts_of_state
from autopar.search.problem.payments import Payments
from autopar.search.problem.problem import ChosenState, Problem, Reader, Value
from autopar.search.problem.strategies import Placed, homes, strategies
from autopar.search.transfer_prices.chains import Chains, OutOfTime, State, Tables

COLLECTIVES = {function for function, transfer in transfers.BY_FUNCTION.items() if transfer.collective}
LEAST_PENALTY = 2.0**33  # nanoseconds, of what is forbidden: up to here all sums are exact


def build(
    boundary: Boundary,
    machine: Machine,
    *,
    strict: bool = False,
    ending: Ending | None = None,
    deadline: float = math.inf,
    below: float = math.inf,
    cheaper: float | None = None,
    tables: Tables | None = None,
    priced: bool = True,
) -> Problem:
    """Return the problem of choosing the layouts of a traced program.

    Args:
        strict: refuse ops without a rule.
        ending: what ends the step, if the program is a micro-batch.
        deadline: of ``time.monotonic``, after which the problem is returned as it is, with ``late`` set.
        below: only plans that cost less nanoseconds are wanted.
        cheaper: of a wide problem, keep all states that a plan may have which costs less nanoseconds for one
            micro-batch; without it few are kept.
        tables: prices of transfers that further problems share.
        priced: whether it will be solved; else no transfer has a price, and no state is left out.

    Raises:
        RuleError: an op has no rule, and ``strict`` is set.
        PlanError: no strategy of an op meets a constraint.
        NotCheaper: the ops alone cost as much as ``below``.
    """
    builder = _Builder(boundary, machine, strict, ending)
    with doing(builder.doing):
        return builder.build(deadline, below, cheaper, tables, priced)


class _Builder:
    def __init__(self, boundary: Boundary, machine: Machine, strict: bool, ending: Ending | None) -> None:
        self.ending = ending
        self.boundary, self.program, self.mesh, self.strict = boundary, boundary.program, boundary.mesh, strict
        self.machine = machine
        self.chains = Chains(self.mesh, machine)
        self.problem = Problem(self.program, self.mesh, self.chains)
        self.graph = self.problem.graph
        self._block_of = block_of(self.program)
        self._blocks = blocks(module_paths(self.program))
        self._turning = turning_block(self.program)
        self._strategies: dict[object, list[Placed]] = {}
        self._prices: dict[object, np.ndarray] = {}
        self._opened: dict[fx.Node, OpenedStrategies] = {}
        self._numbering: dict[tuple[str, int], list[fx.Node]] = {}  # phase, size → the ops that may number the indices
        self._with: dict[object, tuple[list[Placed], np.ndarray, np.ndarray]] = {}
        self._at: fx.Node | None = None  # for the progress bar, as is the next
        self._done = "layouts", 0, 0  # what is done with values, how many, and of how many
        self.payments = Payments(self.graph, self.chains, self.problem.order, self.problem.labels, LEAST_PENALTY)

    def doing(self) -> str:
        """Name the step, and the module whose layouts are listed or priced."""
        at = "" if self._at is None else record_of(self._at).module
        what, done, count = self._done
        return f"search, {what} of {done:,} of {count:,} values: {at}".removesuffix(": ")

    def build(
        self, deadline: float, below: float, cheaper: float | None, tables: Tables | None, priced: bool
    ) -> Problem:
        nodes = list(self.program.nodes)
        bounds = {
            node: usable_rule(node, strict=self.strict)
            for node in nodes
            if node.op == "call_function" and not is_getitem(node)
        }
        parts = _parts(bounds)
        self._open(bounds, parts)
        for position, node in enumerate(nodes):
            self._at, self._done = node, ("layouts", position, len(nodes))
            if node.op in ("placeholder", "get_attr"):
                self._add_placeholder(node, position)
            elif node in bounds:
                self._add_op(node, bounds[node], parts[node], position)
        if self.ending is not None and self.ending.chooses:
            self._add_states(self.ending)
        self._read_results()
        if not priced:
            self.problem.ending, self.problem.late = self.ending, True
            self.problem.microbatches = 1 if self.ending is None else self.ending.microbatches
            self.problem.allowed += allowed_states(self.problem, self.boundary).items()
            return self.problem
        # dearer than a plan that there always is: all ranks compute everything
        everything = self.problem.explicit_price([0] * len(self.graph.costs))
        self.payments.penalty = max(LEAST_PENALTY, 2.0 ** (2 * everything).bit_length())
        self.chains.impossible = int(self.payments.penalty)
        if tables is not None:
            self.chains.share(tables)
        allowed = allowed_states(self.problem, self.boundary)
        self.problem.pairs = pairs_of(self.problem)
        if is_wide(self.problem):
            ties = tangent_states(self.problem, self.boundary)
            narrow(self.problem, self.boundary, self.ending, ties, allowed, deadline, cheaper)
            allowed = allowed_states(self.problem, self.boundary)
        for node, equal in tangent_states(self.problem, self.boundary).items():
            self._tie_tangent(node, equal)
        for node, other in drawn_alike(nodes).items():
            self._tie_drawn((other, node), (bounds[other], bounds[node]))
        for (phase, size), sharing in self._numbering.items():
            if len(sharing) == PAIR:
                charge_pair(self.problem, phase, size, [self.problem.variables[node] for node in sharing])
        for variable, fits in allowed.items():
            self.payments.add_costs(variable, np.where(fits, 0.0, self.payments.penalty))
            self.problem.allowed.append((variable, fits))
        self.problem.ending = self.ending
        self.problem.microbatches = 1 if self.ending is None else self.ending.microbatches
        refuse_dearer(self.problem.least_of_ops * self.problem.microbatches, below)
        self.chains.deadline = deadline
        try:
            for position, ((node, _), value) in enumerate(self.problem.values.items()):
                self._at, self._done = node, ("transfers", position, len(self.problem.values))
                self.payments.pay(value)
            if self.ending is not None:
                self._end(self.ending)
        except OutOfTime:
            self.problem.late = True
        self.chains.deadline = math.inf
        return self.problem

    # -- variables -----------------------------------------------------------------------------------------------

    def _add_placeholder(self, node: fx.Node, position: int) -> None:
        type = tensor_type(node)
        options = self.boundary.homes(node, homes(type.shape, self.mesh))
        returned = self.boundary.tangents.get(node)
        if returned is not None and returned.op == "placeholder":  # its homes may be the user's, and none of ours
            value = self.problem.value(returned)
            own = (_returned(self.boundary, value, attr) for attr, _ in value.states)
            options = list(dict.fromkeys((*options, *own)))
        variable = self._add(node, [0.0] * len(options), position)
        self.problem.homes[variable] = options
        states = tuple((attr, type.dtype) for attr in options)
        stays = self.ending is not None and self.ending.stays and len(options) > 1 and record_of(node).role == "param"
        self.problem.values[node, 0] = Value(node.name, type, variable, states, False, is_parameter(node), stays)

    def _add_op(self, node: fx.Node, bound: Bound, parts: Mapping[str, tuple[int, ...]], position: int) -> None:
        record = record_of(node)
        read = operands(node)
        values = [self.problem.value(operand) for operand in read]
        dtypes = required_dtypes(record, [value.type for value in values])
        types = record.type if isinstance(record.type, tuple) else (record.type,)
        key = (bound, tuple(sorted(parts.items())))
        placed = self._strategies.get(key)
        if placed is None:
            placed = self._strategies[key] = strategies(bound, self.mesh, parts)
        prices = self._prices_of(key, bound, placed, dtypes, types)
        costs = prices
        if node in self._opened:
            placed, prices, costs = self._with_opened(node, placed, prices)
        variable = self._add(node, costs, position)
        self.problem.placed[variable], self.problem.prices[variable] = placed, prices
        if node in self._opened:
            self.problem.opened[variable] = record.phase
        made = computed(node)
        for k, type in enumerate(types):
            if type is not None:
                states = tuple((attr, type.dtype) for p in placed if (attr := p.gives[k]) is not None)
                self.problem.values[node, k] = Value(node.name, type, variable, states, made)
        block = self._block_of(node)
        for k, (value, dtype) in enumerate(zip(values, dtypes, strict=True)):
            needs = tuple((p.needs[k], dtype) for p in placed)
            label = self.problem.labels[variable]
            self._add_reader(value, Reader(variable, needs, record.phase, label, block == self._turning))

    def _add_reader(self, value: Value, reader: Reader) -> None:
        """Add a use of a value; equal ones, as of ``add(x, x)``, are one, because they share all transfers."""
        if reader not in value.readers:
            value.readers.append(reader)

    def _prices_of(
        self, key: object, bound: Bound, placed: Sequence[Placed], dtypes: Sequence, types: Sequence
    ) -> np.ndarray:
        writes = tuple(None if type is None else type.dtype for type in types)
        priced = (key, tuple(dtypes), writes)
        found = self._prices.get(priced)
        if found is None:
            prices = OpPrices(bound, self.mesh, dtypes, writes, self.machine)
            found = np.array([prices.price(dict(p.split)) for p in placed], dtype=np.float64)
            self._prices[priced] = found
        return found

    def _open(self, bounds: Mapping[fx.Node, Bound], parts: Mapping[fx.Node, Mapping[str, tuple[int, ...]]]) -> None:
        """Find the opened strategies of all ops."""
        opened = Opened(self.mesh, self.machine)
        for node, bound in bounds.items():
            found = opened.of(node, bound, parts[node])
            if found is not None:
                self._opened[node] = found
                for size in {each.size for places in found.places for each in places}:
                    self._numbering.setdefault((record_of(node).phase, size), []).append(node)

    def _with_opened(
        self, node: fx.Node, placed: list[Placed], prices: np.ndarray
    ) -> tuple[list[Placed], np.ndarray, np.ndarray]:
        """Return all strategies of an op with their prices, and with these prices and a share of what ops share."""
        found, phase = self._opened[node], record_of(node).phase
        ops = {size: len(self._numbering[phase, size]) for size in {p.size for some in found.places for p in some}}
        key = id(placed), id(prices), id(found.placed), tuple(sorted(ops.items()))
        known = self._with.get(key)
        if known is None:
            shares = [share_of(places, self.chains, ops) for places in found.places]
            every, costs = np.concatenate([prices, found.prices]), np.concatenate([prices, found.prices + shares])
            known = self._with[key] = [*placed, *found.placed], every, costs
        return known

    def _add(self, node: fx.Node, costs: Sequence[float] | np.ndarray, position: float) -> int:
        variable = self.graph.add_variable(node.name, costs)
        self.problem.variables[node] = variable
        self.problem.order.append(position)
        self.problem.labels.append(self._label(node))
        return variable

    def _label(self, node: fx.Node) -> str:
        """Return the path of the block of an op, or of the only block that reads a placeholder."""
        nodes = [node] if node.op == "call_function" else [user for user in node.users if user.op != "output"]
        paths = {self._block_of(user) for user in nodes}
        path = paths.pop() if len(paths) == 1 else ""
        return path if path in self._blocks else ""

    # -- boundary conditions -------------------------------------------------------------------------------------

    def _read_results(self) -> None:
        """Add the uses at the output: gradients and states are returned in the homes of their placeholders."""
        output = self.program.output
        record = record_of(output)
        named = {node.name: node for node in self.program.placeholders}
        values = [self.problem.value(node) for node in operands(output)]
        dtypes = required_dtypes(record, [value.type for value in values])
        begins = next((record_of(n).phase for n in self.program.nodes if n.op == "call_function"), "forward")
        for node, value, result, dtype in zip(operands(output), values, record.results, dtypes, strict=True):
            early = result.kind != "grad" and record_of(node).phase == "forward" and begins != "update"
            phase = "forward" if early else "backward"
            home = self.problem.variables.get(named[result.of]) if result.of in named else None
            own: tuple[State, ...] = ()
            if home is None:
                own = tuple((_returned(self.boundary, value, attr), dtype) for attr, _ in value.states)
                self._add_reader(value, Reader(value.variable, own, phase, self.problem.labels[value.variable]))
            else:
                needs = tuple((attr, dtype) for attr in self.problem.homes[home])
                turning = self._block_of(output) == self._turning
                self._add_reader(value, Reader(home, needs, phase, self.problem.labels[home], turning))
            self.problem.results.append((value, home, own, dtype))

    def _tie_tangent(self, node: fx.Node, equal: np.ndarray) -> None:
        """Give a tangent the layout in which its value is returned."""
        variable, value = self.problem.variables[node], self.problem.value(self.boundary.tangents[node])
        count = len(self.problem.homes[variable])
        self.graph.add_edge(value.variable, variable, equal, np.arange(count), self.payments.equal(count))

    def _tie_drawn(self, ops: tuple[fx.Node, fx.Node], bounds: tuple[Bound, Bound]) -> None:
        """Split two ops alike that draw the same random numbers."""
        one, two = (self.problem.variables[node] for node in ops)
        rows, columns = (
            [splits_in_common(bound, dict(placed.split), other, self.mesh) for placed in self.problem.placed[variable]]
            for variable, bound, other in zip((one, two), bounds, reversed(bounds), strict=True)
        )
        differs = np.array([[self.payments.penalty * (row != column) for column in columns] for row in rows])
        self.graph.add_edge(one, two, np.arange(len(rows)), np.arange(len(columns)), self.graph.intern(differs))

    # -- the end of the step -------------------------------------------------------------------------------------

    def _add_states(self, ending: Ending) -> None:
        """Add the layouts of the optimizer's states that are chosen."""
        for sum_, parameter in self.boundary.sums.items():
            if parameter is None or name_of(parameter) not in ending.trained:
                continue
            home = self.problem.variables[parameter]
            layouts = layouts_of_state(tensor_type(parameter).shape, self.problem.homes[home], self.mesh)
            variable = self.graph.add_variable(f"{parameter.name}_state", [0.0] * len(layouts))
            self.problem.order.append(self.problem.order[home])
            self.problem.labels.append(self.problem.labels[home])
            self.problem.chosen_states[parameter] = ChosenState(variable, layouts, sum_)

    def _end(self, ending: Ending) -> None:
        """Add the prices of the update, which reads the sums of gradients."""
        for sum_, parameter in self.boundary.sums.items():
            variable, type = self.problem.variables[sum_], tensor_type(sum_)
            sums = self.problem.homes[variable]
            if parameter is None:
                self._add_ending(None, variable, ending.of_loss(self.chains, type, sums)[None])
                continue
            home, chosen = self.problem.variables[parameter], self.problem.chosen_states.get(parameter)
            name, own, homes = name_of(parameter), tensor_type(parameter), self.problem.homes[home]
            if chosen is None:
                table = ending.nanoseconds(self.chains, name, own, homes, sums, type.dtype)
                self._add_ending(home, variable, table)
            else:
                updated = ending.updated(self.chains, name, own, chosen.layouts, sums, type.dtype)
                dear = self.payments.penalty * ending.microbatches
                updated = np.where(follows_sum(chosen.layouts, sums), updated, dear)
                self._add_ending(chosen.variable, variable, updated)
                moved = ending.moved(self.chains, name, own, homes, chosen.layouts)
                moved = np.where(follows_home(homes, chosen.layouts), moved, dear)
                self._add_ending(home, chosen.variable, moved)

    def _add_ending(self, left: int | None, right: int, table: np.ndarray) -> None:
        """Add a table of nanoseconds that are paid once in a step."""
        self.problem.endings.append((left, right, table))
        share = self.graph.intern(np.floor(table * 2**20 / self.problem.microbatches) / 2**20)
        if left is None:
            self.payments.add_costs(right, share[0])
        else:
            self.graph.add_edge(left, right, np.arange(len(table)), np.arange(table.shape[1]), share)


def tangent_states(problem: Problem, boundary: Boundary) -> dict[fx.Node, np.ndarray]:
    """Return the state of each tangent for each state of the value that is returned in its layout."""
    found = {}
    for node, returned in boundary.tangents.items():
        value, options = problem.value(returned), problem.homes[problem.variables[node]]
        found[node] = np.array([options.index(_returned(boundary, value, attr)) for attr, _ in value.states])
    return found


def _returned(boundary: Boundary, value: Value, attr: DistAttr) -> DistAttr:
    return boundary.returned_attr(replace(value.type, layout=layout_of(boundary.mesh, attr)))


def _parts(bounds: Mapping[fx.Node, Bound]) -> dict[fx.Node, dict[str, tuple[int, ...]]]:
    """Return the sizes of the parts of the factors of each op."""
    search, numbers = CutSearch(), dict[tuple[fx.Node, int], int]()

    def number(node: fx.Node, part: int = 0) -> int:
        return numbers.setdefault(element_of(node) if is_getitem(node) else (node, part), len(numbers))

    for op, (node, bound) in enumerate(bounds.items()):
        results = [number(node, part) for part in range(len(bound.results))]
        search.add(op, bound, [number(value) for value in operands(node)], results)
    search.run()
    return {node: search.of(op, bound) for op, (node, bound) in enumerate(bounds.items())}
