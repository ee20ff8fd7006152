"""The state of a step that does not fit is told by name, before anything is changed; what may be missing begins as
torch's."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import loops
import pytest
import torch
from equality import relative
from processes import ranks
from steps import Pair, Single, differences, run, vectors
from torch import distributed

import autopar
from autopar import CheckpointError, Mesh, checkpoint
from autopar.optimizers import register_optimizer
from autopar.optimizers.definition import DEFINITIONS

Change = Callable[[dict[str, Any]], Any]


def adamw(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def sgd(model: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, **{"momentum": 0.9, **options})


def adagrad(model: Any) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(model.parameters(), lr=0.05, initial_accumulator_value=0.1)


def batch(k: int) -> dict[str, torch.Tensor]:
    return {"x": vectors(k)["x"], "y": vectors(k + 9)["x"]}


def narrow(k: int) -> dict[str, torch.Tensor]:
    return {name: tensor.float() for name, tensor in batch(k).items()}


def made(optimizer: Callable[[Any], Any] = adamw, model: torch.nn.Module | None = None, **options: Any) -> Any:
    torch.manual_seed(0)
    parallel = autopar.parallelize(model or Pair().double(), Mesh(dp=2))
    return parallel.train_step(optimizer(parallel), **options)


def everything(step: Any) -> dict[str, Any]:
    """All that a step goes on from, as copies; full tensors."""

    def copied(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: copied(one) for key, one in value.items()}
        if isinstance(value, list):
            return [copied(one) for one in value]
        return loops.whole(value).clone() if isinstance(value, torch.Tensor) else value

    return copied(step.state_dict())


def same(a: Any, b: Any) -> bool:
    """Bit for bit."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


# -- what is refused -------------------------------------------------------------------------------------------------


def of(state: dict[str, Any], name: str = "up.weight") -> dict[str, Any]:
    return state["optimizer"]["state"][name]


