"""Compile the programs that end a pipelined step: an update for each stage, and sums of tied parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from autopar.ir.layout import layout_of
from autopar.ir.nodes import name_of, record_of, tensor_type
from autopar.ir.program import Program
from autopar.ir.record import Record, TensorType
from autopar.ir.value_names import foreign_name, gradient_name
from autopar.model.compiled import Compiler
from autopar.report.passes import PassReport
from autopar.report.progress import doing
from autopar.runtime.lowering.bundles import Crossed
from autopar.scheduling.programs.order import OF_STEPS, Execution
from autopar.step.compiling.compiled_step import Placed, about
from autopar.step.compiling.graph_builder import GraphBuilder
from autopar.step.compiling.update import Norm, Staged, Trained, update_of
from autopar.step.options import StepOptions
from autopar.step.pipelined.placing.programs import PipelinedMicro, Stage, Tied
from autopar.verify.levels import verify


@dataclass(frozen=True)
class StageUpdate:
    """The update of one stage.

    Attributes:
        placed: its program, and the local programs; ``None`` if the stage has nothing to update, to count or to
            return.
        returns: the names of the values that it returns.
        states: the names of the states that it replaces.
    """

    placed: Placed | None = None
    returns: tuple[str, ...] = ()
    states: frozenset[str] = frozenset()


@dataclass(frozen=True)
class SentHome:
    """The sum of a tied parameter's gradients on a stage that is not its home.

    Attributes:
        tied: the parameter.
        reader: the stage.
        number: the number of the reader among those of the parameter.
        placed: the program that reduces the sum, and its local programs.
        value: the reduced sum, and its place on the home.
    """

    tied: Tied
    reader: int
    number: int
    placed: Placed
    value: Crossed


@dataclass(frozen=True)
class PipelinedUpdate:
    """What ends a pipelined step.

    Attributes:
        stages: the update of each stage.
        homeward: the sums that go to their homes before.
        returns: the names of the values that a step returns.
        reports: what each pass did.
    """

    stages: tuple[StageUpdate, ...]
    homeward: tuple[SentHome, ...]
    returns: tuple[str, ...]
    reports: tuple[PassReport, ...]
    crossing: tuple[str, ...] = ()
    note: str = ""
    sums: Mapping[str, str] = field(default_factory=dict)

    @property
    def explicit(self) -> list[Program]:
        """The explicit programs."""
        return [
            *(ending.placed[0] for ending in self.stages if ending.placed is not None),
            *(sent.placed[0] for sent in self.homeward),
        ]


@doing("update")
def compile_pipelined_update(
    compiler: Compiler, trained: Sequence[Trained], micro: PipelinedMicro, options: StepOptions
) -> PipelinedUpdate:
    """Compile the optimizer's step behind the micro-batches of a pipeline."""
    makes = _Updates(compiler, micro, options, {t.name: t for t in trained})
    homeward = makes.homeward()
    stages = [makes.of(stage) for stage in micro.stages]
    returns = ("loss", *(("norm",) if options.measured else ()), *(("found_inf",) if options.scaled else ()))
    return PipelinedUpdate(tuple(stages), tuple(homeward), returns, tuple(makes.reports))


class _Updates:
    """Makes the updates of the stages."""

    def __init__(
        self, compiler: Compiler, micro: PipelinedMicro, options: StepOptions, trained: Mapping[str, Trained]
    ) -> None:
        self.compiler, self.micro, self.options, self.trained = compiler, micro, options, trained
        self.device = micro.captured.device
        self.reports: list[PassReport] = []
        self.foreign: dict[str, list[TensorType]] = {}  # parameter → the types of the sums that come to its home

    def homeward(self) -> list[SentHome]:
        """Return the sums of tied parameters on stages that are not their homes."""
        found = []
        measured = {other.name: other.state for stage in self.micro.stages for other in stage.micro.untrained}
        for tied in self.micro.tied:
            home = self.micro.stages[tied.home]
            state = self.trained[tied.name].state if tied.name in self.trained else measured.get(tied.name)
            if state is None:
                continue  # nobody needs its gradient
            for reader in tied.readers:
                stage = self.micro.stages[reader]
                type = stage.types.get(gradient_name(tied.name))
                if type is None:
                    continue
                placed = self._reduced(stage, type, tied.name)
                target = TensorType(type.shape, type.dtype, layout_of(home.mesh, state))
                source = tensor_type(placed[0].output.all_input_nodes[0])
                comes = self.foreign.setdefault(tied.name, [])
                value = Crossed.of(foreign_name(tied.name, len(comes)), source, target)
                found.append(SentHome(tied, reader, len(comes), placed, value))
                comes.append(target)
        return found

    def _reduced(self, stage: Stage, type: TensorType, parameter: str) -> Placed:
        """Place the program that reduces a sum of gradients."""
        builder = GraphBuilder(self.device)
        name = gradient_name(parameter)
        waits = bool(type.attr.pending)
        kept = type if waits else TensorType(type.shape, type.dtype)
        record = Record(kept, role="buffer", name=name, module=parameter.rpartition(".")[0], source="tied parameter")
        node = builder.placeholder(name, record)
        program = builder.program([node])
        verify(program, "update")
        attrs = {} if waits else {node.name: type.attr}
        local, reports, _ = self._on(stage).place(program, attrs, self.device, execution=OF_STEPS)
        self.reports += about(f"stage {stage.number} home", reports)
        return program, local

    def of(self, stage: Stage) -> StageUpdate:
        """Return the update of a stage."""
        options, micro = self.options, stage.micro
        trained = [self.trained[name] for name in micro.parameters if name in self.trained]
        norm = Norm(options.clip_norm, micro.untrained) if options.measured else None
        ending = update_of(
            trained, micro.loss, self.device, norm=norm, scaling=options.loss_scale if options.scaled else None,
            ema=options.ema, staged=Staged(list(self.trained.values()), self.foreign),
        )  # fmt: skip
        if not ending.program.placeholders:
            return StageUpdate()
        verify(ending.program, "update")
        states = frozenset(name_of(node) for node in ending.program.placeholders if record_of(node).role == "state")
        execution = Execution(written=states, sums=True)
        local, reports, _ = self._on(stage).place(
            ending.program, ending.constraints, self.device, execution=execution, split_update=True
        )
        self.reports += about(f"stage {stage.number} update", reports)
        return StageUpdate((ending.program, local), ending.returns, states)

    def _on(self, stage: Stage) -> Compiler:
        return replace(self.compiler, mesh=stage.mesh, whole=False)
