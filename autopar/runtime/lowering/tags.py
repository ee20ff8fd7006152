"""Number messages: each boundary between stages, pass and micro-batch has a tag.

How backends use tags, as tried on torch 2.13:

* gloo matches a receive with the send of the same tag, in any order of tags. Messages of one tag, between the same two
  ranks, are first in, first out. Each process group has tags of its own.
* NCCL ignores tags: messages between two ranks match in the order in which they are issued.

So programs are checked as if there were no tags (``autopar.verify.channels``), and a program that passes is right on
both backends. With tags, a receive may be posted long before another one without taking its message.
"""

from __future__ import annotations

PASSES = ("forward", "backward")
BOUNDARIES = 1 << 14
MICRO_BATCHES = 1 << 15  # from here on the numbers repeat, and the messages of one tag are first in, first out
UNTAGGED = 0  # the tag of a message that names none
TAGS = BOUNDARIES * len(PASSES) * MICRO_BATCHES  # tags are 1 … TAGS, well within the 31 bits that backends take


def tag_of(boundary: int, during: str, micro_batch: int) -> int:
    """Return the tag of a message, the same at both of its ends.

    Args:
        boundary: the number of the value that crosses from one stage to another, below ``BOUNDARIES``.
        during: one of ``PASSES``.
        micro_batch: the number of the micro-batch, from 0.

    Raises:
        ValueError: there is no such boundary, pass or micro-batch.
    """
    if not 0 <= boundary < BOUNDARIES:
        raise ValueError(f"no tag for boundary {boundary}; there are {BOUNDARIES}, from 0 to {BOUNDARIES - 1}")
    if during not in PASSES:
        raise ValueError(f"no tag for the pass {during!r}; passes are {', '.join(PASSES)}")
    if micro_batch < 0:
        raise ValueError(f"no tag for micro-batch {micro_batch}; micro-batches are numbered from 0")
    crossing = boundary * len(PASSES) + PASSES.index(during)
    return UNTAGGED + 1 + crossing * MICRO_BATCHES + micro_batch % MICRO_BATCHES
