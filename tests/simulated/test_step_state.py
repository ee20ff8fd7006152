"""What is missing in the state of a step begins as torch's, or is told by name, whoever put it there."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from equality import relative
from step_states import Change, adagrad, adamw, batch, everything, made, of, same, sgd
from steps import Pair, Single, run

from autopar.optimizers import register_optimizer
from autopar.optimizers.definition import DEFINITIONS

# -- averages -------------------------------------------------------------------------------------------------------


def test_an_average_without_a_state_of_the_optimizer() -> None:
    """SGD without momentum keeps none, so the step's own averages say of what there is one."""
    step = made(lambda model: sgd(model, momentum=0), ema=0.9)
    run(step, batch(0))
    state = everything(step)
    assert state["optimizer"]["state"] == {}
    del state["ema"]["weights"]["up.weight"]
    with pytest.raises(
        ValueError, match=r"the state's 'ema' has no average of up\.weight, which is trained, but of 3 others; "
    ):
        step.load_state_dict(state)
    state["ema"]["weights"]["up.weight"] = state["model"]["up.weight"]
    step.load_state_dict(state)
    assert torch.equal(step.ema["up.weight"], state["model"]["up.weight"])


@pytest.mark.parametrize("optimizer", [adamw, adagrad])
def test_an_average_of_what_was_frozen(optimizer: Callable[[Any], Any]) -> None:
    """Its state has none: that of a step that trains it begins as the weight. Adagrad has its state all the same."""
    step = made(optimizer, ema=0.9)
    step.parallel.up.weight.requires_grad_(False)
    run(step, batch(0))
    state = everything(step)
    assert ("up.weight" in state["optimizer"]["state"]) == (optimizer is adagrad)
    other = made(optimizer, ema=0.9)
    run(other, batch(1))
    other.load_state_dict(state)
    assert "up.weight" not in state["ema"]["weights"] and len(state["ema"]["weights"]) == 3
    assert torch.equal(other.ema["up.weight"], state["model"]["up.weight"])
    run(other, batch(2))
    assert relative(other.ema["up.weight"], state["model"]["up.weight"].lerp(other.parallel.up.weight, 0.1)) <= 1e-12


# -- what is frozen -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", [adamw, sgd, adagrad])
@pytest.mark.parametrize("first", [0, 1])
def test_the_state_of_what_is_frozen(optimizer: Callable[[Any], Any], first: int) -> None:
    """It is saved and loaded as torch does, so that training goes on from it. It was frozen after ``first`` steps."""
    step, other, alone = made(optimizer), made(optimizer), Pair().double()
    alone.load_state_dict(step.parallel.state_dict())
    single = Single(alone, optimizer(alone))
    for k in range(first + 1):
        for model in (step.parallel, alone):
            model.up.weight.requires_grad_(k < first)
        run(step, batch(k)), single(**batch(k))
    single.optimizer.zero_grad()
    other.load_state_dict(everything(step))
    step.optimizer.load_state_dict(copy.deepcopy(step.optimizer.state_dict()))
    alone.up.weight.requires_grad_(True)
    for one in (step, other):
        kept = one.optimizer.state_dict()["state"]
        wanted = single.optimizer.state_dict()["state"]
        assert kept.keys() == wanted.keys() and all(kept[k].keys() == wanted[k].keys() for k in wanted)
        one.parallel.up.weight.requires_grad_(True)
    loss = single(**batch(2))[0]
    assert relative(run(step, batch(2)), loss) <= 1e-11 and relative(run(other, batch(2)), loss) <= 1e-11
    for one in (step, other):
        assert all(relative(p, q) <= 1e-11 for p, q in zip(one.parallel.parameters(), alone.parameters(), strict=True))


# -- what torch has put there ----------------------------------------------------------------------------------------

