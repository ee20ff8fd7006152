"""Bind and key the calls of a model on a mesh, and provide their layouts, pieces, seeds and agreement of the ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from autopar.capture import Captured
from autopar.capture.arguments import Arguments, bind_arguments, signature_of
from autopar.capture.guards import GuardedCall, Original
from autopar.capture.model_state import ModelState, model_state
from autopar.capture.provenance import user_line
from autopar.errors import PlanError
from autopar.ir.layout import DistAttr, Layout
from autopar.ir.mesh import Mesh
from autopar.ir.program import Program
from autopar.model.call_agreement import CallAgreement
from autopar.model.captures import Captures, about_recapture
from autopar.model.compiled import Compiled, Compiler, RankContext
from autopar.model.dtensor_parameters import move_parameters
from autopar.model.first_step import FirstStep
from autopar.model.inputs import CallInputs, CallKey, Inputs, Shapes, call_inputs
from autopar.model.kept_calls import compiled_by_cache
from autopar.model.late_captures import said_if_late
from autopar.model.local_tensors import LocalTensors, refuse_without_values
from autopar.model.sizes import SizedCaptures
from autopar.model.stage_homes import StageHomes
from autopar.model.stage_parameters import move_to_stages
from autopar.model.uneven_batches import with_like_pieces
from autopar.plan.boundary import OPEN
from autopar.plan.constraints import layouts_without_search
from autopar.plan.plan import of_the_batch
from autopar.report.passes import PassReport
from autopar.runtime.processes.agreement import Agreement
from autopar.runtime.processes.dtensor_ops import take_dtensor_ops
from autopar.runtime.processes.job import Job, Membership
from autopar.runtime.processes.replicas import Replicas
from autopar.runtime.processes.whole_steps import take_steps
from autopar.runtime.seeds import step_seed
from autopar.search.devices.stages import Pipelined
from autopar.torch_private import transforms

TRANSFORMED = (
    "torch.func transforms a call of a model on a mesh, whose captured program has gradients through backward() alone\n"
    "    {line}\n  use the transform inside of forward, where it is captured with the model, or loss.backward() and "
    "torch.autograd.grad outside"
)


class Calls:
    """The state that the calls of a model and of its training steps share.

    Attributes:
        compiler: how calls are captured and placed: on the mesh, or where it has stages, on that of one stage.
        module: the model, with parameters that are DTensors on processes.
        mesh: the mesh.
        job: the processes of the mesh; ``None`` in a process that is alone.
        agreement: compares each call with those of the other ranks.
        membership: the model's use of the job, until it is closed.
        tensors: the tensors of the model and of its calls, on this rank.
        captures: the captures of the model's own calls.
        latest: the capture that was used last.
        recapture: whether another call may be captured after the first one.
        unfinished: functions that complete the steps that have left something under way.
        homes: where the parameters are that are on stages of a pipeline; ``None`` before a step has cut the model.
        staged: what runs the calls of a model on stages, once there was one.
        generation: what generates tokens, once it was asked to.
        traced: the traced program of an example, on a mesh with stages.
        pipelined: the pipeline that the plan has chosen; ``None`` if it has none.
        first_step: looks at the first step of an optimizer of the model; ``None`` for a copy.

    Args:
        inputs: the option of ``parallelize``.
        layouts: parameter → its layout between calls.
        original: the model of which ``module`` is a copy.
    """

    def __init__(self, compiler: Compiler, mesh: Mesh, job: Job | None, inputs: Inputs, recapture: bool,
                 layouts: Mapping[str, DistAttr], original: Original | None = None) -> None:  # fmt: skip
        self.compiler, self.job, self.recapture = compiler, job, recapture
        self.module, self.mesh = compiler.model, mesh
        self.agreement = CallAgreement(None if compiler.context is None else compiler.context.agreement)
        self.membership = Membership(job, self.agreement.ranks)
        self.tensors = LocalTensors(self.module, self.mesh, job, compiler.whole)
        if job is not None:
            take_steps()
            take_dtensor_ops()
        if self.agreement.ranks is not None:
            self.agreement.ranks.replicas = Replicas(self.tensors.parameters)
        self.captures: Captures[Compiled] = Captures()
        self.latest: Compiled | None = None
        self.unfinished: dict[int, Callable[[], None]] = {}
        self.homes: StageHomes | None = None
        self.staged: Any = None
        self.generation: Any = None
        self.traced: Program | None = None
        self.notes: list[PassReport] = []  # what was verified beside captures
        self.pipelined: Pipelined | None = None
        self.first_step: FirstStep | None = None
        self.passed, self._layouts, self._original = inputs, dict(layouts), original
        self._input_layouts: dict[Any, Mapping[str, DistAttr]] = {}  # by names and shapes of inputs
        self._of_the_batch: dict[Any, Mapping[str, bool]] = {}  # by names and numbers of dims of inputs

    @property
    def about_cache(self) -> list[PassReport]:
        """What the notes say of the cache."""
        return [note for note in self.notes if note.name.startswith("cache")]

    def copied(self, module: torch.nn.Module) -> Calls:
        """Return the calls of a copy of the module, without captures. All ranks call it.

        ``RuntimeError`` after ``close``.
        """
        self.membership.check()
        context = self.compiler.context
        if context is not None and context.agreement is not None:
            assert self.job is not None
            context = replace(context, agreement=Agreement(self.job.control, self.mesh))
        sizes = SizedCaptures(self.compiler.sizes.dynamic, self.compiler.sizes.keep)
        compiler = replace(self.compiler, model=module, context=context, sizes=sizes)
        copied = Calls(compiler, self.mesh, self.job, self.passed, self.recapture, self._layouts)
        copied.homes, copied.pipelined = self.homes, self.pipelined
        return copied

    def beside(self, module: torch.nn.Module) -> Calls:
        """Return the calls of the model under another forward, with captures of their own.

        ``module`` has the attributes of the model. All else is shared: the agreement, the process groups, the layouts.
        Tensors are global where they are passed, and come back in pieces.
        """
        beside = copy.copy(self)
        sizes = SizedCaptures(self.compiler.sizes.dynamic, self.compiler.sizes.keep)
        beside.compiler = replace(self.compiler, model=module, whole=False, sizes=sizes)
        beside.module, beside.passed = module, "global"
        beside.tensors = LocalTensors(module, self.mesh, self.job, False)
        beside.captures, beside.latest, beside.staged, beside.traced = Captures(), None, None, None
        beside._input_layouts, beside._of_the_batch = {}, {}
        return beside

    def follow(self, other: Calls) -> None:
        """Take the layouts of parameters from the calls of the same model; a search does not change them here."""
        homes = dict(other._layouts) if other.compiler.searches else dict(other.compiler.homes)
        if homes != self.compiler.homes:
            self.compiler = replace(self.compiler, homes=homes)
            self.captures.clear()
            self.latest = None

    def complete(self, but: object = None) -> None:
        """Complete the steps that have left something under way, except one. All ranks call it."""
        for key, finish in list(self.unfinished.items()):
            if key != id(but):
                finish()

    def refuse_unfinished(self, what: str) -> None:
        """Raise ``RuntimeError`` while the update of parameters is under way."""
        if self.unfinished:
            raise RuntimeError(
                f"{what} while the update of the last step is under way (across=True), so that its values are old; "
                f"call step.finish() on all ranks first"
            )

    @property
    def device(self) -> torch.device:
        """The device of this process's pieces."""
        if self.job is not None:
            return self.job.device
        return next((p.device for p in self.module.parameters() if not p.is_meta), torch.device("cpu"))

    def context(self, advice: str = "") -> RankContext:
        """Return the context of this process's rank. ``RuntimeError`` if the process only simulates.

        The error has ``advice`` after the command that starts processes.
        """
        if self.compiler.context is None:
            raise RuntimeError(
                f"the mesh ({self.mesh}) needs {self.mesh.size} processes, and this one is alone; start them with "
                f"torchrun --nproc-per-node {self.mesh.size}{advice}, or call .simulate(...) to run all ranks in this "
                f"process"
            )
        return self.compiler.context

    def refuse_to_simulate(self) -> None:
        """Raise ``RuntimeError`` on processes, each of which has only its pieces of parameters.

        Also where each rank brings its piece of the batch, of which a process that is alone has only one.
        """
        if self.job is not None:
            raise RuntimeError(
                "the parameters of this model are sharded over processes; to simulate, call parallelize in a process "
                "that is alone"
            )
        if self.passed == "local" and self.mesh.size > 1:
            raise RuntimeError(
                'with inputs="local" each process brings its piece of the batch, and a simulation takes the whole; to '
                'simulate, call parallelize with inputs="global"'
            )

    # -- the inputs of a call ----------------------------------------------------------------------------------------

    def bound(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Arguments:
        """Bind the arguments of a call to the parameters of forward, and flatten them; this is done once for each call.

        If the ranks bring pieces of different sizes, the result has the whole batch. All ranks call it.

        Raises:
            RuntimeError: the model is closed.
            ValueError: torch.func transforms the call.
        """
        self.membership.check()
        if transforms():
            raise ValueError(TRANSFORMED.format(line=user_line()))
        arguments = bind_arguments(self.module, args, kwargs)
        if self.passed == "global" or self.agreement.ranks is None:
            return arguments
        return with_like_pieces(arguments, self.mesh, self.agreement.ranks, self._layouts_of)

    def inputs(self, arguments: Arguments) -> CallInputs:
        """Return the inputs of a call: bound arguments with their layouts."""
        return call_inputs(arguments, "global" if arguments.whole else self.passed, self.mesh, self._layouts_of)

    def _layouts_of(self, shapes: Shapes) -> Mapping[str, DistAttr]:
        """Return the plan's layouts for inputs of the given shapes, which ranks bring in pieces.

        They are not searched: inputs that the plan does not name have the defaults.

        Raises:
            PlanError: the plan leaves a dim of an input open.
        """
        key = tuple(shapes.items())
        if key not in self._input_layouts:
            attrs = layouts_without_search(self.compiler.plan, self.module, self.mesh, shapes)
            _refuse_open(attrs)
            self._input_layouts[key] = attrs
        return self._input_layouts[key]

    def row_axes(self) -> tuple[str, ...] | None:
        """Return the axes over which the plan splits dim 0 of inputs; ``None`` if it may name inputs by themselves."""
        plan = self.compiler.plan
        parts = plan if isinstance(plan, (list, tuple)) else () if plan is None else (plan,)
        if any(isinstance(part, Mapping) for part in parts):
            return None
        attrs = self._layouts_of({"rows": (self.mesh.size,)})
        dims = attrs["rows"].dims if "rows" in attrs else ()
        return tuple(axis for dim in dims for _, axes in dim for axis in axes)

    def of_the_batch(self, inputs: Mapping[str, int]) -> Mapping[str, bool]:
        """Return for each named input whether its dim 0 is the batch. ``inputs``: name → number of dims."""
        key = tuple(inputs.items())
        if key not in self._of_the_batch:
            state = model_state(self.module)
            # a glob of the plan means these tensors if an input has the same name
            others = {name for name, _ in (*state.parameters, *state.buffers)}
            self._of_the_batch[key] = of_the_batch(
                self.compiler.plan, self.mesh, {name: dims for name, dims in inputs.items() if name not in others}
            )
        return self._of_the_batch[key]

    def refuse_without_values(self, inputs: CallInputs, state: ModelState) -> None:
        """Raise ``ValueError`` if a parameter, a buffer or an input has no values to compute with."""
        refuse_without_values([*state.parameters, *state.buffers, *inputs.named])

    def computed(self, captured: Captured) -> dict[str, torch.Tensor]:
        """Return the tensors that a captured program takes besides the call's: numbers that forward reads, and a seed.

        The seed is there only if the program draws random numbers.
        """
        control = None if self.job is None else self.job.control
        if captured.draws:
            self.agreement.wait()  # the ranks exchange seeds in the group in which they compare calls
        seed = step_seed(captured.draws, self.compiler.random, captured.device, control)
        return {
            **{number.name: number.tensor(captured.device) for number in captured.numbers},
            **({"seed": seed[0]} if seed else {}),
        }

    # -- captures ----------------------------------------------------------------------------------------------------

    def key(self, inputs: CallInputs, state: ModelState) -> CallKey:
        """Return the key of a call's capture, without the values that forward reads."""
        if self._original is not None:
            self._original.take_over()
        return signature_of(state, inputs.arguments), inputs.facts

    def call(self, inputs: CallInputs, state: ModelState) -> GuardedCall:
        """Return a call of the model itself, with the values that forward would read now."""
        return self.captures.call(self.key(inputs, state), state.modules)

    def compiled(self, inputs: CallInputs, call: GuardedCall) -> Compiled:
        """Return the capture of a call of the model itself; capture it first if it is new. All ranks call it.

        Parameters that are on stages come back to the whole mesh.
        """
        self.leave_stages()
        if not call.known:
            with said_if_late(self.compiler.context, self.captures, call, self.compiler.sizes):
                self._capture(inputs, call)
        self.latest = self.captures[call]
        return self.latest

    def _capture(self, inputs: CallInputs, call: GuardedCall) -> None:
        compiler = self.compiler.like(self.captures.plan(call.key), call.numbers)
        served = compiler.serves(inputs)
        notes = [] if served else about_recapture(call.key, self.captures.keys, call.changes, self.recapture)
        compiled = compiled_by_cache(compiler, inputs, notes)
        if compiled.found is not None:
            self._settle(compiled.homes)
        # one order of collectives on all ranks
        self.agreement.compare_programs(compiled.text, compiled.captured.guards)
        self.captures.add(call, compiled.captured.guards, compiled, compiled.found)

    def _settle(self, layouts: Mapping[str, DistAttr]) -> None:
        """Keep parameters in the layouts that a search gave them; later captures do not change them."""
        moved = {name: attr for name, attr in layouts.items() if self._layouts.get(name) != attr}
        self._layouts |= moved
        self.compiler = replace(self.compiler, homes={**self.compiler.homes, **layouts})
        if self.job is not None and moved:
            # ``initialize`` may have made new ones, which are known by the placements that they are about to lose
            self.tensors.check_parameters(model_state(self.module).parameters)
            move_parameters(self.module, moved, self.mesh, self.job)

    def move(self, layouts: Mapping[str, DistAttr]) -> None:
        """Give parameters other layouts from now on, and drop what was captured for the old ones. All ranks call it.

        Those that are on stages come back to the whole mesh.
        """
        self.leave_stages()
        if any(self._layouts.get(name) != attr for name, attr in layouts.items()):
            self._settle(layouts)
            self.captures.clear()
            self.latest = None

    def move_to_stages(self, homes: StageHomes) -> None:
        """Give parameters to the stages of a pipeline. All ranks call it."""
        if self.homes is None or self.homes.layouts != homes.layouts or self.homes.stage != homes.stage:
            move_to_stages(self.module, homes.layouts, self.job)
            self.homes = homes
            self.captures.clear()
            self.latest = None

    def leave_stages(self) -> None:
        """Bring the parameters that are on stages back to the whole mesh. All ranks call it."""
        if self.homes is not None:
            homes = {name: Layout(self.mesh, self._layouts[name]) for name in self.homes.layouts}
            move_to_stages(self.module, homes, self.job)
            self.homes = None


def _refuse_open(attrs: Mapping[str, DistAttr]) -> None:
    """Refuse open dims of inputs that ranks bring in pieces."""
    for name, attr in attrs.items():
        if OPEN in attr.dims:
            raise PlanError(
                f"the plan leaves a dim of the input {name} open ('?'), and with inputs=\"local\" each rank brings its "
                f"piece of it, so its layout is known before the search; give an axis or None for each dim, or use "
                f'inputs="global"'
            )
