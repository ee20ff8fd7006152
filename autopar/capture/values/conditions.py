"""Follow which statements run only if a tensor's value says so, and let what they write count only then.

The statements are captured as if the value were true. A write into a tensor that is older than the condition becomes a
choice between the new and the old contents. A tensor that is made under the condition may be used under it only.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from autopar.capture.values.later import Later
from autopar.capture.values.lines import Statement
from autopar.torch_private import storage_of, tensor_dict


@dataclass(eq=False)
class Condition:
    """A condition on a tensor's value, under which statements run.

    Attributes:
        value: the tensor: one truth.
        line: the user's line.
        frame: where the statements are.
        statement: their lines; ``None`` for a turn of a loop, which ends by itself.
        before: the local variables that the statements assign, and what they were before.
        of: the mask of which ``value`` says whether it is true anywhere.
        entered: whether its statements have been seen to run.
        impossible: whether eager would raise an error where it holds.
    """

    value: Later
    line: str
    frame: types.FrameType
    statement: Statement | None = None
    names: frozenset[str] = frozenset()
    before: dict[str, Any] = field(default_factory=dict)
    of: torch.Tensor | None = None
    open: bool = True
    entered: bool = False
    impossible: bool = False

    def __post_init__(self) -> None:
        now = self.frame.f_locals
        self.before = {name: now[name] for name in self.names if name in now}

    def holds(self) -> bool:
        """Return whether the frame still runs its statements."""
        if self.statement is None:
            return self.open
        frame: types.FrameType | None = sys._getframe(1)
        while frame is not None and frame is not self.frame:
            frame = frame.f_back
        holds = frame is not None and self.statement.first <= frame.f_lineno <= self.statement.last
        self.entered = self.entered or holds
        return holds

    def asked_again(self) -> bool:
        """Return whether its test asks for another value, before its statements have run."""
        at = self.frame.f_lineno
        return (
            self.statement is not None and not self.entered and self.statement.test[0] <= at <= self.statement.test[1]
        )

    def changed(self, is_stand_in: Callable[[Any], bool]) -> str | None:
        """Return a variable that is older than the condition and now holds something that is no tensor."""
        now = self.frame.f_locals
        for name, old in self.before.items():
            new = now.get(name)
            if new is not old and not is_stand_in(new):
                return name
        return None


class Conditions:
    """The conditions under which statements run now, and the tensors that were made under one.

    Args:
        refuse: makes the error for what cannot be captured: the problem, the remedy, the line.
        is_stand_in: whether a value stands for a tensor.
    """

    def __init__(self, refuse: Callable[..., Exception], is_stand_in: Callable[[Any], bool]) -> None:
        self.refuse, self.is_stand_in = refuse, is_stand_in
        self.open: list[Condition] = []
        self._made = tensor_dict()
        # memory → a tensor that keeps it alive, and the conditions that it is made under
        self._homes: dict[int, tuple[torch.Tensor, tuple[Condition, ...]]] = {}

    def add(self, condition: Condition) -> None:
        self.open.append(condition)

    def close_ended(self) -> None:
        for condition in [one for one in self.open if not one.holds()]:
            if condition.asked_again():
                raise self.refuse(
                    "decides by several values in one test", "write one test inside of the other", condition.line
                )
            self.close(condition)

    def close_all(self) -> None:
        for condition in list(self.open):
            self.close(condition)

    def close(self, condition: Condition) -> None:
        condition.open = False
        if condition in self.open:
            self.open.remove(condition)
        name = condition.changed(self.is_stand_in)
        condition.before = {}
        if name is not None:
            raise self.refuse(
                f"changes the variable {name} only for some values of a tensor",
                "compute both, and choose with torch.where",
                condition.line,
            )

    def note_made(self, made: Iterable[Any], operands: Iterable[Any] = ()) -> None:
        """Note that tensors, or their stand-ins, are made under the open conditions, perhaps as views of operands."""
        if not self.open:
            self._homes.clear()
            return
        older = {storage_of(x) for x in operands if isinstance(x, torch.Tensor)}
        for value in made:
            if isinstance(value, torch.Tensor):
                self._made[value] = tuple(self.open)
                storage = storage_of(value)
                self._homes.setdefault(storage, (value, () if storage in older else tuple(self.open)))
            else:
                value.made_under = tuple(self.open)

    def made_under(self, value: Any) -> tuple[Condition, ...]:
        if isinstance(value, torch.Tensor):
            return tuple(self._made.get(value, ()))
        return tuple(getattr(value, "made_under", ()))

    def check(self, values: Iterable[Any]) -> None:
        """Refuse the use of what was made under a condition that is no longer open."""
        for value in values:
            for condition in self.made_under(value):
                if condition not in self.open:
                    raise self.refuse(
                        "uses a tensor that is made only for some values of another tensor, whatever these are",
                        "add to a tensor that is made before, as with out.index_add_(0, rows, values), or choose with "
                        "torch.where",
                        condition.line,
                    )

    def outside(self, tensor: torch.Tensor) -> list[Condition]:
        """Return the open conditions that the memory of a tensor is older than."""
        _, own = self._homes.get(storage_of(tensor), (None, ()))
        return [condition for condition in self.open if condition not in own]
