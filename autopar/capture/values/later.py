"""Hold tensors that are computed later, so that equal computations of several experts become one batched computation.

    y0 = x @ w[0]        y1 = x @ w[1]        …        →        y = vmap(lambda w: x @ w)(w)

A value is a function of other values. Values are alike if their functions and arguments are, except for tensors that
differ: these are stacked. Selections ``w[0], w[1], …`` of all of a tensor are that tensor, without a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from autopar.capture.provenance import Recorder
from autopar.torch_private import pytree, version_of

COMPARES = frozenset({"eq", "__eq__", "ne", "__ne__"})  # with a number, which may differ among values that are alike


class Unlike(Exception):
    """The values are not alike."""


@dataclass(eq=False)
class Later:
    """A tensor that is computed when it is needed.

    Attributes:
        function: what computes it, of arguments with other values among them; ``None`` for a tensor that exists.
        tensor: the result, once there is one.
        place: module path and line of the user that compute it.
        random: whether it draws random numbers. Then it is computed once, or in one batch.
        batched: whether it has been computed in a batch.
    """

    function: Callable[..., Any] | None
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    tensor: Any = None
    place: tuple[str, str] = ("", "")
    random: bool = False
    version: int = 0  # of the tensor, when it was noted
    rows: int = 0  # how many rows it has
    batched: bool = False

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Later:
        return cls(None, tensor=tensor, version=version_of(tensor))

    def changed(self) -> bool:
        """Return whether the tensor that it holds has been written since."""
        return self.function is None and version_of(self.tensor) != self.version

    def still(self, made: torch.Tensor) -> bool:
        """Return whether the tensor that has been made so, and all that it was made of, are as they were then."""
        return version_of(made) == self.version and not any(
            isinstance(x, Later) and x.changed() for x in parts(self)[0]
        )


@dataclass(eq=False)
class Slot:
    """The place of one tensor among those that differ."""

    index: int


def parts(value: Later) -> tuple[list[Any], Any]:
    """Flatten the arguments of a value."""
    return pytree.tree_flatten((value.args, dict(value.kwargs)))


class Evaluator:
    """Computes values, each once, at the place in the user's code where it belongs.

    Args:
        recorder: notes where ops belong, and the tensors in which experts differ.
        refuse: raises the error for a value that cannot be computed any more.
    """

    def __init__(self, recorder: Recorder, refuse: Callable[[str, str], Exception], device: torch.device) -> None:
        self.recorder, self.refuse, self.device = recorder, refuse, device

    def now(self, value: Later) -> Any:
        """Compute a value, and keep it."""
        if value.tensor is None:
            if value.batched and value.random:
                raise self.refuse("draws random numbers for rows that are used twice", "use them once")
            value.tensor = self._computed(value, self.now)
        elif value.changed():
            raise self.refuse(
                "takes rows of a tensor that it writes into before the rows are used", "write into a copy, with clone()"
            )
        return value.tensor

    def _computed(self, value: Later, of: Callable[[Any], Any]) -> Any:
        args, kwargs = pytree.tree_map_only((Later, Slot), of, (value.args, dict(value.kwargs)))
        assert value.function is not None
        if value.random and self.recorder.random == "single":
            raise self.refuse("draws random numbers for rows whose number is a value", 'leave random="parallel"')
        with self.recorder.placed(value.place):
            return value.function(*args, **kwargs)

    def together(self, values: Sequence[Later], histories: Mapping[torch.Tensor, Later]) -> torch.Tensor | None:
        """Compute values that are alike in one batch: their number comes first; ``None`` if they are not alike."""
        alike = Alike(len(values), histories, self)
        if any(value.tensor is not None for value in values):
            return None
        try:
            template = alike.template(values)
        except Unlike:
            return None
        if not alike.stacked or not isinstance(template, Later):
            return None

        def one(*slots: torch.Tensor) -> Any:
            done: dict[int, Any] = {}

            def of(value: Any) -> Any:
                if isinstance(value, Slot):
                    return slots[value.index]
                if id(value) not in alike.templates:
                    return self.now(value)
                if id(value) not in done:
                    done[id(value)] = self._computed(value, of)
                return done[id(value)]

            return of(template)

        for value in alike.shared:
            self.now(value)  # outside of the batch
        _mark_batched(values)
        for stacked in alike.stacked:
            if stacked.is_floating_point():
                self.recorder.spread(stacked)
        return torch.vmap(one, randomness="different")(*alike.stacked)


def _mark_batched(values: Sequence[Later]) -> None:
    open_ = list(values)
    while open_:
        value = open_.pop()
        if not value.batched and value.function is not None:
            value.batched = True
            open_ += [leaf for leaf in parts(value)[0] if isinstance(leaf, Later)]


class Alike:
    """Finds what is common to values, and stacks the tensors in which they differ."""

    def __init__(self, count: int, histories: Mapping[torch.Tensor, Later], evaluator: Evaluator) -> None:
        self.count, self.histories, self.evaluator = count, histories, evaluator
        self.stacked: list[torch.Tensor] = []
        self.shared: list[Later] = []
        self.templates: dict[int, Later] = {}
        self._known: dict[tuple[int, ...], Any] = {}

    def template(self, values: Sequence[Any]) -> Any:
        """Return one value for all: with slots where they differ.

        Raises:
            Unlike: they differ in more than tensors.
        """
        key = tuple(map(id, values))
        if key not in self._known:
            self._known[key] = (self._template(values), values)  # the values are kept, so that no other has their id
        return self._known[key][0]

    def _template(self, values: Sequence[Any]) -> Any:
        first = values[0]
        if all(value is first for value in values):
            if isinstance(first, Later):
                self.shared.append(first)
            return first
        if all(isinstance(value, torch.Tensor) for value in values):
            return self._of_tensors(values)
        if all(isinstance(value, Later) for value in values):
            if all(value.function is None for value in values):
                return self._of_tensors([value.tensor for value in values])
            return self._of_functions(values)
        if any(isinstance(value, (Later, torch.Tensor)) for value in values) or any(v != first for v in values):
            raise Unlike
        return first

    def _of_functions(self, values: Sequence[Later]) -> Any:
        first = values[0]
        flat = [parts(value) for value in values]
        if any(v.function != first.function or spec != flat[0][1] for v, (_, spec) in zip(values, flat, strict=True)):
            raise Unlike
        columns = list(zip(*(leaves for leaves, _ in flat), strict=True))
        name = getattr(first.function, "__name__", "")
        if name == "__getitem__" and len(columns) == 2 and (stack := self._selected(*columns)) is not None:
            return stack
        new = [self._number(column) if name in COMPARES else self.template(column) for column in columns]
        args, kwargs = pytree.tree_unflatten(new, flat[0][1])
        return self._add(Later(first.function, args, kwargs, place=first.place, random=first.random))

    def _add(self, value: Later) -> Later:
        self.templates[id(value)] = value
        return value

    def _number(self, column: Sequence[Any]) -> Any:
        """Return a slot for whole numbers that count up, else what they have in common."""
        if all(type(value) is int for value in column) and list(column) != [column[0]] * len(column):
            if list(column) != list(range(column[0], column[0] + self.count)):
                raise Unlike
            return self._slot(torch.arange(column[0], column[0] + self.count, device=self.evaluator.device))
        return self.template(column)

    def _selected(self, tables: Sequence[Any], indices: Sequence[Any]) -> Slot | None:
        """Return a slot of the table itself for the selections of all its rows, in order."""
        if list(indices) != list(range(self.count)) or any(type(index) is not int for index in indices):
            return None
        mark = len(self.stacked)
        table = self.template(tables)
        if len(self.stacked) != mark:
            raise Unlike
        tensor = table if isinstance(table, torch.Tensor) else self._of_shared(table)
        if tensor is None or tensor.shape[0] < self.count:
            return None
        return self._slot(tensor if tensor.shape[0] == self.count else tensor[: self.count])

    def _of_shared(self, value: Any) -> torch.Tensor | None:
        """Compute a template that has no slots."""
        if not isinstance(value, Later):
            return None
        done = (
            self.evaluator._computed(value, self._of_shared)
            if id(value) in self.templates
            else self.evaluator.now(value)
        )
        return done if isinstance(done, torch.Tensor) else None

    def _of_tensors(self, tensors: Sequence[torch.Tensor]) -> Any:
        first = tensors[0]
        if all(tensor is first for tensor in tensors):
            return first
        made = [self.histories.get(tensor) for tensor in tensors]
        if all(value is not None and value.still(tensor) for value, tensor in zip(made, tensors, strict=True)):
            mark, known = (len(self.stacked), len(self.shared)), set(self._known)
            try:
                return self._of_functions([value for value in made if value is not None])
            except Unlike:
                del self.stacked[mark[0] :], self.shared[mark[1] :]
                for key in self._known.keys() - known:
                    del self._known[key]
        if any((t.shape, t.dtype, t.device) != (first.shape, first.dtype, first.device) for t in tensors):
            raise Unlike
        return self._slot(torch.stack(list(tensors)))

    def _slot(self, stacked: torch.Tensor) -> Slot:
        self.stacked.append(stacked)
        return Slot(len(self.stacked) - 1)


def alike(histories: Mapping[torch.Tensor, Later], a: Any, b: Any) -> bool:
    """Return whether two tensors have been made in the same way from the same tensors, which have not changed since."""
    if isinstance(a, Later) and isinstance(b, Later):
        a, b = a.tensor, b.tensor
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return type(a) is type(b) and bool(a == b)
    one, other = histories.get(a), histories.get(b)
    if a is b or one is None or other is None or one.function != other.function:
        return a is b
    (left, spec), (right, same) = parts(one), parts(other)
    made = spec == same and one.still(a) and other.still(b)
    return made and all(alike(histories, x, y) for x, y in zip(left, right, strict=True))
