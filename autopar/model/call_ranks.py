"""Say who is asked of a call: this rank, and the others of the mesh, which must make the same call."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from autopar.capture import Captured
from autopar.capture.guards import Guards
from autopar.ir.mesh import Mesh
from autopar.ir.ops.seeded_random import Random
from autopar.model.compiled import Compiler
from autopar.model.inputs import CallInputs, LocalTensors
from autopar.model.rank_context import RankContext
from autopar.runtime.processes.agreement import Agreement
from autopar.runtime.processes.dtensor_ops import take_dtensor_ops
from autopar.runtime.processes.job import Job, Membership
from autopar.runtime.processes.replicas import Replicas
from autopar.runtime.processes.whole_steps import take_steps
from autopar.runtime.seeds import seeds_of_calls

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

    def computed(self, captured: Captured, random: Random, count: int = 1) -> list[dict[str, torch.Tensor]]:
        """Return the tensors that a captured program takes besides those of each of several calls: name → tensor.

        They are numbers that forward reads, and a seed if the program draws random numbers. The seeds are drawn at once
        and in the order of the calls, so that a schedule changes no draw.
        """
        if captured.draws:
            self.agreement.wait()  # the ranks exchange seeds in the group in which they compare calls
        control = None if self.job is None else self.job.control
        seeds = seeds_of_calls(count, captured.draws, random, captured.device, control)
        numbers = {number.name: number.tensor(captured.device) for number in captured.numbers}
        return [{**numbers, **({"seed": seeds[k]} if seeds else {})} for k in range(count)]
