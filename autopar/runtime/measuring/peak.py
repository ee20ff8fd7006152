"""Measure the peak memory of a call, from the events of torch's allocator."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile


def peak_bytes(call: Callable[[], Any]) -> int:
    """Return the most bytes that tensors on CPU hold at once while ``call`` runs, beyond those held before it.

    Counted from each allocation and release that torch's profiler sees: exact, and the same in every run.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        call()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    changes = sorted((event["ts"], event["args"]["Bytes"]) for event in events if event.get("name") == "[memory]")
    used = peak = 0
    for _, change in changes:
        used += change
        peak = max(peak, used)
    return peak
