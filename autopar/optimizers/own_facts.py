"""Finds out by trials what the step of an optimizer's class does: which state it keeps, whether it works element by element.

A trial runs the class's own step on small parameters of float64. A parameter is cut along each dim, and the step of the pieces is compared
with the step of the whole: where both are the same, each element is changed by its own gradient and state alone, and ranks may step their
pieces. Where they are not, as with the norms of LAMB or the matrices of Muon, parameters are gathered for their steps. What a trial cannot
show to be right is refused.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autopar.optimizers.own_step import FirstValues, OwnStep, regrouped

STEPS = (1.0, 1e-3, 30.0, 1.0)  # of a trial: the size of its gradients, some of which a clipping would see
LONG, SHORT = 5, 3  # the first dim of a trial's parameter, and the others
CLOSE = 1e-11

State = dict[str, Any]


class Unfit(Exception):  # it is a reason
    """Why a step cannot be run on pieces."""


@dataclass(frozen=True)
class Facts:
    """What is known of a step.

    Attributes:
        lying: states of the parameter's shape.
        moved: states that are one number and change as they like, the same for all parameters that have taken equally many steps.
        counted: states that count steps.
        elementwise: whether it works element by element.
        kinds: number → the type it is kept in: that of a tensor, or Python's own.
    """

    lying: tuple[str, ...]
    moved: tuple[str, ...]
    counted: tuple[str, ...]
    elementwise: bool
    kinds: Mapping[str, Any]


def facts_of(step: OwnStep, numbers: Mapping[str, float], dims: Sequence[int]) -> Facts:
    """The facts of a step, for parameters with so many dims.

    Raises:
        Unfit: it cannot be run on pieces; the message says why.
    """
    numbers = {**numbers, "lr": numbers["lr"] or 0.1} if "lr" in numbers else dict(numbers)
    trials = [_Trial(step, numbers, (LONG, *[SHORT] * (count - 1))) for count in sorted({max(1, count) for count in dims})]
    known: Facts | None = None
    for trial in trials:
        found = trial.facts()
        if known is not None and (found.lying, found.moved, found.counted) != (known.lying, known.moved, known.counted):
            raise Unfit("it keeps other states for parameters with other numbers of dims: give each kind a parameter group of its own")
        known = found if known is None else Facts(found.lying, found.moved, found.counted, known.elementwise and found.elementwise, found.kinds)
    assert known is not None
    return known


class _Trial:
    def __init__(self, step: OwnStep, numbers: Mapping[str, float], shape: tuple[int, ...]) -> None:
        self.step, self.numbers, self.shape = step, numbers, shape
        self._generator = torch.Generator().manual_seed(0)
        self.begin, self.other = (self._drawn(1.0) for _ in range(2))
        self.grads, self.others = ([self._drawn(size) for size in STEPS] for _ in range(2))

    def _drawn(self, size: float) -> torch.Tensor:
        return torch.randn(self.shape, dtype=torch.float64, generator=self._generator) * size

    def facts(self) -> Facts:
        first = self._first()
        lying = tuple(n for n, value in first.items() if isinstance(value, torch.Tensor) and value.shape == self.shape)
        single = [n for n in first if n not in lying]
        for name in single:
            value = first[name]
            if (isinstance(value, torch.Tensor) and value.dim()) or not isinstance(value, (torch.Tensor, int, float)):
                told = f"of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else f"{value!r:.40}"
                raise Unfit(f"its state {name} is {told}, and neither of the parameter's shape nor a number")
        self._check_begin(first)
        whole, history = self._run(self.begin, self.grads, first)
        self._check_alone(whole, first)
        counted = tuple(n for n in single if [float(state[n]) for state in history] == [float(first[n]) + k for k in range(1, len(STEPS) + 1)])
        moved = tuple(n for n in single if n not in counted)
        kinds = {n: value.dtype if isinstance(value := first[n], torch.Tensor) else type(value) for n in single}
        return Facts(lying, moved, counted, self._is_elementwise(whole, history[-1], first, lying, single), kinds)

    def _first(self) -> State:
        """The state with which a parameter begins; and that nothing else is changed by a step."""
        before, optimizer = torch.get_rng_state(), self.step.optimizer
        kept = {name: _value(value) for name, value in vars(optimizer).items() if name not in ("param_groups", "state")}
        params, states = [self.begin.clone()], [FirstValues()]
        stand_in = self._stepped(params, [self.grads[0]], states)
        (group,) = stand_in.param_groups
        given = {name: value for name, value in group.items() if name != "params"}
        changed = [name for name, value in vars(stand_in).items() if name in kept and _value(value) != kept[name]]
        changed += [name for name in vars(stand_in) if name not in kept and name not in ("param_groups", "state")]
        if changed := [name for name in changed if not name.startswith("_opt")]:
            raise Unfit(f"it changes an attribute of the optimizer, {changed[0]}, which all parameters share")
        if given != {**self.step.constants, **regrouped(self.numbers)}:
            raise Unfit("it changes entries of its parameter groups, which all parameters share")
        if not torch.equal(before, torch.get_rng_state()):
            raise Unfit("it draws random numbers")
        if torch.equal(params[0], self.begin):
            raise Unfit("it does not change the parameters of its groups")
        if unknown := [name for name, value in states[0].items() if value is not None and name not in states[0].first]:
            raise Unfit(f"its state {unknown[0]} is made in a way that cannot be seen")
        return dict(states[0].first)

    def _check_begin(self, first: State) -> None:
        """A first step that is given the state it would begin with is the first step, also with another gradient."""
        for grad in (self.grads[0], self.others[0]):
            fresh, begun = [self.begin.clone()], [self.begin.clone()]
            states: list[State] = [{}, copy.deepcopy(first)]
            self._stepped(fresh, [grad], states[:1])
            self._stepped(begun, [grad], states[1:])
            if not _alike(fresh[0], begun[0]) or not all(_alike(states[0].get(n), states[1].get(n)) for n in first):
                raise Unfit("its first step does not begin with a state that is the same for all gradients")

    def _check_alone(self, whole: torch.Tensor, first: State) -> None:
        """A parameter's step is the same with another parameter beside it."""
        params, states = [self.begin.clone(), self.other.clone()], [copy.deepcopy(first), copy.deepcopy(first)]
        for grad, other in zip(self.grads, self.others, strict=True):
            self._stepped(params, [grad, other], states)
        if not _alike(params[0], whole):
            raise Unfit("the step of a parameter depends on the other parameters")

    def _is_elementwise(self, whole: torch.Tensor, last: State, first: State, lying: Sequence[str], single: Sequence[str]) -> bool:
        for dim, at in itertools.product(range(len(self.shape)), (0, 2)):
            sizes = (at, self.shape[dim] - at)
            cut = [value.split(sizes, dim) for value in (self.begin, *self.grads)]
            ends: list[tuple[torch.Tensor, State]] = []
            for k in range(2):
                begin = {n: first[n].split(sizes, dim)[k].clone() if n in lying else copy.deepcopy(first[n]) for n in first}
                try:
                    param, history = self._run(cut[0][k], [one[k] for one in cut[1:]], begin)
                except Unfit:
                    return False
                ends.append((param, history[-1]))
            joined = [(torch.cat([param for param, _ in ends], dim), whole)]
            joined += [(torch.cat([state[n] for _, state in ends], dim), last[n]) for n in lying]
            numbers = [(state[n], last[n]) for _, state in ends for n in single]
            if not all(_alike(a, b) for a, b in (*joined, *numbers)):
                return False
        return True

    def _run(self, begin: torch.Tensor, grads: Sequence[torch.Tensor], first: State) -> tuple[torch.Tensor, list[State]]:
        """A parameter after all steps, and its state after each."""
        params, states, history = [begin.clone()], [copy.deepcopy(first)], []
        for grad in grads:
            self._stepped(params, [grad], states)
            history.append(copy.deepcopy(states[0]))
        return params[0], history

    def _stepped(self, params: Sequence[torch.Tensor], grads: Sequence[torch.Tensor], states: Sequence[State]) -> torch.optim.Optimizer:
        try:
            return self.step(params, [grad.clone() for grad in grads], states, self.numbers)
        except Exception as error:
            text = str(error).partition("\n")[0]
            raise Unfit(f"a trial of it with a parameter of shape {list(params[0].shape)} ended with {type(error).__name__}: {text}") from error


def _alike(a: Any, b: Any) -> bool:
    if a is None or b is None:
        return a is b
    a, b = (one if isinstance(one, torch.Tensor) else torch.tensor(one, dtype=torch.float64) for one in (a, b))
    return a.shape == b.shape and torch.allclose(a.double(), b.double(), rtol=CLOSE, atol=CLOSE, equal_nan=True)


def _value(value: Any) -> Any:
    """What shows whether an attribute was changed: a copy of numbers and of containers of them, else the object itself."""
    plain: Callable[[Any], bool] = lambda one: isinstance(one, (bool, int, float, str, type(None)))  # noqa: E731
    if isinstance(value, (list, tuple)) and all(map(plain, value)):
        return list(value)
    if isinstance(value, dict) and all(map(plain, value.values())):
        return dict(value)
    return value if plain(value) else id(value)
