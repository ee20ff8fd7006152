"""Report how a step is cut into stages, and simulate its schedule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.table import Table

from autopar.capture.blocks import ancestors
from autopar.costs.machine import Machine
from autopar.costs.profile import Profile
from autopar.ir.mesh import stage_name
from autopar.ir.nodes import name_of, record_of
from autopar.ir.program import Program
from autopar.notebook import InNotebook, printed, right
from autopar.page.subject import Messages
from autopar.pipeline import PipelineSchedule, Sizes, Times
from autopar.pipeline.simulate import Simulation
from autopar.runtime.localize import LocalPrograms
from autopar.scheduling.programs.order import OF_STEPS, Execution, Order
from autopar.scheduling.simulation import Issue
from autopar.step.compiling.compiled_step import StepUpdate
from autopar.step.compiling.part_of_stage import part_of_stage
from autopar.step.pipelined.placing.programs import PipelinedMicro
from autopar.step.pipelined.reports.sizes import sizes_of
from autopar.step.pipelined.reports.times import times_of
from autopar.step.program import Step

SHOWN = 4  # modules of a stage that are named


@dataclass(frozen=True)
class StageReport:
    """One stage of a pipelined step.

    Attributes:
        number: its number.
        ranks: the ranks that compute it.
        modules: the modules that it runs, the outermost ones of those that no other stage runs.
        parameters: the names of the parameters that it keeps.
        copies: those of which it takes a copy when a step begins, because another stage keeps them.
        sent, sent_back: bytes of one micro-batch that go to the next stage, and to the one before, of the whole values.
    """

    number: int
    ranks: tuple[int, ...]
    modules: tuple[str, ...]
    parameters: tuple[str, ...]
    copies: tuple[str, ...]
    sent: int
    sent_back: int


@dataclass(frozen=True)
class Pipeline(InNotebook):
    """How a step is cut into stages, and in which order these run. Prints as a table.

    Attributes:
        schedule: the schedule, with messages and the slots that release their buffers.
        stages: the stages.
    """

    schedule: PipelineSchedule
    stages: tuple[StageReport, ...]
    _micro: PipelinedMicro
    _update: StepUpdate
    _figures: Machine | Profile
    _rendezvous: bool
    _around: Callable[[], float]

    @staticmethod
    def of(
        micro: PipelinedMicro, update: StepUpdate, figures: Machine | Profile, issue: Issue, around: Callable[[], float]
    ) -> Pipeline:
        """Report a captured step.

        Args:
            figures: by which its programs are scheduled.
            issue: how lines are issued.
            around: returns the most seconds that a rank takes around the slots.
        """
        modules = _own_modules([stage.program for stage in micro.stages])
        count = len(micro.stages)
        reports = []
        for stage, own in zip(micro.stages, modules, strict=True):
            number = stage.number
            up = micro.forward_values(number) if number + 1 < count else []
            down = micro.backward_values(number - 1) if number else []
            keeps = tuple(name for name in stage.parameters if micro.homes[name] == number)
            copies = tuple(name for name in stage.parameters if micro.homes[name] != number)
            sent, back = (sum(value.bytes for value in values) for values in (up, down))
            reports.append(StageReport(number, stage.mesh.ranks, own, keeps, copies, sent, back))
        return Pipeline(micro.schedule, tuple(reports), micro, update, figures, issue == "direct", around)

    @property
    def times(self) -> Times:
        """The seconds of each stage's passes and messages, for ``autopar.pipeline``.

        They are by the figures of the machine; with ``profile=step.measure()``, they are measured.
        """
        return times_of(self._micro, self._figures, self._rendezvous)

    @property
    def sizes(self) -> Sizes:
        """The bytes of each stage's values, for ``autopar.pipeline``."""
        return sizes_of(self._micro, self._update)

    def simulate(self) -> Simulation[PipelineSchedule]:
        """Simulate the schedule with the durations and the memory of this step.

        Each pass takes the makespan of its program, and messages the price of their bytes on the machine. On a CPU a
        message begins when both its ranks have reached it. The update is not part of it. Times are in seconds, sizes in
        bytes.
        """
        return self.schedule.simulate(self.times, self.sizes)

    def messages(self, simulated: Simulation[PipelineSchedule]) -> list[Messages]:
        """Return what the stages send to each other in the passes of a simulated step."""
        return [
            Messages(stage.number, phase, len(spans), len(spans) * bytes, sum(span.end - span.start for span in spans))
            for stage in self.stages
            for phase, of, bytes in (("forward", "F", stage.sent), ("backward", "B", stage.sent_back))
            if (spans := [span for span in simulated.sent if span.op.stage == stage.number and span.op.of == of])
        ]

    @property
    def seconds(self) -> float:
        """The simulated seconds of a step: those of the slots, and the most that a rank takes around them."""
        return self.simulate().makespan + self._around()

    def __str__(self) -> str:
        table = Table("stage", "ranks", "modules", *map(right, ("parameters", "sends", "sends back")))
        for stage in self.stages:
            more = "" if len(stage.modules) <= SHOWN else f", … ({len(stage.modules)})"
            copied = "" if not stage.copies else f" + {len(stage.copies)} copied"
            table.add_row(
                str(stage.number), " ".join(map(str, stage.ranks)), ", ".join(stage.modules[:SHOWN]) + more,
                f"{len(stage.parameters)}{copied}", f"{stage.sent:,}", f"{stage.sent_back:,}",
            )  # fmt: skip
        return f"{printed(table)}{self.schedule.title}; bytes of one micro-batch\n"


def _own_modules(programs: Sequence[Program]) -> list[tuple[str, ...]]:
    """Return the outermost modules that each program alone runs."""
    paths = [_modules(program) for program in programs]
    own = []
    for k, mine in enumerate(paths):
        others = {outer for j, path in enumerate(paths) if j != k for p in path for outer in ancestors(p)}
        outermost = (next((o for o in ancestors(path) if o not in others), path) for path in mine)
        own.append(tuple(dict.fromkeys(path for path in outermost if path)))
    return own


def _modules(program: Program) -> list[str]:
    """Return the modules of the ops of the forward that depend on a parameter or on another stage."""
    reached = {n for n in program.placeholders if record_of(n).role == "param" or name_of(n).startswith(".received.")}
    modules: dict[str, None] = {}
    for node in program.nodes:
        if node.op == "call_function" and any(value in reached for value in node.all_input_nodes):
            reached.add(node)
            if record_of(node).phase == "forward":
                modules[record_of(node).module] = None
    return list(modules)


def orders_of_stages(
    micro: PipelinedMicro,
    update: StepUpdate,
    step: Step,
    on_stage: Callable[[LocalPrograms, Program, Execution], Order],
) -> dict[str, tuple[Order, int]]:
    """Return how the collectives of each stage are scheduled: name → the order of a program, and how often it runs.

    Args:
        on_stage: returns the order of the part of a stage, with its times, of a program of all stages.
    """
    orders: dict[str, tuple[Order, int]] = {}
    copy, written = micro.around.get("copy"), Execution(whole=True, written=update.states)
    ending = "turn" if update.crossing else "update"
    for stage, parts in zip(micro.stages, step.stages, strict=True):
        at = f"stage {stage.number}"
        if copy is not None:
            orders[f"{at} copy"] = on_stage(copy[1], parts["copy"], OF_STEPS), 1
        orders[at] = micro.order_of(stage.number), micro.schedule.batches
        part = part_of_stage(update.last[0], stage_name(stage.number)) if update.crossing else parts["update"]
        orders[f"{at} {ending}"] = on_stage(update.last[1], part, written), 1
    return orders
