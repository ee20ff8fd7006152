"""Describe Python values so that equal values have one description in all processes, and others have another one.

A number is described by its digits, a function by its code, a class by its methods, an object of the user's by its
class: what forward reads of it is guarded by itself. A value without such a description is refused: ``NotCached``.
"""

from __future__ import annotations

import collections
import contextvars
import datetime
import decimal
import enum
import fractions
import functools
import hashlib
import itertools
import logging
import pathlib
import re
import threading
import types
import uuid
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from autopar.cache.code import class_digest, code_digest, codes_in, codes_of_class
from autopar.cache.folder import NotCached
from autopar.capture.guards.namespaces import is_users_file
from autopar.capture.guards.places import MISSING
from autopar.capture.guards.values import (
    BUILTINS,
    FOREIGN,
    LARGEST,
    NAMESPACES,
    elements_of,
    is_container,
    is_scalar,
    is_small_array,
    is_users_object,
    members,
)
from autopar.torch_private import OpOverload, OpOverloadPacket

MOST_BYTES = 2**26  # of a tensor whose contents are described
DEEPEST = 16
PRINTED = (  # classes of the standard library whose text is their value
    re.Pattern, datetime.date, datetime.time, datetime.timedelta, datetime.tzinfo, decimal.Decimal, fractions.Fraction,
    pathlib.PurePath, uuid.UUID,
)  # fmt: skip
CLASS_ALONE = (type(threading.Lock()), type(threading.RLock()))  # whose contents decide nothing
TYPING = ("typing", "types")  # Python modules of annotations, whose text is their value


