"""Describe machines by the figures from which prices are computed: from data sheets (``machines.json``) or measured.

``autopar calibrate --output FILE`` measures a machine. A device that is in no file gets the ``generic``
machine, whose note says so; no device gets the figures of another one. Times are in seconds, sizes in bytes, rates in
bytes a second.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from autopar.costs.json_fields import Malformed, array, fields_of, number, one_of, text, whole
from autopar.errors import shown
from autopar.ir.record import DTYPE_NAMES, DTYPES

VERSION = 1  # of the file format
HOST = "host"  # the innermost of what shares links

# the range of figures in files
SLOWEST, LONGEST_LATENCY = 1e3, 100.0  # bytes or operations a second; seconds
MOST_INTERFERENCE = 100.0

# operations for each byte that memory delivers, for a machine without peaks: round figures of GPUs since 2017
NARROW_OPERATIONS = 160.0  # in float dtypes of one or two bytes, with matrix units
WIDE_OPERATIONS = 16.0  # in all others


@dataclass(frozen=True)
class Link:
    """A link: a message of n bytes takes ``latency + n / bandwidth``; in one direction, for one rank."""

    latency: float
    bandwidth: float


@dataclass(frozen=True)
class Level:
    """Sets of nodes that are closer to each other than to others, such as racks.

    Attributes:
        name: what one set is called, in the singular: ``rack``.
        ranks: the ranks of one set: ``0 … ranks-1`` are in the first, and so on.
        link: a rank's share of the link between two sets.
    """

    name: str
    ranks: int
    link: Link


@dataclass(frozen=True)
class Measured:
    """A fit to measured times of one operation, ``t(n) = max(floor, latency + n/B(n))``.

    ``B(n) = bandwidth · n / (n + half)``.

    At ``n = half`` half the bandwidth is reached. ``n/B(n)`` is ``(n + half) / bandwidth``, so ``t`` never falls. Times
    determine only ``latency + half/bandwidth``; of this, ``latency`` is the part up to the floor.

    Attributes:
        operation: a transfer's name; ``recv`` uses that of ``send``, ``redistribute`` that of ``all_to_all``.
        ranks: the number of ranks in the measurement, on one node; times for other numbers are scaled from it.
        floor: the least time of any message.
    """

    operation: str
    ranks: int
    floor: float
    latency: float
    bandwidth: float
    half: float

    def seconds(self, bytes: Any) -> Any:
        """Return ``t(n)`` for a number or an array of bytes."""
        return np.maximum(self.floor, self.latency + (bytes + self.half) / self.bandwidth)


MEASURABLE = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")


@dataclass(frozen=True)
class Machine:
    """The figures of one kind of node, and of the network between nodes.

    Attributes:
        name: the device as ``torch.cuda.get_device_name`` prints it, ``cpu`` or ``generic``.
        kind: the device type of torch; ``any`` for the generic machine.
        ranks_per_node: ranks ``0 … ranks_per_node-1`` share the first node, and so on.
        inside: the link between ranks of one node.
        outside: a rank's share of the link between nodes, when all ranks of its node send at once.
        levels: further levels of links, from inner to outer; then ``outside`` joins the nodes of one rack.
        memory: the overhead of one local op, and the rate at which it reads and writes.
        peak: (dtype, floating point operations a second) pairs; dense, and without TF32 for f32.
        capacity: the bytes of memory of one rank's device; ``None`` if it is unknown.
        measured: fits that replace the formulas within a node.
        aliases: other names of the same device.
        source: where the figures are from.
        note: a remark that is printed with prices.
        interference: how much slower an op computes while a collective runs: 0.5 means 1.5 times as long. By default
            it is 0, no slower.
        start: the seconds of the host for each start of a collective, where it computes itself: packing, and the
            threads that it wakes, which share its cores. By default it is 0.
    """

    name: str
    kind: str
    ranks_per_node: int
    inside: Link
    outside: Link
    memory: Link
    peak: tuple[tuple[str, float], ...] = ()
    measured: tuple[Measured, ...] = ()
    aliases: tuple[str, ...] = ()
    source: str = ""
    note: str = ""
    capacity: float | None = None
    interference: float = 0.0
    start: float = 0.0
    levels: tuple[Level, ...] = ()

    @property
    def borders(self) -> tuple[tuple[str, int], ...]:
        """What shares links, from inner to outer, and the ranks of each: ``("host", 8), ("rack", 64)``."""
        return (HOST, self.ranks_per_node), *((level.name, level.ranks) for level in self.levels)

    def across(self, borders: int) -> Machine:
        """Return the machine as ranks see it that are separated by so many borders: its outside is their slowest link.

        Links are no faster than those inside.
        """
        return _across(self, borders) if borders > 1 else self

    def flops(self, dtype: torch.dtype) -> float:
        """Return the floating point operations a second in a dtype: its peak, or that of the dtype of ``stand_in``.

        Without any peak they are ``memory.bandwidth`` times ``NARROW_OPERATIONS`` or ``WIDE_OPERATIONS``. One complex
        operation counts as four real ones.
        """
        peaks = dict(self.peak)
        if DTYPE_NAMES.get(dtype) in peaks:
            return peaks[DTYPE_NAMES[dtype]]
        if dtype.is_complex:
            return self.flops(dtype.to_real()) / 4
        if peaks:
            return peaks[self.stand_in(dtype)]
        narrow = dtype.is_floating_point and dtype.itemsize <= 2
        return self.memory.bandwidth * (NARROW_OPERATIONS if narrow else WIDE_OPERATIONS)

    def stand_in(self, dtype: torch.dtype) -> str:
        """Return the name of the dtype whose peak stands for that of ``dtype``; empty if there is no peak.

        It is the dtype itself if it is listed. For a float dtype it is a listed float dtype of the same size, or else
        of the next larger size; of several the slowest. For any other, and for one that is wider than all, it is the
        slowest that is listed. For a complex dtype it is that of its parts.
        """
        peaks = dict(self.peak)
        if not peaks or DTYPE_NAMES.get(dtype) in peaks:
            return DTYPE_NAMES[dtype] if peaks else ""
        if dtype.is_complex:
            return self.stand_in(dtype.to_real())
        sizes = {name: DTYPES[name].itemsize for name in peaks if DTYPES[name].is_floating_point}
        fitting = [(size, peaks[name], name) for name, size in sizes.items() if size >= dtype.itemsize]
        if dtype.is_floating_point and fitting:
            return min(fitting)[2]
        return min(peaks, key=peaks.__getitem__)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Caches of prices look a machine up often."""
        return hash(
            (self.name, self.ranks_per_node, self.inside, self.outside, self.memory, self.measured, self.levels)
        )

    def fit(self, operation: str) -> Measured | None:
        """Return the fit of an operation, or ``None``."""
        return next((fit for fit in self.measured if fit.operation == operation), None)

    def save(self, path: str | Path) -> None:
        """Write a machine description that ``load`` reads."""
        Path(path).write_text(json.dumps(self.description(), indent=2, allow_nan=False) + "\n")

    def description(self) -> dict[str, Any]:
        """Return the machine as JSON, which ``described`` reads."""
        fields = asdict(self)
        fields |= {"peak": dict(self.peak), "measured": [*fields["measured"]], "aliases": [*self.aliases]}
        if self.capacity is None:
            del fields["capacity"]
        for name in ("interference", "start", "levels"):
            if not fields[name]:
                del fields[name]
        if self.levels:
            fields["levels"] = [
                {"name": level.name, "ranks": level.ranks, **asdict(level.link)} for level in self.levels
            ]
        return {"version": VERSION, "machines": [fields]}

    @staticmethod
    def load(path: str | Path) -> Machine:
        """Return the machine that a file describes.

        Raises:
            ValueError: the file has another version or is malformed; the error names the file and the field.
            OSError: the file cannot be read.
        """
        machines = load(path)
        if len(machines) != 1:
            raise ValueError(f"{path}: machines: the file must have one machine, but has {len(machines)}")
        return machines[0]


