"""List the passes in the order in which they run.

``PIPELINE`` is the whole order, and all that runs passes walks it. Capture comes before it, and ``localize`` (one
program per class of ranks) after it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from autopar.costs.machine import Machine, machine_from
from autopar.costs.prices import crosses_hosts
from autopar.ir.hosts import Hosts
from autopar.ir.layout import DistAttr
from autopar.ir.mesh import Mesh
from autopar.passes.amp import Amp
from autopar.passes.defer import Defer
from autopar.passes.expand import Expand
from autopar.passes.fold import Fold
from autopar.passes.follow import Follow
from autopar.passes.levels import Levels
from autopar.passes.lift import Lift
from autopar.passes.manager import Pass, run_passes
from autopar.passes.narrow import Narrow
from autopar.passes.place import Place
from autopar.passes.reassociate import Reassociate
from autopar.passes.recompute import Recompute
from autopar.passes.reshard import Reshard
from autopar.passes.search import Search
from autopar.passes.share import Share
from autopar.passes.split_backward import SplitBackward
from autopar.passes.spread import OnStages, Spread
from autopar.passes.widen import Widen
from autopar.search.search import Find


class Row(NamedTuple):
    """One pass of the order.

    Attributes:
        make: the pass.
        reads: field of the pass → the option of ``pipeline`` that it is.
        when: the option with which it runs; without one it always runs.
        unless: the option with which it does not run.
    """

    make: type[Pass]
    reads: Mapping[str, str] = {}
    when: str = ""
    unless: str = ""

    @property
    def name(self) -> str:
        return self.make.name


_WHERE = {"mesh": "mesh", "constraints": "constraints"}
_PRICED = {"machine": "machine"}
_PLACING = {**_WHERE, **_PRICED, "strict": "strict", "whole": "whole"}

PIPELINE: tuple[Row, ...] = (
    Row(Amp, {"amp": "amp", "keep": "keep", "device": "device"}, when="amp"),
    Row(Recompute, {"what": "recompute", **_WHERE}, when="recompute"),
    Row(Expand, {**_PLACING, "device": "device"}, unless="search"),
    Row(Reassociate, {"constraints": "constraints", "strict": "strict"}, when="search"),
    Row(
        Search,
        {**_PLACING, "time_limit": "time_limit", "memory": "memory", "find": "search", "device": "device"},
        when="search",
    ),
    Row(Place, _PLACING, unless="search"),
    Row(Follow, _PRICED, unless="search"),
    Row(Narrow, unless="search"),
    Row(Lift, unless="search"),
    Row(Defer, unless="search"),
    Row(Spread, {"on": "stages"}, when="stages"),
    Row(Widen, when="widen"),
    Row(Reshard, _PRICED),
    Row(Fold, _PRICED),
    Row(Share),
    Row(SplitBackward, when="split_backward"),
    Row(Levels, {"machine": "levels", "hosts": "hosts"}, when="levels"),
)


def pipeline(
    mesh: Mesh | None = None,
    constraints: Mapping[str, DistAttr] | None = None,
    *,
    strict: bool = False,
    whole: bool = False,
    device: torch.device | None = None,
    widen: bool = False,
    amp: str | None = None,
    keep: Mapping[str, str] | None = None,
    recompute: str | Sequence[str] | None = None,
    search: bool | Find = False,
    machine: Machine | str | Path | None = None,
    time_limit: float = 60.0,
    memory: float | None = None,
    split_backward: bool = False,
    stages: OnStages | None = None,
    levels: Machine | None = None,
    hosts: Hosts | None = None,
    last: type[Pass] = Levels,
) -> list[Pass]:
    """Return the passes of ``PIPELINE`` that run with these options, in order.

    Args:
        mesh, constraints, strict, whole, device: as for ``place`` and ``expand``.
        widen: whether partial sums of low precision are reduced in float32.
        amp, keep: as for ``amp``.
        recompute: what the backward computes again, as for ``recompute``.
        search: whether the cheapest layouts are searched, instead of those that follow from the constraints; or the
            function that does it in the place of ``autopar.search.search``.
        machine: the machine whose nanoseconds decide, its name, or a file of one; without one the fewest bytes do.
        time_limit, memory: as for ``search``.
        split_backward: whether gradients of weights are computed apart, as on the stages of a pipeline.
        stages: where the values are, of a program of all stages of a pipeline; ``mesh`` is then that of one stage.
        levels: the machine on whose hosts collectives may go level by level, by default ``machine``; without one they
            run at once.
        hosts: the hosts of the job, for the report.
        last: where to end. A training step makes ``micro`` of a program between ``amp`` and the passes behind it.
    """
    options = {
        "mesh": mesh, "constraints": constraints or {}, "strict": strict, "whole": whole, "device": device,
        "widen": widen, "amp": amp, "keep": keep or {}, "recompute": recompute, "search": search,
        "machine": None if machine is None else machine_from(machine),
        "time_limit": time_limit, "memory": memory, "split_backward": split_backward,
        "stages": stages, "levels": levels, "hosts": hosts,
    }  # fmt: skip
    if levels is None and machine is not None and mesh is not None and crosses_hosts(mesh, machine_from(machine)):
        options["levels"] = machine_from(machine)
    end = [row.make for row in PIPELINE].index(last) + 1
    return [
        row.make(**{own: options[option] for own, option in row.reads.items()})
        for row in PIPELINE[:end]
        if (not row.when or options[row.when] not in (None, False))
        and (not row.unless or options[row.unless] in (None, False))
    ]


__all__ = [
    "PIPELINE",
    "Amp",
    "Defer",
    "Expand",
    "Fold",
    "Follow",
    "Levels",
    "Lift",
    "Narrow",
    "OnStages",
    "Pass",
    "Place",
    "Reassociate",
    "Recompute",
    "Reshard",
    "Search",
    "Share",
    "SplitBackward",
    "Spread",
    "Widen",
    "pipeline",
    "run_passes",
]