class Descriptions:
    """Describes the values that one model's forward reads.

    Attributes:
        codes: the ids of the code objects that descriptions depend on.

    Args:
        modules: the model's modules, once for each name.
        skipped: whether a value is compared elsewhere, as the model's parameters are.
        ran: the ids of the code objects that forward ran, if it did in this process.
    """

    def __init__(
        self, modules: list[torch.nn.Module], skipped: Callable[[Any], bool], ran: Collection[int] | None = None
    ) -> None:
        self._skipped, self._ran = skipped, ran
        self._modules: dict[int, int] = {}
        for number, module in enumerate(modules):
            self._modules.setdefault(id(module), number)
        self._known: dict[int, tuple[Any, Any]] = {}
        self._classes: dict[type, Any] = {}
        self._open: list[int] = []
        self.codes: set[int] = set()

    def of(self, value: Any) -> Any:
        """Return the description of a value, as JSON.

        Raises:
            NotCached: it has none.
        """
        if value is MISSING:
            return "missing"
        if self._skipped(value):
            return "of the model"
        if isinstance(value, enum.Enum):
            return ["enum", *self.named(type(value)), value.name, repr(value.value)]
        if is_scalar(value):
            return [type(value).__name__, repr(value)]
        if id(value) in self._open:
            return ["again", len(self._open) - self._open.index(id(value))]
        known = self._known.get(id(value))
        if known is not None:
            return known[1]
        if len(self._open) > DEEPEST:
            raise NotCached("forward reads a value that is nested too deeply to be described")
        self._open.append(id(value))
        try:
            made = self._of(value)
        finally:
            self._open.pop()
        if isinstance(value, (types.FunctionType, type)) and not self._open:
            self._known[id(value)] = value, made
        return made

    def _of(self, value: Any) -> Any:
        if isinstance(value, torch.nn.Module):
            if id(value) not in self._modules:
                raise NotCached(f"forward reads a module that is not part of the model: {type(value).__name__}")
            return ["module", self._modules[id(value)]]
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if is_small_array(value):
            dtype, shape, content = elements_of(value)
            return ["array", dtype, list(shape), hashlib.sha256(content).hexdigest()]
        if is_container(value):
            return self._container(value)
        if isinstance(value, type):
            return self.cls(value)
        if isinstance(value, types.ModuleType):
            return ["python module", value.__name__]
        return self._function(value) if callable(value) or isinstance(value, property) else self._object(value)

    def _tensor(self, tensor: torch.Tensor) -> Any:
        facts = ["tensor", type(tensor).__name__, str(tensor.dtype), list(tensor.shape), list(tensor.stride()),
                 str(tensor.device), tensor.requires_grad]  # fmt: skip
        if tensor.is_meta:
            return facts
        if tensor.nbytes > MOST_BYTES or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            raise NotCached(f"forward reads a tensor of shape {list(tensor.shape)} that is not part of the model")
        raw = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        return [*facts, hashlib.sha256(raw).hexdigest()]

    def _container(self, value: Any) -> Any:
        inside = vars(value) if isinstance(value, NAMESPACES) else value
        if len(inside) > LARGEST:
            raise NotCached(f"forward reads a {type(value).__name__} of {len(inside)} entries, more than {LARGEST}")
        kind = self.cls(type(value))
        if isinstance(value, (set, frozenset)):
            return [kind, sorted(repr(self.of(member)) for member in value)]
        keys = [self.of(key) for key in inside] if isinstance(inside, Mapping) else None
        default = getattr(value, "default_factory", None) if isinstance(value, collections.defaultdict) else None
        return [kind, keys, [self.of(member) for member in members(value)], default and self.of(default)]

    def cls(self, cls: type) -> Any:
        """Describe a class by its name and the code of its methods."""
        if cls.__module__.partition(".")[0] in FOREIGN:
            return ["class of a library", *self.named(cls)]
        if cls not in self._classes:
            self.codes.update(id(code) for code in codes_of_class(cls))
            self._classes[cls] = ["class", *self.named(cls), class_digest(cls)]
        return self._classes[cls]

    @staticmethod
    def named(value: Any) -> list[str]:
        """Return the names by which a class or a function is found."""
        return [str(getattr(value, "__module__", None)), str(getattr(value, "__qualname__", None))]

    def _function(self, value: Any) -> Any:
        if isinstance(value, types.FunctionType):
            if not is_users_file(value.__code__.co_filename):
                cells = [self._cell(cell) for cell in value.__closure__ or ()] if value.__closure__ else []
                return ["function of a library", *self.named(value), code_digest(value.__code__), cells]
            self.codes.update(id(code) for code in codes_in(value.__code__))
            cells = [self._cell(cell) for cell in value.__closure__ or ()]
            return ["function", *self.named(value), code_digest(value.__code__), self.of(value.__defaults__),
                    self.of(value.__kwdefaults__), cells]  # fmt: skip
        if isinstance(value, types.MethodType):
            return ["method", self.of(value.__func__), self.of(value.__self__)]
        if isinstance(value, functools.partial):
            return ["partial", self.of(value.func), self.of(value.args), self.of(value.keywords)]
        if isinstance(value, (staticmethod, classmethod)):
            return [type(value).__name__, self.of(value.__func__)]
        if isinstance(value, property):
            return ["property", *(self.of(part) for part in (value.fget, value.fset, value.fdel))]
        if isinstance(value, (OpOverload, OpOverloadPacket)):
            return ["op", str(value)]
        if isinstance(value, BUILTINS):
            owner = getattr(value, "__self__", None)
            if owner is not None and not isinstance(owner, (types.ModuleType, type)):
                return ["builtin of", self.of(owner), value.__name__]
            return ["builtin", *self.named(value)]
        return self._object(value)

    def _cell(self, cell: types.CellType) -> Any:
        try:
            return self.of(cell.cell_contents)
        except ValueError:
            return "empty"

    def _object(self, value: Any) -> Any:
        if isinstance(value, PRINTED):
            return [*self.named(type(value)), repr(value)]
        if type(value).__module__ in TYPING:
            return [*self.named(type(value)), repr(value)]
        if isinstance(value, CLASS_ALONE):
            return self.named(type(value))
        if isinstance(value, logging.Logger):
            return ["logger", value.name, value.getEffectiveLevel(), value.disabled]
        if isinstance(value, contextvars.ContextVar):
            try:
                return ["context variable", value.name, self.of(value.get())]
            except LookupError:
                return ["context variable", value.name]
        if isinstance(value, torch.jit.ScriptFunction):
            return ["script", value.qualified_name, value.code]
        if is_users_object(value):
            return ["object", *self.cls(type(value))]
        wrapped = getattr(value, "__wrapped__", None)
        if isinstance(wrapped, types.FunctionType):  # of functools.lru_cache
            filled = hasattr(value, "cache_info") and value.cache_info().currsize
            if filled and self._ran is not None and id(wrapped.__code__) not in self._ran:
                raise NotCached(f"{wrapped.__qualname__} gives what it has computed before forward")
            return ["wrapped", *self.named(type(value)), self.of(wrapped)]
        attributes = getattr(value, "__dict__", None)
        if type(value).__module__.partition(".")[0] == "torch" and isinstance(attributes, dict):
            return [*self.named(type(value)), [[name, self.of(part)] for name, part in attributes.items()]]
        name = f"{type(value).__module__}.{type(value).__qualname__}"
        raise NotCached(f"forward reads a {name}, which cannot be compared with that of another process")


def described_options(value: Any) -> Any:
    """Describe an option that the user gave, or a table of them; ``NotCached`` for what has no text of its own."""
    if value is None or isinstance(value, (bool, int, float, complex, str, torch.dtype, torch.device)):
        return [type(value).__name__, repr(value)]
    if isinstance(value, Mapping):
        return ["dict", [[described_options(key), described_options(part)] for key, part in value.items()]]
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, [described_options(part) for part in itertools.islice(value, None)]]
    if isinstance(value, (set, frozenset)):
        return ["set", sorted(repr(described_options(part)) for part in value)]
    if isinstance(value, pathlib.PurePath):
        return ["path", str(value)]
    if hasattr(type(value), "__dataclass_fields__"):
        fields = {name: getattr(value, name) for name, field in type(value).__dataclass_fields__.items()
                  if field.compare or name == "compared"}  # fmt: skip
        return [type(value).__qualname__, described_options(fields)]
    if type(value).__module__.startswith("torch.distributed.tensor"):  # placements
        return [type(value).__name__, repr(value)]
    raise NotCached(f"an option is a {type(value).__module__}.{type(value).__qualname__}")
