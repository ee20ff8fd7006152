"""A piece of a tensor is read in stretches of a file: exactly the part that is wanted."""

from __future__ import annotations

import math

import pytest
import strategies
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.checkpoint import pieces


@settings(deadline=None)
@given(data=st.data())
def test_stretches_are_the_part_that_is_wanted(data: st.DataObject) -> None:
    sizes = data.draw(strategies.shapes(min_size=1))
    start = tuple(data.draw(st.integers(0, n - 1)) for n in sizes)
    lengths = tuple(data.draw(st.integers(1, n - a)) for n, a in zip(sizes, start, strict=True))
    limit, row = data.draw(st.sampled_from([1, 8, 40, 10**6])), data.draw(st.sampled_from([1, 8, 40]))
    stored = torch.arange(math.prod(sizes)).reshape(sizes)
    filled = torch.full(lengths, -1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "STRETCH", limit)
        patch.setattr(pieces, "ROW", row)
        for one in pieces.stretches(sizes, start, lengths, 2):
            count = math.prod(one.sizes)
            assert count * 2 <= max(limit, row, 2 * sizes[-1] if sizes else 2)
            filled[one.target] = stored.reshape(-1)[one.first : one.first + count].reshape(one.sizes)[one.wanted]
    assert torch.equal(filled, stored[tuple(slice(a, a + n) for a, n in zip(start, lengths, strict=True))])
