"""Report which functions run, and find what they read: globals, closures and defaults, also of those they may call."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import Function

from autopar.capture.guards.bytecode import modules_named, names_in
from autopar.capture.guards.closures import function_of, functions_of
from autopar.capture.guards.namespaces import Namespaces, is_own, is_users_file, is_users_frame
from autopar.capture.guards.places import GuardedPlace
from autopar.capture.guards.values import FUNCTIONS, frozen, is_container, is_named, is_scalar
from autopar.torch_private import TorchDispatchMode

# -- ran ---------------------------------------------------------------------------------------------------------------
#
# Report which functions run: each once, with its frame, when it begins.
#
# From Python 3.12 on this uses ``sys.monitoring`` and switches the event off for a function after its first report,
# which costs nearly nothing. Before, Python calls a profile function at each call. That function is off while torch
# dispatches an op: a trace spends most of its time there, and no code of the model runs there.


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


# -- functions ---------------------------------------------------------------------------------------------------------


# methods that Python calls without an attribute lookup
SPECIAL = ("__call__", "__getitem__", "__len__", "__iter__", "__contains__", "__bool__", "__getattr__")
OF_FUNCTIONS = ("forward", "backward", "setup_context", "jvp", "vmap")  # called by ``apply`` of an autograd.Function
TENSORS = (torch.Tensor, torch.nn.Parameter)  # and no tensor of a trace
WRAPPED = (types.MethodType, functools.partial, staticmethod, classmethod, property)


class Functions:
    """Collect the Python values that functions may read. Each function is examined once.

    Attributes:
        watched: whether ``begins`` is called for each function that runs; then a function is only examined when it
            runs.
        code: the code objects of the user's functions that were examined.
        places: the globals, attributes of modules and classes, closure variables and defaults that they may read.
        first: the frozen value of each of these places before forward read it.
        named: the other such places, which hold functions, classes and Python modules of libraries, and these.

    Args:
        follow: called with each value that a function may read and with its name, before the function reads the value's
            attributes.
        others: whether a value inside of a container is compared elsewhere, as the model's parameters are.
        skipped: identities of places that are left out.
    """

    def __init__(
        self,
        follow: Callable[[Any, str], None],
        others: Callable[[Any], bool],
        skipped: Collection[tuple[int, str]] = (),
    ) -> None:
        self._others, self._skipped = others, skipped
        self.places: dict[tuple[int, str], GuardedPlace] = {}
        self.named: dict[tuple[int, str], tuple[GuardedPlace, Any]] = {}
        self.first: dict[tuple[int, str], Any] = {}
        self.namespaces = Namespaces(self._note)
        self._follow = follow
        self._examined: dict[int, Any] = {}
        self.code: dict[int, types.CodeType] = {}
        self.watched = False
        # functions by their code, until it runs
        self._waiting: dict[int, list[tuple[types.FunctionType, type | None]]] = {}
        # code that ran and whose function was not found; whether it closes over values
        self._unfound: dict[int, tuple[types.CodeType, bool]] = {}
        self._open: list[tuple[Any, type | None, str]] | None = None
        self._of_module: set[int] = set()  # code of methods of modules that ran
        self._importing: dict[int, types.CodeType] = {}  # code whose imports are known
        self._unloaded: set[str] = set()  # modules that a function may import, and that nobody has loaded yet

    def look_into(self, function: Any, cls: type | None = None, words: str = "") -> None:
        """Examine a function; ``cls``: the class of which it is a method; ``words``: its name in messages."""
        if self._open is not None:  # another function is being examined
            self._open.append((function, cls, words))
            return
        self._open = [(function, cls, words)]
        try:
            while self._open:
                self._look_into(*self._open.pop())
        finally:
            self._open = None

    def look_into_class(self, cls: type) -> None:
        """Examine the methods of a class that Python calls without an attribute lookup."""
        if id(cls) not in self._examined:
            self._examined[id(cls)] = cls
            autograd = issubclass(cls, Function)
            for base in cls.__mro__:
                for name in (*SPECIAL, *OF_FUNCTIONS) if autograd else SPECIAL:
                    if isinstance(vars(base).get(name), (types.FunctionType, staticmethod, classmethod)):
                        self.look_into(vars(base)[name], cls)

    def begins(self, frame: types.FrameType) -> None:
        """Examine the function that begins to run in this frame."""
        code = frame.f_code
        if not is_users_frame(frame):
            return
        if str(frame.f_globals.get("__name__")).startswith("namedtuple_"):
            return  # a named tuple is made in a namespace of its own, which holds no value
        self.code[id(code)] = code
        if _is_method(code, type(frame.f_locals[code.co_varnames[0]]) if code.co_argcount else None):
            self._of_module.add(id(code))
        waiting = self._waiting.pop(id(code), [])
        for function, cls in waiting:
            self.look_into(function, cls)
        if (running := function_of(frame)) is not None:
            self.look_into(running)
            return
        self._globals(code, frame.f_globals, id(code) in self._of_module)
        closed = any(_is_guarded(frame.f_locals[name]) for name in code.co_freevars if name in frame.f_locals)
        if closed or (
            not waiting
            and (code.co_argcount or code.co_kwonlyargcount)
            and not code.co_name.endswith(("comp>", "genexpr>"))
        ):
            self._unfound[id(code)] = code, closed

    def end(self) -> None:
        """Examine the functions that ran and were not found before, and drop all references.

        Drop the functions, because some may hold results of forward.
        """
        for name in sorted(self._unloaded & sys.modules.keys()):
            if is_own(sys.modules[name]):
                self._follow(sys.modules[name], name)
        self._unloaded.clear()
        examined = {
            id(function.__code__) for function in self._examined.values() if isinstance(function, types.FunctionType)
        }
        codes = [code for code, closed in self._unfound.values() if closed or id(code) not in examined]
        for function in functions_of(codes) if codes else ():
            self.look_into(function)
        self._unfound.clear()
        self._waiting.clear()
        self._examined.clear()

    # -- one function --------------------------------------------------------------------------------------------------

    def _look_into(self, function: Any, cls: type | None, words: str) -> None:
        while isinstance(function, WRAPPED):
            if isinstance(function, functools.partial):
                self._partial(function, words)
                function = function.func
            elif isinstance(function, property):
                function = function.fget
            else:
                if isinstance(function, types.MethodType):
                    self._follow(function.__self__, words)
                function = function.__func__
        if id(function) in self._examined or not isinstance(function, types.FunctionType):
            return
        code = function.__code__
        users = is_users_file(code.co_filename)
        if users and self.watched and id(code) not in self.code and not is_own(function):
            self._waiting.setdefault(id(code), []).append((function, cls))
            return
        self._examined[id(function)] = function
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=False):
            try:
                value = cell.cell_contents
            except ValueError:
                continue
            if users:
                self._note(GuardedPlace(cell, name, f"{name} of the closure {function.__qualname__}"), value)
            elif isinstance(value, FUNCTIONS):  # a decorated function
                self.look_into(value, cls)
        if users:
            self.code[id(code)] = code
            self._defaults(function)
            self._globals(code, function.__globals__, id(code) in self._of_module or _is_method(code, cls))
            self._methods(names_in(code).names, cls)
            if vars(function):
                self.namespaces.add(function)

    def _partial(self, partial: functools.partial[Any], words: str) -> None:
        for name in ("args", "keywords"):
            if getattr(partial, name):
                self._note(
                    GuardedPlace(partial, name, f"{words or 'a partial'}.{name}", computed=True), getattr(partial, name)
                )

    def _defaults(self, function: types.FunctionType) -> None:
        words = f"the defaults of {function.__qualname__}"
        if function.__defaults__:
            self._note(GuardedPlace(function, "__defaults__", words, computed=True), function.__defaults__)
        if function.__kwdefaults__:
            self._note(GuardedPlace(function, "__kwdefaults__", words, computed=True), function.__kwdefaults__)

    def _globals(self, code: types.CodeType, namespace: dict[str, Any], of_module: bool) -> None:
        found = names_in(code)
        self.namespaces.add_names(found, of_module)
        self._imported(code, namespace)
        for name in sorted(found.loaded & namespace.keys()):
            value = namespace[name]
            self._note(
                GuardedPlace(namespace, name, f"the global {name} of {namespace.get('__name__', 'the program')}"), value
            )
            if (
                isinstance(value, type)
                or (isinstance(value, types.ModuleType) and is_users_file(getattr(value, "__file__", None) or ""))
            ) and not is_own(value):
                self._attributes(value, found.attributes | found.own)

    def _imported(self, code: types.CodeType, namespace: Mapping[str, Any]) -> None:
        """Follow the user's modules that a function imports. Those that it loads first are followed at the end."""
        if id(code) in self._importing:
            return
        self._importing[id(code)] = code
        for name in modules_named(names_in(code), str(namespace.get("__package__") or "")):
            module = sys.modules.get(name)
            if module is None:
                self._unloaded.add(name)
            elif is_own(module):
                self._follow(module, name)

    def _attributes(self, owner: Any, names: Set[str]) -> None:
        """Note the values of a library's module or class that a function can read by these names."""
        for base in owner.__mro__ if isinstance(owner, type) else (owner,):
            root = base.__module__ if isinstance(base, type) else base.__name__
            attributes = self.namespaces.attributes_of(base)
            for name in (
                sorted(names & attributes.keys())
                if root.partition(".")[0] not in ("torch", "typing", "abc", "enum")
                else ()
            ):
                value = attributes[name]
                if not name.startswith("__") and (
                    is_scalar(value) or is_container(value) or not isinstance(base, type)
                ):
                    self._note(GuardedPlace(attributes, name, f"{owner.__name__}.{name}", owner=base), value)

    def _methods(self, names: Iterable[str], cls: type | None) -> None:
        """Examine the methods of its class that a method may call."""
        called = set(names)
        for base in cls.__mro__ if cls is not None else ():
            for name in sorted(called & vars(base).keys()):
                if isinstance(vars(base)[name], (*FUNCTIONS, *WRAPPED)):
                    self.look_into(vars(base)[name], cls)

    def _note(self, place: GuardedPlace, value: Any) -> None:
        function = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
        users = isinstance(function, types.FunctionType) and is_users_file(function.__code__.co_filename)
        own = isinstance(value, (type, types.ModuleType)) and is_own(value)
        if users or own or _is_guarded(value):
            self._keep(place, value)
        elif is_named(value):
            self.named.setdefault(place.identity, (place, value))
        self._follow(value, place.words)

    def _keep(self, place: GuardedPlace, value: Any) -> None:
        if place.identity not in self.places and place.identity not in self._skipped:
            self.places[place.identity] = place
            self.first[place.identity] = frozen(value, self._others)


def _is_guarded(value: Any) -> bool:
    """Return whether a place with this value is guarded.

    Functions, classes and Python modules of libraries are not, nor modules of the model, nor tensors of a trace.
    """
    if isinstance(value, torch.Tensor):
        return type(value) in TENSORS
    return not (is_named(value) or isinstance(value, torch.nn.Module))


def _is_method(code: types.CodeType, cls: type | None) -> bool:
    """Return whether code is that of a method of a class of modules."""
    if cls is None or not issubclass(cls, torch.nn.Module):
        return False
    found = (vars(base).get(code.co_name) for base in cls.__mro__)
    return any(isinstance(each, types.FunctionType) and each.__code__ is code for each in found)
