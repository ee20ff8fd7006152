"""List the passes in the order in which they run.

Each takes a program of one level and gives one of the same or the next level. ``PIPELINE`` is the whole order. Capture
comes before it, and ``localize`` (one program per class of ranks) after it.
"""

from collections.abc import Mapping
from typing import Any

import torch

from autopar.ir.layout import DistAttr
from autopar.ir.mesh import Mesh
from autopar.passes.amp import Amp
from autopar.passes.defer import Defer
from autopar.passes.expand import Expand
from autopar.passes.fold import Fold
from autopar.passes.follow import Follow
from autopar.passes.lift import Lift
from autopar.passes.manager import Pass, run_passes
from autopar.passes.place import Place
from autopar.passes.recompute import Recompute
from autopar.passes.reshard import Reshard
from autopar.passes.share import Share
from autopar.passes.widen import Widen

PIPELINE: tuple[type[Pass], ...] = (Expand, Place, Follow, Lift, Defer, Reshard, Fold, Share)


def pipeline(mesh: Mesh | None = None, constraints: Mapping[str, DistAttr] | None = None, *, strict: bool = False,
             whole: bool = False, device: torch.device | None = None, widen: bool = False) -> list[Pass]:  # fmt: skip
    """Return the passes in order, with the options of ``expand`` and ``place``.

    ``widen``: reduce partial sums of low precision in float32.
    """
    place_options = (mesh, constraints or {}, strict, whole)
    options: dict[type[Pass], tuple[Any, ...]] = {Place: place_options, Expand: (*place_options, device)}
    order = [other for step in PIPELINE for other in ((Widen, step) if widen and step is Reshard else (step,))]
    return [step(*options.get(step, ())) for step in order]


__all__ = [
    "PIPELINE",
    "Amp",
    "Defer",
    "Expand",
    "Fold",
    "Follow",
    "Lift",
    "Pass",
    "Place",
    "Recompute",
    "Reshard",
    "Share",
    "Widen",
    "pipeline",
    "run_passes",
]
