"""Define how a result is written to files of JSON, and read back, with the guards of its capture."""

from __future__ import annotations

import json
import os
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from autopar.cache.addresses import Addresses, Resolver
from autopar.cache.code import Codes, forget_classes, modules_by_file, place_of, values_of, variables_of
from autopar.cache.described import Descriptions
from autopar.cache.folder import NotCached, Unusable, digest_of
from autopar.capture import Captured
from autopar.capture.guards.places import Guard, GuardedPlace
from autopar.capture.guards.values import shown
from autopar.capture.guards.variants import Guards
from autopar.runtime.processes.agreement import Agreement

T = TypeVar("T")
U = TypeVar("U")
GUARDS, MADE = "guards.json", "made.json"
Texts = Mapping[str, str]  # name of a file → its JSON
Check = Callable[[Captured], None]  # raises ``NotCached`` for a capture that cannot be kept
Make = Callable[[Agreement | None, Check | None], T]  # for ranks that agree, or for one; ``Check`` looks at the capture


@dataclass(frozen=True)
class Codec(Generic[T]):
    """How something is kept that was made of a capture.

    Attributes:
        kind: what it is, in one word.
        model: the model that was captured; ``None`` where no forward decides it.
        facts: returns what decides it, besides what surrounds it, by name.
        guards: returns its guards.
        write: returns it as JSON.
        read: makes it of JSON and guards.
    """

    kind: str
    model: torch.nn.Module | None
    facts: Callable[[], Mapping[str, Any]]
    guards: Callable[[T], Guards | None]
    write: Callable[[T], Any]
    read: Callable[[Any, Guards], T]

    def around(self, apart: Callable[[U], T], together: Callable[[T], U]) -> Codec[U]:
        """Return how another thing is kept: ``apart`` returns what is kept of it, ``together`` makes it of that."""
        return Codec(
            self.kind, self.model, self.facts, lambda made: self.guards(apart(made)),
            lambda made: self.write(apart(made)), lambda content, guards: together(self.read(content, guards)),
        )  # fmt: skip


@dataclass(frozen=True)
class Planned(Generic[T]):
    """What one process has found or made, with the texts by which others have the same.

    Attributes:
        line: what came of the look into the folder.
        texts: ``None`` where it cannot be kept.
    """

    made: T
    line: str
    texts: Texts | None


def texts_of(codec: Codec[T], made: T) -> Texts:
    """Return the files of an entry.

    Raises:
        NotCached: a part of it has no form that another process could read.
    """
    guards = codec.guards(made)
    kept = None if guards is None or codec.model is None else guards_to_json(guards, codec.model)
    return {GUARDS: _text(kept), MADE: _text(codec.write(made))}


def opened(texts: Texts, codec: Codec[T]) -> T | str:
    """Return what the files of an entry have; or, in words, what differs in this process.

    Raises:
        Unusable: the files are malformed.
    """
    try:
        guards: Guards | str = Guards((), ())
        if codec.model is not None:
            guards = guards_of(json.loads(texts[GUARDS]), codec.model)
        return guards if isinstance(guards, str) else codec.read(json.loads(texts[MADE]), guards)
    except Exception as error:  # whatever reading malformed JSON raises; it is no error of the user's
        raise Unusable(f"the entry is malformed: {type(error).__name__}: {error}") from error


def made_digest(texts: Texts) -> str:
    """Return the digest of what was made."""
    return digest_of(texts[MADE].encode())


def _text(content: Any) -> str:
    return json.dumps(content, separators=(",", ":"))


# -- guards ------------------------------------------------------------------------------------------------------------
#
# Write the guards of a capture, and compare them in another process: the functions that ran, the values they read.
#
# What one process compares by identity is compared by its description here. If all functions that ran have the same
# code, and all values that they read are the same, then they would do the same again.


ENVIRONMENT = "the environment"


