"""Keep a few captures of one call that differ in the Python values that forward read, and find the one that fits."""

from __future__ import annotations

import collections
import operator
import warnings
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import CellType
from typing import Any

import torch

from autopar.capture.guards.functions import Ran
from autopar.capture.guards.numbers import can_be_input
from autopar.capture.guards.places import MISSING, STORED, Guard, GuardedChange, GuardedPlace
from autopar.capture.guards.reads import HOOKS
from autopar.capture.guards.values import is_number, shown
from autopar.torch_private import GLOBAL_HOOKS

# -- look --------------------------------------------------------------------------------------------------------------
#
# Check whether all values that a capture read are unchanged, with a few calls into C for a whole model.
#
# Nearly every value is still the same object, and that is checked by identity, dict by dict. Only a value that is
# another object is compared by value.


CONTENT = operator.attrgetter("cell_contents")


class Guards:
    """The guards of one capture.

    Attributes:
        entries: the guards of places. The modules and their hooks are checked as well.
        numbers: places whose floats are inputs of the program, so any number is accepted.
        ran: the functions that ran.

    Args:
        named: the model's modules, each with all of its names.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, torch.nn.Module]],
        guards: Sequence[Guard],
        numbers: Sequence[GuardedPlace] = (),
        ran: Ran | None = None,
    ) -> None:
        self._named, self.numbers, self.ran = named, tuple(numbers), ran or Ran()
        inputs = {place.identity for place in numbers}
        self.entries = [guard for guard in guards if guard.place.identity not in inputs]
        self._modules = [module for _, module in named]
        self._classes = [type(module) for module in self._modules]
        self._arrange_places()
        paths = {module: path for path, module in reversed(named)}
        hooks = [
            (f"{path}.{name}".lstrip("."), vars(module), name)
            for module, path in reversed(paths.items())
            for name in HOOKS
        ]
        hooks += [("hooks of all modules", {"": global_hooks}, "") for global_hooks in GLOBAL_HOOKS]
        self._hooks = [(words, holder, name, list(holder[name].values())) for words, holder, name in hooks]
        self._without = [holder[name] for _, holder, name, before in self._hooks if not before]
        self._with = [hook for hook in self._hooks if hook[3]]

    def _arrange_places(self) -> None:
        """Group the guards by the dict that holds their values, so that one call reads all values of a dict."""
        by_dict: dict[int, list[Guard]] = {}
        self._absent: list[Guard] = []
        self._by_value: list[Guard] = []
        self._cells: list[Guard] = []
        stored: dict[str, list[Guard]] = {key: [] for key in STORED}
        for guard in self.entries:
            if not guard.by_identity:
                self._by_value.append(guard)
            elif guard.place.computed:
                stored[guard.place.key].append(guard)
            elif isinstance(guard.place.holder, CellType):
                (self._by_value if guard.value is MISSING else self._cells).append(guard)
            elif guard.value is MISSING:
                self._absent.append(guard)
            else:
                by_dict.setdefault(id(guard.place.holder), []).append(guard)
        # itemgetter of a single name returns no tuple
        groups = [guards if len(guards) > 1 else guards * 2 for guards in by_dict.values()]
        self._reads: list[tuple[Callable[[Any], tuple[Any, ...]], Any]] = [
            (operator.itemgetter(*(guard.place.key for guard in guards)), guards[0].place.holder) for guards in groups
        ]
        many: dict[Callable[[Any], Any], list[Guard]] = {
            CONTENT: self._cells,
            **{operator.attrgetter(key): guards for key, guards in stored.items()},
        }
        self._each = [(read, [guard.place.holder for guard in guards]) for read, guards in many.items() if guards]
        self._grouped = [
            *(guard for guards in groups for guard in guards),
            *(guard for guards in many.values() for guard in guards),
        ]
        self._expected = [guard.value for guard in self._grouped]
        self._absent_from = [guard.place.holder for guard in self._absent], [guard.place.key for guard in self._absent]

    def without(self, numbers: Sequence[GuardedPlace]) -> Guards:
        """Return these guards for a program in which these numbers are inputs."""
        return Guards(self._named, self.entries, numbers, self.ran)

    def hold(self, modules: Sequence[torch.nn.Module]) -> bool:
        """Return whether nothing has changed. ``modules``: the model's modules now."""
        return (
            self._modules_hold(modules)
            and self._hooks_hold()
            and all(is_number(place.now()) for place in self.numbers)
            and self._places_hold()
        )

    def _modules_hold(self, modules: Sequence[torch.nn.Module]) -> bool:
        same = len(modules) == len(self._modules) and all(map(operator.is_, modules, self._modules))
        return same and all(map(operator.is_, map(type, modules), self._classes))

    def _hooks_hold(self) -> bool:
        return not any(self._without) and all(_same(holder[name], before) for _, holder, name, before in self._with)

    def _places_hold(self) -> bool:
        now: list[Any] = []
        try:
            for read, holder in self._reads:
                now += read(holder)
            for read, holders in self._each:
                now += map(read, holders)
        except (KeyError, ValueError):  # an attribute or a closure's variable was deleted
            return False
        if not all(map(operator.is_, now, self._expected)):
            if not all(
                guard.holds() for guard, value in zip(self._grouped, now, strict=True) if value is not guard.value
            ):
                return False
            self._expected = now
        return not any(map(operator.contains, *self._absent_from)) and all(guard.holds() for guard in self._by_value)

    def changes(self, modules: Sequence[torch.nn.Module]) -> list[GuardedChange]:
        """Return what has changed, in words."""
        changes = [GuardedChange.of(guard) for guard in self.entries if not guard.holds()]
        changes += [
            GuardedChange(place, place.words, "a number", shown(place.now()))
            for place in self.numbers
            if not is_number(place.now())
        ]
        if not self._modules_hold(modules):
            now, before = [type(module).__name__ for module in modules], [cls.__name__ for cls in self._classes]
            pairs = zip(modules, map(type, modules), self._modules, self._classes, strict=False)
            at = next(
                (k for k, (a, kind, b, cls) in enumerate(pairs) if a is not b or kind is not cls),
                min(len(now), len(before)),
            )
            changes.append(
                GuardedChange(
                    None,
                    f"module {at} of the model",
                    *("missing" if at >= len(classes) else f"a {classes[at]}" for classes in (before, now)),
                )
            )
        for words, holder, name, before in self._hooks:
            if not _same(holder[name], before):
                changes.append(GuardedChange(None, words, _shown(before), _shown(holder[name].values())))
        return changes


