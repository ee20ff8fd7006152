"""Find an object again in another process: by the way that leads to it from the model, or from a Python module.

["module", 3, "attr", "config"]                              the config of the model's fourth module
["python", "transformers.masking_utils", "attr", "TABLE"]    a global
["class", "models", "Net"]                                   a class
["python", "models", "attr", "wrapped", "cell", 1]           what a closure holds
"""

from __future__ import annotations

import collections
import functools
import gc
import itertools
import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from autopar.cache.folder import NotCached
from autopar.capture.guards.namespaces import is_own, is_users_file
from autopar.capture.guards.reads import HOOKS
from autopar.capture.guards.values import NAMESPACES, is_container, is_users_object

Address = tuple[Any, ...]  # the root, and the steps from there
MOST = 200_000  # objects that are looked at
PLAIN = (list, tuple, collections.deque)
WIDEST = 1024  # members of a container that are looked at
MODULE, PYTHON, CLASS = "module", "python", "class"


class Addresses:
    """Gives addresses to the places that hold what forward reads.

    Args:
        modules: the model's modules, once for each name.
        python: the names of the Python modules whose functions ran.
        cells: the closures' variables among the places.
    """

    def __init__(
        self, modules: Sequence[torch.nn.Module], python: Sequence[str], cells: Sequence[types.CellType] = ()
    ) -> None:
        self._modules, self._python, self._cells = list(modules), python, cells
        self._searched = False
        self._found: dict[int, Address] = {}
        self._kept: list[Any] = []  # so that ids stay their own
        for number, module in enumerate(self._modules):
            self._keep(vars(module), (MODULE, number, "vars"))
            self._keep(module, (MODULE, number))

    def _keep(self, value: Any, address: Address) -> bool:
        if id(value) in self._found:
            return False
        self._found[id(value)] = address
        self._kept.append(value)
        return True

    def of(self, holder: Any, owner: Any = None) -> Address:
        """Return the address of a holder. ``owner``: the class whose attributes it is, if it is those of one.

        Raises:
            NotCached: no way leads to it.
        """
        if isinstance(owner, type):
            return (*class_address(owner), "vars")
        if isinstance(holder, type):
            return class_address(holder)
        name = holder.get("__name__") if isinstance(holder, dict) else None
        if isinstance(name, str) and vars(sys.modules.get(name, types.ModuleType(""))) is holder:
            return (PYTHON, name, "vars")
        if id(holder) not in self._found:
            self._search()
        if id(holder) not in self._found:
            raise NotCached(f"no way leads from the model to {_shown(holder)}")
        return self._found[id(holder)]

    def _search(self) -> None:
        """Follow all ways from the model's modules, and from the Python modules whose functions ran."""
        if self._searched:
            return
        self._searched = True
        roots: list[tuple[Any, Address]] = [(module, (MODULE, k)) for k, module in enumerate(self._modules)]
        roots += [(sys.modules[name], (PYTHON, name)) for name in self._python if name in sys.modules]
        self._follow(roots)
        if missing := self._missing():
            self._follow(_named_functions(missing))

    def _missing(self) -> list[types.CellType]:
        return [cell for cell in self._cells if id(cell) not in self._found]

    def dead(self) -> set[int]:
        """Return the ids of the closures' variables whose functions nobody has any more, as those of a model before."""
        self._search()
        if not (missing := self._missing()):
            return set()
        gc.collect()
        used = {id(cell) for function in closing_over(missing) for cell in function.__closure__ or ()}
        return {id(cell) for cell in missing} - used

    def _follow(self, roots: Sequence[tuple[Any, Address]]) -> None:
        queue, seen = collections.deque(roots), set[int]()
        while queue and len(seen) < MOST:
            value, address = queue.popleft()
            if id(value) in seen:
                continue
            seen.add(id(value))
            for step, part in ways_from(value):
                if self._keep(part, (*address, *step)) or id(part) not in seen:
                    queue.append((part, self._found[id(part)]))


def _named_functions(cells: Sequence[types.CellType]) -> list[tuple[Any, Address]]:
    """Return the functions that close over some of these variables and that are found by their own names."""
    found: list[tuple[Any, Address]] = []
    for function in closing_over(cells):
        *path, name = function.__qualname__.split(".")
        owner = (CLASS, function.__module__, ".".join(path), "own") if path else (PYTHON, function.__module__, "attr")
        try:
            value = resolve((*owner, name), ())
        except LookupError:
            continue
        found.append((value, (*owner, name)))
    return found


def closing_over(cells: Sequence[types.CellType]) -> list[types.FunctionType]:
    """Return the functions that close over some of these variables."""
    closures = [each for each in gc.get_referrers(*cells) if isinstance(each, tuple)]
    return [each for each in gc.get_referrers(*closures) if isinstance(each, types.FunctionType)] if closures else []


def class_address(cls: type) -> Address:
    """Return the address of a class. ``NotCached`` if its names do not lead to it."""
    address = CLASS, cls.__module__, cls.__qualname__
    try:
        found = resolve(address, ())
    except LookupError:
        found = None
    if found is not cls:
        raise NotCached(f"the class {cls.__module__}.{cls.__qualname__} is not found by its name")
    return address


