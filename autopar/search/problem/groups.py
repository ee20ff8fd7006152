"""Divide the readers of a value into groups of at most three, whose shared transfers form one path."""

from __future__ import annotations

from autopar.search.problem.problem import Reader, Value

GROUP = 3


def groups_of(value: Value) -> list[tuple[list[Reader], float, float]]:
    """Return groups of readers, with the fractions of prices that count in each: in general, and where phases share.

    All transfers of one group are among those of the value. So the mean over the groups of a phase never charges more
    than the value does, and it charges as much where they all need the same.
    """
    phases: dict[str, dict[str, list[Reader]]] = {}
    for reader in value.readers:
        phases.setdefault(reader.phase, {}).setdefault(reader.block, []).append(reader)
    crosses = len(phases) > 1 and _may_cross(value)
    if crosses and len(value.readers) <= GROUP:
        return [(value.readers, 1.0, 1.0)]
    groups = []
    for by_block in phases.values():
        if sum(map(len, by_block.values())) <= GROUP:
            chunks = [[reader for own in by_block.values() for reader in own]]
        else:
            chunks = [chunk for own in by_block.values() for chunk in _chunks(own)]
        share = 1 / len(chunks)
        groups += [(own, share, share / (len(phases) if crosses else 1)) for own in chunks]
    return groups


def _may_cross(value: Value) -> bool:
    """Return whether readers in different phases may share a transfer: a reduction, a narrowing cast, or the gather of
    a parameter of the block with which the forward ends."""
    if any(attr.pending for attr, _ in value.states) or (
        value.parameter and any(reader.turning for reader in value.readers)
    ):
        return True
    itemsize = value.type.dtype.itemsize
    return value.computed and any(
        dtype.itemsize < itemsize for reader in value.readers for _, dtype in reader.states[:1]
    )


def _chunks(readers: list[Reader]) -> list[list[Reader]]:
    count = -(-len(readers) // GROUP)
    return [readers[k * len(readers) // count : (k + 1) * len(readers) // count] for k in range(count)]
