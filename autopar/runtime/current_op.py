"""Where this process is: found out by whoever asks, so that the step itself pays nothing for it.

The step of a rank is one generated function a phase, whose lines are registered here with what they do. Another thread
that wants to know looks at the stacks of all threads. Only the count of phases is kept by the step.
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

# by id, since two code objects of the same text are equal; each goes with its code, since a step may be captured anew
_registered: dict[int, tuple[weakref.ref[CodeType], Mapping[int, str]]] = {}
_calls: set[int] = set()  # those of functions that belong to a call of the user's, and not to an op with a line of its own
_ticks = 0


@dataclass(frozen=True)
class CurrentOp:
    """How many phases this process has begun, and the op it is in, or the user's line where it is in none."""

    ticks: int
    inside: bool  # of a phase of a step
    text: str


def register(code: CodeType, lines: Mapping[int, str], *, is_call: bool = False) -> None:
    """Say what each line of a generated function does, as the user should read it. Once more replaces it.

    A line without a text, such as the ``del`` after an op, belongs to the nearest one above that has one. ``is_call``: the user's line
    is told with it.
    """
    key = id(code)
    if is_call:
        _calls.add(key)
    _registered[key] = (weakref.ref(code, lambda _: _registered.pop(key, None)), lines)


def tick() -> None:
    """A phase of a step begins."""
    global _ticks
    _ticks += 1


def where() -> CurrentOp:
    """The place of this process now: the op that any of its threads is in, else the user's line of the main thread."""
    own, main = threading.get_ident(), threading.main_thread().ident
    frames = {thread: frame for thread, frame in sys._current_frames().items() if thread != own or thread == main}
    for frame in frames.values():
        for code, line in _outwards(frame):
            text = _op(code, line)
            if text is not None:
                at = "   " + _users_line(_outwards(frames.get(main or 0))) if id(code) in _calls else ""
                return CurrentOp(_ticks, True, text + at)
    return CurrentOp(_ticks, False, _users_line(_outwards(frames.get(main or 0))))


def where_raised(traceback: TracebackType | None) -> CurrentOp:
    """The place where an exception was raised: its stack is gone, but its traceback still has it."""
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
    """An error that an op of a step raised says, from Python 3.11 on, which op that is; ``text``, where the traceback does not tell it."""
    place = where_raised(error.__traceback__)
    if (text or place.inside) and hasattr(error, "add_note") and not isinstance(error, AutoparError):
        error.add_note(f"while autopar ran\n    {text or place.text}")


def _outwards(frame: FrameType | None) -> Iterator[tuple[CodeType, int]]:
    while frame is not None:
        yield frame.f_code, frame.f_lineno or 0
        frame = frame.f_back


def _op(code: CodeType, line: int) -> str | None:
    """What a line of a registered function does; ``None`` where the function is not one."""
    known = _registered.get(id(code))
    if known is None:
        return None
    above = [number for number in known[1] if number <= line]
    return known[1][max(above)] if above else f"the beginning of {code.co_name}"


def _users_line(stack: Iterator[tuple[CodeType, int]]) -> str:
    """``train.py:41  time.sleep(100)``: the innermost line that is the user's own, rather than of a package they installed."""
    lines = [(code.co_filename, line) for code, line in stack]
    users = [(name, line) for name, line in lines if is_users(name)]
    own = [(name, line) for name, line in users if f"{os.sep}site-packages{os.sep}" not in name]
    found = own or users
    if not found:
        return "the end of the program"
    name, line = found[0]
    text = linecache.getline(name, line).strip()
    shown = text if len(text) <= LINE else text[: LINE - 1] + "…"
    return f"{os.path.basename(name)}:{line}  {shown}".rstrip()
