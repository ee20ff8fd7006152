"""Find the op that this process is running, at no cost for the step itself.

The step of a rank is one generated function per phase, and its lines are registered here with their ops, and with the
ranks that they wait for. Another thread finds the current op in the stacks of all threads. The step itself only counts
its phases. The text of a line is static; what changes from call to call is the slot (``current_slot``).
"""

from __future__ import annotations

import linecache
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import NamedTuple

from autopar.capture.provenance import LINE, is_users
from autopar.errors import AutoparError, add_note
from autopar.runtime.current_slot import Wait, current_slot, current_wait, entered

COMMANDS = ("typer", "click")  # packages that run commands: their lines say nothing of the program


class _Registered(NamedTuple):
    code: weakref.ref[CodeType]
    lines: Mapping[int, str]
    waits: Mapping[int, Wait | None]


# by id, because two code objects of the same text are equal; an entry is dropped with its code, because a step may be
# captured again
_registered: dict[int, _Registered] = {}
_calls: set[int] = set()  # ids of code that belongs to a call of the user, and not to an op with its own line
_ticks = 0


@dataclass(frozen=True)
class CurrentOp:
    """What this process is running.

    Attributes:
        ticks: how many phases and slots it has begun.
        inside: whether it is in a phase or a slot of a step.
        text: the slot and the op, or the user's line if it is outside.
        peers: the ranks that it waits for.
        collective: what it waits in together with them; empty if it waits for a message, or for nobody.
    """

    ticks: int
    inside: bool
    text: str
    peers: tuple[int, ...] = ()
    collective: str = ""


def register(
    code: CodeType, lines: Mapping[int, str], *, waits: Mapping[int, Wait | None] | None = None, is_call: bool = False
) -> None:
    """Register the text that the user should read for each line of a generated function.

    A second call replaces the texts. A line without a text, such as the ``del`` after an op, belongs to the nearest
    line above that has one.

    Args:
        waits: for the lines with a text that wait for other ranks, the ranks.
        is_call: whether messages quote the user's line too.
    """
    key = id(code)
    if is_call:
        _calls.add(key)
    _registered[key] = _Registered(weakref.ref(code, lambda _: _registered.pop(key, None)), lines, waits or {})


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

    def users_line() -> str:
        return _users_line(_outwards(frames.get(main or 0)))

    for frame in frames.values():
        for code, line in _outwards(frame):
            op = _op(code, line)
            if op is not None:
                quoted = f"{op.text}   {users_line()}" if id(code) in _calls else op.text
                return _place(op._replace(text=quoted), users_line)
    return _place(None, users_line)


def where_raised(error: BaseException) -> CurrentOp:
    """Return the slot and the op that raised an exception, from its traceback."""
    steps: list[tuple[CodeType, int]] = []
    traceback = error.__traceback__
    while traceback is not None:
        steps.append((traceback.tb_frame.f_code, traceback.tb_lineno))
        traceback = traceback.tb_next
    steps.reverse()
    op = next((op for code, line in steps if (op := _op(code, line)) is not None), None)
    return _place(op, lambda: _users_line(iter(steps)), error)


def add_op(error: Exception, text: str = "") -> None:
    """Add the op that raised an error to the error.

    ``text`` names the op if the traceback does not have it. An op that has raised a message of its own is not added.
    """
    place = where_raised(error)
    if repr(str(error))[1:-1] in text:  # a check of the program, which is an argument of its op
        return
    if (text or place.inside) and not isinstance(error, AutoparError):
        add_note(error, f"while autopar ran\n    {text or place.text}")


def _outwards(frame: FrameType | None) -> Iterator[tuple[CodeType, int]]:
    while frame is not None:
        yield frame.f_code, frame.f_lineno or 0
        frame = frame.f_back


class _Op(NamedTuple):
    text: str
    wait: Wait | None


def _place(op: _Op | None, users_line: Callable[[], str], error: BaseException | None = None) -> CurrentOp:
    """Return the place of an op in its slot, or that of the slot or the wait, or else the user's line.

    Args:
        error: the error that was raised there; ``None``: this process is there now.
    """
    slot, waiting, ticks = current_slot(error), current_wait(error), _ticks + entered()
    doing = op.text if op is not None else waiting.text if waiting is not None else ""
    if not slot and not doing:
        return CurrentOp(ticks, False, users_line())
    within = f"{slot}: " if slot else ""
    wait = op.wait if op is not None else None
    if wait is None and waiting is not None:
        wait = waiting.wait
    peers, collective = wait or Wait(())
    return CurrentOp(ticks, True, within + doing if doing else slot, peers, within + collective if collective else "")


def _op(code: CodeType, line: int) -> _Op | None:
    """Return the text and the wait of a line of a registered function; ``None`` for other code."""
    entry = _registered.get(id(code))
    if entry is None:
        return None
    above = [number for number in entry.lines if number <= line]
    if not above:
        return _Op(f"the beginning of {code.co_name}", None)
    return _Op(entry.lines[max(above)], entry.waits.get(max(above)))


def _users_line(stack: Iterator[tuple[CodeType, int]]) -> str:
    """Return the user's innermost line, ``train.py:41 time.sleep(100)``.

    Lines of installed packages count only if there are no others.
    """
    lines = [(code.co_filename, line) for code, line in stack]
    users = [(name, line) for name, line in lines if is_users(name)]
    packages = f"{os.sep}site-packages{os.sep}"
    outside_packages = [(name, line) for name, line in users if packages not in name]
    of_commands = tuple(packages + package + os.sep for package in COMMANDS)
    chosen = outside_packages or [(name, line) for name, line in users if not any(map(name.__contains__, of_commands))]
    if not chosen:
        return "a command of autopar" if users else "the end of the program"
    name, line = chosen[0]
    text = linecache.getline(name, line).strip()
    shown = text if len(text) <= LINE else text[: LINE - 1] + "…"
    return f"{os.path.basename(name)}:{line}  {shown}".rstrip()
