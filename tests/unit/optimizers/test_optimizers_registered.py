"""Optimizers that autopar is told of: Lion, and two that look at a parameter as a whole."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from lion import ByHand, Lion, State, lion
from optimizer_steps import SHAPES, Stepped, drawn, take_step
from torch import nn
from torch.optim import AdamW, Optimizer

from autopar.optimizers import definition_of, register_optimizer
from autopar.optimizers.definition import DEFINITIONS
from autopar.torch_private import FakeTensorMode, make_fx


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    before = dict(DEFINITIONS)
    yield
    DEFINITIONS.clear()
    DEFINITIONS.update(before)


class Lamb(ByHand):
    """You et al., ICLR 2020: Adam's step, as long as the parameter is."""

    def step_of(self, param: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state |= {
                "step": torch.zeros(()),
                "exp_avg": torch.zeros_like(param),
                "exp_avg_sq": torch.full_like(param, 0.1),
            }
        state["step"] += 1
        mean, square, step = (
            state["exp_avg"].lerp_(grad, 0.1),
            state["exp_avg_sq"].lerp_(grad * grad, 0.01),
            int(state["step"]),
        )
        direction = mean / (1 - 0.9**step) / ((square / (1 - 0.99**step)).sqrt() + group["eps"])
        long, wide = param.norm(), direction.norm()
        param.add_(direction, alpha=-group["lr"] * float(long / wide if long > 0 and wide > 0 else 1))


def lamb(param: torch.Tensor, grad: torch.Tensor, state: State, lr: torch.Tensor, *, eps: float) -> Any:
    step = state["step"] + 1
    mean, square = state["exp_avg"].lerp(grad, 0.1), state["exp_avg_sq"].lerp(grad * grad, 0.01)
    direction = mean / (1 - 0.9 ** step.double()) / ((square / (1 - 0.99 ** step.double())).sqrt() + eps)
    long, wide = param.norm(), direction.norm()
    ratio = torch.where((long > 0) & (wide > 0), long / wide, 1.0)
    return param - lr * ratio * direction, {"step": step, "exp_avg": mean, "exp_avg_sq": square}


class NormalizedDescent(ByHand):
    """Nesterov 1984: steps of one length."""

    def step_of(self, param: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        param.sub_(group["lr"] * grad / (grad.norm() + 1e-3))


def normalized(param: torch.Tensor, grad: torch.Tensor, state: State, lr: torch.Tensor) -> Any:
    return param - lr * grad / (grad.norm() + 1e-3), {}


def tenths(param: torch.Tensor, group: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {"exp_avg_sq": torch.full_like(param, 0.1)}


REGISTERED: list[tuple[type[Optimizer], dict[str, Any], dict[str, Any]]] = [
    (
        Lion,
        {"lr": 1e-2, "betas": (0.9, 0.99), "weight_decay": 0.1},
        {"update": lion, "state": "exp_avg", "options": "betas weight_decay"},
    ),
    (
        Lamb,
        {"lr": 1e-2, "eps": 1e-6},
        {
            "update": lamb,
            "state": ("step", "exp_avg", "exp_avg_sq"),
            "shared": ["step"],
            "options": "eps",
            "initial": tenths,
        },
    ),
    (NormalizedDescent, {"lr": 1e-2}, {"update": normalized}),
]
CASES = pytest.mark.parametrize(
    ("kind", "options", "told"), REGISTERED, ids=[kind.__name__ for kind, _, _ in REGISTERED]
)


@CASES
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_registered_steps_are_the_optimizers(
    kind: Any, options: dict[str, Any], told: dict[str, Any], dtype: torch.dtype
) -> None:
    """Also scaled, and where some are skipped; gradients may have another dtype."""
    register_optimizer(kind, **told)
    optimizer = kind([nn.Parameter(tensor) for tensor in drawn(SHAPES, 0, dtype)], **options)
    stepped = Stepped(optimizer)
    for k in range(10):
        optimizer.param_groups[0]["lr"] = options["lr"] / (k + 1)
        grads = drawn(SHAPES, k + 1, torch.bfloat16)
        if k % 4 == 0:
            broken = [grad * float("nan") for grad in grads]
            stepped.step(broken, None, torch.ones(()))
        else:
            stepped.step([4 * grad for grad in grads], torch.tensor(4.0), torch.zeros(()))
            take_step(optimizer, [grad.to(dtype) for grad in grads])
    tolerance = {"rtol": 1e-12, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 1e-5, "atol": 1e-6}
    for param, ours, state in zip(optimizer.param_groups[0]["params"], stepped.params, stepped.states, strict=True):
        torch.testing.assert_close(ours, param.detach(), **tolerance)
        for name, value in optimizer.state[param].items():
            torch.testing.assert_close(state[name], value, **tolerance)


@CASES
def test_traced_it_is_plain_ops(kind: Any, options: dict[str, Any], told: dict[str, Any]) -> None:
    register_optimizer(kind, **told)
    optimizer = kind([nn.Parameter(torch.ones(4, 3))], **options)
    (group,) = optimizer.param_groups
    update = definition_of(optimizer).update(group)
    assert (update.op, update.elementwise, update.counted) == (None, None, ())

    def step(param: Any, grad: Any, lr: Any, scale: Any, found_inf: Any, *states: Any) -> Any:
        return update(param, grad, dict(zip(update.states, states, strict=True)), lr, scale, found_inf)

    with FakeTensorMode():
        x, number = torch.empty(4, 3), torch.empty(())
        states = [number if name == "step" else x for name in update.states]
        graph = make_fx(step)(x, x, number.double(), number, number, *states).graph
    ops = [node.target for node in graph.nodes if node.op == "call_function"]
    assert ops and all(op.namespace == "aten" and not op._schema.is_mutable for op in ops)


def test_half_precision_is_rounded_once() -> None:
    register_optimizer(Lion, **REGISTERED[0][2])
    param, grad = nn.Parameter(torch.ones(3, dtype=torch.float16)), torch.full((3,), 2.0**20)
    update = definition_of(Lion([param], **REGISTERED[0][1])).update({**REGISTERED[0][1]})
    lr = torch.tensor(1e-3, dtype=torch.float64)
    new, state = update(param, grad, {"exp_avg": torch.zeros(3, dtype=torch.float16)}, lr, torch.tensor(2.0**20))
    assert (new.dtype, state["exp_avg"].dtype) == (torch.float16, torch.float16)
    assert new.tolist() == [torch.tensor(1 - 1e-4 - 1e-3).half().item()] * 3
    assert state["exp_avg"].tolist() == [torch.tensor(0.01).half().item()] * 3


def test_equal_groups_have_equal_updates() -> None:
    register_optimizer(Lion, **REGISTERED[0][2])
    one, other = (Lion([nn.Parameter(torch.ones(2))], **REGISTERED[0][1]) for _ in range(2))
    update = definition_of(one).update
    assert update(one.param_groups[0]) == update(other.param_groups[0])
    assert update(one.param_groups[0]) != update({**other.param_groups[0], "weight_decay": 0.2})


def test_a_second_definition_takes_the_place_of_the_first() -> None:
    register_optimizer(AdamW, update=normalized)
    assert definition_of(AdamW([nn.Parameter(torch.ones(2))])).name == "AdamW"
    assert definition_of(AdamW([nn.Parameter(torch.ones(2))])).update({}).op is None


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ((nn.Linear,), TypeError, "is no subclass of torch.optim.Optimizer; give the class of your optimizer"),
        ((Lion(params=[nn.Parameter(torch.ones(2))]),), TypeError, "is no subclass of torch.optim.Optimizer"),
        ((Lion, "lion"), TypeError, "the update of Lion is a function of (param, grad, state, lr), not 'lion'"),
        (
            (Lion, lion, "exp_avg", "step"),
            ValueError,
            "'step' is shared, but no state of Lion; its states are exp_avg: name it in state too",
        ),
        (
            (Lion, lion, "exp_avg", "", "decay"),
            ValueError,
            "'decay' is scheduled, but no option of Lion; its options are betas weight_decay: name it in options too",
        ),
        (
            (Lion, lion, "exp_avg", "", "lr"),
            ValueError,
            "'lr' is scheduled, but no option of Lion; a step has one of its own",
        ),
    ],
)
def test_what_cannot_be_registered(given: tuple[Any, ...], error: type[Exception], message: str) -> None:
    kind, update, state, shared, scheduled = (*given, *(None, lion, "exp_avg", (), ())[len(given) :])
    with pytest.raises(error, match=re.escape(message)):
        register_optimizer(
            kind, update=update, state=state, shared=shared, options="betas weight_decay", scheduled=scheduled
        )


def test_what_is_scheduled_is_a_number_or_some() -> None:
    register_optimizer(Lion, update=lion, state="exp_avg", options="betas weight_decay", scheduled="betas weight_decay")
    optimizer = Lion([nn.Parameter(torch.ones(2))], **REGISTERED[0][1])
    (group,) = optimizer.param_groups
    update = definition_of(optimizer).update(group)
    assert (update.scheduled, update.constants) == ({"betas.0": 0.9, "betas.1": 0.99, "weight_decay": 0.1}, {})
    assert definition_of(optimizer).update({**group, "betas": (0.8, 0.99)}) == update
    group["weight_decay"] = True
    with pytest.raises(
        ValueError,
        match="weight_decay of Lion is True, but a scheduled option is a number, or a tuple of numbers: remove it "
        "from scheduled",
    ):
        definition_of(optimizer)


def test_options_are_entries_of_groups() -> None:
    register_optimizer(Lion, update=lion, state="exp_avg", options="betas decay")
    optimizer = Lion([nn.Parameter(torch.ones(2))], lr=0.1, betas=(0.9, 0.99))
    with pytest.raises(
        ValueError, match="'decay' is an option of Lion, but its groups have betas, lr: name one of these"
    ):
        definition_of(optimizer)
    register_optimizer(Lion, update=lion, state="exp_avg", options="betas")
    optimizer.param_groups[0]["betas"] = (0.9, torch.tensor(0.99))
    with pytest.raises(
        ValueError, match="betas of Lion is a tensor, but the graph would keep its value; give a number"
    ):
        definition_of(optimizer)


WRONG: list[tuple[Callable[..., Any], str]] = [
    (
        lambda p, g, s, lr: p - g,
        "the update of Lion returns a tensor, not the new parameter and a dict of its new states: return param, {…}",
    ),
    (
        lambda p, g, s, lr: (p - g, {}),
        "the update of Lion returns the states none, and was registered with exp_avg: return each of these",
    ),
    (
        lambda p, g, s, lr: (p.sum(), s),
        "the update of Lion changes the shape of the parameter from [4, 3] to []: keep the shape",
    ),
    (
        lambda p, g, s, lr: (p, {"exp_avg": 0}),
        "the update of Lion changes the shape of exp_avg from [4, 3] to 0: keep the shape",
    ),
    (
        lambda p, g, s, lr: (p - g, {"exp_avg": s["exp_avg"].add_(g)}),
        "the update of Lion writes to exp_avg: return a new tensor instead",
    ),
    (lambda p, g, s, lr: (p.sub_(g), s), "the update of Lion writes to the parameter: return a new tensor instead"),
]


@pytest.mark.parametrize(("update", "message"), WRONG, ids=[message[19:] for _, message in WRONG])
@pytest.mark.parametrize("fake", [False, True])
def test_wrong_updates_are_told(update: Callable[..., Any], message: str, fake: bool) -> None:
    register_optimizer(Lion, update=update, state="exp_avg")
    found = definition_of(Lion([nn.Parameter(torch.ones(4, 3))])).update({})
    with FakeTensorMode(allow_non_fake_inputs=True) if fake else torch.no_grad():
        x = torch.ones(4, 3)
        with pytest.raises(ValueError, match=re.escape(message)):
            found(x, x.clone(), {"exp_avg": x.clone()}, torch.ones(()))


@pytest.mark.parametrize(
    "looks", [lambda norm: 1.0 if norm > 0 else 2.0, lambda norm: norm.item(), float], ids=["if", "item", "float"]
)
def test_an_update_that_looks_at_values_is_told_where(looks: Callable[[torch.Tensor], float]) -> None:
    def update(param: torch.Tensor, grad: torch.Tensor, state: State, lr: torch.Tensor) -> Any:
        return param - lr * looks(grad.norm()) * grad, {}

    register_optimizer(Lion, update=update)
    found = definition_of(Lion([nn.Parameter(torch.ones(4, 3))])).update({})
    with FakeTensorMode(), pytest.raises(ValueError) as caught:
        x = torch.ones(4, 3)
        make_fx(lambda x: found(x, x, {}, torch.ones(())))(x)
    first, line = str(caught.value).splitlines()
    assert first == "the update of Lion looks at a value, which a graph does not have: choose with torch.where"
    assert line.startswith("    test_optimizers_registered.py:") and "norm" in line
