"""Switch the emulated wire on and off: ``autopar.emulate``."""

from __future__ import annotations

import contextlib
import difflib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import distributed

from autopar.costs.durations import figures_from
from autopar.costs.machine import Link, Machine
from autopar.costs.profile import Profile
from autopar.errors import shown
from autopar.runtime.wire import clock
from autopar.runtime.wire.link_table import SIZE, LinkTable
from autopar.runtime.wire.pacing import Pacer
from autopar.runtime.wire.process_group import WireGroup
from autopar.runtime.wire.report import Counts, Record, WireReport
from autopar.runtime.wire.shared_file import share
from autopar.runtime.wire.transfer import Medium
from autopar.runtime.wire.wire_groups import BACKEND, EMULATED
from autopar.torch_private import gloo_group

LINKS = ("rank", "axis")
Figures = Machine | Profile
Pace = Mapping[str, float] | Figures | str | Path


class Wire:
    """An emulated wire, from ``emulate`` to ``close``.

    Attributes:
        settings: latency in seconds, bandwidth in bytes a second, and what a link is.
        figures: the machine or the profile that paces programs; ``None`` if they are not paced.
        pacer: the compute clock of this process.
    """

    def __init__(self, settings: dict[str, Any], durations: Mapping[str, float], figures: Figures | None) -> None:
        self.settings, self.figures = settings, figures
        self._counts = Counts()
        self.pacer = Pacer(durations, self._counts)
        self._medium: Medium | None = None  # of the present default group

    def report(self) -> WireReport:
        """Return what this process has sent, and how late it was, since the start or the last ``reset``."""
        return self._counts.report()

    def reset(self) -> None:
        """Begin a new span to report, as after a warm-up."""
        self._counts.reset()

    @property
    def records(self) -> list[Record]:
        """The newest finished transfers of this process since the last ``reset``, in the order of their begin."""
        return sorted(self._counts.records, key=lambda record: record.begin)

    def close(self) -> None:
        """Switch the wire off: new process groups are plain. Existing groups stay on the wire."""
        if EMULATED and EMULATED[0] is self:
            EMULATED.clear()
            distributed.Backend.default_device_backend_map["cpu"] = "gloo"

    def make_group(self, options: Any, *_: Any) -> WireGroup:
        """Make a process group of ``BACKEND``, with torch's options of a backend.

        Raises:
            RuntimeError: the ranks have different wires, or are on several hosts.
        """
        ranks = list(options.global_ranks_in_group)
        if not ranks:
            self._medium = self._join(options)
        if self._medium is None:
            raise RuntimeError(
                f"the default process group is not on the emulated wire; make it with the backend {BACKEND!r}, or "
                f"with none"
            )
        inner, members = gloo_group(options), ranks or range(options.group_size)
        return WireGroup(inner, members, options.group_id, self.settings, options.timeout, self._medium)

    def _join(self, options: Any) -> Medium:
        """Share a table with the ranks of a new default group."""
        timeout = options.timeout.total_seconds()
        shared_file = share(options.store, options.group_rank, SIZE, timeout, self.settings)
        table = LinkTable(shared_file.buffer, shared_file.locked, clock.now)
        return Medium(table, shared_file, self._counts)


def present() -> Wire | None:
    """Return the wire that is emulated, if there is one."""
    return EMULATED[0] if EMULATED else None