ANEW = "or leave the state of up.weight out, and it begins anew"
SAVE = "save what step.state_dict() gives"
RNG = (
    f"and no state of this torch's random numbers, uint8{list(torch.get_rng_state().shape)}; give what "
    f"torch.get_rng_state() gives"
)
REFUSED: dict[str, tuple[Change, type[Exception], str]] = {
    "a state lacks a moment": (
        lambda s: of(s).pop("exp_avg_sq"),
        ValueError,
        f"the state of up.weight has no 'exp_avg_sq', but 'exp_avg', 'step': it would begin at zero, and the others "
        f"go on; load what AdamW has saved, {ANEW}",
    ),
    "a state lacks its count": (
        lambda s: of(s).pop("step"),
        ValueError,
        f"the state of up.weight has no 'step', but 'exp_avg', 'exp_avg_sq': it would begin at zero, and the others "
        f"go on; load what AdamW has saved, {ANEW}",
    ),
    "a state of another optimizer": (
        lambda s: s["optimizer"]["state"].update({"up.weight": {"momentum_buffer": torch.ones(16, 8)}}),
        ValueError,
        f"the state of up.weight has no 'exp_avg', but 'momentum_buffer': it would begin at zero, and the others go "
        f"on; load what AdamW has saved, {ANEW}",
    ),
    "a state that strict=False has not filled": (
        lambda s: of(s).update(dict.fromkeys(of(s))),
        ValueError,
        f"the state of up.weight has no 'exp_avg', but nothing: it would begin at zero, and the others go on; load "
        f"what AdamW has saved, {ANEW}",
    ),
    "a moment of another shape": (
        lambda s: of(s).update(exp_avg=torch.zeros(3, 3)),
        ValueError,
        f"the state of up.weight has exp_avg of shape [3, 3], and the parameter is [16, 8]: load the state of this "
        f"model, {ANEW}",
    ),
    "a moment that broadcasts": (
        lambda s: of(s).update(exp_avg=torch.zeros(1, 8)),
        ValueError,
        f"the state of up.weight has exp_avg of shape [1, 8], and the parameter is [16, 8]: load the state of this "
        f"model, {ANEW}",
    ),
    "many counts": (
        lambda s: of(s).update(step=torch.ones(2)),
        ValueError,
        f"the state of up.weight has step of shape [2], and it is one number, without dims: load the state of this "
        f"model, {ANEW}",
    ),
    "a moment that is a text": (
        lambda s: of(s).update(exp_avg="x"),
        ValueError,
        f"the state of up.weight has exp_avg as 'x', which is no tensor; load what AdamW has saved, {ANEW}",
    ),
    "a state that is None": (
        lambda s: s["optimizer"]["state"].update({"up.weight": None}),
        TypeError,
        f"the state of up.weight is None, and no dict; {SAVE}",
    ),
    "no optimizer": (
        lambda s: s.update(optimizer=None),
        TypeError,
        f"the state's 'optimizer' is None, and no dict; {SAVE}",
    ),
    "an optimizer without groups": (
        lambda s: s["optimizer"].pop("param_groups"),
        ValueError,
        f"the state's 'optimizer' has no 'param_groups', but 'state'; {SAVE}",
    ),
    "an optimizer without states": (
        lambda s: s["optimizer"].pop("state"),
        ValueError,
        f"the state's 'optimizer' has no 'state', but 'param_groups'; {SAVE}",
    ),
    "groups that are no list": (
        lambda s: s["optimizer"].update(param_groups=None),
        TypeError,
        f"the 'param_groups' of the state's 'optimizer' are None, and no list; {SAVE}",
    ),
    "a group that is None": (
        lambda s: s["optimizer"]["param_groups"].__setitem__(0, None),
        TypeError,
        f"group 0 of the state's 'optimizer' is None, and no dict; {SAVE}",
    ),
    "states that are None": (
        lambda s: s["optimizer"].update(state=None),
        TypeError,
        f"the state of the optimizer is None, and no dict; {SAVE}",
    ),
    "fewer parameters": (
        lambda s: s["optimizer"]["param_groups"][0]["params"].pop(),
        ValueError,
        "the state has other parameter groups: 1 of 3, and the optimizer 1 of 4; make the optimizer with the groups "
        "that were saved",
    ),
    "another order": (
        lambda s: s["optimizer"]["param_groups"][0]["params"].reverse(),
        ValueError,
        "the state has other parameter groups: 1 of 4, and the optimizer 1 of 4, down.bias for up.weight; make the "
        "optimizer with the groups that were saved",
    ),
    "torch's state of an optimizer": (
        lambda s: s["optimizer"]["param_groups"][0].update(params=[0, 1, 2, 3]),
        ValueError,
        "the state has parameters by numbers, as optimizer.state_dict() does, and not by names: "
        f"load that with optimizer.load_state_dict, or {SAVE}",
    ),
    "an unknown parameter": (
        lambda s: s["optimizer"]["state"].update({"up.wieght": {}}),
        ValueError,
        "the state has the parameter up.wieght, which the optimizer does not have",
    ),
    "no random numbers": (lambda s: s.update(rng=None), ValueError, f"the state's 'rng' is None, {RNG}"),
    "few random numbers": (
        lambda s: s.update(rng=torch.zeros(3, dtype=torch.uint8)),
        ValueError,
        f"the state's 'rng' is uint8[3], {RNG}",
    ),
    "random numbers of another dtype": (
        lambda s: s.update(rng=torch.zeros(5056)),
        ValueError,
        f"the state's 'rng' is float32[5056], {RNG}",
    ),
    "a step that is a text": (
        lambda s: s.update(step="x"),
        ValueError,
        f"the state's 'step' is 'x', and no number of steps; {SAVE}",
    ),
    "a step below 0": (
        lambda s: s.update(step=-1),
        ValueError,
        f"the state's 'step' is -1, and no number of steps; {SAVE}",
    ),
    "no step": (
        lambda s: s.pop("step"),
        ValueError,
        f"the state of a step has no 'step', but 'model', 'optimizer', 'ema', 'scaler', 'rng'; {SAVE}",
    ),
    "no model": (lambda s: s.update(model=None), TypeError, f"the state's 'model' is None, and no dict; {SAVE}"),
    "a model that lacks a parameter": (
        lambda s: s["model"].pop("down.bias"),
        ValueError,
        "the state's 'model' has no down.bias, which the model has: it is of another model",
    ),
    "a model with another parameter": (
        lambda s: s["model"].update(more=torch.ones(1)),
        ValueError,
        "the state's 'model' has more, which the model has not: it is of another model",
    ),
    "a parameter of another shape": (
        lambda s: s["model"].update({"down.bias": torch.ones(3)}),
        ValueError,
        "the state's 'model' has down.bias of shape [3], and the model's is [8]: it is of another model",
    ),
    "a parameter that is None": (
        lambda s: s["model"].update({"down.bias": None}),
        ValueError,
        f"the state's 'model' has down.bias as None, which is no tensor; {SAVE}",
    ),
    "a scale that is a text": (
        lambda s: s["scaler"].update(scale="x"),
        ValueError,
        f"the state's 'scaler' has the scale 'x', and no number above 0; {SAVE}",
    ),
    "no scale": (
        lambda s: s["scaler"].pop("scale"),
        ValueError,
        f"the state's 'scaler' has no 'scale', but {{}}; {SAVE}",
    ),
    "a scale that was kept for no steps": (
        lambda s: s["scaler"].update(_growth_tracker=None),
        ValueError,
        f"the '_growth_tracker' of the state's 'scaler' is None, and no number of steps; {SAVE}",
    ),
    "an average is missing": (
        lambda s: s["ema"]["weights"].pop("up.weight"),
        ValueError,
        f"the state's 'ema' has no average of up.weight, which is trained, but of 3 others; {SAVE}, "
        "or let it begin as the weight: state['ema']['weights']['up.weight'] = state['model']['up.weight']",
    ),
    "an average that is None": (
        lambda s: s["ema"]["weights"].update({"up.weight": None}),
        ValueError,
        f"the state's 'ema' has up.weight as None, which is no tensor; {SAVE}",
    ),
    "averages without a count": (
        lambda s: s["ema"].update(count="x"),
        ValueError,
        f"the count of the state's 'ema' is 'x', and no number of steps; {SAVE}",
    ),
}


