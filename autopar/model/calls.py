"""Keep what was captured of the calls of a model, and hold it beside what is known of a call and who is asked."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch

from autopar.capture import Captured
from autopar.capture.guards import GuardedCall, Guards, Original
from autopar.capture.model_state import ModelState, model_state
from autopar.ir.layout import DistAttr, Layout
from autopar.ir.mesh import Mesh
from autopar.ir.ops.seeded_random import Random
from autopar.ir.program import Program
from autopar.model.binding import CallBinding
from autopar.model.captures import Captures, about_recapture, said_if_late
from autopar.model.compiled import Compiled, Compiler, RankContext
from autopar.model.dtensor_parameters import move_parameters
from autopar.model.first_step import FirstStep
from autopar.model.inputs import CallInputs, Inputs, LocalTensors
from autopar.model.kept_calls import codec_of_call
from autopar.model.stage_homes import StageHomes
from autopar.report.passes import PassReport
from autopar.runtime.processes.agreement import Agreement
from autopar.runtime.processes.dtensor_ops import take_dtensor_ops
from autopar.runtime.processes.job import Job, Membership
from autopar.runtime.processes.replicas import Replicas
from autopar.runtime.processes.whole_steps import take_steps
from autopar.runtime.seeds import seeds_of_calls
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

    def computed(self, captured: Captured) -> dict[str, torch.Tensor]:
        """Return the tensors that a captured program takes besides the call's, as ``CallRanks.computed``."""
        return self.ranks.computed(captured, self.compiler.random)

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


ALIKE = "let all ranks have the same there, by one seed for example, or draw or read it once and pass it to forward"


class CallAgreement:
    """The ranks agree on each call before its first collective. On one rank there is nothing to agree on.

    Attributes:
        ranks: compares what this rank does with the others; ``None`` on one rank.
    """

    def __init__(self, ranks: Agreement | None) -> None:
        self.ranks = ranks

    def announce(self, call: str, inputs: Sequence[CallInputs] = (), numbers: str = "", remedy: str = "") -> None:
        """Send the other ranks a digest of the call that this rank makes.

        They compare it with theirs before the first collective of the call.

        Args:
            call: a description that is the same on all ranks that make the same call.
            inputs: the inputs of the call, or of all its micro-batches.
            numbers: a description of the numbers that change from call to call.
            remedy: what to do if another rank makes another call; there is a general one.
        """
        if self.ranks is not None:
            self.ranks.begin(
                call + numbers,
                [brought for call_inputs in inputs for brought in call_inputs.brought()],
                call,
                remedy=remedy,
            )

    def wait(self) -> None:
        """Wait for the calls of the other ranks. ``RuntimeError`` if one of them makes another call."""
        if self.ranks is not None:
            self.ranks.finish()

    def all_make(self, call: str) -> None:
        """Check that all ranks make this call, which compares nothing else. ``RuntimeError`` otherwise."""
        self.announce(call)
        self.wait()

    def compare_programs(self, text: Callable[[], str], guards: Guards) -> None:
        """Check that all ranks captured one program from the same values. All ranks call it.

        ``RuntimeError`` if another rank has captured another program, or its forward has read other values.
        ``text`` returns the program and its order; without other ranks it is not asked.
        """
        if self.ranks is not None:
            digest = hashlib.sha256(text().encode()).hexdigest()[:16]
            self.ranks.compare(digest, {guard.place.words: guard.text for guard in guards.entries})
            kept = ", ".join(guards.ran.changed)
            remedy = f'first_values="keep" keeps what each rank has at its first call: {kept}; {ALIKE}' if kept else ""
            self.ranks.begin(f"capture a program with the digest {digest}", remedy=remedy)
            self.ranks.finish()


@dataclass(frozen=True, eq=False)
class CallRanks:
    """Who is asked about a call: this process as a rank, and the other ranks.

    Attributes:
        mesh: the mesh.
        job: the processes of the mesh; ``None`` in a process that is alone.
        own: this process as a rank; ``None`` if it only simulates.
        agreement: compares each call with those of the other ranks.
        membership: the model's use of the job, until it is closed.
        tensors: the tensors of the model and of its calls, on this rank.
        unfinished: functions that complete the steps that have left something under way.
    """

    mesh: Mesh
    job: Job | None
    own: RankContext | None
    agreement: CallAgreement
    membership: Membership
    tensors: LocalTensors
    unfinished: dict[int, Callable[[], None]] = field(default_factory=dict)

    @staticmethod
    def of(compiler: Compiler, mesh: Mesh, job: Job | None) -> CallRanks:
        """Return who is asked about the calls of the model of a compiler. All ranks call it."""
        own = compiler.context
        agreement = CallAgreement(None if own is None else own.agreement)
        tensors = LocalTensors(compiler.model, mesh, job, compiler.whole)
        if job is not None:
            take_steps()
            take_dtensor_ops()
        if agreement.ranks is not None:
            agreement.ranks.replicas = Replicas(tensors.parameters)
        return CallRanks(mesh, job, own, agreement, Membership(job, agreement.ranks), tensors)

    def own_of_copy(self) -> RankContext | None:
        """Return this process as a rank for a copy of the model, whose ranks agree by themselves. All ranks call it.

        ``RuntimeError`` after ``close``.
        """
        self.membership.check()
        if self.own is None or self.own.agreement is None:
            return self.own
        assert self.job is not None
        return replace(self.own, agreement=Agreement(self.job.control, self.mesh))

    def of_host(self, module: torch.nn.Module) -> CallRanks:
        """Return these for the model under another forward: only its tensors are looked up by themselves."""
        return replace(self, tensors=LocalTensors(module, self.mesh, self.job, False))

    def context(self, advice: str = "") -> RankContext:
        """Return the context of this process's rank. ``RuntimeError`` if the process only simulates.

        The error has ``advice`` after the command that starts processes.
        """
        if self.own is None:
            raise RuntimeError(
                f"the mesh ({self.mesh}) needs {self.mesh.size} processes, and this one is alone; start them with "
                f"torchrun --nproc-per-node {self.mesh.size}{advice}, or call .simulate(...) to run all ranks in this "
                f"process"
            )
        return self.own

    def complete(self, but: object = None) -> None:
        """Complete the steps that have left something under way, except one. All ranks call it."""
        for key, finish in list(self.unfinished.items()):
            if key != id(but):
                finish()

    def begin(self, call: str = "") -> None:
        """Begin what reads or writes the values of the model: complete what is under way. All ranks call it.

        Args:
            call: a description of the call that all ranks make, which they compare; "": they do not.

        Raises:
            RuntimeError: the model is closed, or another rank makes another call.
        """
        self.membership.check()
        self.complete()
        if call:
            self.agreement.all_make(call)

    def refuse_unfinished(self, what: str) -> None:
        """Raise ``RuntimeError`` while the update of parameters is under way."""
        if self.unfinished:
            raise RuntimeError(
                f"{what} while the update of the last step is under way (across=True), so that its values are old; "
                f"call step.finish() on all ranks first"
            )

    def computed(self, captured: Captured, random: Random) -> dict[str, torch.Tensor]:
        """Return the tensors that a captured program takes besides the call's: numbers that forward reads, and a seed.

        The seed is there only if the program draws random numbers.
        """
        if captured.draws:
            self.agreement.wait()  # the ranks exchange seeds in the group in which they compare calls
        control = None if self.job is None else self.job.control
        seed = seeds_of_calls(1, captured.draws, random, captured.device, control)
        return {
            **{number.name: number.tensor(captured.device) for number in captured.numbers},
            **({"seed": seed[0]} if seed else {}),
        }
