"""The state of a step that does not fit is told by name, before anything is changed."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from step_states import Change, batch, everything, made, of, same
from steps import Pair


def narrow(k: int) -> dict[str, torch.Tensor]:
    return {name: tensor.float() for name, tensor in batch(k).items()}


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