def _shown(hooks: Iterable[Any]) -> str:
    return f"[{', '.join(shown(hook).removeprefix('the ') for hook in hooks)}]"


def _same(hooks: Mapping[int, Any], before: Sequence[Any]) -> bool:
    return len(hooks) == len(before) and all(map(operator.is_, hooks.values(), before))


# -- variants ----------------------------------------------------------------------------------------------------------


KEPT = 8  # captures of one call; a value that changes at each step would make ever more


@dataclass(frozen=True)
class GuardedCall:
    """A call, and which capture of it is used.

    Attributes:
        key: the key of the capture, without the values that forward reads.
        number: the number of the capture, which distinguishes it from others with this key.
        changes: the values in which this capture differs from the one before.
        known: whether this call was captured before.
        numbers: places whose floats are inputs, or should become inputs.
    """

    key: Any
    number: int
    changes: tuple[GuardedChange, ...] = ()
    known: bool = False
    numbers: tuple[GuardedPlace, ...] = ()

    @property
    def identity(self) -> tuple[Hashable, int]:
        return self.key, self.number

    @property
    def where(self) -> str:
        """The changed values in words, the same on every rank that has them."""
        return f" where {', '.join(map(str, self.changes))}" if self.changes else ""

    @property
    def numbers_now(self) -> str:
        """The numbers that are inputs, in words."""
        return "".join(f", {place.words}={place.now()!r}" for place in self.numbers)


@dataclass(eq=False)
class Variant:
    """One capture of a call."""

    call: GuardedCall
    guards: Guards


class Variants:
    """The captures of each call, by its key; the capture that was used last comes last."""

    def __init__(self) -> None:
        self._of: dict[Hashable, list[Variant]] = {}
        self._made = 0
        # the values that a place had, in words
        self._values: dict[tuple[Hashable, tuple[int, str]], set[str]] = collections.defaultdict(set)
        # places whose values change and cannot be inputs; the user was warned of them
        self._constant: set[tuple[int, str]] = set()

    @property
    def calls(self) -> list[GuardedCall]:
        """The calls whose captures are kept."""
        return [variant.call for variants in self._of.values() for variant in variants]

    def call(self, key: Hashable, modules: Sequence[torch.nn.Module]) -> GuardedCall:
        """Return the call with this key, for the model's values as they are now."""
        known = self._of.get(key)
        if known is None:
            return GuardedCall(key, self._made)
        for variant in reversed(known):
            if variant.guards.hold(modules):
                if variant is not known[-1]:
                    known.remove(variant)
                    known.append(variant)
                return variant.call
        changes = tuple(known[-1].guards.changes(modules))
        again = [
            place
            for change in changes
            if (place := change.place) is not None and can_be_input(place) and self._changes_again(key, place, change)
        ]
        numbers = [place for place in (*known[-1].guards.numbers, *again) if place.identity not in self._constant]
        return GuardedCall(key, self._made, changes, numbers=tuple(dict.fromkeys(numbers)))

    def _changes_again(self, key: Hashable, place: GuardedPlace, change: GuardedChange) -> bool:
        """Return whether the value of a place has changed before."""
        return len(self._values[key, place.identity] | {change.before, change.now}) > 2

    def _warn(self, key: Hashable, change: GuardedChange, place: GuardedPlace, guards: Guards) -> None:
        """Warn once of each value that changes again and is not an input."""
        if (
            self._changes_again(key, place, change)
            and place not in guards.numbers
            and place.identity not in self._constant
        ):
            self._constant.add(place.identity)
            how = (
                f"uses {place.words} not only in arithmetic with tensors"
                if can_be_input(place)
                else f"reads {place.words}"
            )
            warnings.warn(
                f"forward {how}, and each new value captures the step anew "
                f"({change})\n" + (f"    {place.line}\n" if place.line else "")
                + "  let it change seldom, or make it a buffer, or an argument of forward that is a tensor",
                stacklevel=2,
            )  # fmt: skip

    def add(self, call: GuardedCall, guards: Guards) -> list[GuardedCall]:
        """Keep the capture of a call; return the calls whose captures are dropped for it."""
        known = self._of.setdefault(call.key, [])
        known.append(
            Variant(GuardedCall(call.key, call.number, call.changes, known=True, numbers=guards.numbers), guards)
        )
        self._made += 1
        for change in call.changes:
            if change.place is not None:
                self._values[call.key, change.place.identity] |= {change.before, change.now}
                self._warn(call.key, change, change.place, guards)
        dropped = [variant.call for variant in known[:-KEPT]]
        del known[:-KEPT]
        return dropped
