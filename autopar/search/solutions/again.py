"""Solve a searched problem again: with some layouts fixed, or with each layout that a value may have."""

from __future__ import annotations

import difflib
import fnmatch
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import fx

from autopar.errors import PlanError, shown
from autopar.ir.layout import DistAttr
from autopar.ir.nodes import is_getitem, name_of, record_of, tensor_type
from autopar.ir.record import TensorType
from autopar.ir.text.printer import print_dims
from autopar.plan.boundary import filled
from autopar.plan.spec import Spec, attr_of
from autopar.search.problem.problem import Problem
from autopar.search.solutions.planned import layout_text
from autopar.search.solutions.value_names import value_names
from autopar.search.solver.factor_graph import FactorGraph
from autopar.search.solver.settled import Settled
from autopar.search.solver.solver import Answer, solve

FORBIDDEN = 2.0**33  # nanoseconds, as the penalties of ``build``: up to here sums are exact
LEFT_OUT = ". On this mesh the search left out most layouts; give this one in the plan, so that it is kept"


@dataclass(frozen=True)
class Alternative:
    """One layout that a value may have, with everything else chosen anew.

    Attributes:
        layout: of the value, as programs print it.
        nanoseconds: the price of the cheapest plan with it that was found.
        least: a lower bound of the prices of these plans.
        chosen: whether it is that of the plan.
    """

    layout: str
    nanoseconds: int
    least: float
    chosen: bool


@dataclass(frozen=True, eq=False)
class Again:
    """A problem with its answer.

    Attributes:
        problem: the problem.
        states: the answer.
        time_limit: seconds for each further answer.
        constrained: whether the user has given layouts to the problem.
        returned: ``module()`` → the names of the nodes of the program whose values it returns.
        settled: what solves the graph of the problem again with other costs, if it has long runs.
    """

    problem: Problem
    states: np.ndarray
    time_limit: float
    constrained: bool = False
    returned: Mapping[str, Sequence[str]] = field(default_factory=dict)
    settled: Settled | None = None

    def fixed(self, plan: Mapping[str, Spec]) -> Answer:
        """Return the answer in which values have these layouts.

        Args:
            plan: a glob over names of parameters, inputs and other values → its layout, as in a plan; dims with ``?``
                stay free.

        Raises:
            PlanError: a name matches nothing, or no strategy gives a value this layout.
        """
        wanted: dict[int, np.ndarray] = {}
        named = self._named()
        for glob, spec in plan.items():
            matches = [(name, node) for name, node in named if _matches(glob, name)]
            if not matches:
                raise PlanError(
                    f"{shown(glob)} matches no parameter, input or other value of the plan; near it: "
                    f"{_near(glob, (each for each, _ in named))}"
                )
            for name, node in matches:
                variable, attrs = self._options(node)
                attr = attr_of(
                    f"fix's {glob!r}: {spec!r}", spec, name, tensor_type(node).shape, self.problem.mesh, open_=True
                )
                fits = self._fits(node, attr, attrs) & wanted.get(variable, np.ones(len(attrs), dtype=bool))
                if not fits.any():
                    shape = tensor_type(node).shape
                    some = ", ".join(dict.fromkeys(layout_text(shape, option) for option in attrs))
                    why = "" if self.problem.floor is None else LEFT_OUT
                    raise PlanError(
                        f"no strategy of {node.name} gives {name} the layout [{print_dims(shape, attr)}]; it may have "
                        f"{some}{why}"
                    )
                wanted[variable] = fits
        return self._solved(wanted)

    def alternatives(self, name: str) -> list[Alternative]:
        """Return the cheapest plan with each layout that a value may have, the cheapest first.

        ``PlanError`` if there is no value of this name, or if it is the name of several.
        """
        named = self._named()
        nodes = list(dict.fromkeys(node for each, node in named if each == name))
        if not nodes:
            raise PlanError(no_value(name, [each for each, _ in named]))
        if len(nodes) > 1:
            own = [each for each, node in named if node in nodes and not each.endswith("()")]
            raise PlanError(f"{shown(name)} are {len(nodes)} values; name one of them: {', '.join(own)}")
        (node,) = nodes
        variable, attrs = self._options(node)
        found = []
        for attr in dict.fromkeys(attrs):
            fits = np.array([option == attr for option in attrs])
            answer = self._solved({variable: fits})
            found.append(
                Alternative(
                    layout_text(tensor_type(node).shape, attr),
                    self.problem.explicit_price(answer.states.tolist()),
                    answer.bound * self.problem.microbatches,
                    bool(fits[self.states[variable]]),
                )
            )
        return sorted(found, key=lambda alternative: alternative.nanoseconds)

    # -- values and their layouts ------------------------------------------------------------------------------------

    def _named(self) -> list[tuple[str, fx.Node]]:
        """Return the values that have a variable: parameters and inputs by the user's names, others by their own.

        Values that modules return have their names, too: ``up()``.
        """
        own = value_names(self.problem.program)
        named, nodes = [], {}
        for node in self.problem.program.nodes:
            if node in self.problem.variables and isinstance(record_of(node).type, TensorType) and not is_getitem(node):
                user = node.op == "placeholder" and record_of(node).role in ("param", "input", "buffer")
                named.append((name_of(node) if user else own[node], node))
                nodes[node.name] = node
        calls = [(call, nodes[name]) for call, names in self.returned.items() for name in names if name in nodes]
        return [*named, *calls]

    def _options(self, node: fx.Node) -> tuple[int, Sequence[DistAttr]]:
        """Return the variable of a value, and its layout in each state of it."""
        variable = self.problem.variables[node]
        return variable, [attr for attr, _ in self.problem.value(node).states]

    def _fits(self, node: fx.Node, wanted: DistAttr, attrs: Iterable[DistAttr]) -> np.ndarray:
        shape, mesh = tensor_type(node).shape, self.problem.mesh
        return np.array([filled(wanted, attr).normalize(shape, mesh) == attr for attr in attrs])

    def _solved(self, wanted: Mapping[int, np.ndarray]) -> Answer:
        """Return the best answer whose variables have wanted states."""
        problem = self.problem
        graph = FactorGraph(problem.graph.intern, list(problem.graph.costs), problem.graph.names, problem.graph.edges)
        penalty = max(FORBIDDEN, 2.0 ** (2 * problem.explicit_price(self.states.tolist())).bit_length())
        for variable, fits in wanted.items():
            graph.costs[variable] = graph.intern(graph.costs[variable] + np.where(fits, 0.0, penalty))
        deadline = time.monotonic() + self.time_limit
        return problem.bounded(solve(graph, problem.order, problem.labels, deadline, self.settled))


def no_value(name: str, known: Iterable[str]) -> str:
    """Return the error for a name that no value has."""
    return f"the plan has no value {shown(name)}; near it: {_near(name, known)}"


def _near(text: str, known: Iterable[str]) -> str:
    """Return the names that have a text in them, or else those that are like it, or the first."""
    names, inner = list(dict.fromkeys(known)), text.strip("*?.")
    near = [name for name in names if inner and inner in name]
    near = near or difflib.get_close_matches(text, names, n=4, cutoff=0.4) or names
    return ", ".join(near[:4]) + ", …" * (len(near) > 4)


def _matches(glob: str, name: str) -> bool:
    return fnmatch.fnmatchcase(name, glob) or fnmatch.fnmatchcase("." + name, glob)
