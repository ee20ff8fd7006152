"""Keep what was captured of the calls of a model, and hold it beside what is known of a call and who is asked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import torch

from autopar.capture import Captured
from autopar.capture.guards import GuardedCall, Original
from autopar.capture.model_state import ModelState, model_state
from autopar.ir.layout import DistAttr, Layout
from autopar.ir.mesh import Mesh
from autopar.ir.program import Program
from autopar.model.binding import CallBinding
from autopar.model.call_ranks import CallRanks
from autopar.model.captures import Captures, about_recapture, said_if_late
from autopar.model.compiled import Compiled, Compiler
from autopar.model.dtensor_parameters import move_parameters
from autopar.model.first_step import FirstStep
from autopar.model.inputs import CallInputs, Inputs
from autopar.model.kept_calls import codec_of_call
from autopar.model.stage_homes import StageHomes
from autopar.report.passes import PassReport
from autopar.runtime.processes.job import Job
from autopar.search.devices.stages import Pipelined

T = TypeVar("T")


def device_of(model: torch.nn.Module, job: Job | None) -> torch.device:
    """Return the device of this process's pieces, or of the model in a process that is alone."""
    if job is not None:
        return job.device
    return next((p.device for p in model.parameters() if not p.is_meta), torch.device("cpu"))


class CallCaptures(Captures[Compiled]):
    """What was captured of a model's own calls, and where its parameters are since then.

    Attributes:
        compiler: how calls are captured and placed: on the mesh, or where it has stages, on that of one stage.
        latest: the capture that was used last.
        recapture: whether another call may be captured after the first one.
        homes: where the parameters are that are on stages of a pipeline; ``None`` before a step has cut the model.
        traced: the traced program of an example, on a mesh with stages.
        pipelined: the pipeline that the plan has chosen; ``None`` if it has none.
        first_step: looks at the first step of an optimizer of the model; ``None`` for a copy.
        notes: what was decided or verified beside captures.
    """

    def __init__(self, compiler: Compiler, binding: CallBinding, ranks: CallRanks, recapture: bool) -> None:
        super().__init__()
        self.compiler, self.recapture = compiler, recapture
        self._binding, self._ranks = binding, ranks
        self.latest: Compiled | None = None
        self.homes: StageHomes | None = None
        self.traced: Program | None = None
        self.pipelined: Pipelined | None = None
        self.first_step: FirstStep | None = None
        self.notes: list[PassReport] = []

    @property
    def about_cache(self) -> list[PassReport]:
        """What the notes say of the cache."""
        return [note for note in self.notes if note.name.startswith("cache")]

    def clear(self) -> None:
        """Drop all captures."""
        super().clear()
        self.latest = None

    def compiled(self, inputs: CallInputs, call: GuardedCall) -> Compiled:
        """Return the capture of a call of the model itself; capture it first if it is new. All ranks call it.

        Parameters that are on stages come back to the whole mesh.
        """
        self.leave_stages()
        if not call.known:
            with said_if_late(self.compiler.context, self, call, self.compiler.sizes):
                self._capture(inputs, call)
        self.latest = self[call]
        return self.latest

    def _capture(self, inputs: CallInputs, call: GuardedCall) -> None:
        compiler = self.compiler.like(self.plan(call.key), call.numbers)
        served = compiler.serves(inputs)
        notes = [] if served else about_recapture(call.key, self.keys, call.changes, self.recapture)
        compiled, _ = compiler.once(
            lambda compiler: compiler.compile(inputs, notes), lambda: codec_of_call(compiler, inputs, notes)
        )
        if compiled.found is not None:
            self._settle(compiled.homes)
        # one order of collectives on all ranks
        self._ranks.agreement.compare_programs(lambda: compiled.text, compiled.captured.guards)
        self.add(call, compiled.captured.guards, compiled, compiled.found)

    def _settle(self, layouts: Mapping[str, DistAttr]) -> None:
        """Keep parameters in the layouts that a search gave them; later captures do not change them."""
        binding, job = self._binding, self._ranks.job
        moved = {name: attr for name, attr in layouts.items() if binding.layouts.get(name) != attr}
        binding.layouts |= moved
        self.compiler = replace(self.compiler, homes={**self.compiler.homes, **layouts})
        if job is not None and moved:
            # ``initialize`` may have made new ones, which are known by the placements that they are about to lose
            self._ranks.tensors.check_parameters(model_state(binding.module).parameters)
            self._on_whole_mesh(moved)

    def move(self, layouts: Mapping[str, DistAttr]) -> None:
        """Give parameters other layouts from now on, and drop what was captured for the old ones. All ranks call it.

        Those that are on stages come back to the whole mesh.
        """
        self.leave_stages()
        if any(self._binding.layouts.get(name) != attr for name, attr in layouts.items()):
            self._settle(layouts)
            self.clear()

    def move_to_stages(self, homes: StageHomes) -> None:
        """Give parameters to the stages of a pipeline. All ranks call it."""
        if self.homes is None or self.homes.layouts != homes.layouts or self.homes.stage != homes.stage:
            move_parameters(self._binding.module, homes.layouts, self._ranks.job)
            self.homes = homes
            self.clear()

    def leave_stages(self) -> None:
        """Bring the parameters that are on stages back to the whole mesh. All ranks call it."""
        if self.homes is not None:
            self._on_whole_mesh({name: self._binding.layouts[name] for name in self.homes.layouts})
            self.homes = None

    def _on_whole_mesh(self, layouts: Mapping[str, DistAttr]) -> None:
        homes = {name: Layout(self._ranks.mesh, attr) for name, attr in layouts.items()}
        move_parameters(self._binding.module, homes, self._ranks.job)

    def settled(self) -> Mapping[str, DistAttr]:
        """Return the layouts of parameters for the model under another forward, whose search does not change them."""
        return self._binding.layouts if self.compiler.searches else self.compiler.homes


