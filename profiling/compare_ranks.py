"""Measure the systems of ``compare`` in the processes of one group: plainly, and on the emulated wire."""

from __future__ import annotations

import contextlib
import gc
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from bench_step import barrier, in_rounds, slowest
from compare_systems import SYSTEMS, Setting, System, alone
from process_state import restart_high_water, status
from ranks import together
from step_rivals import Step
from torch import distributed

import autopar
from autopar.costs.machine import Machine
from autopar.examples.peak import live_bytes, peak_bytes
from autopar.runtime.wire.clock import now
from autopar.runtime.wire.prices import CHARGES, machine_of, seconds
from autopar.runtime.wire.report import MOST_LATE, Record
from autopar.runtime.wire.wire_groups import WIRE_GROUPS

SAME = 1e-4  # losses of ``CHECKED`` steps, relatively
CHECKED = 3
RECEIVED = ("recv", "recv_anysource")  # counted where they are sent
IN_BYTES = machine_of(0.0, 1.0)  # the seconds of a transfer on it are the bytes that a link carries


@dataclass
class Plain:
    """What a system takes without a wire.

    Attributes:
        plan, rise: seconds and bytes from the model to the first step, on the worst rank.
        seconds: of a step on the slowest rank, in each round.
        held, peak: bytes between steps and at most in a step, on the worst rank.
        apart: how far its losses are from those of the plain model, relatively.
    """

    plan: float
    rise: int
    apart: float
    seconds: list[float]
    held: int = 0
    peak: int = 0


@dataclass
class Wired:
    """What a system takes on the wire.

    Attributes:
        seconds: of a step on the slowest rank, in each round.
        late: the share of each of these steps in which this machine was slower than the emulated one.
        free: the seconds of a step whose transfers take no time.
        real: the seconds of each of these in which this machine computed or sent data longer than that.
        moved: bytes that leave a rank in a step, the mean over the ranks.
    """

    seconds: list[float] = field(default_factory=list)
    late: list[float] = field(default_factory=list)
    free: list[float] = field(default_factory=list)
    real: list[float] = field(default_factory=list)
    moved: float = 0.0

    @property
    def exposed(self) -> tuple[float, float]:
        """Seconds of communication that computing does not hide, at least and at most.

        Data takes some time in ``free`` too, which may be hidden or not.
        """
        low = statistics.median(a - b for a, b in zip(self.seconds, self.free, strict=True))
        return max(0.0, low), max(0.0, low + statistics.median(self.real))

    @property
    def is_void(self) -> bool:
        return statistics.median(self.late) > MOST_LATE


def checked(system: System, step: Step, right: Sequence[float]) -> float:
    """How far the losses of the first steps are from the right ones; it refuses a system that is too far."""
    found = [system.loss(step) for _ in right]
    apart = max(abs(a - b) / abs(b) for a, b in zip(found, right, strict=True))
    if not apart <= SAME:
        raise AssertionError(f"{system.name}: losses differ by {apart:.1e}, relatively: {found}, and not {list(right)}")
    return apart


def chosen(names: Sequence[str]) -> list[System]:
    return [system for system in SYSTEMS if system.name in names]


# -- without a wire ----------------------------------------------------------------------------------------------------


def plainly(names: Sequence[str], rounds: int, steps: int) -> dict[str, Plain]:
    """Build, check and time systems, in rounds."""
    import torch.distributed.fsdp
    import torch.distributed.pipelining
    import torch.distributed.tensor.parallel  # noqa: F401 - not what a plan takes

    right, built, found = alone(CHECKED), dict[str, Step](), dict[str, Plain]()
    for system in chosen(names):
        built[system.name], plan, rise = planned(system)
        found[system.name] = Plain(plan, rise, checked(system, built[system.name], right), [])
    for name, times in in_rounds(built, rounds, steps).items():
        found[name].seconds = times
    for name, row in found.items():
        row.held, row.peak = memory(built, name)
    return found


def planned(system: System) -> tuple[Step, float, int]:
    """The step, the seconds until it is there, and the bytes that the process grows by at most."""
    gc.collect()
    barrier()
    restart_high_water()
    before, begun = status("VmRSS"), time.perf_counter()
    step = system.build(Setting())
    taken = slowest(time.perf_counter() - begun)
    return step, taken, max(together(max(0, status("VmHWM") - before))) * 1024


def memory(steps: dict[str, Step], name: str) -> tuple[int, int]:
    """The bytes that tensors of a system hold between steps, and at most in a step, on the worst rank.

    The system is removed: what it holds is what its end releases. Buckets of DistributedDataParallel are not seen.
    """
    rise = peak_bytes(steps[name])
    before = live_bytes()
    del steps[name]
    held = before - live_bytes()
    return max(together(held)), max(together(held + rise))


# -- on the wire -------------------------------------------------------------------------------------------------------


def on_wire(names: Sequence[str], machine: Machine, rounds: int) -> dict[str, Wired]:
    """Time steps on the wire and with transfers that take no time, in turn."""
    right, built = alone(1), dict[str, Step]()
    with free():
        for system in chosen(names):
            built[system.name] = system.build(Setting(machine))
    with free():  # groups that systems have made
        for system in chosen(names):
            checked(system, built[system.name], right)
    found = {name: Wired() for name in built}
    for _ in range(rounds):
        for name, step in built.items():
            row = found[name]
            taken, row.moved, late = stepped(step)
            row.seconds.append(taken)
            row.late.append(late)
            with free():
                taken, _, late = stepped(step)
            row.free.append(taken)
            row.real.append(late * taken)
    return found


def stepped(step: Step) -> tuple[float, float, float]:
    """Seconds of the slowest rank, bytes that leave a rank, and the share of late seconds."""
    wire: Any = autopar.runtime.wire.emulate.present()
    distributed.barrier()
    wire.reset()
    begun = now()
    step()
    taken, late = now() - begun, wire.report().share_late
    moved = sum(map(bytes_of, wire.records))
    return slowest(taken), statistics.mean(together(moved)), max(together(late))


def bytes_of(record: Record) -> float:
    """The bytes that a rank's link carries for a transfer."""
    if record.name in RECEIVED:
        return 0.0
    return seconds(CHARGES[record.name].form, record.bytes, WIRE_GROUPS[record.group].size(), IN_BYTES)


@contextlib.contextmanager
def free() -> Iterator[None]:
    """Let transfers of all groups take no time."""
    with contextlib.ExitStack() as stack:
        for group in list(WIRE_GROUPS.values()):
            stack.enter_context(mock.patch.object(group, "_machine", lambda _: machine_of(0.0, math.inf)))
        yield
