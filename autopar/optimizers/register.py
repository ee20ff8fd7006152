"""Optimizers that autopar is told of: a short function of plain torch ops."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from autopar.errors import shown
from autopar.optimizers.definition import DEFINITIONS, Definition, Group, State, constant, words
from autopar.optimizers.ops import unless, unscaled, widened
from autopar.optimizers.update import RATE, Update
from autopar.torch_private import DATA_DEPENDENT, version_of

Function = Callable[..., tuple[torch.Tensor, Mapping[str, torch.Tensor]]]


def register_optimizer(
    cls: type[torch.optim.Optimizer],
    *,
    update: Function,
    state: str | Iterable[str] = (),
    shared: str | Iterable[str] = (),
    options: str | Iterable[str] = (),
    scheduled: str | Iterable[str] = (),
    initial: Callable[[torch.Tensor, Group], State] | None = None,
) -> None:
    """Tell autopar how an optimizer of yours updates a parameter, so that its step can be part of a graph.

        def lion(param, grad, state, lr, *, betas, weight_decay):  # Chen et al. 2023
            mean = state["exp_avg"]
            direction = (betas[0] * mean + (1 - betas[0]) * grad).sign()
            return param * (1 - lr * weight_decay) - lr * direction, {"exp_avg": mean.lerp(grad, 1 - betas[1])}

        register_optimizer(Lion, update=lion, state="exp_avg", options="betas weight_decay")

    What it says is trusted: it must be what ``cls.step`` does. A second definition of a class takes the place of the first.

    Args:
        cls: the class; those that inherit its step are known too.
        update: of the parameter, its gradient, its state by name, and the learning rate (a tensor without dims), all in float32 where
            they are in half precision, with the group's options as keywords: the new parameter and its new state. It writes nothing, and
            does not look at values (``.item()``, ``if``): ``torch.where`` chooses. It need not work element by element: norms of a
            parameter that is split become sums over its ranks.
        state: the names of its states, as in ``optimizer.state[param]``.
        shared: those of them that have no dims, such as ``step``.
        options: the entries of a group that it takes: numbers, truths, texts and tuples of them.
        scheduled: those of them that change from step to step, as ``OneCycleLR`` changes ``betas`` or ``momentum``: numbers, and tuples of
            them. ``update`` is given tensors without dims, as ``lr`` is one; the others are part of the program, so that another value
            of theirs is another program.
        initial: of a parameter and its group, the states that do not begin as zeros.

    Raises:
        TypeError: ``cls`` is no class of optimizers, or ``update`` no function.
        ValueError: a name in ``shared`` that is not in ``state``, or in ``scheduled`` that is not in ``options``.
    """
    if not isinstance(cls, type) or not issubclass(cls, torch.optim.Optimizer):
        raise TypeError(f"{shown(cls)} is no subclass of torch.optim.Optimizer; give the class of your optimizer")
    if not callable(update):
        raise TypeError(f"the update of {cls.__name__} is a function of (param, grad, state, lr), not {shown(update)}")
    states = words(state)
    for name in words(shared):
        if name not in states:
            raise ValueError(f"{name!r} is shared, but no state of {cls.__name__}; its states are {', '.join(states) or 'none'}: name it in state too")
    for name in words(scheduled):
        if name not in words(options) or name in (RATE, "step"):
            why = "a step has one of its own" if name in (RATE, "step") else f"its options are {' '.join(words(options)) or 'none'}: name it in options too"
            raise ValueError(f"{name!r} is scheduled, but no option of {cls.__name__}; {why}")
    function = _Plain(cls.__name__, update, states)

    def update_of(group: Group) -> Update:
        given = {option: _option(cls.__name__, option, group) for option in words(options)}
        changing = {key: number for option in words(scheduled) for key, number in _numbers(cls.__name__, option, given.pop(option)).items()}
        return Update(function, states, given, scheduled=changing)

    def begin(param: torch.Tensor, group: Group, known: Mapping[str, Any]) -> State:
        return initial(param, group) if initial else {}

    DEFINITIONS[cls] = Definition(cls.__name__, update_of, frozenset(words(shared)), begin)


def _option(kind: str, name: str, group: Group) -> Any:
    if name not in group:
        raise ValueError(f"{name!r} is to be an option of {kind}, but its groups have {', '.join(sorted(set(group) - {'params'}))}: give one of these")
    return constant(kind, name, group[name])


def _numbers(kind: str, name: str, value: Any) -> dict[str, float]:
    """What is scheduled of an option: itself, or each number of a tuple, as ``betas.0``."""
    numbers = {f"{name}.{k}": one for k, one in enumerate(value)} if isinstance(value, (tuple, list)) else {name: value}
    for one in numbers.values():
        if isinstance(one, bool) or not isinstance(one, (int, float)):
            raise ValueError(f"{name} of {kind} is {shown(value)}, and what is scheduled is a number, or a tuple of numbers: leave it out of scheduled")
    return {key: float(one) for key, one in numbers.items()}


def _regrouped(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options with the tuples that ``_numbers`` has taken apart."""
    found: dict[str, Any] = {}
    for key, value in options.items():
        name, _, part = key.partition(".")
        found[name] = (*found.get(name, ()), value) if part else value
    return found


