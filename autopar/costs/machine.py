"""Machines: the figures that prices are made of, from data sheets (``machines.json``) or measured.

``python profiling/run.py calibrate --write FILE`` measures one. A device that is in no file is ``generic`` and says so
in its note; no device is ever taken for another. All times are seconds, all sizes bytes, all rates bytes a second.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from autopar.ir.record import DTYPES

VERSION = 1  # of the files


@dataclass(frozen=True)
class Link:
    """A message of n bytes takes ``latency + n / bandwidth``; one direction, one rank."""

    latency: float
    bandwidth: float


@dataclass(frozen=True)
class Measured:
    """How long one operation took: ``t(n) = max(floor, latency + n/B(n))`` with ``B(n) = bandwidth · n / (n + half)``.

    At ``n = half`` half the bandwidth is reached. ``n/B(n)`` is ``(n + half) / bandwidth``, so ``t`` never falls; times
    determine ``latency + half/bandwidth`` only, and of that ``latency`` is what the floor has.

    Attributes:
        operation: a transfer's name; ``recv`` is read from ``send``, ``redistribute`` from ``all_to_all``.
        ranks: how many took part, on one node; other numbers are scaled from it.
        floor: below this no message gets.
    """

    operation: str
    ranks: int
    floor: float
    latency: float
    bandwidth: float
    half: float

    def seconds(self, bytes: Any) -> Any:
        """``t(n)``, of a number or an array."""
        return np.maximum(self.floor, self.latency + (bytes + self.half) / self.bandwidth)


MEASURABLE = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")


@dataclass(frozen=True)
class Machine:
    """One kind of node, and the network between nodes.

    Attributes:
        name: the device as ``torch.cuda.get_device_name`` prints it, ``cpu`` or ``generic``.
        kind: the device type of torch; ``any`` of the generic machine.
        ranks_per_node: ranks ``0 … ranks_per_node-1`` share the first node, and so on.
        inside: what joins a rank to the others of its node.
        outside: a rank's share of what joins nodes, when all ranks of its node send at once.
        memory: the overhead of one local op, and the rate at which it reads and writes.
        peak: (dtype, floating point operations a second) pairs; dense, and without TF32 for f32.
        measured: fits that take the place of formulas within a node.
        aliases: other names of the same device.
        source: where the figures are from.
        note: what a reader of prices has to know.
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

    def fit(self, operation: str) -> Measured | None:
        """What was measured of an operation."""
        return next((one for one in self.measured if one.operation == operation), None)

    def save(self, path: str | Path) -> None:
        """Writes a machine description that ``load`` reads."""
        one = {**asdict(self), "peak": dict(self.peak)}
        Path(path).write_text(json.dumps({"version": VERSION, "machines": [one]}, indent=2, allow_nan=False) + "\n")

    @staticmethod
    def load(path: str | Path) -> Machine:
        """The machine that a file describes.

        Raises:
            ValueError: another version, or a malformed file; names the file and the field.
            OSError: there is no such file.
        """
        machines = load(path)
        if len(machines) != 1:
            raise ValueError(f"{path}: machines: one machine is wanted, there are {len(machines)}")
        return machines[0]


# -- finding one -------------------------------------------------------------------------------------------------------


@cache
def known() -> Mapping[str, Machine]:
    """The machines of ``machines.json``, by name and alias."""
    return _by_name(load(Path(__file__).with_name("machines.json")))


def machine(name: str) -> Machine:
    """The machine of this very name or alias.

    Raises:
        ValueError: there is none.
    """
    if name in known():
        return known()[name]
    near = difflib.get_close_matches(str(name), known(), n=1)
    hint = f"; did you mean {near[0]!r}?" if near else f"; there are {', '.join(one.name for one in dict.fromkeys(known().values()))}"
    raise ValueError(f"there is no machine {name!r}{hint}")


def machine_of(device: torch.device | str, also: Iterable[Machine] = ()) -> Machine:
    """The machine that a device belongs to: one of ``also`` (measured ones), a known one, else the generic one with a note.

    ``device`` may be a device of torch, or the name of one, present or not. Never an error, and never another device.
    """
    names = {**known(), **_by_name(also)}
    said = device if isinstance(device, str) and device in names else _name_of(device)
    if said in names:
        return names[said]
    note = f"unknown device {said!r}: generic figures, which rank transfers but do not time them; measure it with profiling/run.py calibrate"
    return replace(names["generic"], note=note)


def _name_of(device: torch.device | str) -> str:
    """What a device calls itself; of one that is not here, what it is called here."""
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        return str(device)
    if isinstance(device, str) and ":" in device and device.rpartition(":")[2] != str(found.index):
        return device  # an index that torch wraps around
    if found.type == "cuda" and 0 <= (found.index or 0) < torch.cuda.device_count():
        return torch.cuda.get_device_name(found)
    return found.type if found.type == "cpu" else str(found)


