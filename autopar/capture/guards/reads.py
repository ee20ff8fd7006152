"""Record the Python values that a forward reads: attributes of modules and objects, globals, closures."""

from __future__ import annotations

import contextlib
import dis
import inspect
import itertools
import threading
import types
import weakref
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch

from autopar.capture.guards.functions import WRAPPED, Functions, Ran, running_shown
from autopar.capture.guards.namespaces import is_own, is_users_file
from autopar.capture.guards.places import MISSING, UNKNOWN, Guard, GuardedPlace
from autopar.capture.guards.unrepeated import Watch, clocks_shown
from autopar.capture.guards.values import (
    DEEPEST,
    FUNCTIONS,
    LARGEST,
    frozen,
    is_container,
    is_scalar,
    is_users_object,
    members,
)
from autopar.capture.provenance import is_users, quoted, user_line

HOOKS = ("_backward_pre_hooks", "_backward_hooks", "_forward_hooks", "_forward_pre_hooks")
SKIPPED = frozenset(  # structure, flags and hooks, which are compared separately; and the machinery of a call
    {"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "training", "_call_impl",
     "_wrapped_call_impl", "_compiled_call_impl", "_slow_forward", *HOOKS, "_is_full_backward_hook",
     "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs",
     "_maybe_warn_non_full_backward_hook", "_get_backward_hooks", "_get_backward_pre_hooks",
     # weak references to a recurrent layer's parameters: a reference held here would prevent the swap
     "_flat_weight_refs"}
)  # fmt: skip