@lru_cache(maxsize=256)
def _across(machine: Machine, borders: int) -> Machine:
    links = (machine.outside, *(level.link for level in machine.levels[: borders - 1]))
    slowest = Link(max(link.latency for link in links), min(link.bandwidth for link in links))
    return replace(machine, outside=slowest, levels=())


# -- finding one -------------------------------------------------------------------------------------------------------


@cache
def known() -> Mapping[str, Machine]:
    """Return the machines of ``machines.json``, by name and alias."""
    return _by_name(load(Path(__file__).with_name("machines.json")))


def machine(name: str) -> Machine:
    """Return the machine of exactly this name or alias.

    Raises:
        ValueError: there is no such machine.
    """
    if name in known():
        return known()[name]
    near = _near(str(name))
    hint = (
        f"; did you mean {near}?"
        if near
        else f"; there are {', '.join(known_machine.name for known_machine in dict.fromkeys(known().values()))}; "
        f"autopar calibrate measures this one"
    )
    raise ValueError(f"there is no machine {shown(name)}{hint}")


def _near(text: str) -> str:
    """Return the names of machines that contain a text, one of each machine, or else one that is like it."""
    near = {one: name for name, one in reversed([*known().items()]) if text and text.casefold() in name.casefold()}
    names = [repr(name) for name in reversed(near.values())] or [
        *map(repr, difflib.get_close_matches(text, known(), n=1))
    ]
    return " or ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


