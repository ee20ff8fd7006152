"""Say how the programs of a step are compiled: on one mesh, or on the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from autopar.cache.codec import Codec
from autopar.cache.records import Leaf
from autopar.ir.mesh import PIPELINE, Mesh
from autopar.model.calls import Calls
from autopar.model.compiled import Compiler
from autopar.pipeline import PipelineSchedule
from autopar.step.compiled import AnyStep, CompiledOnMesh
from autopar.step.compiling.compile_update import compile_update
from autopar.step.compiling.compiled_step import CompiledMicro, MicroBatch
from autopar.step.compiling.memory_limit import within_memory
from autopar.step.compiling.request import MicroRequest
from autopar.step.compiling.update import Trained
from autopar.step.kept_steps import codec_of_micro, codec_of_update
from autopar.step.options import StepOptions
from autopar.step.pipelined.compiled import CompiledOnStages
from autopar.step.pipelined.placing.compile import compile_pipelined
from autopar.step.pipelined.placing.programs import PipelinedMicro
from autopar.step.pipelined.schedules import schedule_of


@dataclass(frozen=True)
class StepCompiler:
    """How the programs of a step are compiled.

    Attributes:
        kind: what the programs of a micro-batch are called in the cache.
        record: the class that holds them.
        compile: makes them.
        made: the class that holds the programs of a whole step.
        leaves: class → the form of its values in the cache, where records have no own.
    """

    kind: str
    record: type[Any]
    compile: Callable[[Compiler, MicroRequest], CompiledMicro]
    made: type[Any]
    leaves: Mapping[Any, Leaf] = field(default_factory=dict)

    @staticmethod
    def of(calls: Calls, options: StepOptions) -> StepCompiler:
        """Return how a step of these options is compiled. Errors are those of ``schedule_of``."""
        if not is_on_stages(calls.mesh, options):
            on_cpu = calls.device.type == "cpu"
            return StepCompiler("micro", MicroBatch, partial(within_memory, on_cpu=on_cpu), CompiledOnMesh)
        schedule = schedule_of(options, calls.mesh)
        make = partial(compile_pipelined, mesh=calls.mesh, schedule=schedule)
        leaf = Leaf(lambda _: None, lambda _: schedule)
        return StepCompiler("stages", PipelinedMicro, make, CompiledOnStages, {PipelineSchedule: leaf})

    def codec(self, compiler: Compiler, request: MicroRequest, kind: str = "") -> Codec[CompiledMicro]:
        """Return how the programs of a micro-batch are kept."""
        return codec_of_micro(kind or self.kind, self.record, compiler, request, self.leaves)

    def micro(self, compiler: Compiler, request: MicroRequest) -> CompiledMicro:
        """Return the programs of a micro-batch: from the cache, or compiled. All ranks call it."""
        made, digest = compiler.once(
            lambda compiler: self.compile(compiler, request), lambda: self.codec(compiler, request)
        )
        return replace(made, digest=digest)

    def step(
        self, compiler: Compiler, trained: Sequence[Trained], micro: CompiledMicro, options: StepOptions, calls: Calls
    ) -> AnyStep:
        """Return the programs of a whole step, whose update is from the cache, or compiled. All ranks call it."""
        update, _ = compiler.once(
            lambda compiler: compile_update(compiler, trained, micro, options),
            lambda: codec_of_update(compiler, micro.digest, trained, options),
        )
        made: AnyStep = self.made(micro, update, options, calls, compiler)
        return made


def is_on_stages(mesh: Mesh, options: StepOptions) -> bool:
    """Return whether a step is cut into stages: the mesh has them, or an option is about them."""
    given = (options.schedule, options.chunks, options.stages)
    return mesh.sizes.get(PIPELINE, 1) > 1 or any(option is not None for option in given)
