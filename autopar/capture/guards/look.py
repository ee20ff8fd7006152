"""Check whether all values that a capture read are unchanged, with a few calls into C for a whole model.

Nearly every value is still the same object, and that is checked by identity, dict by dict. Only a value that is another
object is compared by value.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import CellType
from typing import Any

import torch

from autopar.capture.guards.places import MISSING, STORED, Guard, GuardedChange, GuardedPlace
from autopar.capture.guards.ran import Ran
from autopar.capture.guards.reads import HOOKS
from autopar.capture.guards.values import is_number, shown
from autopar.torch_private import GLOBAL_HOOKS

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
