"""Refuse the axis of pipeline stages where a command is about one stage."""

from __future__ import annotations

from autopar.cli.train.refused import Refused
from autopar.ir.mesh import PIPELINE, Mesh


def refuse_stages(mesh: Mesh, command: str) -> None:
    """Raise ``Refused`` if a mesh has an axis ``pp``."""
    if PIPELINE in mesh.names:
        others = ",".join(f"{axis}={size}" for axis, size in mesh.axes if axis != PIPELINE) or "dp=1"
        raise Refused(
            f"--mesh {','.join(f'{axis}={size}' for axis, size in mesh.axes)} has an axis pp, and {command} is about "
            f"the ranks of one stage: use --mesh {others}; autopar train and autopar schedule are about stages"
        )
