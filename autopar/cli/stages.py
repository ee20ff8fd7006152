"""Check the options of a pipeline's stages, and refuse an axis of stages where a command is about one stage."""

from __future__ import annotations

from typing import Any, Protocol

from autopar.cli.train.options import SCHEDULE, option
from autopar.cli.train.refused import Refused
from autopar.errors import ScheduleError
from autopar.ir.mesh import PIPELINE, Mesh
from autopar.pipeline.policies import build


class StageOptions(Protocol):
    """The options of a command that runs steps on stages."""

    @property
    def mesh(self) -> str | None: ...

    @property
    def microbatches(self) -> int: ...

    @property
    def schedule(self) -> str | None: ...

    @property
    def chunks(self) -> int | None: ...


def schedule_options(options: StageOptions) -> dict[str, Any]:
    """Return the arguments of ``train_step`` on a mesh with an axis pp."""
    return {"schedule": options.schedule or SCHEDULE, "chunks": options.chunks}


def check_schedule(options: StageOptions, mesh: Mesh) -> None:
    """Raise ``Refused`` if there is a schedule without stages, or one that does not fit."""
    if PIPELINE not in mesh.names:
        for name in ("schedule", "chunks"):
            if (value := getattr(options, name)) is not None:
                raise Refused(
                    f"{option(name)} {value} is for the stages of a pipeline, and --mesh {options.mesh} has no axis "
                    f"pp; use --mesh pp=2,…, or leave {option(name)} out"
                )
        return
    try:
        build(options.schedule or SCHEDULE, mesh.sizes[PIPELINE], options.microbatches, options.chunks)
    except ScheduleError as error:
        raise Refused(f"--schedule {options.schedule or SCHEDULE}: {error}") from None


def refuse_stages(mesh: Mesh, command: str) -> None:
    """Raise ``Refused`` if a mesh has an axis ``pp``."""
    if PIPELINE in mesh.names:
        others = ",".join(f"{axis}={size}" for axis, size in mesh.axes if axis != PIPELINE) or "dp=1"
        raise Refused(
            f"--mesh {','.join(f'{axis}={size}' for axis, size in mesh.axes)} has an axis pp, and {command} is about "
            f"the ranks of one stage: use --mesh {others}; autopar train, verify and schedule are about stages"
        )
