"""On each rank of real processes: where the watch sees a rank that compares its calls with those of the others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import distributed

from autopar import Mesh
from autopar.runtime.current_op import CurrentOp, where
from autopar.runtime.processes.agreement import Agreement


class Seen:
    """The work of a collective, and where this process is while it waits for it."""

    def __init__(self, work: Any) -> None:
        self.work, self.places = work, list[CurrentOp]()

    def wait(self) -> None:
        self.places.append(where())
        self.work.wait()


def place_of_a_comparison() -> CurrentOp:
    control = distributed.group.WORLD
    assert control is not None
    agreement = Agreement(control, Mesh(dp=control.size()))
    agreement.begin("a call")
    assert agreement._pending is not None
    seen = Seen(agreement._pending.work)
    agreement._pending = replace(agreement._pending, work=seen)  # type: ignore[arg-type]
    agreement.finish()
    return seen.places[0]
