"""Record steps: the times of each line or slot on each rank, beside what was computed; and measure their ops."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

import torch

from autopar.costs.machine import Machine
from autopar.costs.profile import Profile
from autopar.errors import shown
from autopar.model.calls import Calls
from autopar.runtime.marks import marks_of
from autopar.runtime.measuring.clock import Effort
from autopar.runtime.recording import Recorder, recording
from autopar.step.compiled import AnyStep
from autopar.step.reports.measured_rank import measured_rank
from autopar.step.reports.rank_record import RankRecord, Recording, on_one_clock
from autopar.step.reports.rank_report import RankReport
from autopar.step.reports.step_profile import StepProfile, places_of
from autopar.step.reports.timeline import StepTimeline


class NextSteps:
    """The next steps that a loop runs are recorded. Prints as their profile when the last one has run.

    Attributes:
        steps: how many.
        path: the file.
        profile: the profile; ``None`` before the last step has run.
    """

    def __init__(self, steps: int, path: str | os.PathLike[str]) -> None:
        self.steps, self.path = steps, path
        self.profile: StepProfile | None = None
        self._recorders: list[Recorder] = []

    def run(self, step: RecordedSteps, args: tuple[object, ...], kwargs: Mapping[str, object]) -> object:
        """Run a step, and return what it returns. The last one makes the profile, and the first rank writes it.

        A step that fails ends the recording.
        """
        step._next_steps = None
        recorder, returned = step._recorded(args, kwargs, in_slots=True)
        self._recorders.append(recorder)
        if len(self._recorders) < self.steps:
            step._next_steps = self
        else:
            self.profile = step._profile_of(step._of_ranks(self._recorders), self.steps, self.path)
            self._recorders.clear()
        return returned

    def __str__(self) -> str:
        if self.profile is not None:
            return str(self.profile)
        return (
            f"{len(self._recorders)} of {self.steps} steps have run; {os.fspath(self.path)} is written after the last"
        )


class RecordedSteps:
    """What a training step has to record itself."""

    _calls: Calls
    _next_steps: NextSteps | None = None

    def measure(
        self, *, machine: Machine | str | Path | None = None, effort: Effort | None = None, interference: bool = False
    ) -> Profile:
        """Time each distinct op and collective of the step once, on its own, and return the times. All ranks call it.

        The profile prints as a table, ``.save(path)`` writes it, and it has the durations by which communication is
        scheduled. Nothing of the model or the optimizer changes. In a process that is alone, the ops of the first rank
        are timed, and collectives have prices.

        Args:
            machine: whose prices stand beside the times; by default that of ``parallelize``.
            effort: how long each call is timed.
            interference: whether to time also how much slower ops compute while a collective runs.

        Raises:
            RuntimeError: nothing has been captured yet, or the model is closed.
            ValueError: ``interference`` in a process that is alone; or there is no such machine.
        """
        self._calls.ranks.membership.check()
        made = self._current()
        with torch.inference_mode(False):
            return made.measured(machine, effort, interference)

    def _current(self) -> AnyStep:
        """Return the programs that are shown. ``RuntimeError`` before a capture."""
        raise NotImplementedError

    def timeline(self, *args: object, **kwargs: object) -> StepTimeline:
        """Run one step and record when each line begins and ends on each rank, beside the simulated step.

        Where the step has stages, it is each slot of their schedule.

        All ranks call it, as they call the step: parameters change. ``print`` shows a table, and ``.save(path)`` writes
        a trace for Perfetto. On an accelerator the times are those of events on the stream that computes: a start takes
        no time there, and a wait is what the stream waits. Where the device waits for the host, a line has that, too.
        """
        recorder, _ = self._recorded(args, kwargs)
        if recorder.slots:
            recorder.runs.clear()  # what runs around the slots is recorded as slots, too
        made = self._current()
        return StepTimeline(made.communication, made.simulation, self._of_ranks([recorder]))

    def rank_report(self, *args: object, **kwargs: object) -> RankReport:
        """Run a few steps on this rank, and report its memory, its time by classes of ops, and its communication.

        Prints as tables. Measured memory stands beside the predicted one. In ``autopar.one_rank(mesh, rank)`` no other
        process is needed; on the processes of a job, all ranks call it. Parameters change, as by any step.

        Raises:
            RuntimeError: this process simulates all ranks.
        """
        return measured_rank(self, args, kwargs)

    @overload
    def profile(self, batch: None = None, *, steps: int = 3, path: str | os.PathLike[str] = ...) -> NextSteps: ...
    @overload
    def profile(self, batch: Any, *, steps: int = 3, path: str | os.PathLike[str] = ...) -> StepProfile: ...

    def profile(
        self, batch: Any = None, *, steps: int = 3, path: str | os.PathLike[str] = "trace.json"
    ) -> StepProfile | NextSteps:
        """Run steps and record when each line begins and ends on each rank. Writes one trace for Perfetto.

        Without a batch it runs nothing: the next steps that the loop runs are recorded, and the last one of them writes
        the trace. ``print`` the result then.

        The trace has the computed step, and the recorded steps of all ranks: lines in their modules, messages, and
        arrows from sends to receives, from starts to waits, and between the ranks of a collective. The result prints
        as a table of modules and phases. All ranks call it, as they call the step: parameters change. The first rank
        writes the file. In a process that simulates ranks no step runs, because simulated ranks have no times, and
        the trace has the computed step alone.

        Args:
            batch: a batch, with which each step runs; or an iterator, which gives a batch for each step; ``None``: the
                loop runs the steps.
            steps: the number of steps.
            path: the file.

        Raises:
            ValueError: ``steps`` is no number above 0, or the iterator has fewer batches.
            OSError: the file cannot be written; this is found before a step runs.
            RuntimeError: the next steps are recorded already; without a batch, where ranks are simulated, before a
                capture.
        """
        if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
            raise ValueError(f"steps={shown(steps)} is not a number of steps above 0")
        if self._next_steps is not None:
            raise RuntimeError(f"steps are recorded already: {self._next_steps}; run them first")
        calls = self._calls
        simulates = calls.job is None and calls.mesh.size > 1
        batches = [] if batch is None else _batches(batch, steps)
        if self._writes:
            with open(path, "a", encoding="utf-8"):
                pass
        for each in batches[:1] if simulates else batches:
            self.capture(each)  # type: ignore[attr-defined]
        following = NextSteps(steps, path)
        if simulates:
            following.profile = self._profile_of((), steps, path)
        else:
            self._next_steps = following
            for each in batches:
                self(each)  # type: ignore[operator]
        return following if batch is None or following.profile is None else following.profile

    @property
    def _writes(self) -> bool:
        """Whether this rank writes the file."""
        return self._calls.job is None or self._calls.job.rank == self._calls.mesh.ranks[0]

    def _profile_of(self, records: tuple[RankRecord, ...], steps: int, path: str | os.PathLike[str]) -> StepProfile:
        """Return what was recorded beside the computed step. The first rank writes it."""
        made = self._current()
        places = {name: places_of(local) for name, local in made.running.items()}
        profile = StepProfile(made.communication, made.simulation, records, places, steps, os.fspath(path))
        if self._writes:
            profile.save(path)
        return profile

    def _of_ranks(self, recorders: list[Recorder]) -> tuple[RankRecord, ...]:
        """Return what all ranks have recorded, on one clock. All ranks call it."""
        rank, host = self._calls.context().rank, socket.gethostname()
        own = [Recording(host, made.begun, made.runs, made.slots.get(rank, [])) for made in recorders]
        stages = {rank: at.stages for at in self._current().runs.timetable.positions for rank in at.ranks}
        together = self._calls.agreement.ranks
        gathered = [own] if together is None else together.gathered(own)
        return on_one_clock(dict(zip(self._calls.mesh.ranks, gathered, strict=True)), stages)

    def _recorded(
        self, args: Sequence[object], kwargs: Mapping[str, object], *, in_slots: bool = False
    ) -> tuple[Recorder, object]:
        """Run one step. Returns what was recorded on this rank, and what the step returned."""
        self.capture(*args, **kwargs)  # type: ignore[attr-defined]
        together = self._calls.agreement.ranks
        if together is not None:
            together.agree("record a timeline")  # then the clocks of all ranks begin
        with recording(in_slots, marks_of(self._calls.device)) as recorder:
            returned = self(*args, **kwargs)  # type: ignore[operator]
        return recorder, returned


def _batches(batch: object, steps: int) -> list[object]:
    if not isinstance(batch, Iterator):
        return [batch] * steps
    batches = [own for _, own in zip(range(steps), batch, strict=False)]
    if len(batches) < steps:
        raise ValueError(f"the iterator of batches ended after {len(batches)} of steps={steps}; give it more batches")
    return batches