class Reads:
    """Records what one forward of one model reads.

    Attributes:
        changed: the values that forward both reads and changes; they are not guarded: in words → the name alone.

    Args:
        inputs: identities of the places whose floats are inputs of the trace.
    """

    def __init__(self, model: torch.nn.Module, inputs: Collection[tuple[int, str]] = ()) -> None:
        self._modules = list(model.modules())
        self._model_tensors = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
        self._paths = {id(module): path for path, module in reversed(list(model.named_modules(remove_duplicate=False)))}
        self._reached: dict[int, tuple[Any, str]] = {}  # id → (object whose attributes are recorded, its name)
        self._read: dict[tuple[int, str], tuple[Any, str, Any, str]] = {}  # owner, name, frozen value, the user's line
        self._made: dict[int, torch.nn.Module] = {}  # id → a module that forward has made, as a slice of a ModuleList
        self._inputs = inputs
        self._functions = Functions(self._follow, self.skipped, inputs)
        self._replaced: dict[tuple[Any, str], Any] = {}  # class, name of a method → its own method before, if any
        self._written: set[tuple[int, str]] = set()  # owner, name of what forward writes before it reads it
        self.watch = Watch()
        self._thread = 0
        self.changed: dict[str, str] = {}

    def skipped(self, value: Any) -> bool:
        """Return whether a value is a parameter or buffer of the model, which are compared elsewhere."""
        return id(value) in self._model_tensors

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record attribute reads and the functions that run, while the ``with`` block runs.

        The attributes are those of the model's modules and of the objects that they hold.
        """
        self._thread = threading.get_ident()
        self._record_reads_of(torch.nn.Module)
        try:
            with (
                clocks_shown(self.watch.called),
                running_shown(self._begins, self.watch.called) as self._functions.watched,
            ):
                for hook in (
                    hook for module in self._modules for name in HOOKS for hook in vars(module)[name].values()
                ):
                    self._functions.look_into(hook)
                yield
            self._functions.end()
        finally:
            for (cls, name), original in self._replaced.items():
                if original is None:
                    delattr(cls, name)
                else:
                    setattr(cls, name, original)
            self._replaced = {}

    def guards(self) -> list[Guard]:
        """Return a guard for each place that was read, with the value that it has when the model has been restored."""
        places: dict[tuple[int, str], GuardedPlace] = {}
        first = dict(self._functions.first)
        restored = set()
        for owner, name, then, line in self._read.values():
            for place in self._places(owner, name, then, line):
                places.setdefault(place.identity, place)
                first.setdefault(place.identity, then)
                if isinstance(owner, torch.nn.Module):
                    restored.add(place.identity)
        for identity, place in self._functions.places.items():
            places.setdefault(identity, place)
        for value, words in self._reached.values():
            places.setdefault(
                (id(value), "__class__"), GuardedPlace(value, "__class__", f"{words}.__class__", computed=True)
            )
        guards = []
        for identity, place in places.items():
            guard = Guard.of(place, self.skipped)
            if first.get(identity, UNKNOWN) in (UNKNOWN, guard.frozen) or guard.value is MISSING:
                guards.append(guard)
            elif identity not in restored:  # in a restored place, forward has written the value before it read it
                self.changed[place.words] = place.key
        return guards

    @property
    def ran(self) -> Ran:
        """What ran; to be read after ``guards``."""
        functions = self._functions
        return Ran(tuple(functions.code.values()), functions.watched, named=tuple(functions.named.values()))

    def is_written_first(self, words: str) -> bool:
        """Return whether forward gives an attribute of a module a value before it reads it."""
        path, _, name = words.rpartition(".")
        owners = (owner for owner, known in self._paths.items() if known == path)
        return any((owner, name) in self._written for owner in owners)

    def line_of(self, attribute: str) -> str:
        """Return the first line of the user's functions that names an attribute or a global."""
        for code in self._functions.code.values():
            at = code.co_firstlineno
            for instruction in dis.get_instructions(code):
                at = _line_at(instruction) or at
                if instruction.argval == attribute and is_users(code.co_filename):
                    return quoted(code.co_filename, at)
        return ""

    def uses(self, attribute: str) -> bool:
        """Return whether a function of the user reads an attribute or a global, other than to write it back.

        ``self.calls += 1`` and ``self.hits[k] += 1`` read and write in one statement, and ``self.seen.append(1)`` only
        writes; they do not count.
        """
        return any(_uses(code, attribute) for code in self._functions.code.values())

    # -- while forward runs --------------------------------------------------------------------------------------------

    def _record_reads_of(self, cls: Any) -> None:
        if any((base, "__getattribute__") in self._replaced for base in cls.__mro__):
            return
        original: Callable[[Any, str], Any] = cls.__getattribute__
        record, thread = self._record, threading.get_ident

        def recorded(owner: Any, name: str) -> Any:
            try:
                value = original(owner, name)
            except AttributeError:
                if thread() == self._thread:
                    record(owner, name, MISSING)
                raise
            if thread() == self._thread:
                record(owner, name, value)
            return value

        set_original = cls.__setattr__

        def written(owner: Any, name: str, value: Any) -> None:
            if thread() == self._thread and (id(owner), name) not in self._read:
                self._written.add((id(owner), name))
            set_original(owner, name, value)

        for name, method in (("__getattribute__", recorded), ("__setattr__", written)):
            before = vars(cls).get(name)
            try:
                setattr(cls, name, method)
            except TypeError:  # a class of an extension
                return
            self._replaced[cls, name] = before

    def _begins(self, frame: types.FrameType) -> None:
        self.watch.begins(frame)
        self._functions.begins(frame)

    def _record(self, owner: Any, name: str, value: Any) -> None:
        if name in SKIPPED or name.startswith("__") or (id(owner), name) in self._read:
            return
        is_module = isinstance(owner, torch.nn.Module)
        if is_module and name == "call_super_init":  # ``Module.__init__`` alone reads it, so that forward makes it now
            self._made[id(owner)] = owner
        if id(owner) in self._made:
            return
        if (
            not (is_module and type(owner) is not torch.nn.Module)
            and id(owner) not in self._reached
            and id(owner) not in self._paths
        ):
            return  # forward has made it, or it is the module in which a trace keeps constants
        if self._inputs and (id(_dict_of(owner)), name) in self._inputs:
            return
        if is_module and value is MISSING:
            attributes = object.__getattribute__(owner, "__dict__")
            if any(name in attributes.get(kind, ()) for kind in ("_parameters", "_buffers", "_modules")):
                return
        cls = type(owner)
        self._functions.namespaces.add(cls)
        if (id(owner), name) in self._written:  # what forward has made itself
            self.watch.skip(value)
        self.watch.see(value, f"{self._words(owner)}{name}")
        if isinstance(value, FUNCTIONS):
            self._functions.look_into(value, cls)
        elif isinstance(static := inspect.getattr_static(cls, name, None), property):
            self._functions.look_into(static, cls)
        # the containers of a module hold stand-ins during a trace
        comparable = is_scalar(value) or value is MISSING or (is_container(value) and not is_module)
        then = frozen(value, self.skipped) if comparable else UNKNOWN
        self._read[id(owner), name] = (
            owner,
            name,
            then,
            user_line() if is_scalar(value) or isinstance(value, torch.Tensor) else "",
        )
        self._follow(value, f"{self._words(owner)}{name}")

    def _follow(self, value: Any, words: str, depth: int = 0) -> None:
        """Record attribute reads of an object from now on, and of objects in a container; examine a function."""
        if isinstance(value, (*FUNCTIONS, *WRAPPED)):
            self.watch.see(value, words)
            self._functions.look_into(value, words=words)
        elif isinstance(value, (type, types.ModuleType)):
            self._functions.namespaces.add(value)
            if isinstance(value, type) and issubclass(value, torch.autograd.Function) and is_own(value):
                self._functions.look_into_class(value)
        elif not is_scalar(value):
            self.watch.see(value, words)
            if is_container(value) and depth <= DEEPEST:
                for k, member in enumerate(itertools.islice(members(value), LARGEST)):
                    if not isinstance(member, torch.Tensor):
                        self._follow(member, f"{words}[{k}]", depth + 1)
            if isinstance(value, weakref.ref):
                self._follow(value(), f"{words}()", depth)
            if is_users_object(value) and id(value) not in self._reached:
                self._reached[id(value)] = value, words
                self._record_reads_of(type(value))
                self._functions.look_into_class(type(value))

    # -- afterwards ----------------------------------------------------------------------------------------------------

    def _words(self, owner: Any) -> str:
        if isinstance(owner, torch.nn.Module):
            path = self._paths.get(id(owner))
            return f"{type(owner).__name__}." if path is None else f"{path}." if path else ""
        return f"{self._reached[id(owner)][1]}."

    def _places(self, owner: Any, name: str, then: Any, line: str) -> Iterator[GuardedPlace]:
        """Yield the places of an attribute: the object's dict, its class, or the object itself.

        It is the object itself if the attribute is computed.
        """
        words = f"{self._words(owner)}{name}"
        attributes = _dict_of(owner)
        static = inspect.getattr_static(type(owner), name, MISSING)
        absent = then is not UNKNOWN and then == frozen(MISSING)
        if attributes is not None and (name in attributes or static is not MISSING or absent):
            if not isinstance(static, property):
                yield GuardedPlace(attributes, name, words, line=line)
            if name in attributes:
                return
        if static is MISSING or isinstance(static, types.MemberDescriptorType):
            if not absent or attributes is None:
                yield GuardedPlace(owner, name, words, computed=True)
            return
        cls = next(base for base in type(owner).__mro__ if name in vars(base))
        users = not isinstance(static, FUNCTIONS) or is_users_file(
            getattr(getattr(static, "__code__", None), "co_filename", "")
        )
        if users and not isinstance(static, (property, classmethod, staticmethod)):
            yield GuardedPlace(self._functions.namespaces.attributes_of(cls), name, words, owner=cls)


