"""Find the op that this process is running, at no cost for the step itself.

The step of a rank is one generated function per phase, and its lines are registered here with their ops. Another thread
finds the current op in the stacks of all threads. The step itself only counts its phases.
"""

from __future__ import annotations

import linecache
import os
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import CodeType, FrameType, TracebackType

from autopar.capture.provenance import LINE, is_users
from autopar.errors import AutoparError

# by id, because two code objects of the same text are equal; an entry is dropped with its code, because a step may be
# captured again
_registered: dict[int, tuple[weakref.ref[CodeType], Mapping[int, str]]] = {}
_calls: set[int] = set()  # ids of code that belongs to a call of the user, and not to an op with its own line
_ticks = 0


@dataclass(frozen=True)
class CurrentOp:
    """How many phases this process has begun, and the op that it is running, or the user's line if it runs no op."""

    ticks: int
    inside: bool  # whether it is in a phase of a step
    text: str


def register(code: CodeType, lines: Mapping[int, str], *, is_call: bool = False) -> None:
    """Register the text for each line of a generated function, as the user should read it. A second call replaces the
    texts.

    A line without a text, such as the ``del`` after an op, belongs to the nearest line above that has one.

    Args:
        is_call: whether messages quote the user's line too.
    """
    key = id(code)
    if is_call:
        _calls.add(key)
    _registered[key] = (weakref.ref(code, lambda _: _registered.pop(key, None)), lines)


def tick() -> None:
    """Count a phase of a step that begins."""
    global _ticks
    _ticks += 1


def where() -> CurrentOp:
    """Return the op that any thread of this process is running now, or else the user's line of the main thread."""
    this_thread, main = threading.get_ident(), threading.main_thread().ident
    frames = {
        thread: frame for thread, frame in sys._current_frames().items() if thread != this_thread or thread == main
    }
    for frame in frames.values():
        for code, line in _outwards(frame):
            text = _op(code, line)
            if text is not None:
                at = "   " + _users_line(_outwards(frames.get(main or 0))) if id(code) in _calls else ""
                return CurrentOp(_ticks, True, text + at)
    return CurrentOp(_ticks, False, _users_line(_outwards(frames.get(main or 0))))


def where_raised(traceback: TracebackType | None) -> CurrentOp:
    """Return the op that raised an exception, from its traceback."""
    steps: list[tuple[CodeType, int]] = []
    while traceback is not None:
        steps.append((traceback.tb_frame.f_code, traceback.tb_lineno))
        traceback = traceback.tb_next
    steps.reverse()
    for code, line in steps:
        text = _op(code, line)
        if text is not None:
            return CurrentOp(_ticks, True, text)
    return CurrentOp(_ticks, False, _users_line(iter(steps)))


def add_op(error: Exception, text: str = "") -> None:
    """Add the op that raised an error to the error, from Python 3.11 on. ``text`` names the op if the traceback does
    not have it."""
    place = where_raised(error.__traceback__)
    if (text or place.inside) and hasattr(error, "add_note") and not isinstance(error, AutoparError):
        error.add_note(f"while autopar ran\n    {text or place.text}")


def _outwards(frame: FrameType | None) -> Iterator[tuple[CodeType, int]]:
    while frame is not None:
        yield frame.f_code, frame.f_lineno or 0
        frame = frame.f_back


def _op(code: CodeType, line: int) -> str | None:
    """Return the text of a line of a registered function; ``None`` for other code."""
    entry = _registered.get(id(code))
    if entry is None:
        return None
    lines = entry[1]
    above = [number for number in lines if number <= line]
    return lines[max(above)] if above else f"the beginning of {code.co_name}"


def _users_line(stack: Iterator[tuple[CodeType, int]]) -> str:
    """Return the user's innermost line, ``train.py:41  time.sleep(100)``; lines of installed packages count only if
    there are no others."""
    lines = [(code.co_filename, line) for code, line in stack]
    users = [(name, line) for name, line in lines if is_users(name)]
    outside_packages = [(name, line) for name, line in users if f"{os.sep}site-packages{os.sep}" not in name]
    chosen = outside_packages or users
    if not chosen:
        return "the end of the program"
    name, line = chosen[0]
    text = linecache.getline(name, line).strip()
    shown = text if len(text) <= LINE else text[: LINE - 1] + "…"
    return f"{os.path.basename(name)}:{line}  {shown}".rstrip()
