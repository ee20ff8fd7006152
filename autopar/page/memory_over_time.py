"""Follow a rank's memory from op to op by kind, as a picture shows it."""

from __future__ import annotations

from typing import Any

from autopar.ir.nodes import record_of
from autopar.report.liveness import KINDS, START, Lifetimes

POINTS = 600  # most points of the picture


def memory_over_time(lives: Lifetimes | None) -> dict[str, Any] | None:
    """Return ``kinds``, and ``points``: for each the position of its op, its phase and line, and bytes by kind.

    Of neighbouring ops, the one with most memory is kept, so that the peak is there. ``None`` without lifetimes.
    """
    if lives is None or not lives.ops:
        return None
    kinds = [*dict.fromkeys([*KINDS, *(storage.kind for storage in lives.storages)])]
    row = {kind: k for k, kind in enumerate(kinds)}
    count = len(lives.ops)
    changes: list[list[tuple[int, int]]] = [[] for _ in range(count + 1)]
    now = [0] * len(kinds)
    for storage in lives.storages:
        if storage.born == START:
            now[row[storage.kind]] += storage.bytes
        else:
            changes[storage.born].append((row[storage.kind], storage.bytes))
        if START < storage.dies < count:
            changes[storage.dies + 1].append((row[storage.kind], -storage.bytes))
        elif storage.dies == START:
            changes[0].append((row[storage.kind], -storage.bytes))
    each = max(1, -(-count // POINTS))
    points: list[dict[str, Any]] = []
    best: tuple[int, int, Any, list[int]] | None = None
    for position, node in enumerate(lives.ops):
        for kind, bytes in changes[position]:
            now[kind] += bytes
        total = sum(now)
        if best is None or total > best[0]:
            best = total, position, node, [*now]
        if (position + 1) % each == 0 or position + 1 == count:
            record = record_of(best[2])
            points.append({"at": best[1], "phase": record.phase, "module": record.module, "op": best[2].name,
                           "bytes": best[3]})  # fmt: skip
            best = None
    used = [k for k in range(len(kinds)) if any(point["bytes"][k] for point in points)]
    for point in points:
        point["bytes"] = [point["bytes"][k] for k in used]
    return {"kinds": [kinds[k] for k in used], "ops": count, "points": points}
