"""Measure the peak memory of a call, from the events of torch's allocator."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile


def peak_bytes(call: Callable[[], Any]) -> int:
    """Return the most bytes that tensors on CPU hold at once while ``call`` runs, beyond those held before it."""
    return max(accumulate(changes_of_bytes(call), initial=0))


def changes_of_bytes(call: Callable[[], Any]) -> list[int]:
    """Return the bytes of each allocation, and less than 0 of each release, while ``call`` runs.

    They are all that torch's profiler sees: exact, and the same in every run.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        call()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    changes = sorted((event["ts"], event["args"]["Bytes"]) for event in events if event.get("name") == "[memory]")
    return [change for _, change in changes]
