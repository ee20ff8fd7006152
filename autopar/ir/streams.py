"""Name the process group of a transfer: its ranks, and the stream on which they run it.

A stream is one process group. A transfer without a stream, or on one that is called like its axes (``all_reduce(x, tp)
on tp``, ``dp_tp`` for both), runs in the group that its ranks have anyhow. Any other name is a group of its own over
the same ranks: what runs there may overtake, and be overtaken.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Ranks = tuple[int, ...]
Stream = tuple[Ranks, str]  # the ranks, in ascending order, and the name; the default stream of the ranks has none
GroupKey = Ranks | Stream
Groups = Mapping[GroupKey, str]  # ranks in ascending order, or those with the name of a stream → name of the group

DEFAULT = ""


def stream_of(named: str | None, axis: str | Sequence[str] | None) -> str:
    """Return the stream of a transfer, ``DEFAULT`` if it runs in the group that its ranks have anyhow.

    Args:
        named: the stream that its record names, if any.
        axis: the axis or the axes of its group; ``None`` for a message between stages.
    """
    if named is None or (axis and named == (axis if isinstance(axis, str) else "_".join(axis))):
        return DEFAULT
    return named


def group_key(ranks: Ranks, stream: str) -> GroupKey:
    """Return what stands for a stream of some ranks, given in any order, in a mapping from groups to their names."""
    ranks = tuple(sorted(ranks))
    return ranks if stream == DEFAULT else (ranks, stream)