LATER: dict[str, tuple[Callable[[Any], Any], Change, str]] = {
    "adamw": (adamw, lambda state: state.pop("exp_avg_sq"),
              r"the state of up\.weight has no 'exp_avg_sq', but 'step', 'exp_avg': .* what AdamW has saved"),
    "adagrad": (adagrad, lambda state: state.pop("sum"),
                r"the state of up\.weight has no 'sum', but 'step': .* what Adagrad has saved"),
    "shape": (adamw, lambda state: state.update(exp_avg=torch.zeros(3, 3)),
              r"the state of up\.weight has exp_avg of shape \[3, 3\], and the parameter is \[16, 8\]"),
    "broadcast": (sgd, lambda state: state.update(momentum_buffer=torch.zeros(1, 8)),
                  r"up\.weight has momentum_buffer of shape \[1, 8\], and the parameter is"),
    "sgd's count alone": (
        lambda model: sgd(model, dampening=0.5),
        lambda state: state.update(momentum_buffer=None, step=torch.tensor(3.0)),
        r"the state of up\.weight has no 'momentum_buffer', but 'step': ",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("case", "captured"), [
    *((case, k % 2 == 0) for k, case in enumerate(LATER)),
    *(pytest.param(case, k % 2 == 1, marks=pytest.mark.sweep("another case shows it before, or after, the capture"))
      for k, case in enumerate(LATER)),
])  # fmt: skip
def test_states_that_torch_takes_are_refused_by_the_step(case: str, captured: bool) -> None:
    """Nothing is changed; and with the whole state the step goes on as torch's."""
    optimizer, change, text = LATER[case]
    step, alone = made(optimizer), Pair().double()
    alone.load_state_dict(step.parallel.state_dict())
    single = Single(alone, optimizer(alone))
    single(**batch(0))
    step.parallel.load_state_dict(alone.state_dict())
    if captured:
        step.capture(**batch(0))
    whole = single.optimizer.state_dict()
    broken = copy.deepcopy(whole)
    change(broken["state"][0])
    step.optimizer.load_state_dict(broken)
    second = batch(1)
    before = everything(step)
    for _ in range(2):
        with pytest.raises(ValueError, match=text):
            run(step, second)
        assert same(everything(step), before)
    step.optimizer.load_state_dict(copy.deepcopy(whole))
    for k in (1, 2):
        assert relative(run(step, batch(k)), single(**batch(k))[0]) <= 1e-11


def test_an_option_that_needs_another_state() -> None:
    """As torch's own step, which raises a KeyError."""
    step = made()
    run(step, batch(0))
    step.optimizer.param_groups[0]["amsgrad"] = True
    with pytest.raises(ValueError, match=r"the state of up\.weight has no 'max_exp_avg_sq', but "):
        run(step, batch(1))
    step.optimizer.param_groups[0]["amsgrad"] = False
    run(step, batch(1))


# -- what may be missing ---------------------------------------------------------------------------------------------

BEGINS: dict[str, tuple[Callable[[Any], Any], Change]] = {
    "whole": (adamw, lambda states: None),
    "one is absent": (adamw, lambda states: states.pop(0)),
    "one is empty": (adamw, lambda states: states.update({0: {}})),
    "none at all": (adamw, lambda states: states.clear()),
    "another key": (adamw, lambda states: states[0].update(other=torch.zeros(3))),
    "amsgrad was on": (adamw, lambda states: states[0].update(max_exp_avg_sq=torch.zeros(16, 8, dtype=torch.float64))),
    "counts as numbers": (adamw, lambda states: [one.update(step=4) for one in states.values()]),
    "sgd": (sgd, lambda states: None),
    "sgd of another optimizer": (sgd, lambda states: states.update({0: {"exp_avg": torch.zeros(16, 8)}})),
    "sgd, None": (sgd, lambda states: states[0].update(momentum_buffer=None)),
    "sgd, absent": (sgd, lambda states: states[0].pop("momentum_buffer")),
    "sgd without momentum": (
        lambda model: sgd(model, momentum=0),
        lambda states: states.update({0: {"momentum_buffer": None}}),
    ),
    "sgd with dampening": (lambda model: sgd(model, dampening=0.5), lambda states: None),
    "adagrad": (adagrad, lambda states: None),
}


@pytest.mark.parametrize("case", BEGINS)
def test_what_may_be_missing_begins_as_torchs(case: str) -> None:
    optimizer, change = BEGINS[case]
    step, alone = made(optimizer), Pair().double()
    alone.load_state_dict(step.parallel.state_dict())
    single = Single(alone, optimizer(alone))
    for k in range(2):
        single(**batch(k))
    step.parallel.load_state_dict(alone.state_dict())
    state = copy.deepcopy(single.optimizer.state_dict())
    change(state["state"])
    step.optimizer.load_state_dict(copy.deepcopy(state))
    single.optimizer.load_state_dict(copy.deepcopy(state))
    for k in range(2, 5):
        assert relative(run(step, batch(k)), single(**batch(k))[0]) <= 1e-11
    assert all(relative(p, q) <= 1e-11 for p, q in zip(step.parallel.parameters(), alone.parameters(), strict=True))


def test_counts_as_numbers_in_the_state_of_a_step() -> None:
    """As torch kept them once; ``optimizer.load_state_dict`` makes tensors of them, and so does the step."""
    step, twin = made(), made()
    for one in (step, twin):
        run(one, batch(0)), run(one, batch(1))
    state = everything(step)
    for one in state["optimizer"]["state"].values():
        one["step"] = 2
    step.load_state_dict(state)
    assert torch.equal(run(step, batch(2)), run(twin, batch(2)))
    assert same(step.state_dict()["optimizer"], twin.state_dict()["optimizer"])


class Lazy(torch.optim.SGD):
    """Momentum, beside a note of which the step is not told."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["note"] = 0

    def step(self, closure: Any = None) -> None: ...


def test_states_of_registered_optimizers(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of those that it was registered with is a beginning; some of them are not. They are of any shape, but for
    shared ones."""
    monkeypatch.setattr("autopar.optimizers.register.DEFINITIONS", (known := dict(DEFINITIONS)))
    monkeypatch.setattr("autopar.optimizers.lookup.DEFINITIONS", known)

    def update(param: torch.Tensor, grad: torch.Tensor, state: dict[str, torch.Tensor], lr: torch.Tensor) -> Any:
        rows = state["rows"] + grad.square().sum(tuple(range(1, grad.dim())))
        return param - lr * grad, {"rows": rows, "count": state["count"] + 1}

    register_optimizer(
        Lazy,
        update=update,
        state="rows count",
        shared="count",
        initial=lambda p, group: {"rows": torch.zeros(p.shape[:1], dtype=p.dtype)},
    )
    step = made(lambda model: Lazy(model.parameters()))
    for k in range(2):
        run(step, batch(k))
    state = everything(step)
    assert of(state)["rows"].shape == (16,) and of(state)["count"] == 2
    step.load_state_dict(state)
    del of(state)["rows"]
    with pytest.raises(
        ValueError, match=r"the state of up\.weight has no 'rows', but 'note', 'count': .* what Lazy has saved"
    ):
        step.load_state_dict(state)
    of(state).update(rows=torch.zeros(16, dtype=torch.float64), count=torch.zeros(1))
    with pytest.raises(
        ValueError, match=r"the state of up\.weight has count of shape \[1\], and it is one number, without dims"
    ):
        step.load_state_dict(state)