class Calls:
    """The calls of a model and of its training steps: what is known, what was captured, and who is asked.

    Attributes:
        binding: what is known of a call: its arguments, layouts and key.
        captures: what was captured of the model's own calls.
        ranks: who is asked: this rank, and the others.
        module: the model, with parameters that are DTensors on processes.
        mesh, job, agreement, tensors, unfinished: those of ``ranks``.
    """

    def __init__(self, compiler: Compiler, binding: CallBinding, ranks: CallRanks, recapture: bool) -> None:
        self.binding, self.ranks = binding, ranks
        self.captures = CallCaptures(compiler, binding, ranks, recapture)
        self.module, self.mesh, self.job = binding.module, ranks.mesh, ranks.job
        self.agreement, self.tensors, self.unfinished = ranks.agreement, ranks.tensors, ranks.unfinished
        self.bound, self.inputs, self.key = binding.bound, binding.inputs, binding.key
        self.context, self.complete = ranks.context, ranks.complete
        self._made: dict[Callable[[Calls], object], Any] = {}

    @staticmethod
    def of(
        compiler: Compiler, mesh: Mesh, job: Job | None, passed: Inputs, recapture: bool,
        layouts: Mapping[str, DistAttr], original: Original | None = None,
    ) -> Calls:  # fmt: skip
        """Return the calls of the model of a compiler. All ranks call it.

        Args:
            job: the processes of the mesh; ``None`` in a process that is alone.
            passed: the option ``inputs`` of ``parallelize``.
            recapture: whether another call may be captured after the first one.
            layouts: parameter → its layout between calls.
            original: the model of which the compiler's is a copy.
        """
        ranks = CallRanks.of(compiler, mesh, job)
        binding = CallBinding(compiler.model, compiler.plan, ranks, passed, layouts, original)
        return Calls(compiler, binding, ranks, recapture)

    @property
    def compiler(self) -> Compiler:
        """How calls are captured and placed, with the layouts that were found by now."""
        return self.captures.compiler

    @property
    def homes(self) -> StageHomes | None:
        """Where the parameters are that are on stages of a pipeline; ``None`` if none is."""
        return self.captures.homes

    @property
    def device(self) -> torch.device:
        """The device of this process's pieces."""
        return device_of(self.module, self.job)

    def call(self, inputs: CallInputs, state: ModelState) -> GuardedCall:
        """Return a call of the model itself, with the values that forward would read now."""
        return self.captures.call(self.key(inputs, state), state.modules)

    def computed(self, captured: Captured, count: int = 1) -> list[dict[str, torch.Tensor]]:
        """Return the tensors that a captured program takes besides those of the calls, as ``CallRanks.computed``."""
        return self.ranks.computed(captured, self.compiler.random, count)

    def once(self, make: Callable[[Calls], T]) -> T:
        """Return what is made of these calls when it is first asked for, such as what generates tokens."""
        if make not in self._made:
            self._made[make] = make(self)
        made: T = self._made[make]
        return made

    def made(self, make: Callable[[Calls], T]) -> T | None:
        """Return what ``once`` has made; ``None`` before."""
        return self._made.get(make)

    def of_copy(self, module: torch.nn.Module) -> Calls:
        """Return the calls of a copy of the model, without captures. All ranks call it.

        ``RuntimeError`` after ``close``.
        """
        known, captures = self.binding, self.captures
        compiler = self.compiler.of(module, context=self.ranks.own_of_copy())
        copied = Calls.of(compiler, self.mesh, self.job, known.passed, captures.recapture, known.layouts)
        copied.captures.homes, copied.captures.pipelined = captures.homes, captures.pipelined
        return copied

    def of_host(self, module: torch.nn.Module) -> Calls:
        """Return the calls of the model under another forward, with captures of their own.

        ``module`` has the attributes of the model. All else is shared: the agreement, the process groups, the layouts
        that the parameters have now. Tensors are global where they are passed, and come back in pieces.
        """
        ranks = self.ranks.of_host(module)
        compiler = self.compiler.of(module, whole=False, homes=dict(self.captures.settled()))
        return Calls(compiler, self.binding.of_host(module, ranks), ranks, self.captures.recapture)


# -- ranks -------------------------------------------------------------------------------------------------------------