def emulate(
    latency: float, bandwidth: float, links: str = "rank", pace: Pace | None = None, *,
    ranks_per_host: int | None = None, between: Link | tuple[float, float] | None = None,
) -> Wire:  # fmt: skip
    """Emulate a wire between the processes of this host: transfers end no earlier than on that wire.

    Call it on all ranks, before process groups exist. Groups of the CPU that are made afterwards without a backend are
    on the wire: those of autopar, of DistributedDataParallel, FSDP2 and DTensor alike. Data really travels, by gloo. A
    transfer begins when all its members have issued it and their links are free, and takes at least its price
    (``costs.prices``), as plans and schedules assume. A message takes the way out of its sender and the way into its
    receiver; a collective takes both ways of all its members. Numbers do not change. Control messages of autopar
    are not charged.

    Args:
        latency: the seconds of an empty message.
        bandwidth: the bytes a second of a link; may be ``math.inf``.
        links: ``"rank"``: all transfers of a rank share one link. ``"axis"``: each process group has links of its own.
        pace: a profile or its path, or a machine or its name or path: the ops of autopar's programs then take at least
            its durations. Or name → seconds of segments of computing, for ``Wire.pacer``.
        ranks_per_host: emulates hosts of so many ranks, which follow each other. They count as the hosts of the job.
        between: latency and bandwidth of a rank's link to other hosts. A transfer whose ranks are on several hosts
            takes its price, and occupies these links alone.

    Returns:
        The wire, which reports what it has carried and whether a measurement is void.

    Raises:
        ValueError: a latency or a duration below 0, a bandwidth that is not above 0, or unknown links; or one of
            ``ranks_per_host`` and ``between`` without the other.
        RuntimeError: process groups exist.
    """
    settings = {
        "latency": _number("latency", latency, "seconds", latency_is_valid),
        "bandwidth": _number("bandwidth", bandwidth, "bytes a second", bandwidth_is_valid),
        "links": _links(links),
        **_several_hosts(ranks_per_host, between),
    }
    named = pace if isinstance(pace, Mapping) else {}
    figures = None if pace is None or isinstance(pace, Mapping) else figures_from(pace)
    wire = Wire(settings, named, figures)
    if distributed.is_initialized():
        raise RuntimeError(
            "emulation after groups exist: the process groups that are there would not meet the wire; call "
            "autopar.emulate before init_process_group and before parallelize, or call destroy_process_group first"
        )
    with contextlib.suppress(IndexError):
        EMULATED[0].close()
    EMULATED.append(wire)
    if BACKEND not in distributed.Backend.backend_list:
        distributed.Backend.register_backend(BACKEND, _make_group, extended_api=True, devices=["cpu"])
    distributed.Backend.default_device_backend_map["cpu"] = BACKEND
    return wire


def _make_group(options: Any, *more: Any) -> WireGroup:
    wire = present()
    if wire is None:
        raise RuntimeError(f"the backend {BACKEND!r} needs a wire; call autopar.emulate first")
    return wire.make_group(options, *more)


def _several_hosts(ranks_per_host: Any, between: Any) -> dict[str, Any]:
    """Return the settings of emulated hosts; none for one host."""
    if ranks_per_host is None and between is None:
        return {}
    if isinstance(ranks_per_host, bool) or not isinstance(ranks_per_host, int) or ranks_per_host < 1:
        raise ValueError(
            f"ranks_per_host is the number of ranks of an emulated host, ≥ 1, not {shown(ranks_per_host)}; with it, "
            f"between=(latency, bandwidth) are the links between hosts"
        )
    pair = (between.latency, between.bandwidth) if isinstance(between, Link) else between
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise ValueError(
            f"between is (latency, bandwidth) of a rank's link to other hosts, not {shown(between)}; with it, "
            f"ranks_per_host says which ranks share a host"
        )
    slow = [_number("latency between hosts", pair[0], "seconds", latency_is_valid),
            _number("bandwidth between hosts", pair[1], "bytes a second", bandwidth_is_valid)]  # fmt: skip
    return {"ranks_per_host": ranks_per_host, "between": slow}


def latency_is_valid(value: float) -> bool:
    return 0 <= value < math.inf


def bandwidth_is_valid(value: float) -> bool:
    return value > 0


def _number(name: str, value: Any, unit: str, is_valid: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not is_valid(value):
        least = "≥ 0" if name.startswith("latency") else "> 0"
        raise ValueError(f"{name} is a number of {unit}, {least}, not {shown(value)}")
    return float(value)


def _links(links: Any) -> str:
    if links not in LINKS:
        near = difflib.get_close_matches(str(links), LINKS, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"links is one of {', '.join(map(repr, LINKS))}, not {shown(links)}{hint}")
    return links
