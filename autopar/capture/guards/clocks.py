"""Tell which calls read a clock, and report the calls of functions in C, of which Python itself reports nothing."""

from __future__ import annotations

import contextlib
import datetime
import dis
import functools
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

ALWAYS = 99
CLOCKS = {  # functions of the module ``time`` → with so many arguments they read no clock
    **{
        f"{name}{unit}": ALWAYS
        for name in ("time", "monotonic", "perf_counter", "process_time", "thread_time", "clock_gettime")
        for unit in ("", "_ns")
    },
    **dict.fromkeys(("localtime", "gmtime", "ctime", "asctime"), 1),
    "strftime": 2,
}
OF_DATES = frozenset({"now", "utcnow", "today"})  # class methods of dates
UNPACKING = dis.opmap["CALL_FUNCTION_EX"]


def clock_named(function: Any, given: Callable[[], int]) -> str:
    """Return the name of a clock that a call reads; "" for another call. ``given``: counts the call's arguments."""
    name, owner = getattr(function, "__name__", ""), getattr(function, "__self__", None)
    if getattr(function, "__module__", None) == "time" and name in CLOCKS:
        return f"time.{name}" if CLOCKS[name] == ALWAYS or given() < CLOCKS[name] else ""
    if isinstance(owner, type) and issubclass(owner, datetime.date) and name in OF_DATES:
        return f"{owner.__name__}.{name}"
    return ""


def given_in(frame: types.FrameType | None) -> int:
    """Count the arguments of the call that a frame makes now, by its instruction; ``ALWAYS`` of ``f(*arguments)``."""
    if frame is None or frame.f_lasti < 0:
        return ALWAYS
    op, count = frame.f_code.co_code[frame.f_lasti : frame.f_lasti + 2]
    return ALWAYS if op == UNPACKING else count


@contextlib.contextmanager
def clocks_shown(called: Callable[[types.FrameType, Any, Any, int], None]) -> Iterator[None]:
    """Call ``called`` for each call of a clock by its name in ``time`` on this thread, while the ``with`` block runs.

    So ``functools.partial(time.time)()`` and ``next(iter(time.time, None))`` are seen, which functions in C call.
    """
    thread = threading.get_ident()

    def shown(clock: Any) -> Any:
        @functools.wraps(clock)
        def read(*arguments: Any) -> Any:
            if threading.get_ident() == thread:
                called(sys._getframe(1), clock, None, sum(each is not None for each in arguments))
            return clock(*arguments)

        return read

    clocks = {name: getattr(time, name, None) for name in CLOCKS}  # those that tests of the user's replace stay
    clocks = {name: clock for name, clock in clocks.items() if isinstance(clock, types.BuiltinFunctionType)}
    for name, clock in clocks.items():
        setattr(time, name, shown(clock))
    try:
        yield
    finally:
        for name, clock in clocks.items():
            setattr(time, name, clock)