def guards_to_json(guards: Guards, model: torch.nn.Module) -> dict[str, Any]:
    """Return the guards of a capture as JSON.

    Raises:
        NotCached: a function or a value has no description, or is not found again.
    """
    if guards.numbers:
        raise NotCached(f"a float of the model is an input of the program: {guards.numbers[0].words}")
    if not guards.ran.seen:
        raise NotCached("a profiler runs, so that the functions that ran are not known")
    variables = variables_of(guards.ran.codes, modules_by_file())
    if guards.ran.changed:
        raise NotCached(f"forward reads and changes {', '.join(guards.ran.changed)}")
    modules = [module for _, module in model.named_modules(remove_duplicate=False)]
    descriptions = Descriptions(modules, _of_the_model(model), set(map(id, guards.ran.codes)))
    forget_classes()
    for module in modules:
        descriptions.cls(type(module))
    python = _python_modules(guards.ran.codes)
    compared = [(guard.place, guard.value, True) for guard in guards.entries]
    compared += [(place, value, False) for place, value in guards.ran.named]
    cells = [place.holder for place, *_ in compared if isinstance(place.holder, types.CellType)]
    addresses = Addresses(modules, python, cells)
    dead = addresses.dead()
    texts: dict[str, int] = {}
    places: dict[str, int] = {}
    rows = []
    for place, value, guarded in compared:
        if id(place.holder) in dead:
            continue
        try:
            described = _described(descriptions, place, value)
            address = addresses.of(place.holder, place.owner)
        except NotCached as refused:
            raise NotCached(f"{refused} ({place.words})") from None
        rows.append([
            places.setdefault(json.dumps(address), len(places)), place.key, int(place.computed),
            texts.setdefault(json.dumps(described), len(texts)), place.words, place.line, int(guarded),
        ])  # fmt: skip
    return {
        "places": list(places), "values": list(texts), "rows": rows,
        "functions": _functions(guards.ran.codes, descriptions.codes, python),
        "variables": [variables, values_of(variables)],
    }  # fmt: skip


def _described(descriptions: Descriptions, place: GuardedPlace, value: Any) -> Any:
    """Describe a value. As a global, the environment is compared by the variables that functions name."""
    is_global = isinstance(place.holder, dict) and "__name__" in place.holder
    return ENVIRONMENT if value is os.environ and is_global else descriptions.of(value)


def _of_the_model(model: torch.nn.Module) -> Any:
    tensors = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    return lambda value: id(value) in tensors


def _python_modules(codes: Sequence[types.CodeType]) -> list[str]:
    """Return the names of the Python modules of code that ran."""
    by_file = modules_by_file()
    names = [by_file[code.co_filename] for code in codes if code.co_filename in by_file]
    return list(dict.fromkeys([*names, *(["__main__"] if "__main__" in sys.modules else [])]))


def _functions(codes: Sequence[types.CodeType], described: set[int], python: Sequence[str]) -> list[Any]:
    """Return where the code that ran is found, and its digest, without code on which guarded values depend.

    Raises:
        NotCached: code is not found by the names of its Python module, or it reads what cannot be guarded.
    """
    by_file = modules_by_file()
    rows: dict[str, Any] = {}
    known: dict[str, Codes] = {}
    for code in codes:
        if id(code) in described:
            continue
        for name in dict.fromkeys([by_file.get(code.co_filename, "__main__"), *python]):
            if name in sys.modules and name not in known:
                known[name] = Codes(sys.modules[name])
            if name in known and any(code is found for found in known[name].by_place.get(place_of(code), ())):
                row = [name, list(place_of(code)), known[name].digests(place_of(code))]
                rows[json.dumps(row[:2])] = row
                break
        else:
            raise NotCached(f"the function {code.co_name} ({code.co_filename}:{code.co_firstlineno}) is not found by "
                            f"the names of its module")  # fmt: skip
    return list(rows.values())


def guards_of(content: Mapping[str, Any], model: torch.nn.Module) -> Guards | str:
    """Return the guards of a capture for the model of this process; or, in words, what differs here."""
    named = list(model.named_modules(remove_duplicate=False))
    modules = [module for _, module in named]
    forget_classes()
    variables, values = content["variables"]
    for name, before, now in zip(variables, values, values_of(variables), strict=True):
        if before != now:
            return f"the environment variable {name} is {now!r}, and was {before!r}"
    known: dict[str, Codes] = {}
    for name, (file, function, line), digests in content["functions"]:
        if name not in sys.modules:
            return f"the Python module {name} is not loaded"
        if name not in known:
            known[name] = Codes(sys.modules[name])
        if known[name].digests((file, function, line)) != digests:
            return f"the function {function} of {name} has changed"
    skipped = _of_the_model(model)
    descriptions, resolver = Descriptions(modules, skipped), Resolver(modules)
    places = [_tuple(json.loads(text)) for text in content["places"]]
    guards = []
    for at, key, computed, value, words, line, guarded in content["rows"]:
        address = places[at]
        try:
            holder = resolver.at(address)
        except LookupError:
            return f"{words} is not there"
        owner = resolver.at(address[:-1]) if isinstance(holder, types.MappingProxyType) else None
        place = GuardedPlace(holder, key, words, bool(computed), line, owner)
        try:
            described = json.dumps(_described(descriptions, place, place.now()))
        except (NotCached, AttributeError):
            described = ""
        if described != content["values"][value]:
            return f"{words} is {shown(place.now())}, and was another value"
        if guarded:
            guards.append(Guard.of(place, skipped))
    return Guards(named, guards)


def _tuple(value: Any) -> Any:
    return tuple(map(_tuple, value)) if isinstance(value, list) else value
