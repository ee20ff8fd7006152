"""Find the plans of a model's programs: one rank searches, and the other ranks take its plan."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from autopar.costs.machine import Machine
from autopar.errors import AutoparError, PlanError, RuleError
from autopar.ir.record import TensorType
from autopar.plan.boundary import OPEN, Boundary
from autopar.runtime.processes.agreement import Agreement
from autopar.search.applied import applied, graph_digest, planned_values
from autopar.search.artifact import from_json
from autopar.search.ending import Ending
from autopar.search.search import Found, search
from autopar.search.solution import Solution

SAID_BY = {
    "PlanError": PlanError,
    "RuleError": RuleError,
}  # class of an error of the searching rank → as others raise it


@dataclass(frozen=True)
class Planner:
    """How the plans of a model are searched.

    Attributes:
        machine: the machine whose seconds decide.
        time_limit: seconds, after which the best plan so far is taken.
        agreement: the ranks that take one plan; ``None`` for one process.
        given: plans that need no search, for the traced programs that they are of.
    """

    machine: Machine
    time_limit: float = 60.0
    agreement: Agreement | None = None
    given: tuple[Solution, ...] = ()


@dataclass
class Search:
    """One search of a planner. The pass ``search`` calls it.

    Attributes:
        ending: what ends the step, if the program is a micro-batch.
        solution: what was found, without the times of modules; ``None`` before.
    """

    planner: Planner
    ending: Ending | None = None
    solution: Solution | None = field(default=None, init=False)

    def __call__(self, boundary: Boundary, machine: Machine, *, strict: bool, time_limit: float) -> Found:
        graph = graph_digest(boundary.program)
        for given in self.planner.given:
            if given.graph == graph and (found := _agreeing(given, boundary)) is not None:
                self.solution = given
                return found
        agreement = self.planner.agreement
        if agreement is None:
            found = search(boundary, machine, strict=strict, time_limit=time_limit, ending=self.ending)
            self.solution = _solution(found, boundary, graph)
            return found
        self.solution = self._of_first_rank(agreement, boundary, machine, graph, strict, time_limit)
        return _found(self.solution, boundary)

    def _of_first_rank(
        self, agreement: Agreement, boundary: Boundary, machine: Machine, graph: str, strict: bool, time_limit: float
    ) -> Solution:
        """Search on the first rank, and send the plan to the others as text. All ranks call it."""
        text, error = "", None
        if agreement.rank == 0:
            try:
                found = search(boundary, machine, strict=strict, time_limit=time_limit, ending=self.ending)
                text = json.dumps(_solution(found, boundary, graph).to_json())
            except AutoparError as raised:
                error = raised
        said = None if error is None else (type(error).__name__, str(error))
        text, said = agreement.gathered((text, said))[0]
        if error is not None:
            raise error
        if said is not None:
            raise SAID_BY.get(said[0], PlanError)(said[1])
        solution = from_json(json.loads(text))
        if solution.graph != graph:
            raise PlanError("rank 0 has searched a plan for another program than this rank's; let all ranks pass the "
                            "same model and the same arguments")  # fmt: skip
        return solution


def _solution(found: Found, boundary: Boundary, graph: str) -> Solution:
    values = planned_values(boundary.program, found.types, found.uses)
    return Solution(
        found.machine, found.nanoseconds, found.least, found.search_seconds, found.reason, boundary.mesh, graph, values
    )


def _found(solution: Solution, boundary: Boundary) -> Found:
    types, uses = applied(solution, boundary.program)
    return Found(
        solution.machine, solution.nanoseconds, solution.least, solution.search_seconds, solution.reason, types, uses
    )


def _agreeing(solution: Solution, boundary: Boundary) -> Found | None:
    """Return the plan for a program, if its homes are those that the constraints want."""
    found = _found(solution, boundary)
    for node in boundary.program.placeholders:
        decided, type = boundary.decided(node), found.types[node]
        if decided is None or OPEN in decided.dims or node in boundary.tangents or node in boundary.open_sums:
            continue
        assert isinstance(type, TensorType)
        if boundary.home(node).kept != type.attr:
            return None
    return found
