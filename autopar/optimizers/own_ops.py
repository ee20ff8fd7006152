"""Make an op from the step of an optimizer's class, for one parameter and for a list of them in place.

    rmsprop = autopar::step_RMSprop(param, grad, square_avg, step, lr, None, None, alpha=alpha, eps=eps, …,
    of='RMSprop(centered=False, …)')

One op is made for each class and set of states; ``of`` names the options that are not numbers. Its kernel runs the step
of the class (``own_step``) on copies. If the step works element by element, so does the op; states that are one number
are then updated by another op, ``autopar::numbers_of_NAdam``: the same step of a parameter without elements. Otherwise
the op takes the whole parameter.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autopar.optimizers.definition import Definition, Group, State
from autopar.optimizers.in_place import IN_PLACE, SHARED
from autopar.optimizers.ops import make_op, unless, unscaled, widened
from autopar.optimizers.own_facts import Facts, Unfit, facts_of
from autopar.optimizers.own_step import FirstValues, OwnStep, options_of
from autopar.optimizers.update import RATE, Update
from autopar.torch_private import OpOverload

# (the op's name, ``of``) → step
STEPS: weakref.WeakValueDictionary[tuple[str, str], _Stepped] = weakref.WeakValueDictionary()
_OPS: dict[tuple[Any, ...], tuple[OpOverload, OpOverload | None]] = {}
_LISTENERS: list[Callable[[str, int, int, int], None]] = []


def on_new_op(tell: Callable[[str, int, int, int], None]) -> None:
    """Call ``tell`` with each op that is made, and its counts of operands and results.

    The arguments are its name, how many operands and results have the parameter's shape (0: the op takes the whole
    parameter), how many operands are numbers, and how many results there are.
    """
    _LISTENERS.append(tell)


@dataclass(frozen=True)
class OwnUpdate:
    """The step of a parameter, as ``Update`` calls it.

    It has no reference to the optimizer, so that a traced program keeps none.

    Attributes:
        op, numbers: the ops; ``numbers`` updates the states that are one number, if ``op`` does not.
        of: the name of the step.
        same_shape: how many states have the parameter's shape.
        moved: how many states are one number.
    """

    op: OpOverload
    numbers: OpOverload | None
    of: str
    same_shape: int
    moved: int

    def __call__(self, param: torch.Tensor, grad: torch.Tensor, *operands: Any, **scheduled: Any) -> Any:
        *states, lr, grad_scale, found_inf = operands
        numbers = {_word(name): value for name, value in scheduled.items()}
        results = self.op(param, grad, *states, lr, grad_scale, found_inf, **numbers, of=self.of)
        if self.numbers is None:
            return results
        more = self.numbers(*states[self.same_shape :], lr, found_inf, **numbers, of=self.of)
        return (*_several(results), *_several(more))


class _Stepped:
    """A step with its facts.

    Attributes:
        step: the step of the class.
        facts: its facts.
        scheduled: the names of its numbers, without the learning rate.
    """

    def __init__(self, step: OwnStep, facts: Facts, scheduled: Sequence[str]) -> None:
        self.step, self.facts, self.scheduled = step, facts, tuple(scheduled)

    def in_place(self, params: Sequence[torch.Tensor], grads: Sequence[torch.Tensor],
                 states: Sequence[Sequence[torch.Tensor]], lr: torch.Tensor, grad_scale: torch.Tensor | None,
                 found_inf: torch.Tensor | None, numbers: Mapping[str, torch.Tensor], moves: bool) -> None:  # fmt: skip
        """Step several parameters; ``moves``: also write the numbers among their states.

        ``states`` has one list for each state: those of the parameter's shape, numbers, and counts, which include this
        step already.
        """
        if not params or (found_inf is not None and found_inf != 0):
            return
        facts = self.facts
        names = (*facts.same_shape, *facts.moved, *facts.counted)
        wide = [widened(param) for param in params]
        states_of = [
            {n: self._kept(n, values[k]) for n, values in zip(names, states, strict=True)} for k in range(len(params))
        ]
        grads = [unscaled(grad, param.dtype, grad_scale) for grad, param in zip(grads, wide, strict=True)]
        self.step(
            wide, grads, states_of, {RATE: lr.item(), **{name: numbers[_word(name)].item() for name in self.scheduled}}
        )
        for k, (param, new) in enumerate(zip(params, wide, strict=True)):
            if new is not param:
                param.copy_(new)
            for n, values in zip((*facts.same_shape, *(facts.moved if moves else ())), states, strict=False):
                if states_of[k][n] is not values[k]:
                    values[k].copy_(torch.as_tensor(states_of[k][n]))

    def _kept(self, name: str, value: torch.Tensor) -> Any:
        """Return a state in the type that the class keeps."""
        kind = self.facts.kinds.get(name)
        if kind is None:
            return widened(value)
        if not isinstance(kind, torch.dtype):
            return kind(value.item() - (name in self.facts.counted))
        return (value - 1).to(kind) if name in self.facts.counted else value.clone()


def _word(name: str) -> str:
    return name.replace(".", "_")


def _several(results: Any) -> tuple[Any, ...]:
    return results if isinstance(results, tuple) else (results,)


def _ops(kind: str, facts: Facts, scheduled: Sequence[str]) -> tuple[OpOverload, OpOverload | None]:
    """Return the ops of such a step; they are made when they are first needed."""
    key = (kind, facts.same_shape, facts.moved, facts.counted, facts.elementwise, tuple(scheduled))
    if key not in _OPS:
        number = sum(other[0] == kind for other in _OPS)
        name = "".join(c if c.isalnum() else "_" for c in kind) + f"_{number}" * bool(number)
        _OPS[key] = _step_op(f"step_{name}", facts, scheduled), _numbers_op(f"numbers_of_{name}", facts, scheduled)
    return _OPS[key]


def _schema(tensors: Sequence[str], last: str, scheduled: Sequence[str], results: int) -> str:
    operands = [
        *(f"Tensor {_word(name)}_" for name in tensors),
        "Tensor lr",
        *last.split("; "),
        "*",
        *(f"Tensor {_word(name)}" for name in scheduled),
        "str of",
    ]
    return f"({', '.join(operands)}) -> {'Tensor' if results == 1 else '(' + ', '.join(['Tensor'] * results) + ')'}"


def _step_op(name: str, facts: Facts, scheduled: Sequence[str]) -> OpOverload:
    returned = len(facts.same_shape) + (0 if facts.elementwise else len(facts.moved))  # how many states it returns
    states = (*facts.same_shape, *facts.moved, *facts.counted)

    def functional(param: torch.Tensor, grad: torch.Tensor, *operands: Any, of: str, **numbers: torch.Tensor) -> Any:
        *states_before, lr, grad_scale, found_inf = operands
        new = [value.clone() for value in (param, *states_before)]
        STEPS[name, of].in_place(
            new[:1],
            [grad.clone()],
            [[value] for value in new[1:]],
            lr,
            grad_scale,
            found_inf,
            numbers,
            not facts.elementwise,
        )
        return tuple(new[: 1 + returned]) if returned else new[0]

    def fake(param: torch.Tensor, grad: torch.Tensor, *operands: Any, of: str, **numbers: Any) -> Any:
        return (
            tuple(torch.empty_like(value) for value in (param, *operands[:returned]))
            if returned
            else torch.empty_like(param)
        )

    schema = _schema(("param", "grad", *states), "Tensor? grad_scale; Tensor? found_inf", scheduled, 1 + returned)
    op = make_op(name, schema, functional, fake)

    @torch.no_grad()
    def update(
        params: Any, grads: Any, states: Any, lr: Any, grad_scale: Any, found_inf: Any, *, of: str, **numbers: Any
    ) -> None:
        STEPS[name, of].in_place(params, grads, states, lr, grad_scale, found_inf, numbers, not facts.elementwise)

    IN_PLACE[op], SHARED[op] = update, 3
    alike = 2 + len(facts.same_shape) if facts.elementwise else 0
    for tell in _LISTENERS:
        tell(f"autopar::{name}", alike, 5 + len(states) + len(scheduled) - alike, 1 + returned)
    return op


def _numbers_op(name: str, facts: Facts, scheduled: Sequence[str]) -> OpOverload | None:
    """Make the op that updates the states that are one number, by the step of a parameter without elements."""
    if not facts.moved or not facts.elementwise:
        return None
    count = len(facts.moved)

    def functional(*operands: Any, of: str, **numbers: torch.Tensor) -> Any:
        *states_before, lr, found_inf = operands
        new = [value.clone() for value in states_before]
        nothing = [torch.empty(0, dtype=torch.float64, device=lr.device) for _ in range(2 + len(facts.same_shape))]
        STEPS[name, of].in_place(
            nothing[:1],
            nothing[1:2],
            [*([empty] for empty in nothing[2:]), *([value] for value in new)],
            lr,
            None,
            None,
            numbers,
            moves=True,
        )
        results = tuple(unless(found_inf, value, old) for value, old in zip(new[:count], states_before, strict=False))
        return results if count > 1 else results[0]

    def fake(*operands: Any, of: str, **numbers: Any) -> Any:
        results = tuple(torch.empty_like(value) for value in operands[:count])
        return results if count > 1 else results[0]

    states = (*facts.moved, *facts.counted)
    op = make_op(name, _schema(states, "Tensor? found_inf", scheduled, count), functional, fake)
    for tell in _LISTENERS:
        tell(f"autopar::{name}", 0, 2 + len(states) + len(scheduled), count)
    return op


def own_definition(optimizer: torch.optim.Optimizer) -> Definition:
    """Return the definition of an optimizer of an unknown class, made from its own step.

    Raises:
        Unfit: the step cannot be run on pieces; the message says why.
    """
    kind = type(optimizer).__name__
    known: dict[Any, tuple[_Stepped, Update]] = {}

    def step_of(group: Group) -> tuple[_Stepped, Update]:
        constants, numbers = options_of(group, optimizer.defaults)
        dims = frozenset(param.dim() for param in group["params"])
        key = repr(constants), tuple((name, value == 0) for name, value in numbers.items()), dims
        if key not in known:
            known[key] = _stepped(optimizer, constants, numbers, dims)
        stepped, update = known[key]
        scheduled = {name: numbers[name] for name in stepped.scheduled}
        return stepped, Update(update.function, update.states, {}, update.counted, update.elementwise, scheduled)

    def begin(param: torch.Tensor, group: Group, state: Mapping[str, Any]) -> State:
        stepped, update = step_of(group)
        if all(name in state for name in update.states):
            return {}
        first = FirstValues()
        _, numbers = options_of(group, optimizer.defaults)
        stepped.step([param.detach().clone()], [torch.zeros_like(param)], [first], numbers)
        values = {name: first.first[name] for name in update.states}
        return {
            n: v if isinstance(v, torch.Tensor) else torch.full((), v, dtype=torch.float64, device=param.device)
            for n, v in values.items()
        }

    single = {name for group in optimizer.param_groups for name in step_of(group)[0].facts.kinds}
    return Definition(kind, lambda group: step_of(group)[1], frozenset(single), begin, at_once=True)


def _stepped(
    optimizer: torch.optim.Optimizer, constants: Mapping[str, Any], numbers: Mapping[str, float], dims: frozenset[int]
) -> tuple[_Stepped, Update]:
    step, kind = OwnStep(optimizer, constants), type(optimizer).__name__
    facts = facts_of(step, numbers, sorted(dims))
    scheduled = [name for name in numbers if name != RATE]
    stepped = _Stepped(step, facts, scheduled)
    op, more = _ops(kind, facts, scheduled)
    names = [op_or_none.name().removeprefix("autopar::") for op_or_none in (op, more) if op_or_none is not None]
    attributes = {name: value for name, value in vars(optimizer).items() if name not in _base_attributes()}
    plain = {name: value for name, value in {**constants, **attributes}.items() if _is_plain(value)}
    base = of = f"{kind}({', '.join(f'{name}={value!r}' for name, value in plain.items())})"
    shares = all(map(_is_plain, attributes.values()))  # then an optimizer with the same text has the same step
    number = 1
    while (other := STEPS.get((names[0], of))) is not None and not (
        shares and type(other.step.optimizer) is type(optimizer)
    ):
        number += 1
        of = f"{base} {number}"
    for name in names:
        stepped = STEPS.setdefault((name, of), stepped)
    states = (*facts.same_shape, *facts.moved, *facts.counted)
    return stepped, Update(
        OwnUpdate(op, more, of, len(facts.same_shape), len(facts.moved)), states, {}, facts.counted, facts.elementwise
    )


def _is_plain(value: Any) -> bool:
    return isinstance(value, (bool, int, float, str, type(None))) or (
        isinstance(value, (tuple, list)) and all(map(_is_plain, value))
    )


@functools.cache
def _base_attributes() -> frozenset[str]:
    """Return the attributes that every optimizer has, and those that schedulers set.

    Cached and late: the first optimizer of a process imports torch's compiler.
    """
    return frozenset(vars(torch.optim.SGD([torch.zeros(1)]))) | {"step", "_opt_called"}


__all__ = ["Unfit", "on_new_op", "own_definition"]
