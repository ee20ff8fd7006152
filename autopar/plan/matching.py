"""Match the dicts of a plan against the names of values: which layout does a dict give each value?"""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from autopar.errors import PlanError, shown
from autopar.ir.layout import DistAttr
from autopar.ir.mesh import Mesh
from autopar.plan.spec import Spec, attr_of, dims_of


@dataclass(frozen=True)
class Layer:
    """One dict of a plan. The dict of a preset has a name, and its globs need not match or fit.

    Attributes:
        requested: whether the user named the preset; else it is the default.
    """

    globs: Mapping[str, Spec]
    preset: str = ""
    requested: bool = True


@dataclass(frozen=True)
class Choice:
    """The layout that one dict gives a tensor: the glob, and the tensor's names that it matches.

    It also holds whether these names leave wrappers out.
    """

    attr: DistAttr
    glob: str
    names: list[str]
    through: bool


@dataclass(frozen=True)
class Matcher:
    """Matches the dicts of a plan against the names of values.

    Attributes:
        shapes: listed name → shape.
        aliases, through: as for ``resolve``.
        parts: listed names of tensors that follow another; presets do not match them.
        open_: whether dims of parameters and inputs may be undecided.
    """

    mesh: Mesh
    shapes: Mapping[str, Sequence[int]]
    aliases: Mapping[str, str]
    through: Sequence[tuple[str, str]]
    parts: set[str]
    open_: bool = False

    def choices(self, layer: Layer, misfits: dict[str, str], is_known: Callable[[str], bool]) -> dict[str, Choice]:
        """Return the layout that a dict gives each value that it matches.

        ``misfits`` receives the globs of a preset that do not fit.
        """
        chosen: dict[str, Choice] = {}
        for glob, spec in layer.globs.items():
            subject = f"the plan's {glob!r}: {_show(spec)}"
            matches = [*self._matching(glob, layer)]
            if not matches and not layer.preset:
                if is_known(glob):
                    raise PlanError(_no_match(glob, [name for name, _, _ in self._names()]))
                dims_of(subject, spec, None, self.mesh, open_=self.open_ or glob.endswith("()"))
            for listed, names, through in matches:
                try:
                    name = listed if ":" in names[0] else names[0]
                    attr = attr_of(subject, spec, name, self.shapes[listed], self.mesh, open_=self.open_)
                except PlanError as error:
                    if not layer.preset:
                        raise
                    misfits.setdefault(
                        glob,
                        f"of the preset {layer.preset}, {glob!r} does not fit {names[0]}, which stays as it is: "
                        f"{error}",
                    )
                    continue
                before = chosen.get(listed)
                if before is not None and before.through < through:
                    continue
                if before is not None and before.attr != attr and before.through == through and not layer.preset:
                    raise _contradiction(layer.globs, before, glob, names)
                chosen[listed] = Choice(attr, glob, names, through)
        return chosen

    def _names(self) -> Iterator[tuple[str, str, bool]]:
        """Yield each name, its listed name, and whether it leaves wrappers out."""
        yield from ((name, name, False) for name in self.shapes)
        yield from ((name, listed, False) for name, listed in self.aliases.items())
        yield from ((name, listed, True) for name, listed in self.through if listed in self.shapes)

    @cached_property
    def _by_kind(self) -> dict[tuple[bool, bool], list[tuple[str, str, bool]]]:
        """Return what ``_names`` yields, by the kind of the name: a glob matches names of its own kind only."""
        found: dict[tuple[bool, bool], list[tuple[str, str, bool]]] = {}
        for row in self._names():
            found.setdefault(_kind(row[0]), []).append(row)
        return found

    def _matching(self, glob: str, layer: Layer) -> Iterator[tuple[str, list[str], bool]]:
        """Yield each value that a glob matches, its names that match, and whether all of these leave wrappers out."""
        matching: dict[str, tuple[list[str], list[str]]] = {}
        fits = _pattern(glob)
        for name, listed, through in self._by_kind.get(_kind(glob), ()):
            if fits(name) and not (layer.preset and listed in self.parts):
                matching.setdefault(listed, ([], []))[through].append(name)
        for listed, (names, without_wrappers) in matching.items():
            yield listed, names or without_wrappers, not names


def _contradiction(globs: Mapping[str, Spec], before: Choice, glob: str, names: list[str]) -> PlanError:
    shared = [name for name in names if name in before.names]
    both = shared[0] if shared else f"one tensor with the names {before.names[0]} and {names[0]}"
    return PlanError(
        f"the plan contradicts itself on {both}: {before.glob!r} says {_show(globs[before.glob])}, {glob!r} says "
        f"{_show(globs[glob])}; " + ("make the globs disjoint" if shared else "split it alike under both names")
    )


def is_of_parameter(glob: str, names: Iterable[str]) -> bool:
    """Return whether a glob that matches nothing can mean no input: it ends as names of parameters do, or nearly so."""
    above, _, last = glob.rpartition(".")
    if not above or last.endswith("()") or any(letter in last for letter in "*?["):
        return False
    return bool(difflib.get_close_matches(last, {name.rpartition(".")[2] for name in names}, cutoff=0.8))


def matches(glob: str, name: str) -> bool:
    return _kind(glob) == _kind(name) and _pattern(glob)(name)


def _kind(name: str) -> tuple[bool, bool]:
    """Return whether a name or glob is of a call, and whether it has classes of modules."""
    return name.endswith("()"), ":" in name


@lru_cache(1024)
def _pattern(glob: str) -> Callable[[str], bool]:
    """Return what says whether a glob matches a name of its kind; ``*.weight`` matches ``weight`` too."""
    if ":" in glob:  # a module without a class in the glob may have any class
        *modules, parameter = glob.split(".")
        glob = ".".join([part if ":" in part or not part.strip("*") else f"{part}:*" for part in modules] + [parameter])
    end = glob[1:]
    if glob[:1] == "*" and not _WILD & set(end):
        return lambda name: ("." + name).endswith(end)
    compiled = re.compile(fnmatch.translate(glob)).match
    return lambda name: bool(compiled("." + name) or compiled(name))


_WILD = set("*?[")
_ORIGINAL = re.compile(r"(.*)\bparametrizations\.(\w+)\.original\d*")


def _no_match(glob: str, names: list[str]) -> str:
    originals = [name for name in names if (match := _ORIGINAL.fullmatch(name)) and matches(glob, match[1] + match[2])]
    if originals:
        return (
            f"the plan's glob {glob!r} names a tensor that a parametrization computes from parts of other shapes, so "
            f"the layouts of the parts are not known; name the parts: {', '.join(originals[:4])}"
        )
    calls = glob.endswith("()")
    names = [name for name in names if name.endswith("()") == calls and (":" in name) == (":" in glob)]
    near = difflib.get_close_matches(glob.lstrip("*."), names, n=3, cutoff=0.3) or names[:3]
    kind = "module that is called and returns one tensor, which the step needs" if calls else "parameter or input"
    return f"the plan's glob {glob!r} matches no {kind}; near it: {', '.join(near) or 'the model has none'}"


def _show(spec: object) -> str:
    return shown(tuple(spec) if isinstance(spec, list) else spec)
