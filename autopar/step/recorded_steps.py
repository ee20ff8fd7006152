"""Record steps: the times of each line or slot on each rank, beside what was computed."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from typing import Any

from autopar.errors import shown
from autopar.model.calls import Calls
from autopar.runtime.localize import LocalPrograms
from autopar.runtime.recording import Recorder, clock_offsets, recording
from autopar.scheduling.programs.communication import Communication
from autopar.step.step_profile import Computed, Places, RankRecord, StepProfile, computed_track, places_of
from autopar.step.timeline import Timeline


class RecordedSteps:
    """What a training step has to record itself."""

    _calls: Calls

    @property
    def communication(self) -> Communication:
        """How the communication of the step is scheduled."""
        raise NotImplementedError

    def timeline(self, *args: Any, **kwargs: Any) -> Any:
        """Run one step and record when each line begins and ends on each rank, beside the simulated step.

        All ranks call it, as they call the step: parameters change. ``print`` shows a table, and ``.save(path)`` writes
        a trace for Perfetto.

        Raises:
            RuntimeError: the model is on an accelerator, where lines end later than Python calls them; use
                ``torch.profiler`` there.
        """
        runs = self._recorded(*args, **kwargs).runs
        return Timeline(self.communication, tuple(self._gathered(runs)))

    def profile(self, batch: Any, *, steps: int = 3, path: str | os.PathLike[str] = "trace.json") -> StepProfile:
        """Run steps and record when each line begins and ends on each rank. Writes one trace for Perfetto.

        The trace has the computed step, and the recorded steps of all ranks: lines in their modules, messages, and
        arrows from sends to receives, from starts to waits, and between the ranks of a collective. The result prints
        as a table of modules and phases. All ranks call it, as they call the step: parameters change. The first rank
        writes the file. In a process that simulates ranks no step runs, because simulated ranks have no times, and
        the trace has the computed step alone.

        Args:
            batch: a batch, with which each step runs; or an iterator, which gives a batch for each step.
            steps: the number of steps.
            path: the file.

        Raises:
            ValueError: ``steps`` is no number above 0, or the iterator has fewer batches.
            OSError: the file cannot be written; this is found before a step runs.
            RuntimeError: as of ``timeline``.
        """
        if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
            raise ValueError(f"steps={shown(steps)} is not a number of steps above 0")
        batches = _batches(batch, steps)
        calls = self._calls
        first = calls.job is None or calls.job.rank == calls.mesh.ranks[0]
        if first:
            with open(path, "a", encoding="utf-8"):
                pass
        simulates = calls.job is None and calls.mesh.size > 1
        records = () if simulates else self._records(batches)
        if simulates:
            self.capture(batches[0])  # type: ignore[attr-defined]
        made = self.communication
        places = {name: places_of(local) for name, local in self._running().items()}
        profile = StepProfile(made, places, self._computed(made, places), records, len(batches), os.fspath(path))
        if first:
            profile.save(path)
        return profile

    def _records(self, batches: list[Any]) -> tuple[RankRecord, ...]:
        """Run a step with each batch. Returns what all ranks have recorded, on one clock."""
        for batch in batches:
            self.capture(batch)  # type: ignore[attr-defined]
        recorders = [self._recorded(batch, in_slots=True) for batch in batches]
        rank = self._calls.context().rank
        own = [((socket.gethostname(), made.begun), made.runs, made.slots.get(rank, [])) for made in recorders]
        ranks: list[list[tuple[Any, Any, Any]]] = self._gathered(own)
        # the clock of the first step; a later one began at its own time since then
        offsets = clock_offsets([steps[0][0] for steps in ranks])
        return tuple(
            RankRecord.of(
                [(at - steps[0][0][1] + offset, runs, slots) for (_, at), runs, slots in steps], self._words(rank)
            )
            for rank, steps, offset in zip(self._calls.mesh.ranks, ranks, offsets, strict=True)
        )

    def _words(self, rank: int) -> str:
        """Return the name of the track of a rank."""
        return f"rank {rank}"

    def _computed(self, made: Communication, places: Places) -> Computed:
        return Computed([computed_track("computed", made, places)], made.makespan, made.exposed)

    def _running(self) -> dict[str, LocalPrograms]:
        """Return the programs that a step runs, by the names of the parts of its communication."""
        raise NotImplementedError

    def _recorded(self, *args: Any, in_slots: bool = False, **kwargs: Any) -> Recorder:
        """Run one step, and return what was recorded on this rank."""
        if self._calls.device.type != "cpu":
            raise RuntimeError(
                f"a timeline needs lines that have ended when Python goes on, and {self._calls.device.type} runs them "
                "later; use torch.profiler there"
            )
        self.capture(*args, **kwargs)  # type: ignore[attr-defined]
        together = self._calls.agreement.ranks
        if together is not None:
            together.agree("record a timeline")  # then the clocks of all ranks begin
        with recording(in_slots) as recorder:
            self(*args, **kwargs)  # type: ignore[operator]
        return recorder

    def _gathered(self, value: Any) -> list[Any]:
        """Return the values of all ranks. All ranks call it."""
        together = self._calls.agreement.ranks
        return [value] if together is None else together.gathered(value)


def _batches(batch: Any, steps: int) -> list[Any]:
    if not isinstance(batch, Iterator):
        return [batch] * steps
    batches = [own for _, own in zip(range(steps), batch, strict=False)]
    if len(batches) < steps:
        raise ValueError(f"the iterator of batches ended after {len(batches)} of steps={steps}; give it more batches")
    return batches
