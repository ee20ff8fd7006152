"""Find what forward does that a captured step does not repeat: it draws numbers, advances iterators, reads clocks.

Generators and iterators are found where the model, closures or globals hold them, and compared with what they were
before forward used them. A clock is seen when it is called.
"""

from __future__ import annotations

import contextlib
import datetime
import dis
import functools
import io
import os
import random
import sys
import threading
import time
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from autopar.capture.guards.namespaces import is_users_frame
from autopar.capture.provenance import is_users, quoted, user_line
from autopar.errors import class_of

# -- clocks ------------------------------------------------------------------------------------------------------------
#
# Tell which calls read a clock, and report the calls of functions in C, of which Python itself reports nothing.


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


# -- unrepeated --------------------------------------------------------------------------------------------------------


OPTION = 'parallelize(…, first_values="keep") keeps the first one, which all ranks must have alike'
OF_SYSTEM = frozenset({"urandom", "getrandom", "times"})
RANDOM_FILES = (random.__file__, "uuid.py", "secrets.py")  # which call urandom for the user
SYSTEM_CODES = frozenset(  # without what SystemRandom shares with Random
    function.__code__
    for function in vars(random.SystemRandom).values()
    if isinstance(function, types.FunctionType) and function not in vars(random.Random).values()
)
SEED = random.Random.seed.__code__
FirstValues = Literal["refuse", "keep"]  # of what a captured step does not repeat
FIRST_VALUES: tuple[FirstValues, ...] = get_args(FirstValues)
UNKNOWN_STATE = object()
CALLING = type(iter(int, 1))  # what it calls decides its next value


@dataclass(frozen=True)
class Unrepeated:
    """One thing that a captured step does not repeat.

    Attributes:
        does: what forward does, with the name.
        words: the name alone.
        remedy: how it is avoided.
        line: the user's line.
    """

    does: str
    words: str
    remedy: str
    line: str = ""

    def __str__(self) -> str:
        return (
            f"forward {self.does}, and a captured step keeps the value of the first call\n"
            f"    {self.line or 'unknown line'}\n  {self.remedy}; {OPTION}"
        )

    @staticmethod
    def drawn(words: str, line: str) -> Unrepeated:
        remedy = "draw with torch, or before the call, and pass it to forward"
        return Unrepeated(f"draws numbers from {words}", words, remedy, line)

    @staticmethod
    def changed(words: str, line: str) -> Unrepeated:
        remedy = (
            "change it outside of forward, before the call, or make it a buffer; what is only set once is set after "
            "one call of the model itself"
        )
        return Unrepeated(f"reads and changes {words}", words, remedy, line)


class Watch:
    """Watches the generators, iterators and clocks that one forward uses."""

    def __init__(self) -> None:
        self._held: dict[int, tuple[Any, str, Any, str]] = {}  # id → value, its name, its state then, the user's line
        self._called: dict[str, Unrepeated] = {}

    def see(self, value: Any, words: str) -> None:
        """Note the state of a value before forward uses it."""
        owner = getattr(value, "__self__", None) if callable(value) and not isinstance(value, type) else None
        value = owner if is_generator(owner) or is_iterator(owner) else value  # of ``rng.uniform``
        if isinstance(value, functools.partial):
            self.called(sys._getframe(1), value, given=0, from_user=True)
        if id(value) not in self._held and (is_generator(value) or is_iterator(value)):
            self._held[id(value)] = value, words, state_of(value), user_line()

    def skip(self, value: Any) -> None:
        """Leave out a value that forward has made."""
        if is_generator(value) or is_iterator(value):
            self._held.setdefault(id(value), (value, "", None, ""))

    def called(
        self,
        frame: types.FrameType | None,
        function: Any,
        first: Any = None,
        given: int | None = None,
        from_user: bool = False,
    ) -> None:
        """Note a call from a frame if it reads a clock, or asks the system for randomness.

        Args:
            given: the number of arguments; ``None``: those of the call that the frame makes now.
            from_user: whether the call is from the innermost frame of the user's behind this one.
        """
        before = 0
        while isinstance(function, functools.partial):
            before, function = before + len(function.args), function.func
        name = clock_named(function, lambda: before + (given_in(frame) if given is None else given))
        name = name or _of_system(function, first)
        while from_user and name and frame is not None and not is_users(frame.f_code.co_filename):
            frame = frame.f_back
        while frame is not None and name.startswith("os.") and frame.f_code.co_filename.endswith(RANDOM_FILES):
            frame = frame.f_back
        if name and frame is not None and is_users_frame(frame) and name not in self._called:
            remedy, line = "read it before the call, and pass it on", _line_of(frame)
            if name == "os.urandom" and any(row.line == line for row in self._called.values()):
                return  # it is how a source that has a name draws
            self._called[name] = Unrepeated(f"reads {name}()", f"{name}()", remedy, line)

    def begins(self, frame: types.FrameType) -> None:
        """Note a function that begins if it asks the system for randomness, for whoever has called it."""
        if frame.f_code in SYSTEM_CODES or (frame.f_code is SEED and frame.f_locals["a"] is None):
            self.called(frame, os.urandom)

    def found(self) -> list[Unrepeated]:
        """Return what forward did, now that it has returned; drop all references."""
        held, self._held = list(self._held.values()), {}
        rows = list(self._called.values())
        for value, words, before, line in held:
            now = state_of(value)
            if not line and not words:
                continue
            if now is not UNKNOWN_STATE and now == before:
                continue
            if is_generator(value):
                rows.append(Unrepeated.drawn(f"{words}, {class_of(value)}", line))
            else:
                remedy = "take the next value before the call, and pass it to forward"
                rows.append(Unrepeated(f"advances {words}, {class_of(value)}", words, remedy, line))
        return rows


