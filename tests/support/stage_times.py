"""Draw the times of the stages of a pipeline."""

from __future__ import annotations

from hypothesis import strategies as st

from autopar.pipeline.simulate import Times


@st.composite
def times_of(draw: st.DrawFn, stages: int, most: int = 40) -> Times:
    """Times in eighths, whose sums are exact."""
    some = [[draw(st.integers(0, most)) / 8 for _ in range(stages)] for _ in range(3)]
    return Times(*some, [draw(st.integers(0, most // 2)) / 8 for _ in range(stages - 1)])
