"""Hold the plan that a search found, with its certificate; it prints as a table, and can be saved."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

from rich.table import Table

from autopar.capture.arguments import AtSizes
from autopar.errors import PlanError
from autopar.gc_pause import gc_paused
from autopar.ir.mesh import Mesh
from autopar.ir.nodes import name_of, tensor_type
from autopar.ir.program import Program, program_digest
from autopar.notebook import InNotebook, printed, right
from autopar.plan.spec import Spec
from autopar.search.certificate import Certificate
from autopar.search.solutions.again import Again
from autopar.search.solutions.asked import check_layouts, check_marks, check_name, check_other, check_path, check_symbol
from autopar.search.solutions.crossed import Solved
from autopar.search.solutions.found import Found, found_by
from autopar.search.solutions.module_times import ModuleTime, module_times
from autopar.search.solutions.planned import Planned, layout_text, planned_values
from autopar.search.solutions.searched_update import SearchedUpdate
from autopar.search.solutions.step_choice import StepChoice, Way
from autopar.search.solutions.tables import Difference, Explanation, gives_text
from autopar.search.symbols.crossovers import Crossover, crossovers
from autopar.search.symbols.expression import Expression, Priced, expression_of
from autopar.search.symbols.sizes import Marks

VERSION = 1  # of the file format
Kind = Literal["call", "step"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True)
class Solution(InNotebook, Certificate):
    """The cheapest plan that a search found, and how far from the cheapest of all it can be. Prints as a table.

    Attributes:
        mesh: the mesh.
        kind: whether it is of a call of the model or of a training step.
        graph: the digest of the traced program.
        values: name of a value → its layouts; ``value_names`` gives the names.
        optimizer_states: parameter → the layout of the optimizer's state, where it was chosen beside the plan.
        step: how the step runs, for a plan of a training step that was compiled.
        start: the preset that the plan is, if it was cheaper than what the search found; else "".
        modules: what each module takes, without the modules inside of it; together they are the price.
        again: solves the problem again; ``None`` on ranks that did not search, and for a plan from a file.
        alike: nanoseconds of a step that are the same in all plans, which price and bound have and ``again`` has not;
            ``None`` for a call, and before the step is built.
        priced: what the price was computed from; ``None`` if the plan was not applied in this process.
        source: the file that it was read from, or "".
        update: the update of the step that it was searched for; ``None`` for a call, and before the step is built.
        solved: the crossovers that were asked for; the reports of calls beyond them say so.
    """

    mesh: Mesh
    kind: Kind
    graph: str
    values: Mapping[str, Planned] = field(repr=False)
    optimizer_states: Mapping[str, str] = field(default_factory=dict, repr=False)
    start: str = ""
    step: StepChoice | None = field(default=None, repr=False)
    modules: Sequence[ModuleTime] = field(default=(), repr=False, compare=False)
    again: Again | None = field(default=None, repr=False, compare=False)
    priced: Priced | None = field(default=None, repr=False, compare=False)
    alike: int | None = None
    source: str = field(default="", repr=False, compare=False)
    update: SearchedUpdate | None = field(default=None, repr=False)
    solved: list[Solved] = field(default_factory=list, repr=False, compare=False)

    def __str__(self) -> str:
        if not self.modules:
            return f"{self.certificate}\n"
        table = Table("module", "parameters → result", right("ops µs"), right("transfers µs"))
        ops, moved = sum(row.ops for row in self.modules), sum(row.transfers for row in self.modules)
        total = ModuleTime(f"together, {self.runs}", "", ops, moved)
        for row in (*self.modules, total):
            end = row is self.modules[-1]
            table.add_row(
                row.module, row.layouts, f"{row.ops / 1e3:,.1f}", f"{row.transfers / 1e3:,.1f}", end_section=end
            )
        choice = str(self.step) if self.step is not None and self.step.candidates else ""
        start = (
            f"the plan is the preset {self.start}: the search has found none that is cheaper\n" if self.start else ""
        )
        return f"{printed(table)}{choice}{start}{self.certificate}\n"

    @property
    def runs(self) -> str:
        """What has the price, in words: a call, or a step with all of its micro-batches."""
        return "a call" if self.kind == "call" else runs_of(self.microbatches)

    # -- how the step runs -------------------------------------------------------------------------------------------

    @property
    def microbatches(self) -> int:
        """The number of micro-batches of the step."""
        return 1 if self.step is None else self.step.microbatches

    @property
    def recompute(self) -> Way:
        """What the backward of the step computes again, as the option of ``train_step`` says it."""
        return None if self.step is None else self.step.recompute

    @property
    def zero(self) -> int:
        """The stage of ZeRO; the highest of all parameters, where it was chosen for each: ``step.stages`` has them."""
        if self.step is None:
            return 0
        return self.step.zero if isinstance(self.step.zero, int) else max(self.step.stages.values(), default=0)

    # -- questions ---------------------------------------------------------------------------------------------------

    @gc_paused()
    def explain(self, name: str) -> Explanation:
        """Return what each layout of a value would cost, with everything else chosen anew. Prints as a table.

        Args:
            name: of a parameter or an input; or of another value, as in ``values``; or ``"up()"``: what a module
                returns, as its last op gives it.

        Raises:
            PlanError: there is no such value, or the plan was not searched in this process.
        """
        check_name(name)
        more = self.alike or 0
        found = self._again().alternatives(name)
        return Explanation(
            name, tuple(replace(a, nanoseconds=a.nanoseconds + more, least=a.least + more) for a in found)
        )

    @gc_paused()
    def fix(self, plan: Mapping[str, Spec]) -> Solution:
        """Return the cheapest plan in which values have these layouts; ``plan=`` of ``parallelize`` takes it.

        Args:
            plan: a glob over names of parameters, inputs and other values, as in ``values``, or ``"up()"``, what a
                module returns → a layout, as in a plan: dims with ``"?"`` stay free. An op gives its result in this
                layout.

        Raises:
            PlanError: a glob matches nothing, no strategy meets a constraint, or the plan was not searched in this
                process.
        """
        check_layouts(plan)
        again, start = self._again(), time.monotonic()
        found = found_by(
            again.fixed(plan), again.problem, self.machine, start, again.time_limit, constrained=again.constrained
        )
        more, constrained = self.alike or 0, again.constrained or bool(plan)
        assert found.again is not None
        found = replace(
            found, nanoseconds=found.nanoseconds + more, least=found.least + more, constrained=constrained,
            again=replace(again, states=found.again.states),
        )  # fmt: skip
        solution = solution_from(found, again.problem.program, self.mesh, self.kind)
        return replace(solution, step=self.step, alike=self.alike, update=self.update)

    def diff(self, other: Solution) -> Difference:
        """Return the values whose layouts differ in another plan of the same program. Prints as a table."""
        check_other("diff", isinstance(other, Solution), other)
        rows = [
            (name, gives_text(self.values.get(name)), gives_text(other.values.get(name)))
            for name in dict.fromkeys((*self.values, *other.values))
        ]
        different = tuple((name, own, theirs) for name, own, theirs in rows if own != theirs)
        return Difference(different, self.nanoseconds, other.nanoseconds)

    def expression(self, marks: Marks | None = None) -> Expression:
        """Return the price as a sympy expression in the batch, the sequence, and the machine's bandwidths.

        Layouts and transfers stay those of the plan. The call is captured at further sizes, so that each dim is known
        to grow with the batch, with the sequence, or not at all.

        Args:
            marks: input → the symbol of each dim, ``{"x": ("batch", None)}``. By default dim 0 is ``batch``, and dim 1
                is ``sequence`` if the first input has integers, as ids of tokens.

        Raises:
            PlanError: the size of a value is not certain, and the error has its line; or the plan was not applied in
                this process.
        """
        check_marks(marks)
        return expression_of(self._priced("the plan"), marks)

    def crossovers(self, symbol: str, other: Solution, marks: Marks | None = None) -> list[Crossover]:
        """Return the values of a symbol at which this plan and another become cheaper than each other, solved.

        Other symbols have the values of this plan's capture; both plans keep their layouts and transfers.

        Args:
            symbol: such as ``"batch"``.
            other: another plan of the model; it may be for another mesh or machine. A plan of ``fix`` is applied first,
                as in ``parallelize(model, mesh, fixed, example=(x,)).solution``.
            marks: as for ``expression``.

        Raises:
            PlanError: as for ``expression``; or there is no such symbol.
        """
        check_symbol(symbol)
        check_other("crossovers", isinstance(other, Solution), other)
        check_marks(marks)
        own, theirs = self._priced("the plan"), other._priced("the other plan")
        found = crossovers(expression_of(own, marks), expression_of(theirs, marks), symbol)
        self.solved.append(Solved(symbol, tuple(found)))
        return found

    def _priced(self, name: str) -> Priced:
        if self.priced is None:
            raise PlanError(
                f"{name} has no expression, because it is not applied in this process: it is from fix, from a file, or "
                f"another process has searched it; take parallelize(model, mesh, plan, example=…).solution, with this "
                f"plan as plan"
            )
        return self.priced

    def _again(self) -> Again:
        if self.again is None and self.start:
            raise PlanError(
                f"the plan is the preset {self.start}, which has layouts that the search does not try, or was searched "
                f"in another process; only what this process has searched can be chosen anew: name other layouts in "
                f'plan=["search", …] instead'
            )
        if self.again is None:
            raise PlanError(
                "only the process that searched the plan can choose anew; on several ranks it is the first one, and a "
                "plan from a file was searched elsewhere"
            )
        return self.again

    # -- as a file ---------------------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """Return the plan as JSON, without the times of modules."""
        return {
            "version": VERSION, "mesh": dict(self.mesh.axes), "kind": self.kind, "graph": self.graph,
            "machine": self.machine.description(), "nanoseconds": self.nanoseconds, "least": self.least,
            "search_seconds": self.search_seconds, "reason": self.reason, "memory": self.memory, "bytes": self.bytes,
            "step": None if self.step is None else self.step.to_json(), "start": self.start, "alike": self.alike,
            "constrained": self.constrained, "update": None if self.update is None else self.update.to_json(),
            "optimizer_states": dict(self.optimizer_states),
            "values": {name: _row(planned) for name, planned in self.values.items()},
        }  # fmt: skip

    def save(self, path: str | Path) -> None:
        """Write the plan to a JSON file, which ``plan=`` of ``parallelize`` takes.

        Raises:
            FileNotFoundError: there is no such folder.
        """
        check_path(path)
        file = Path(path)
        if not file.parent.is_dir():
            raise FileNotFoundError(f"there is no folder {file.parent} for the plan {file}; make it first")
        file.write_text(json.dumps(self.to_json(), indent=1, allow_nan=False) + "\n")


def runs_of(microbatches: int) -> str:
    """Return a step in words: ``a step of 2 micro-batches``."""
    return "a step" if microbatches == 1 else f"a step of {microbatches} micro-batches"


def _row(planned: Planned) -> dict[str, Any]:
    """Return the layouts of a value as JSON."""
    inside = {"inside": [_row(step) for step in planned.inside]} if planned.inside else {}
    return {"gives": [*planned.gives], "needs": [*planned.needs], **inside}


def solution_from(found: Found, program: Program, mesh: Mesh, kind: Kind) -> Solution:
    """Return what a search found for a traced program, by the names of its values."""
    values = planned_values(program, found.types, found.uses, found.inside)
    types = {name_of(node): tensor_type(node) for node in program.placeholders}
    states = {name: layout_text(types[name].shape, attr) for name, attr in found.optimizer_states.items()}
    return Solution(
        found.machine, found.nanoseconds, found.least, found.search_seconds, found.reason, mesh, kind,
        program_digest(program), values, states, found.start, again=found.again, memory=found.memory, bytes=found.bytes,
        constrained=found.constrained,
    )  # fmt: skip


def priced(solution: Solution, programs: Sequence[tuple[int, Program]], at_sizes: AtSizes | None,
           microbatches: int = 1) -> Solution:  # fmt: skip
    """Return a solution with the explicit programs whose price it has, and how its call is captured at other sizes."""
    if at_sizes is None:
        return solution
    shapes, integers = at_sizes.shapes, at_sizes.integers
    found = Priced(tuple(programs), solution.machine, shapes, integers, at_sizes, microbatches)
    return replace(solution, priced=found)


def timed(solution: Solution, programs: Sequence[tuple[Program, int]]) -> Solution:
    """Return a solution with the times of the modules of its explicit programs, and how often each runs."""
    return replace(solution, modules=module_times(programs, solution.machine))