@pytest.fixture(scope="module")
def taken() -> Any:
    """A step in mixed precision that was taken, with all that it can keep."""
    step = made(model=Pair(), amp="fp16-O2", loss_scale=8.0, ema=0.9)
    step.simulate(**narrow(0))
    return step


@pytest.mark.parametrize("case", REFUSED)
def test_states_that_are_refused(taken: Any, case: str) -> None:
    change, kind, text = REFUSED[case]
    before = everything(taken)
    state = copy.deepcopy(before)
    for tensor in (
        *state["model"].values(),
        *state["ema"]["weights"].values(),
        *(value for one in state["optimizer"]["state"].values() for value in one.values()),
    ):
        tensor.add_(1)
    state["optimizer"]["param_groups"][0]["lr"] = 0.5
    state["scaler"]["scale"], state["step"] = 2.0, 7
    state["rng"] = torch.Generator().manual_seed(9).get_state()
    left = ", ".join(repr(key) for key in state["scaler"] if key != "scale")
    change(state)
    with pytest.raises((ValueError, TypeError)) as caught:
        taken.load_state_dict(state)
    assert (type(caught.value), str(caught.value)) == (kind, text.replace("{}", left)), caught.value
    assert same(everything(taken), before), "nothing is changed"


@pytest.mark.parametrize("state", [None, [1]])
def test_no_state_at_all(taken: Any, state: Any) -> None:
    with pytest.raises(TypeError, match=re.escape(f"the state of a step is {state!r}, and no dict; {SAVE}")):
        taken.load_state_dict(state)


def test_all_that_was_saved_is_taken(taken: Any) -> None:
    """So the cases above are refused for what they say."""
    state = everything(taken)
    taken.load_state_dict(state)
    assert same(everything(taken), state)


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


def test_an_average_of_what_was_frozen() -> None:
    """Its state has none, and nothing of the optimizer: that of a step that trains it begins as the weight."""
    step = made(ema=0.9)
    step.parallel.up.weight.requires_grad_(False)
    run(step, batch(0))
    state = everything(step)
    other = made(ema=0.9)
    run(other, batch(1))
    other.load_state_dict(state)
    assert "up.weight" not in other.ema and len(other.ema) == 3
    run(other, batch(2))
    assert relative(other.ema["up.weight"], state["model"]["up.weight"].lerp(other.parallel.up.weight, 0.1)) <= 1e-12


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


# -- checkpoints -----------------------------------------------------------------------------------------------------


def saved(folder: Path, optimizer: Callable[[Any], Any] = adamw) -> Any:
    step = made(optimizer)
    run(step, batch(0)), run(step, batch(1))
    checkpoint.save(folder, step.state_dict())
    return step


@pytest.mark.parametrize("optimizer", [adamw, sgd])
def test_a_checkpoint_into_a_step_that_has_not_run(tmp_path: Path, optimizer: Any) -> None:
    """What the error says is what helps; strict=False, which it does not say, loses nothing unseen."""
    first, fresh = saved(tmp_path, optimizer), made(optimizer)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load(tmp_path, fresh.state_dict())
    *_, last = str(caught.value).splitlines()
    assert "optimizer/state/up.weight/" in str(caught.value) and last == (
        "  an optimizer has no state before its first step: call step.capture(batch), which gives it one, and then "
        "step.state_dict(); pass a state of the same keys and shapes"
    )
    with pytest.raises(ValueError, match=r"the state of up\.weight has no '.*', but nothing: it would begin at zero"):
        fresh.load_state_dict(checkpoint.load(tmp_path, fresh.state_dict(), strict=False))
    fresh.capture(**batch(0))
    fresh.load_state_dict(checkpoint.load(tmp_path, fresh.state_dict()))
    for k in (2, 3):
        assert torch.equal(run(fresh, batch(k)), run(first, batch(k)))


