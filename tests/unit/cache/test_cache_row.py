"""The row of the cache in a report."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import pytest

from autopar.cache import cache as module
from autopar.cache.cache import Cache
from autopar.cache.codec import Codec
from autopar.cache.folder import Folder


def test_its_time_is_without_that_of_making(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which the rows of the passes have. Each look at the clock takes a second of it, and making 100."""
    now = 0.0

    def perf_counter() -> float:
        nonlocal now
        now += 1
        return now

    def make(ranks: Any, check: Any) -> str:
        nonlocal now
        now += 100
        return "made"

    monkeypatch.setattr(module, "time", types.SimpleNamespace(perf_counter=perf_counter))
    codec = Codec("stub", None, dict, lambda made: None, lambda made: made, lambda content, guards: content)
    made, row, _ = Cache(Folder(tmp_path)).through(make, codec)
    assert (made, row.ms) == ("made", 2000)
