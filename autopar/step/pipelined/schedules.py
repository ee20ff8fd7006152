"""Make the schedule of a step: of a policy's name, or the user's own."""

from __future__ import annotations

from functools import lru_cache

from autopar.errors import ScheduleError, shown
from autopar.ir.mesh import PIPELINE, Mesh
from autopar.pipeline import POLICIES, PipelineSchedule, build
from autopar.pipeline.lowering import with_frees
from autopar.pipeline.task import UNSHARD
from autopar.plan.plan import SEARCH
from autopar.search.devices.stages import Pipelined
from autopar.step.options import StepOptions


def schedule_of(options: StepOptions, mesh: Mesh) -> PipelineSchedule:
    """Return the schedule of a step on a mesh with ``pp``, with messages and releases, verified.

    Where the number of micro-batches is open, it is that of one, for a policy has a schedule of each number.

    Raises:
        ValueError: the step has no schedule.
        TypeError: it is neither a name nor a ``PipelineSchedule``.
        ScheduleError: there is no such policy, it has no schedule of these sizes, or the schedule does not fit.
    """
    if PIPELINE not in mesh.sizes:
        named = next(name for name in ("schedule", "chunks", "stages") if getattr(options, name) is not None)
        raise ValueError(
            f"{named}= is about the stages of a pipeline, and the mesh ({mesh}) has no axis pp, along which they lie: "
            f"use a mesh such as Mesh(pp=2, {', '.join(f'{axis}={size}' for axis, size in mesh.axes) or 'tp=2'}), or "
            f"leave {named}= out"
        )
    ranks, given, is_open = mesh.sizes[PIPELINE], options.schedule, options.microbatches == SEARCH
    if given is None:
        raise ValueError(
            f"the mesh ({mesh}) has {ranks} stages along pp, and train_step has no schedule: give "
            f'schedule="1f1b", another of {", ".join(POLICIES)}, or an autopar.pipeline.PipelineSchedule'
        )
    if isinstance(given, Pipelined):
        given = given.schedule
    if isinstance(given, str) and given.endswith((".json", ".csv")):
        raise ScheduleError(
            f"schedule={given!r} is a file: load it, schedule=autopar.pipeline.PipelineSchedule.load({given!r})"
        )
    if isinstance(given, str):
        count = 1 if is_open else options.count
        if options.chunks is not None and not isinstance(options.chunks, int):
            return with_frees(build(given, ranks, count, options.chunks))  # it is refused
        return _of_policy(given, ranks, count, options.chunks)
    if not isinstance(given, PipelineSchedule):
        raise TypeError(
            f"schedule={shown(given)} is neither the name of a policy ({', '.join(POLICIES)}), nor a PipelineSchedule, "
            f"nor a pipeline of best_pipeline"
        )
    if options.chunks is not None:
        raise ValueError(f"chunks={options.chunks} goes with the name of a policy; this schedule has {given.chunks}")
    if given.ranks != ranks:
        raise ScheduleError(f"the schedule has {given.ranks} ranks, and the mesh ({mesh}) has pp={ranks}")
    if is_open:
        raise ScheduleError(
            f'microbatches="search" compares schedules of several numbers of micro-batches, and this one has '
            f'{given.batches}: give microbatches={given.batches}, or the name of a policy, as in schedule="1f1b"'
        )
    if given.batches != options.count:
        raise ScheduleError(
            f"the schedule has {given.batches} micro-batches, and microbatches={options.count}: give "
            f"microbatches={given.batches}"
        )
    return with_frees(given.checked())


def gathers_apart(schedule: PipelineSchedule) -> bool:
    """Return whether slots of the schedule gather the parameters of stages, for several passes at once."""
    return any(name == UNSHARD for row in schedule.slots for slot in row for name, _ in slot.parameters)


@lru_cache(maxsize=16, typed=True)
def _of_policy(name: str, ranks: int, batches: int, chunks: int | None) -> PipelineSchedule:
    """Make a policy's schedule once: a step asks for it before it captures, and again with each new call."""
    return with_frees(build(name, ranks, batches, chunks))