def test_a_checkpoint_of_another_optimizer(tmp_path: Path) -> None:
    """A capture does not help, and the moments are not to be left."""
    saved(tmp_path)
    other = made(sgd)
    other.capture(**batch(0))
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load(tmp_path, other.state_dict())
    assert str(caught.value).splitlines()[-1] == "  pass a state of the same keys and shapes"


# -- ranks that differ -----------------------------------------------------------------------------------------------


def test_what_ranks_compare() -> None:
    step = made()
    told = step.optimizer_state.describe
    options = "AdamW(lr=0.01, betas=(0.9, 0.999), eps=1e-08, weight_decay=0.01, decoupled_weight_decay=True)"
    assert told() == options
    run(step, batch(0))
    assert told() == f"{options} with a state of 4 parameters after 1 steps"
    run(step, batch(1))
    assert told() == f"{options} with a state of 4 parameters after 2 steps"
    step.load_state_dict(everything(step))
    assert told() == f"{options} with a state of 4 parameters after 2 steps", (
        "what is the same is told alike, loaded or not"
    )
    weight, bias = step.parallel.up.weight, step.parallel.up.bias
    step.optimizer.state[weight]["step"], step.optimizer.state[bias]["step"] = torch.tensor(12345678.0), 3
    assert told() == f"{options} with a state of 4 parameters after 2 3 12345678 steps"
    step.optimizer.state.pop(weight)
    for one in step.optimizer.state.values():
        one["step"] = torch.zeros((), device="meta")  # where a count cannot be read at once
    assert told() == f"{options} with a state of 3 parameters"


def diverging(zero: int) -> None:
    """One rank alone changes its optimizer's state: all are told before anything moves, and may go on when it is as it
    was."""
    rank = distributed.get_rank()
    torch.manual_seed(0)
    model = Pair().double()
    alone = copy.deepcopy(model)
    parallel = autopar.parallelize(model, Mesh(dp=2))
    step, single = (
        parallel.train_step(adamw(parallel), zero=zero, ema=0.9, clip_norm=1.0),
        Single(alone, adamw(alone), 1.0),
    )
    run(step, batch(0)), single(**batch(0))
    older = copy.deepcopy(step.optimizer.state_dict())
    run(step, batch(1)), single(**batch(1))
    newer = copy.deepcopy(step.optimizer.state_dict())
    plain = {
        **older,
        "state": {k: {n: loops.whole(v).clone() for n, v in one.items()} for k, one in older["state"].items()},
    }
    changes: list[tuple[str, Callable[[], Any]]] = [
        (" with a state of 4 parameters after 1 steps", lambda: step.optimizer.load_state_dict(copy.deepcopy(older))),
        (" with a state of 4 parameters after 1 steps", lambda: step.optimizer.load_state_dict(copy.deepcopy(plain))),
        ("", lambda: step.optimizer.state.clear()),
        (" with a state of 3 parameters after 2 steps", lambda: step.optimizer.state.pop(parallel.up.weight)),
        (
            " with a state of 4 parameters after 2 500 steps",
            lambda: step.optimizer.state[parallel.up.weight]["step"].fill_(500),
        ),
    ]
    stage = ", zero=1" if zero else ", clip_norm"
    for k, (told, change) in enumerate(changes, 2):
        before = {name: loops.whole(p).clone() for name, p in parallel.named_parameters()}
        if rank == 0:
            change()
        with pytest.raises(RuntimeError, match="the ranks make different calls") as caught:
            run(step, batch(k))
        _, first, second, remedy = str(caught.value).split("\n")
        assert first.startswith("    rank 0: ") and f"weight_decay=True){told}{stage}" in first, first
        assert (
            second.startswith("    rank 1: ")
            and f"weight_decay=True) with a state of 4 parameters after 2 steps{stage}" in second
        ), second
        assert "with the same options, learning rates and optimizer states" in remedy
        assert all(torch.equal(loops.whole(p), before[name]) for name, p in parallel.named_parameters())
        step.optimizer.load_state_dict(copy.deepcopy(newer))
    assert relative(run(step, batch(9)), single(**batch(9))[0]) <= 1e-11
    assert max(differences(step, single).values()) <= 1e-9


@pytest.mark.processes
@pytest.mark.parametrize("zero", [0, 1])
def test_ranks_that_differ(zero: int) -> None:
    ranks(2).run(diverging, zero)
