"""List policies with fixed numbers of chunks, and write schedules as words."""

from __future__ import annotations

from collections.abc import Iterator

from autopar.pipeline import POLICIES
from autopar.pipeline.optimiser.orders import FORWARD, INPUT, WEIGHT

FIXED = [
    (name, chunks)
    for name, policy in POLICIES.items()
    for chunks in (1, 2, 3)
    if policy.chunks is None or chunks in policy.chunks
]


def words(batches: int, stage: int) -> Iterator[list[int]]:
    """All orders of one stage."""

    def more(f: int, b: int, w: int) -> Iterator[list[int]]:
        if w == batches:
            yield []
        for code, new in ((FORWARD, (f + 1, b, w)), (INPUT, (f, b + 1, w)), (WEIGHT, (f, b, w + 1))):
            if batches >= new[0] >= new[1] >= new[2]:
                yield from ([4 * stage + code, *rest] for rest in more(*new))

    return more(0, 0, 0)