def machine_from(given: Machine | str | Path) -> Machine:
    """Return a machine that is given by itself, by its name or alias, or by the path of its file.

    A text is a path if it is no name, and it ends with ``.json`` or there is such a file.

    Raises:
        ValueError: there is no machine of that name, or the file is malformed.
        OSError: the file cannot be read.
        TypeError: it is neither a machine nor a text nor a path.
    """
    if isinstance(given, Machine):
        return _sound(given)
    if not isinstance(given, (str, Path)):
        raise TypeError(f"{shown(given)} is no machine; give a Machine, a name, or the path of a machine file")
    if isinstance(given, str) and (given in known() or not (given.endswith(".json") or Path(given).is_file())):
        return machine(given)
    return Machine.load(given)


@lru_cache(maxsize=64)
def _sound(given: Machine) -> Machine:
    """Return a machine whose figures are those that a file may have; ``ValueError`` names the figure that is not."""
    described(given.description(), f"the machine {given.name!r}")
    return given


def machine_of(device: torch.device | str, also: Iterable[Machine] = ()) -> Machine:
    """Return the machine of a device: one of ``also`` (measured ones), or a known one.

    Otherwise it is the generic one, with a note.

    ``device`` is a device of torch, or the name of a device, which need not be present. There is no error for unknown
    devices.
    """
    names = {**known(), **_by_name(also)}
    name = device if isinstance(device, str) and device in names else _name_of(device)
    if name in names:
        return names[name]
    note = (
        f"unknown device {name!r}: generic figures, which rank transfers but do not time them; measure it with "
        f"autopar calibrate"
    )
    return replace(names["generic"], note=note)


def _name_of(device: torch.device | str) -> str:
    """Return a device's own name; for a device that is not present, the name that the user gave."""
    try:
        parsed = torch.device(device)
    except (RuntimeError, TypeError):
        return str(device)
    if isinstance(device, str) and ":" in device and device.rpartition(":")[2] != str(parsed.index):
        return device  # torch wraps this index around
    if parsed.type == "cuda" and 0 <= (parsed.index or 0) < torch.cuda.device_count():
        return torch.cuda.get_device_name(parsed)
    return parsed.type if parsed.type == "cpu" else str(parsed)


def _by_name(machines: Iterable[Machine]) -> dict[str, Machine]:
    return {name: machine for machine in machines for name in (machine.name, *machine.aliases)}


# -- reading files -----------------------------------------------------------------------------------------------------


def load(path: str | Path) -> list[Machine]:
    """Return all machines of a file; ``ValueError`` and ``OSError`` as in ``Machine.load``."""
    try:
        content = json.loads(Path(path).read_text())
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no machine file {path}; autopar calibrate writes one") from None
    except (ValueError, RecursionError) as error:  # of characters, nesting, or numbers with thousands of digits
        raise ValueError(f"{path}: the file is not JSON: {error}") from None
    return described(content, path)


