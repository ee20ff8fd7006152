"""Measure the peak memory of a call, by torch's allocator."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


def peak_bytes(call: Callable[[], Any], device: torch.device | None = None) -> int:
    """Return the most bytes that tensors hold at once while ``call`` runs, beyond those held before it.

    On the CPU, counted from each allocation and release that torch's profiler sees: exact, and the same in every run.

    Args:
        device: of the tensors; ``None``: the CPU. Of an accelerator, the figure is that of its allocator.
    """
    if device is not None and device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats(device)
        before = torch.accelerator.memory_allocated(device)
        call()
        return torch.accelerator.max_memory_allocated(device) - before
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
