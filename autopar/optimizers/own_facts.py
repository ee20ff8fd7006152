"""Find out by trials which state the step of an optimizer's class keeps, and whether it works element by element.

A trial runs the class's own step on small float64 parameters. A parameter is cut along each dim, and the step of the
pieces is compared with the step of the whole. If both agree, each element depends only on its own gradient and state,
and ranks may step their own pieces. If not, as with the norms of LAMB or the matrices of Muon, parameters are gathered
for their steps. A step that trials cannot show to be right is refused.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autopar.optimizers.own_step import FirstValues, OwnStep, regrouped

STEPS = (1.0, 1e-3, 30.0, 1.0)  # the sizes of the gradients in a trial; some are large enough to be clipped
LONG, SHORT = 5, 3  # the size of the first dim of a trial's parameter, and of the others
CLOSE = 1e-11

State = dict[str, Any]


class Unfit(Exception):
    """The reason why a step cannot be run on pieces."""


@dataclass(frozen=True)
class Facts:
    """The facts about a step.

    Attributes:
        same_shape: states of the parameter's shape.
        moved: states that are one number and change freely, but equally for all parameters that have taken the same
            number of steps.
        counted: states that count steps.
        elementwise: whether the step works element by element.
        kinds: name of a number → its type: a dtype of torch, or Python's type.
    """

    same_shape: tuple[str, ...]
    moved: tuple[str, ...]
    counted: tuple[str, ...]
    elementwise: bool
    kinds: Mapping[str, Any]


def facts_of(step: OwnStep, numbers: Mapping[str, float], dims: Sequence[int]) -> Facts:
    """Return the facts of a step, for parameters with these numbers of dims.

    Raises:
        Unfit: the step cannot be run on pieces; the message says why.
    """
    numbers = {**numbers, "lr": numbers["lr"] or 0.1} if "lr" in numbers else dict(numbers)
    trials = [
        _Trial(step, numbers, (LONG, *[SHORT] * (count - 1))) for count in sorted({max(1, count) for count in dims})
    ]
    known: Facts | None = None
    for trial in trials:
        facts = trial.facts()
        if known is not None and (facts.same_shape, facts.moved, facts.counted) != (
            known.same_shape,
            known.moved,
            known.counted,
        ):
            raise Unfit(
                "it keeps different states for parameters with different numbers of dims: give each kind a parameter "
                "group of its own"
            )
        known = (
            facts
            if known is None
            else Facts(
                facts.same_shape, facts.moved, facts.counted, known.elementwise and facts.elementwise, facts.kinds
            )
        )
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
        same_shape = tuple(
            n for n, value in first.items() if isinstance(value, torch.Tensor) and value.shape == self.shape
        )
        single = [n for n in first if n not in same_shape]
        for name in single:
            value = first[name]
            if (isinstance(value, torch.Tensor) and value.dim()) or not isinstance(value, (torch.Tensor, int, float)):
                described = f"of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else f"{value!r:.40}"
                raise Unfit(f"its state {name} is {described}, and neither of the parameter's shape nor a number")
        self._check_begin(first)
        whole, history = self._run(self.begin, self.grads, first)
        self._check_alone(whole, first)
        counted = tuple(
            n
            for n in single
            if [float(state[n]) for state in history] == [float(first[n]) + k for k in range(1, len(STEPS) + 1)]
        )
        moved = tuple(n for n in single if n not in counted)
        kinds = {n: value.dtype if isinstance(value := first[n], torch.Tensor) else type(value) for n in single}
        return Facts(
            same_shape, moved, counted, self._is_elementwise(whole, history[-1], first, same_shape, single), kinds
        )

    def _first(self) -> State:
        """Return the state with which a parameter begins, after checking that a step changes nothing else."""
        before, optimizer = torch.get_rng_state(), self.step.optimizer
        attributes = {
            name: _value(value) for name, value in vars(optimizer).items() if name not in ("param_groups", "state")
        }
        params, states = [self.begin.clone()], [FirstValues()]
        stand_in = self._stepped(params, [self.grads[0]], states)
        (group,) = stand_in.param_groups
        options = {name: value for name, value in group.items() if name != "params"}
        changed = [
            name for name, value in vars(stand_in).items() if name in attributes and _value(value) != attributes[name]
        ]
        changed += [name for name in vars(stand_in) if name not in attributes and name not in ("param_groups", "state")]
        if changed := [name for name in changed if not name.startswith("_opt")]:
            raise Unfit(f"it changes an attribute of the optimizer, {changed[0]}, which all parameters share")
        if options != {**self.step.constants, **regrouped(self.numbers)}:
            raise Unfit("it changes entries of its parameter groups, which all parameters share")
        if not torch.equal(before, torch.get_rng_state()):
            raise Unfit("it draws random numbers")
        if torch.equal(params[0], self.begin):
            raise Unfit("it does not change the parameters of its groups")
        if unknown := [name for name, value in states[0].items() if value is not None and name not in states[0].first]:
            raise Unfit(f"autopar cannot see how its state {unknown[0]} is made")
        return dict(states[0].first)

    def _check_begin(self, first: State) -> None:
        """Check that a first step with the initial state equals one without state, also for another gradient."""
        for grad in (self.grads[0], self.others[0]):
            fresh, begun = [self.begin.clone()], [self.begin.clone()]
            states: list[State] = [{}, copy.deepcopy(first)]
            self._stepped(fresh, [grad], states[:1])
            self._stepped(begun, [grad], states[1:])
            if not _alike(fresh[0], begun[0]) or not all(_alike(states[0].get(n), states[1].get(n)) for n in first):
                raise Unfit("its first step does not begin with a state that is the same for all gradients")

    def _check_alone(self, whole: torch.Tensor, first: State) -> None:
        """Check that a parameter's step does not change if another parameter is stepped with it."""
        params, states = [self.begin.clone(), self.other.clone()], [copy.deepcopy(first), copy.deepcopy(first)]
        for grad, other in zip(self.grads, self.others, strict=True):
            self._stepped(params, [grad, other], states)
        if not _alike(params[0], whole):
            raise Unfit("the step of a parameter depends on the other parameters")

    def _is_elementwise(
        self, whole: torch.Tensor, last: State, first: State, same_shape: Sequence[str], single: Sequence[str]
    ) -> bool:
        for dim, at in itertools.product(range(len(self.shape)), (0, 2)):
            sizes = (at, self.shape[dim] - at)
            cut = [value.split(sizes, dim) for value in (self.begin, *self.grads)]
            ends: list[tuple[torch.Tensor, State]] = []
            for k in range(2):
                begin = {
                    n: first[n].split(sizes, dim)[k].clone() if n in same_shape else copy.deepcopy(first[n])
                    for n in first
                }
                try:
                    param, history = self._run(cut[0][k], [pieces[k] for pieces in cut[1:]], begin)
                except Unfit:
                    return False
                ends.append((param, history[-1]))
            joined = [(torch.cat([param for param, _ in ends], dim), whole)]
            joined += [(torch.cat([state[n] for _, state in ends], dim), last[n]) for n in same_shape]
            numbers = [(state[n], last[n]) for _, state in ends for n in single]
            if not all(_alike(a, b) for a, b in (*joined, *numbers)):
                return False
        return True

    def _run(
        self, begin: torch.Tensor, grads: Sequence[torch.Tensor], first: State
    ) -> tuple[torch.Tensor, list[State]]:
        """Return a parameter after all steps, and its state after each."""
        params, states, history = [begin.clone()], [copy.deepcopy(first)], []
        for grad in grads:
            self._stepped(params, [grad], states)
            history.append(copy.deepcopy(states[0]))
        return params[0], history

    def _stepped(
        self, params: Sequence[torch.Tensor], grads: Sequence[torch.Tensor], states: Sequence[State]
    ) -> torch.optim.Optimizer:
        try:
            return self.step(params, [grad.clone() for grad in grads], states, self.numbers)
        except Exception as error:
            text = str(error).partition("\n")[0]
            raise Unfit(
                f"a trial of it with a parameter of shape {list(params[0].shape)} ended with {type(error).__name__}: "
                f"{text}"
            ) from error


def _alike(a: Any, b: Any) -> bool:
    if a is None or b is None:
        return a is b
    a, b = (value if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=torch.float64) for value in (a, b))
    return a.shape == b.shape and torch.allclose(a.double(), b.double(), rtol=CLOSE, atol=CLOSE, equal_nan=True)


def _value(value: Any) -> Any:
    """Return a value that shows whether an attribute changes.

    It is a copy of numbers and containers of numbers, else the object's id.
    """
    plain: Callable[[Any], bool] = lambda item: isinstance(item, (bool, int, float, str, type(None)))  # noqa: E731
    if isinstance(value, (list, tuple)) and all(map(plain, value)):
        return list(value)
    if isinstance(value, dict) and all(map(plain, value.values())):
        return dict(value)
    return value if plain(value) else id(value)