def _line_of(frame: types.FrameType) -> str:
    """Return the line of a frame; of generated code, such as a dataclass's ``__init__``, that of its caller."""
    caller: types.FrameType | None = frame
    while caller is not None and caller.f_code.co_filename.startswith("<"):
        caller = caller.f_back
    frame = caller if caller is not None and is_users(caller.f_code.co_filename) else frame
    return quoted(frame.f_code.co_filename, frame.f_lineno)


def _of_system(function: Any, first: Any) -> str:
    """Return the name of a source of randomness, or of a clock, of the system; "" for another function."""
    name, module = getattr(function, "__name__", ""), getattr(function, "__module__", None)
    owner = getattr(function, "__self__", None)
    if module in ("posix", "nt") and name in OF_SYSTEM:
        return f"os.{name}"
    if module == "uuid" and name in ("uuid1", "uuid4", "uuid6", "uuid7"):
        return f"uuid.{name}"
    of_system = isinstance(owner, random.SystemRandom) or isinstance(first, random.SystemRandom)
    return f"{'secrets' if module == 'secrets' else 'SystemRandom'}.{name}" if of_system or module == "secrets" else ""


def is_generator(value: Any) -> bool:
    """Return whether a value is a generator of random numbers of Python's or NumPy's."""
    if isinstance(value, random.Random):
        return not isinstance(value, random.SystemRandom)
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(
        value, (numpy.random.Generator, numpy.random.RandomState, numpy.random.BitGenerator)
    )


def is_iterator(value: Any) -> bool:
    """Return whether a value gives others one after the other, and is not at its start again afterwards."""
    cls = type(value)
    if isinstance(value, io.IOBase):
        return not value.closed and value.readable()
    return hasattr(cls, "__next__") and not isinstance(value, (torch.Tensor, torch.nn.Module))


def state_of(value: Any, depth: int = 0) -> Any:
    """Return where a generator or an iterator is, to compare; ``UNKNOWN_STATE`` if nothing tells."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python is to take the state of itertools away
            return _state(value, depth)
    except Exception:  # whatever an iterator of a library raises
        return UNKNOWN_STATE


def _state(value: Any, depth: int) -> Any:
    if isinstance(value, random.Random):
        return value.getstate()
    if is_generator(value):
        return _frozen(value.get_state(legacy=False) if hasattr(value, "get_state") else bits_of(value).state)
    if isinstance(value, io.IOBase):
        return value.tell()
    if isinstance(value, CALLING):
        return UNKNOWN_STATE
    if isinstance(value, types.GeneratorType):
        return "ended" if value.gi_frame is None else UNKNOWN_STATE
    if depth > 8:
        return UNKNOWN_STATE
    if "__dict__" in dir(type(value)) or hasattr(value, "__dict__"):
        parts: Any = vars(value)
    else:
        parts = value.__reduce__()
    states = tuple(_part(part, depth) for part in (parts.values() if isinstance(parts, dict) else parts))
    return UNKNOWN_STATE if any(state is UNKNOWN_STATE for state in states) else (type(value), states)


def _part(part: Any, depth: int) -> Any:
    if is_generator(part) or is_iterator(part):
        return state_of(part, depth + 1)
    if isinstance(part, tuple):
        return tuple(_part(each, depth + 1) for each in part)
    return part if isinstance(part, (int, float, str, bytes, range, type(None))) else id(part)


def bits_of(generator: Any) -> Any:
    """Return the bits that a generator of NumPy's draws from."""
    return getattr(generator, "bit_generator", generator)


def _frozen(state: Any) -> Any:
    if isinstance(state, dict):
        return tuple((key, _frozen(part)) for key, part in state.items())
    return state.tobytes() if hasattr(state, "tobytes") else state


def settings_of(model: torch.nn.Module) -> list[Callable[[], None]]:
    """Return functions that set the generators of a model, and the global ones, to what they are now."""
    generators: dict[int, Any] = {}
    for module in model.modules():
        for value in vars(module).values():
            if is_generator(value):
                generators[id(value)] = value
    return [functools.partial(random.setstate, random.getstate()), *_of_numpy(), *map(_setting, generators.values())]


def _of_numpy() -> Iterator[Callable[[], None]]:
    if "numpy" in sys.modules:
        numpy = sys.modules["numpy"]
        yield functools.partial(numpy.random.set_state, numpy.random.get_state())


def _setting(generator: Any) -> Callable[[], None]:
    if isinstance(generator, random.Random):
        return functools.partial(generator.setstate, generator.getstate())
    if hasattr(generator, "set_state"):
        return functools.partial(generator.set_state, generator.get_state())
    bits = bits_of(generator)
    return functools.partial(setattr, bits, "state", bits.state)
