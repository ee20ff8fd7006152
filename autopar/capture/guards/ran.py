"""Report which functions run: each once, with its frame, when it begins.

From Python 3.12 on this uses ``sys.monitoring`` and switches the event off for a function after its first report, which
costs nearly nothing. Before, Python calls a profile function at each call. That function is off while torch dispatches
an op: a trace spends most of its time there, and no code of the model runs there.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from autopar.capture.guards.namespaces import is_users_file
from autopar.capture.guards.places import GuardedPlace
from autopar.torch_private import TorchDispatchMode

Show = Callable[[types.FrameType], None]
Called = Callable[[types.FrameType | None, Any, Any], None]  # the caller, the function, its first argument
TOOLS = (4, 3, 5)  # tool numbers of sys.monitoring that are not reserved


@dataclass(frozen=True)
class Ran:
    """The functions that one capture ran.

    Attributes:
        codes: the code of the user's functions.
        seen: whether each function was seen; ``False`` under a profiler that cannot be shared.
        changed: the values, in words, that forward both reads and changes, draws or reads from a clock, and whose first
            ones the step keeps.
        named: the functions, classes and Python modules of libraries that functions name, with their places. They are
            not guarded in this process, but another one may have others there.
    """

    codes: tuple[types.CodeType, ...] = ()
    seen: bool = True
    changed: tuple[str, ...] = ()
    named: tuple[tuple[GuardedPlace, Any], ...] = ()


@contextlib.contextmanager
def running_shown(show: Show, called: Called) -> Iterator[bool]:
    """Call ``show`` once for each function that begins on this thread while the ``with`` block runs.

    ``called`` is called for each call that the user's code makes: before Python 3.12, of functions in C alone.

    Yields ``False``, and reports nothing, if another profiler runs that cannot be shared, such as cProfile before
    Python 3.12.
    """
    monitoring = getattr(sys, "monitoring", None)
    tool = next((k for k in TOOLS if monitoring.get_tool(k) is None), None) if monitoring is not None else None
    if tool is not None:
        shown_by = _shown_by_monitoring(monitoring, tool, show, called)
    else:
        shown_by = _shown_by_profiling(show, called)
    with shown_by as shown:
        yield shown


@contextlib.contextmanager
def _shown_by_monitoring(monitoring: Any, tool: Any, show: Show, called: Called) -> Iterator[bool]:
    thread, begins, calls = threading.get_ident(), monitoring.events.PY_START, monitoring.events.CALL
    watched: list[types.CodeType] = []  # the user's code, whose calls are reported

    def begin(code: types.CodeType, offset: int) -> Any:
        if threading.get_ident() != thread:
            return None
        if is_users_file(code.co_filename):
            watched.append(code)
            monitoring.set_local_events(tool, code, calls)
        show(sys._getframe(1))
        return monitoring.DISABLE

    def call(code: types.CodeType, offset: int, function: Any, first: Any) -> None:
        if threading.get_ident() == thread:
            called(sys._getframe(1), function, first)

    monitoring.use_tool_id(tool, "autopar")
    monitoring.register_callback(tool, begins, begin)
    monitoring.register_callback(tool, calls, call)
    monitoring.set_events(tool, begins)
    monitoring.restart_events()  # also for functions that an earlier capture has switched off
    try:
        yield True
    finally:
        monitoring.set_events(tool, 0)
        for code in watched:
            monitoring.set_local_events(tool, code, 0)
        monitoring.register_callback(tool, begins, None)
        monitoring.register_callback(tool, calls, None)
        monitoring.free_tool_id(tool)


@contextlib.contextmanager
def _shown_by_profiling(show: Show, called: Called) -> Iterator[bool]:
    before = sys.getprofile()
    if before is not None and not callable(before):  # a profiler in C could not be restored
        yield False
        return
    shown: dict[int, types.CodeType] = {}

    def profile(frame: types.FrameType, event: Any, arg: Any) -> None:
        if event == "call" and id(frame.f_code) not in shown:
            shown[id(frame.f_code)] = frame.f_code
            show(frame)
        elif event == "c_call":
            called(frame, arg, None)
        if before is not None:
            before(frame, event, arg)

    with _Unwatched(profile, before):
        sys.setprofile(profile)
        try:
            yield True
        finally:
            sys.setprofile(before)


class _Unwatched(TorchDispatchMode):
    """Switches the profile function off while ops are dispatched."""

    def __init__(self, profile: Any, before: Any) -> None:
        super().__init__()
        self._profile, self._before = profile, before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        sys.setprofile(self._before)
        try:
            return func(*args, **(kwargs or {}))
        finally:
            sys.setprofile(self._profile)