def _by_name(machines: Iterable[Machine]) -> dict[str, Machine]:
    return {name: one for one in machines for name in (one.name, *one.aliases)}


# -- reading files -----------------------------------------------------------------------------------------------------


def load(path: str | Path) -> list[Machine]:
    """All machines of a file; ``ValueError`` as of ``Machine.load``."""
    try:
        content = json.loads(Path(path).read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: this is no JSON: {error}") from None
    if not isinstance(content, dict) or "version" not in content:
        raise ValueError(f"{path}: version: missing; this is no machine description")
    if content["version"] != VERSION:
        raise ValueError(f"{path}: version: {content['version']!r} is not known; this autopar reads version {VERSION}")
    try:
        rows = _fields(content, "", version=_whole(1), machines=_list(_machine))
        names: dict[str, int] = {}
        for k, one in enumerate(rows["machines"]):
            for name in (one.name, *one.aliases):
                if names.setdefault(name, k) != k or (one.name, *one.aliases).count(name) > 1:
                    raise _Malformed(f"machines[{k}]", f"the name {name!r} is given twice")
    except _Malformed as error:
        raise ValueError(f"{path}: {error}") from None
    return rows["machines"]


class _Malformed(Exception):
    """A field that is not as it has to be."""

    def __init__(self, field: str, why: str) -> None:
        super().__init__(f"{field.lstrip('.')}: {why}")


Reader = Callable[[Any, str], Any]  # (value, the field's name) → what it stands for


def _fields(value: Any, at: str, optional: Mapping[str, Any] | None = None, **readers: Reader) -> dict[str, Any]:
    """The fields of an object, each by its reader; every one that has no default has to be there, and no other."""
    if not isinstance(value, dict):
        raise _Malformed(at, f"an object is wanted, not {value!r}")
    for name in value:
        if name not in readers:
            raise _Malformed(f"{at}.{name}", f"there is no such field; there are {', '.join(readers)}")
    found = {}
    for name, read in readers.items():
        if name not in value and name not in (optional or {}):
            raise _Malformed(f"{at}.{name}", "missing")
        found[name] = read(value[name], f"{at}.{name}") if name in value else optional[name]  # type: ignore[index]
    return found


def _text(value: Any, at: str) -> str:
    if not isinstance(value, str):
        raise _Malformed(at, f"a string is wanted, not {value!r}")
    return value


def _one_of(names: Sequence[str]) -> Reader:
    def read(value: Any, at: str) -> str:
        if value not in names:
            raise _Malformed(at, f"{value!r} is none of {', '.join(names)}")
        return value

    return read


def _whole(least: int) -> Reader:
    def read(value: Any, at: str) -> int:
        if type(value) is not int or value < least:
            raise _Malformed(at, f"an integer ≥ {least} is wanted, not {value!r}")
        return value

    return read


def _number(positive: bool) -> Reader:
    def read(value: Any, at: str) -> float:
        sound = type(value) in (int, float) and math.isfinite(value) and (value > 0 if positive else value >= 0)
        if not sound:
            raise _Malformed(at, f"a number {'>' if positive else '≥'} 0 is wanted, not {value!r}")
        return float(value)

    return read


def _list(read: Reader) -> Reader:
    def read_all(value: Any, at: str) -> list[Any]:
        if not isinstance(value, list):
            raise _Malformed(at, f"a list is wanted, not {value!r}")
        return [read(one, f"{at}[{k}]") for k, one in enumerate(value)]

    return read_all


def _link(value: Any, at: str) -> Link:
    return Link(**_fields(value, at, latency=_number(False), bandwidth=_number(True)))


def _measured(value: Any, at: str) -> Measured:
    return Measured(**_fields(value, at, operation=_one_of(MEASURABLE), ranks=_whole(2), floor=_number(False), latency=_number(False),
                              bandwidth=_number(True), half=_number(False)))  # fmt: skip


def _peak(value: Any, at: str) -> tuple[tuple[str, float], ...]:
    given = _fields(value, at, dict.fromkeys(DTYPES, 0.0), **dict.fromkeys(DTYPES, _number(True)))
    return tuple((dtype, rate) for dtype, rate in given.items() if rate)


def _machine(value: Any, at: str) -> Machine:
    fields = _fields(
        value, at, {"peak": (), "measured": [], "aliases": [], "note": ""},
        name=_text, kind=_one_of(("cpu", "cuda", "any")), ranks_per_node=_whole(1), inside=_link, outside=_link, memory=_link,
        peak=_peak, measured=_list(_measured), aliases=_list(_text), source=_text, note=_text,
    )  # fmt: skip
    operations = [one.operation for one in fields["measured"]]
    if twice := next((name for name in operations if operations.count(name) > 1), None):
        raise _Malformed(f"{at}.measured", f"{twice} is measured twice")
    return Machine(**{**fields, "measured": tuple(fields["measured"]), "aliases": tuple(fields["aliases"])})
