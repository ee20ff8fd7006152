"""What ranks write to TensorBoard: the first one alone writes, for all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from logged import logged
from processes import ranks


def test_the_first_rank_writes_for_all(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    assert ranks(2).run(logged, str(tmp_path)) == [["2"], []]
    (file,) = os.listdir(tmp_path)
    events = accumulator.EventAccumulator(str(tmp_path / file)).Reload()
    flops, mfu = (events.Scalars(f"speed/{tag}")[1].value for tag in ("tflops_per_rank", "mfu"))
    assert events.Scalars("speed/tokens_per_second")[1].value == 6 / 0.5  # of both ranks
    assert flops > 0 and mfu == pytest.approx(flops * 1e12 / 1e11)
