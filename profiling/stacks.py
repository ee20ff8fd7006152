"""Sample stacks, and write the samples as a speedscope file (https://www.speedscope.app).

A timer interrupts the main thread and notes its stack. Nothing else is slowed down, so that short functions are not
made to look expensive, as they are by profilers that are called at every call.
"""

from __future__ import annotations

import json
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

Stack = tuple[CodeType, ...]


def sample(function: Callable[[], Any], seconds: float = 2e-4) -> Counter[Stack]:
    """Stacks seen while ``function`` runs, outermost first, and how often."""
    found: Counter[Stack] = Counter()
    here = sample.__code__

    def look(_: int, frame: FrameType | None) -> None:
        stack: list[CodeType] = []
        while frame is not None and frame.f_code is not here:
            stack.append(frame.f_code)
            frame = frame.f_back
        found[tuple(reversed(stack))] += 1

    before = signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, seconds, seconds)
    try:
        function()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    return found


def below(stacks: Counter[Stack], top: CodeType) -> Counter[Stack]:
    """The stacks that hold ``top``, from there on."""
    found: Counter[Stack] = Counter()
    for stack, count in stacks.items():
        if top in stack:
            found[stack[stack.index(top) :]] += count
    return found


def speedscope(profiles: dict[str, tuple[Counter[Stack], float]]) -> str:
    """A speedscope file of profiles by name; each has its stacks and the milliseconds they stand for."""
    frames: dict[CodeType, int] = {}
    shown = []
    for name, (stacks, total) in profiles.items():
        each = total / max(1, stacks.total())
        ordered = sorted(stacks.items(), key=lambda item: [_name(code) for code in item[0]])
        shown.append({
            "type": "sampled", "name": name, "unit": "milliseconds", "startValue": 0, "endValue": round(total, 4),
            "samples": [[frames.setdefault(code, len(frames)) for code in stack] for stack, _ in ordered],
            "weights": [round(count * each, 4) for _, count in ordered],
        })  # fmt: skip
    table = [{"name": _name(code), "file": _file(code), "line": code.co_firstlineno} for code in frames]
    return json.dumps({
        "$schema": "https://www.speedscope.app/file-format-schema.json",
        "shared": {"frames": table}, "profiles": shown, "activeProfileIndex": 0, "name": "reshard",
    }, separators=(",", ":"))  # fmt: skip


def _file(code: CodeType) -> str:
    return "/".join(Path(code.co_filename).parts[-2:])


def _name(code: CodeType) -> str:
    return getattr(code, "co_qualname", code.co_name)  # Python 3.10 has the short name only
