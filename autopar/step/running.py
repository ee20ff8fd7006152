"""Say what a step runs: its timetable, and the programs that it names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from autopar.ir.mesh import Mesh
from autopar.ir.nodes import name_of, record_of, tensor_type
from autopar.ir.program import Program
from autopar.ir.record import TensorType
from autopar.ir.value_names import ValueRole, belongs_to_step, count_name, roles_in
from autopar.runtime.interface import Interface
from autopar.runtime.running.functions import PlacedProgram
from autopar.runtime.running.messages import Messages
from autopar.runtime.running.programs import output_name
from autopar.runtime.running.rank import ProgramKey, RankRun, Slots
from autopar.step.compiling.compiled_step import MicroBatch, StepUpdate
from autopar.timetable import Position, Timetable
from autopar.timetable.entry import Line
from autopar.timetable.rules import cross, empty, end_of_crossing, hoist_counts, join_update, of_step


@dataclass(frozen=True, eq=False)
class StepRuns:
    """What a step runs.

    Attributes:
        timetable: that of a step behind another one.
        alone: that of a step without one before it; the same, unless something crosses the end of a step.
        end: that which completes a step; ``None`` if nothing crosses its end.
        programs: (name, stage) → the program.
        inputs: the names of the inputs of a micro-batch, in the order in which a call passes them.
        held: stage → the types of what its ranks keep between steps, by the user's names.
        input_types: stage → the types of the inputs that it reads, by name.
        outputs: rank → the types of the outputs of a micro-batch.
        slots: what runs the slots of a rank; ``None`` if there are none.
    """

    timetable: Timetable
    alone: Timetable
    end: Timetable | None
    programs: Mapping[ProgramKey, PlacedProgram]
    inputs: Sequence[str]
    held: Mapping[int | None, Mapping[str, TensorType]]
    input_types: Mapping[int | None, Mapping[str, TensorType]]
    outputs: Callable[[int], Sequence[TensorType]]
    slots: Callable[[int, Messages], Callable[[RankRun], Slots]] | None = None

    def __post_init__(self) -> None:
        self.timetable.verify()
        if self.alone is not self.timetable:
            self.alone.verify()

    def stages_of(self, rank: int) -> tuple[int | None, ...]:
        """Return the stages of a rank; ``(None,)`` where there are none."""
        found = next(position.stages for position in self.timetable.positions if rank in position.ranks)
        return found or (None,)

    def held_on(self, rank: int) -> Mapping[str, TensorType]:
        """Return the types of what a rank keeps between steps, by name."""
        return self._held_on[self.stages_of(rank)]

    @cached_property
    def _held_on(self) -> Mapping[tuple[int | None, ...], Mapping[str, TensorType]]:
        positions = [position.stages or (None,) for position in self.timetable.positions]
        return {of: {name: type for stage in of for name, type in self.held[stage].items()} for of in positions}

    @cached_property
    def known(self) -> Mapping[str, TensorType]:
        """The types of what any rank keeps between steps, by name."""
        return {name: type for own in self.held.values() for name, type in own.items()}

    @property
    def is_staged(self) -> bool:
        """Whether stages send messages to each other."""
        return None not in self.held

    @property
    def explicit(self) -> list[Program]:
        """The explicit programs."""
        return [placed.program for placed in self.programs.values()]

    @cached_property
    def written(self) -> frozenset[str]:
        """The names of what a step may change of what stays between steps."""
        return frozenset(
            name_of(node)
            for placed in self.programs.values()
            for node in placed.program.placeholders
            if node.name in Interface.of(placed.program).states
        )


@dataclass
class KnownRuns:
    """What the steps of captures run, by their programs."""

    _known: dict[tuple[int, int], tuple[object, object, StepRuns]] = field(default_factory=dict)

    def of(self, micro: object, update: object, make: Callable[[], StepRuns]) -> StepRuns:
        """Return what a step runs; ``make`` makes it once."""
        key = id(micro), id(update)
        if key not in self._known:
            self._known[key] = micro, update, make()  # held, so that no other object gets their ids
        return self._known[key][-1]

    def forget(self, program: Program) -> None:
        """Drop what has a program that does not run again."""
        self._known = {
            key: known for key, known in self._known.items() if all(program is not own for own in known[-1].explicit)
        }

    def clear(self) -> None:
        self._known.clear()


def of_one_stage(micro: MicroBatch, update: StepUpdate, microbatches: int, mesh: Mesh) -> StepRuns:
    """Return what a step without stages runs: the last micro-batch is joined with the update."""
    counts = [] if micro.count is None else list(range(len(Interface.of(micro.count[0]).returned)))
    outputs = [output_name(k) for k in range(len(micro.outputs))]
    behind = [*outputs, *update.returns]
    programs: dict[ProgramKey, PlacedProgram] = {("inner", None): PlacedProgram(micro.program, micro.local, outputs)}
    if micro.copy is not None:
        programs["copy", None] = PlacedProgram(*micro.copy, ())
    if update.crossing:
        programs["turn", None] = PlacedProgram(*update.last, behind, update.states, handed_sums=update.sums)
    else:
        programs["last", None] = PlacedProgram(*update.last, behind, update.states)
        if micro.first is not None:
            programs["first", None] = PlacedProgram(*micro.first, [*map(count_name, counts), *outputs])
    tables = timetables(microbatches, mesh, micro, crosses=bool(update.crossing))
    interface = Interface.of(micro.program)
    names = tuple(
        name for node in micro.program.placeholders
        if record_of(node).role == "input" and not belongs_to_step(name := name_of(node))
    )  # fmt: skip
    types = types_in(micro.program)
    returned = [type for _, type in interface.returned]
    return StepRuns(*tables, programs, names, {None: _held(micro, programs)}, {None: types}, lambda rank: returned)


def timetables(
    microbatches: int, mesh: Mesh, micro: MicroBatch, *, crosses: bool
) -> tuple[Timetable, Timetable, Timetable | None]:
    """Return the timetable of a step, that of a first step, and that which completes a step."""

    def table(lines: Sequence[Line], batches: int = microbatches) -> Timetable:
        return Timetable(batches, (Position(tuple(mesh.ranks), (), tuple(empty(lines))),))

    joined = join_update(
        hoist_counts(of_step(microbatches, copy=micro.copy is not None, count=micro.count is not None))
    )
    if not crosses:
        return table(joined), table(joined), None
    return table(cross(joined, True)), table(cross(joined, False)), table(end_of_crossing(), 0)


def _held(micro: MicroBatch, programs: Mapping[ProgramKey, PlacedProgram]) -> dict[str, TensorType]:
    """Return the types of what stays between steps; of a parameter, that of its float32 values."""
    found: dict[str, TensorType] = {}
    for name in ("copy", "last", "turn", "first", "inner"):
        if (name, None) in programs:
            for other, type in held_types(programs[name, None].program).items():
                found.setdefault(other, type)
    return {**found, **micro.parameters}


def types_in(program: Program) -> dict[str, TensorType]:
    """Return the types of the placeholders of a program, by the user's names."""
    return {name_of(node): tensor_type(node) for node in program.placeholders}


def held_types(program: Program, stage: str | None = None) -> dict[str, TensorType]:
    """Return the types of the parameters, buffers and states of a program that stay between steps, by name.

    ``stage``: of a program with several, that whose values are meant, besides those of the whole mesh.
    """
    roles = roles_in(program)
    during = {name for name, (role, _) in roles.items() if role in (ValueRole.GRADIENT, ValueRole.LOSS, ValueRole.COPY)}
    return {
        name: type
        for node in program.placeholders
        if record_of(node).role in ("param", "buffer", "state") and (name := name_of(node)) not in during
        and ((type := tensor_type(node)).mesh.name in (None, stage) or not program.stages)
    }  # fmt: skip
