"""Tags of messages: one for each boundary, pass and micro-batch."""

from __future__ import annotations

import itertools
import re

import pytest

from autopar.runtime.lowering.tags import BOUNDARIES, MICRO_BATCHES, PASSES, TAGS, UNTAGGED, tag_of

ENDS = (0, 1, 2, MICRO_BATCHES - 2, MICRO_BATCHES - 1)


def test_different_messages_have_different_tags() -> None:
    tags = [tag_of(*message) for message in itertools.product(range(BOUNDARIES), PASSES, ENDS)]
    assert len(set(tags)) == len(tags)
    assert min(tags) > UNTAGGED and max(tags) <= TAGS < 2**31


def test_the_range_is_used_up_to_its_ends() -> None:
    assert tag_of(0, PASSES[0], 0) == UNTAGGED + 1
    assert tag_of(BOUNDARIES - 1, PASSES[-1], MICRO_BATCHES - 1) == TAGS


def test_micro_batches_begin_again() -> None:
    """Messages of one tag are first in, first out."""
    assert tag_of(3, "forward", MICRO_BATCHES + 5) == tag_of(3, "forward", 5)


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ((BOUNDARIES, "forward", 0), "no tag for boundary 16384; there are 16384, from 0 to 16383"),
        ((-1, "forward", 0), "no tag for boundary -1; there are 16384, from 0 to 16383"),
        ((0, "update", 0), "no tag for the pass 'update'; passes are forward, backward"),
        ((0, "forward", -1), "no tag for micro-batch -1; micro-batches are numbered from 0"),
    ],
)
def test_what_has_no_tag(message: tuple[int, str, int], said: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(said)}$"):
        tag_of(*message)