def described(content: Any, path: str | Path) -> list[Machine]:
    """Return the machines of a description in JSON; errors begin with ``path``. ``ValueError`` as in ``load``."""
    if not isinstance(content, dict) or "version" not in content:
        raise ValueError(f"{path}: version: missing; this is no machine description")
    if content["version"] != VERSION:
        raise ValueError(
            f"{path}: version: {shown(content['version'])} is not known; this autopar reads version {VERSION}"
        )
    try:
        rows = fields_of(content, "", version=whole(1), machines=array(_machine))
        names: dict[str, int] = {}
        for k, machine in enumerate(rows["machines"]):
            for name in (machine.name, *machine.aliases):
                if names.setdefault(name, k) != k or (machine.name, *machine.aliases).count(name) > 1:
                    raise Malformed(f"machines[{k}]", f"the name {name!r} is given twice")
    except Malformed as error:
        raise ValueError(f"{path}: {error}") from None
    return rows["machines"]


def _link(value: Any, at: str) -> Link:
    return Link(**fields_of(value, at, latency=number(False, most=LONGEST_LATENCY), bandwidth=number(True, SLOWEST)))


def _measured(value: Any, at: str) -> Measured:
    wait = number(False, most=LONGEST_LATENCY)
    return Measured(**fields_of(value, at, operation=one_of(MEASURABLE), ranks=whole(2), floor=wait, latency=wait,
                              bandwidth=number(True, SLOWEST), half=number(False)))  # fmt: skip


def _level(value: Any, at: str) -> Level:
    fields = fields_of(value, at, name=text, ranks=whole(2), latency=number(False, most=LONGEST_LATENCY),
                       bandwidth=number(True, SLOWEST))  # fmt: skip
    return Level(fields["name"], fields["ranks"], Link(fields["latency"], fields["bandwidth"]))


def _check_levels(levels: Iterable[Level], ranks_per_node: int, at: str) -> None:
    """Check that each level consists of several sets of the level inside it, and has a name of its own."""
    names, inner = {HOST}, (HOST, ranks_per_node)
    for k, level in enumerate(levels):
        here = f"{at}.levels[{k}]"
        if level.name in names or not level.name.isidentifier():
            why = f"{shown(level.name)} is no name of a further level; levels have different names of one word, as rack"
            raise Malformed(f"{here}.name", f"{why}, and the innermost is {HOST}")
        if level.ranks % inner[1] or level.ranks == inner[1]:
            why = f"a {level.name} of {level.ranks} ranks does not consist of several {inner[0]}s of {inner[1]}"
            raise Malformed(f"{here}.ranks", f"{why}; give a multiple of {inner[1]}")
        names.add(level.name)
        inner = level.name, level.ranks


def _peak(value: Any, at: str) -> tuple[tuple[str, float], ...]:
    rates = fields_of(value, at, dict.fromkeys(DTYPES, 0.0), **dict.fromkeys(DTYPES, number(True, SLOWEST)))
    return tuple((dtype, rate) for dtype, rate in rates.items() if rate)


def _machine(value: Any, at: str) -> Machine:
    fields = fields_of(
        value, at, {"peak": (), "measured": [], "aliases": [], "note": "", "capacity": None, "interference": 0.0,
                    "start": 0.0, "levels": []},
        name=text, kind=one_of(("cpu", "cuda", "any")), ranks_per_node=whole(1), inside=_link, outside=_link,
        memory=_link, peak=_peak, measured=array(_measured), aliases=array(text), source=text, note=text,
        capacity=number(True), interference=number(False, most=MOST_INTERFERENCE),
        start=number(False, most=LONGEST_LATENCY), levels=array(_level),
    )  # fmt: skip
    operations = [fit.operation for fit in fields["measured"]]
    if twice := next((name for name in operations if operations.count(name) > 1), None):
        raise Malformed(f"{at}.measured", f"{twice} is measured twice")
    _check_levels(fields["levels"], fields["ranks_per_node"], at)
    return Machine(**{**fields, **{name: tuple(fields[name]) for name in ("measured", "aliases", "levels")}})