def ways_from(value: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield the steps from a value, and where each leads."""
    if isinstance(value, torch.Tensor):
        return
    if isinstance(value, torch.nn.Module):
        for name, part in list(vars(value).items()):
            if name not in ("_parameters", "_buffers", "_modules"):
                yield ("attr", name), part
        yield ("type",), type(value)
        for name in HOOKS:
            for number, hook in enumerate(list(vars(value)[name].values())):
                yield ("hook", name, number), hook
    elif isinstance(value, types.FunctionType):
        yield from _of_function(value)
    elif isinstance(value, types.MethodType):
        yield ("func",), value.__func__
        yield ("self",), value.__self__
    elif isinstance(value, functools.partial):
        yield ("func",), value.func
        for number, part in enumerate(value.args):
            yield ("arg", number), part
        for name, part in value.keywords.items():
            yield ("keyword", name), part
    elif isinstance(value, (staticmethod, classmethod)):
        yield ("func",), value.__func__
    elif isinstance(value, property):
        for name in ("fget", "fset", "fdel"):
            yield (name,), getattr(value, name)
    elif isinstance(value, type):
        if is_users_class(value):
            for base in value.__mro__[1:]:
                yield ("base", base.__module__, base.__qualname__), base
            for name, part in list(vars(value).items()):
                yield ("own", name), part
    elif isinstance(value, types.ModuleType):
        if is_users_file(getattr(value, "__file__", None) or "<string>"):
            for name, part in list(vars(value).items()):
                if not isinstance(part, types.ModuleType) or is_own(part):
                    yield ("attr", name), part
    elif is_container(value):
        for key, part in itertools.islice(_members(value), WIDEST):
            yield ("item", key), part
        if is_users_object(value):
            yield from _of_object(value)
    elif is_users_object(value):
        yield from _of_object(value)
    elif isinstance(wrapped := getattr(value, "__wrapped__", None), types.FunctionType):
        yield ("wrapped",), wrapped


def _members(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the members of a container with their keys or positions, without running methods of the user's.

    Sets have no order that another process has, too, so their members have no address.
    """
    if isinstance(value, NAMESPACES):
        value = vars(value)
    if isinstance(value, dict):
        yield from ((key, part) for key, part in dict.items(value) if isinstance(key, (str, int)))
    elif isinstance(value, types.MappingProxyType):
        yield from ((key, part) for key, part in value.items() if isinstance(key, (str, int)))
    else:
        iterate: Any = next((kind.__iter__ for kind in PLAIN if isinstance(value, kind)), lambda value: iter(()))
        yield from enumerate(iterate(value))


def is_users_class(cls: type) -> bool:
    """Return whether a class may have methods that are not a library's."""
    return is_users_file(getattr(sys.modules.get(cls.__module__), "__file__", None) or "<string>")


def _of_object(value: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    attributes = getattr(value, "__dict__", None)
    if isinstance(attributes, dict):
        yield ("vars",), attributes
        for name, part in list(attributes.items()):
            yield ("attr", name), part
    yield ("type",), type(value)


def _of_function(value: types.FunctionType) -> Iterator[tuple[tuple[Any, ...], Any]]:
    for number, cell in enumerate(value.__closure__ or ()):
        yield ("cell", number), cell
        try:
            yield ("cell", number, "contents"), cell.cell_contents
        except ValueError:
            continue
    for number, part in enumerate(value.__defaults__ or ()):
        yield ("default", number), part
    for name, part in (value.__kwdefaults__ or {}).items():
        yield ("keyword default", name), part
    if vars(value):
        yield ("vars",), vars(value)
        for name, part in vars(value).items():
            yield ("attr", name), part


# -- in another process ------------------------------------------------------------------------------------------------


class Resolver:
    """Finds what addresses lead to."""

    def __init__(self, modules: Sequence[torch.nn.Module]) -> None:
        self._modules, self._known = modules, dict[Address, Any]()

    def at(self, address: Address) -> Any:
        """Return what is at an address. ``LookupError`` if the way ends before."""
        if address not in self._known:
            self._known[address] = resolve(address, self._modules)
        return self._known[address]


def resolve(address: Address, modules: Sequence[torch.nn.Module]) -> Any:
    """Follow an address. ``LookupError`` if the way ends before."""
    kind, *rest = address
    steps = iter(rest)
    try:
        if kind == MODULE:
            value: Any = modules[next(steps)]
        elif kind == PYTHON:
            value = sys.modules[next(steps)]
        else:
            value = sys.modules[next(steps)]
            for name in next(steps).split("."):
                value = vars(value)[name]
        for step in steps:
            value = _step(value, step, steps)
    except (LookupError, AttributeError, TypeError, ValueError, StopIteration) as error:
        raise LookupError(f"no value at {address}") from error
    return value


def _step(value: Any, step: str, steps: Iterator[Any]) -> Any:
    if step == "attr":
        return vars(value)[next(steps)]
    if step == "own":
        return vars(value)[next(steps)]
    if step == "vars":
        return vars(value)
    if step == "item":
        wanted = next(steps)
        return next(part for key, part in _members(value) if key == wanted and type(key) is type(wanted))
    if step == "base":
        module, name = next(steps), next(steps)
        return next(base for base in value.__mro__ if (base.__module__, base.__qualname__) == (module, name))
    if step == "hook":
        return list(vars(value)[next(steps)].values())[next(steps)]
    if step == "cell":
        return value.__closure__[next(steps)]
    if step == "contents":
        return value.cell_contents
    if step == "default":
        return value.__defaults__[next(steps)]
    if step == "keyword default":
        return value.__kwdefaults__[next(steps)]
    if step == "arg":
        return value.args[next(steps)]
    if step == "keyword":
        return value.keywords[next(steps)]
    if step == "type":
        return type(value)
    names = {"func": "__func__", "self": "__self__", "wrapped": "__wrapped__"}
    if step == "func" and isinstance(value, functools.partial):
        return value.func
    if step in names or step in ("fget", "fset", "fdel"):
        return getattr(value, names.get(step, step))
    raise LookupError(step)


def _shown(holder: Any) -> str:
    if isinstance(holder, types.CellType):
        return "a closure"
    return f"a {type(holder).__qualname__}"