# the instructions with which a statement ends
ENDS = ("STORE_", "DELETE_", "RETURN_", "POP_", "YIELD_", "RAISE_")
LOADS = ("LOAD_ATTR", "LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF")
STORES = ("STORE_ATTR", "STORE_GLOBAL", "STORE_NAME", "STORE_DEREF")
ADDING = frozenset({"append", "appendleft", "extend", "insert", "add", "update", "clear"})  # methods that only write
COPIES = ("COPY", "DUP_TOP_TWO")  # of ``hits[k] += 1``, directly behind ``hits`` and ``k``


def _uses(code: types.CodeType, name: str) -> bool:
    """Return whether a statement reads an attribute or a global and does not end with writing it."""
    read = adds = False
    found = list(dis.get_instructions(code))
    for k, instruction in enumerate(found):
        op, value = instruction.opname, instruction.argval
        if op in LOADS and value == name:
            after = found[k + 1 : k + 3]
            method = bool(after) and after[0].opname in ("LOAD_METHOD", "LOAD_ATTR") and after[0].argval in ADDING
            if method or (len(after) == 2 and after[0].opname.startswith("LOAD_") and after[1].opname in COPIES):
                adds = True
            else:
                read = True
        elif op in STORES and value == name:
            read = False
        elif op.startswith(ENDS):
            if read or (adds and op not in ("POP_TOP", "STORE_SUBSCR")):
                return True
            adds = False
    return read


def _line_at(instruction: dis.Instruction) -> int | None:
    starts: Any = instruction.starts_line  # from Python 3.13 on this is a truth
    line: int | None = getattr(instruction, "line_number", None) if isinstance(starts, bool) else starts
    return line


def _dict_of(owner: Any) -> dict[str, Any] | None:
    try:
        return object.__getattribute__(owner, "__dict__")
    except AttributeError:
        return None
