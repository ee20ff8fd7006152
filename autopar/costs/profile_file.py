"""Write profiles as JSON with a line for each call, and read them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from autopar.costs.calls import KINDS
from autopar.costs.json_fields import Malformed, Reader, array, fields_of, mapping, number, one_of, text, whole
from autopar.costs.machine import MOST_INTERFERENCE, Machine, described
from autopar.costs.profile_row import ProfileRow
from autopar.errors import ProfileError, shown
from autopar.ir.record import PHASES

VERSION = 1  # of the file format
MOST_SECONDS, MOST_TIMES = 1e6, 10**9  # of a call


def written(fields: Mapping[str, Any], machine: Machine, rows: Sequence[ProfileRow]) -> str:
    """Return the text of a file.

    Args:
        fields: all fields of the profile but the machine and the rows.
    """
    head = {"version": VERSION, **fields, "machine": machine.description()}
    lines = ",\n".join(f"  {json.dumps(_row(row), ensure_ascii=False, allow_nan=False)}" for row in rows)
    begun = json.dumps(head, indent=1, ensure_ascii=False, allow_nan=False).removesuffix("\n}")
    return f'{begun},\n "rows": [\n{lines}\n ]\n}}\n'


def _row(row: ProfileRow) -> dict[str, Any]:
    """Return a row as JSON, without what has its default."""
    group = {"group": row.group, "startup": row.startup} if row.group else {}
    why = {"why": row.why} if row.why else {}
    return {
        "call": row.call, "kind": row.kind, "seconds": row.seconds, "price": row.price, "times": dict(row.times),
        **group, **why,
    }  # fmt: skip


def read(content: Any, path: str | Path) -> dict[str, Any]:
    """Return the fields of a profile from JSON, the rows by their calls.

    Raises:
        ProfileError: it is no profile, or is malformed; the error names the file and the field.
    """
    if not isinstance(content, dict) or "version" not in content or "rows" not in content:
        raise ProfileError(f"{path}: this is no profile of a step; autopar profile step --save FILE writes one")
    if content["version"] != VERSION:
        raise ProfileError(
            f"{path}: version: {shown(content['version'])} is not known; this autopar reads version {VERSION}"
        )
    try:
        fields = fields_of(content, "", None, **READERS)
    except Malformed as error:
        raise ProfileError(f"{path}: {error}") from None
    try:
        machines = described(fields["machine"], f"{path}: machine")
    except ValueError as error:
        raise ProfileError(str(error)) from None
    if len(machines) != 1:
        raise ProfileError(f"{path}: machine: one machine is wanted, not {len(machines)}")
    rows = {row.call: row for row in fields["rows"]}
    if len(rows) != len(fields["rows"]):
        calls = [row.call for row in fields["rows"]]
        twice = next(call for call in calls if calls.count(call) > 1)
        raise ProfileError(f"{path}: rows: {twice} is given twice")
    del fields["version"]
    return {**fields, "machine": machines[0], "rows": rows}


_seconds = number(False, most=MOST_SECONDS, of="durations")
_times = whole(0, MOST_TIMES, "counts")


def _anything(value: Any, at: str) -> Any:
    return value


def _phases(value: Any, at: str) -> dict[str, int]:
    times = mapping(_times)(value, at)
    for phase in times:
        one_of(PHASES)(phase, at)
    return times


def _profile_row(value: Any, at: str) -> ProfileRow:
    row = ProfileRow(**fields_of(
        value, at, {"group": "", "startup": 0.0, "why": ""}, call=text, kind=one_of(KINDS), seconds=_seconds,
        price=_seconds, times=_phases, group=text, startup=_seconds, why=text,
    ))  # fmt: skip
    if row.startup > row.seconds:
        raise Malformed(f"{at}.startup", f"{row.startup:g} is more than the whole call takes, {row.seconds:g} seconds")
    return row


READERS: dict[str, Reader] = {
    "version": whole(VERSION),
    "device": text,
    "backend": text,
    "ranks": whole(1),
    "threads": whole(1),
    "torch": text,
    "mesh": text,
    "programs": mapping(text),
    "launch": _seconds,
    "interference": number(False, most=MOST_INTERFERENCE, of="factors"),
    "machine": _anything,
    "rows": array(_profile_row),
}
