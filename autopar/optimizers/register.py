"""Register a user's optimizer as a short function of plain torch ops."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from autopar.errors import class_of, shown
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
    """Define how an optimizer class of yours updates a parameter, so that its step can be part of a graph.

        def lion(param, grad, state, lr, *, betas, weight_decay):  # Chen et al. 2023
            mean = state["exp_avg"]
            direction = (betas[0] * mean + (1 - betas[0]) * grad).sign()
            return param * (1 - lr * weight_decay) - lr * direction, {"exp_avg": mean.lerp(grad, 1 - betas[1])}

        register_optimizer(Lion, update=lion, state="exp_avg", options="betas weight_decay")

    The function is trusted: it must compute what ``cls.step`` computes. A second definition of a class replaces the
    first.

    Args:
        cls: the class; subclasses that inherit its step are included.
        update: a function of the parameter, its gradient, its state by name, and the learning rate (a tensor without
            dims), with the group's options as keywords. Half precision arrives as float32. It returns the new parameter
            and its new state, writes nothing, and does not look at values (``.item()``, ``if``): use ``torch.where``.
            It need not work element by element: norms of a parameter that is split become sums over its ranks.
        state: the names of its states, as in ``optimizer.state[param]``.
        shared: the states without dims, such as ``step``.
        options: the entries of a group that ``update`` takes: numbers, truths, texts and tuples of them.
        scheduled: the options that change from step to step, as ``OneCycleLR`` changes ``betas`` or ``momentum``:
            numbers, and tuples of them. ``update`` gets them as tensors without dims, like ``lr``. The other options
            are part of the program: another value makes another program.
        initial: a function of a parameter and its group that returns the states that do not begin as zeros.

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
            raise ValueError(
                f"{name!r} is shared, but no state of {cls.__name__}; its states are {', '.join(states) or 'none'}: "
                f"name it in state too"
            )
    for name in words(scheduled):
        if name not in words(options) or name in (RATE, "step"):
            why = (
                "a step has one of its own"
                if name in (RATE, "step")
                else f"its options are {' '.join(words(options)) or 'none'}: name it in options too"
            )
            raise ValueError(f"{name!r} is scheduled, but no option of {cls.__name__}; {why}")
    function = _Plain(cls.__name__, update, states)

    def update_of(group: Group) -> Update:
        constants = {option: _option(cls.__name__, option, group) for option in words(options)}
        changing = {
            key: number
            for option in words(scheduled)
            for key, number in _numbers(cls.__name__, option, constants.pop(option)).items()
        }
        return Update(function, states, constants, scheduled=changing)

    def begin(param: torch.Tensor, group: Group, known: Mapping[str, Any]) -> State:
        return initial(param, group) if initial else {}

    DEFINITIONS[cls] = Definition(cls.__name__, update_of, frozenset(words(shared)), begin)


def _option(kind: str, name: str, group: Group) -> Any:
    if name not in group:
        raise ValueError(
            f"{name!r} is an option of {kind}, but its groups have {', '.join(sorted(set(group) - {'params'}))}: name "
            f"one of these"
        )
    return constant(kind, name, group[name])


def _numbers(kind: str, name: str, value: Any) -> dict[str, float]:
    """Return the scheduled numbers of an option: itself, or each number of a tuple, as ``betas.0``."""
    numbers = (
        {f"{name}.{k}": number for k, number in enumerate(value)} if isinstance(value, (tuple, list)) else {name: value}
    )
    for number in numbers.values():
        if isinstance(number, bool) or not isinstance(number, (int, float)):
            raise ValueError(
                f"{name} of {kind} is {shown(value)}, but a scheduled option is a number, or a tuple of numbers: "
                f"remove it from scheduled"
            )
    return {key: float(number) for key, number in numbers.items()}


def _regrouped(options: Mapping[str, Any]) -> dict[str, Any]:
    """Rebuild the tuples that ``_numbers`` has split."""
    regrouped: dict[str, Any] = {}
    for key, value in options.items():
        name, _, part = key.partition(".")
        regrouped[name] = (*regrouped.get(name, ()), value) if part else value
    return regrouped


@dataclass(frozen=True)
class _Plain:
    """A user's function, called like an op of ``ops``."""

    name: str
    update: Function
    states: tuple[str, ...]

    def __call__(
        self, param: torch.Tensor, grad: torch.Tensor, *state_operands: Any, **options: Any
    ) -> tuple[torch.Tensor, ...]:
        *values, lr, grad_scale, found_inf = state_operands
        state = dict(zip(self.states, values, strict=True))
        wide, others = widened(param), {name: widened(value) for name, value in state.items()}
        grad = unscaled(grad, wide.dtype, grad_scale)
        operands = {"the parameter": wide, "the gradient": grad, **others}
        versions = [version_of(tensor) for tensor in operands.values()]
        try:
            new, new_states = self._returned(self.update(wide, grad, others.copy(), lr, **_regrouped(options)))
        except DATA_DEPENDENT as error:
            raise ValueError(
                f"the update of {self.name} looks at a value, which a graph does not have: choose with "
                f"torch.where{self._line(error)}"
            ) from error
        for (name, tensor), version in zip(operands.items(), versions, strict=True):
            if version_of(tensor) != version:
                raise ValueError(
                    f"the update of {self.name} writes to {name}: return a new tensor instead ({name}.mul(…), not "
                    f"{name}.mul_(…))"
                )
        results = {"the parameter": new, **new_states}
        return tuple(
            self._kept(name, results[name], old, found_inf) for name, old in {"the parameter": param, **state}.items()
        )

    def _returned(self, returned_value: Any) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        if not (
            isinstance(returned_value, tuple) and len(returned_value) == 2 and isinstance(returned_value[1], Mapping)
        ):
            kind = "a tensor" if isinstance(returned_value, torch.Tensor) else f"{class_of(returned_value)}"
            raise ValueError(
                f"the update of {self.name} returns {kind}, not the new parameter and a dict of its new states: "
                f"return param, {{…}}"
            )
        if set(returned_value[1]) != set(self.states):
            returned, wanted = (", ".join(sorted(names)) or "none" for names in (returned_value[1], self.states))
            raise ValueError(
                f"the update of {self.name} returns the states {returned}, and was registered with {wanted}: return "
                f"each of these"
            )
        return returned_value

    def _kept(self, name: str, new: torch.Tensor, old: torch.Tensor, found_inf: torch.Tensor | None) -> torch.Tensor:
        if not isinstance(new, torch.Tensor) or new.shape != old.shape:
            new_shape = list(new.shape) if isinstance(new, torch.Tensor) else repr(new)
            raise ValueError(
                f"the update of {self.name} changes the shape of {name} from {list(old.shape)} to {new_shape}: keep "
                f"the shape"
            )
        return unless(found_inf, new.to(old.dtype), old)

    def _line(self, error: BaseException) -> str:
        """Return the line of the user's file that an error comes from."""
        code = getattr(inspect.unwrap(self.update), "__code__", None)
        lines = [
            frame for frame in traceback.extract_tb(error.__traceback__) if code and frame.filename == code.co_filename
        ]
        return f"\n    {Path(lines[-1].filename).name}:{lines[-1].lineno}: {lines[-1].line}" if lines else ""