@dataclass(frozen=True)
class _Plain:
    """A user's function, called as an op of ``ops`` is."""

    name: str
    update: Function
    states: tuple[str, ...]

    def __call__(self, param: torch.Tensor, grad: torch.Tensor, *rest: Any, **options: Any) -> tuple[torch.Tensor, ...]:
        *values, lr, grad_scale, found_inf = rest
        state = dict(zip(self.states, values, strict=True))
        wide, others = widened(param), {name: widened(value) for name, value in state.items()}
        grad = unscaled(grad, wide.dtype, grad_scale)
        given = {"the parameter": wide, "the gradient": grad, **others}
        versions = [version_of(tensor) for tensor in given.values()]
        try:
            new, made = self._returned(self.update(wide, grad, others.copy(), lr, **_regrouped(options)))
        except DATA_DEPENDENT as error:
            raise ValueError(f"the update of {self.name} looks at a value, which a graph does not have: choose with torch.where{self._line(error)}") from error
        for (name, tensor), version in zip(given.items(), versions, strict=True):
            if version_of(tensor) != version:
                raise ValueError(f"the update of {self.name} writes to {name}: return a new tensor instead ({name}.mul(…), not {name}.mul_(…))")
        found = {"the parameter": new, **made}
        return tuple(self._kept(name, found[name], old, found_inf) for name, old in {"the parameter": param, **state}.items())

    def _returned(self, found: Any) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        if not (isinstance(found, tuple) and len(found) == 2 and isinstance(found[1], Mapping)):
            what = "a tensor" if isinstance(found, torch.Tensor) else f"a {type(found).__name__}"
            raise ValueError(f"the update of {self.name} returns {what}, not the new parameter and a dict of its new states: return param, {{…}}")
        if set(found[1]) != set(self.states):
            returned, wanted = (", ".join(sorted(names)) or "none" for names in (found[1], self.states))
            raise ValueError(f"the update of {self.name} returns the states {returned}, and was registered with {wanted}: return each of these")
        return found

    def _kept(self, name: str, new: torch.Tensor, old: torch.Tensor, found_inf: torch.Tensor | None) -> torch.Tensor:
        if not isinstance(new, torch.Tensor) or new.shape != old.shape:
            what = list(new.shape) if isinstance(new, torch.Tensor) else repr(new)
            raise ValueError(f"the update of {self.name} makes {name} of shape {list(old.shape)} a {what}: its shape stays")
        return unless(found_inf, new.to(old.dtype), old)

    def _line(self, error: BaseException) -> str:
        """The line of the user's file that an error comes from."""
        own = getattr(inspect.unwrap(self.update), "__code__", None)
        lines = [frame for frame in traceback.extract_tb(error.__traceback__) if own and frame.filename == own.co_filename]
        return f"\n    {Path(lines[-1].filename).name}:{lines[-1].lineno}: {lines[-1].line}" if lines else ""
