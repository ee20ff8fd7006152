"""Dynamic loss scaling: the same scales as ``torch.amp.GradScaler``, step by step; its state, both ways; an error at
the bottom."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import OverflowingError
from autopar.ir.program import Program
from autopar.plan.loss_scaling import LossScaling, updated_scale
from autopar.runtime.discovery.proof import prove
from autopar.verify.levels import verify


def step(
    scaling: LossScaling, scale: torch.Tensor, tracker: torch.Tensor, overflow: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    return updated_scale(scale, tracker, torch.tensor(float(overflow)), **scaling.constants)


class Torchs:
    """A ``GradScaler`` over one parameter."""

    def __init__(self, scaling: LossScaling) -> None:
        self.parameter = torch.nn.Parameter(torch.zeros(2))
        self.optimizer = torch.optim.SGD([self.parameter], lr=0.1)
        self.scaler = torch.amp.GradScaler("cpu", scaling.initial, scaling.growth, scaling.backoff, scaling.interval)
        self.scaler.scale(torch.zeros(()))  # makes its tensors

    def step(self, overflow: bool) -> None:
        self.parameter.grad = torch.tensor([1.0, float("inf") if overflow else 1.0])
        self.scaler.step(self.optimizer)
        self.scaler.update()


scalings = st.builds(
    LossScaling, st.sampled_from([2.0**16, 1.0, 3.7e37]), st.sampled_from([2.0, 1.1, 4.0]), st.sampled_from([0.5, 0.3]),
    st.integers(1, 4), st.just(1e-40)
)  # fmt: skip


@pytest.mark.simulated
@settings(deadline=None)
@given(scalings, st.lists(st.booleans(), max_size=24), st.integers(0, 24))
def test_scales_are_those_of_a_grad_scaler(scaling: LossScaling, overflows: list[bool], handed_over: int) -> None:
    """Also where one goes on with the state of the other."""
    torchs, (scale, tracker) = Torchs(scaling), scaling.state()
    for k, overflow in enumerate(overflows):
        if k == handed_over:
            torchs.scaler.load_state_dict(scaling.state_dict(scale, tracker))
            _, scale, tracker = LossScaling.load_state_dict(torchs.scaler.state_dict(), minimum=1e-40)
        torchs.step(overflow)
        scale, tracker = step(scaling, scale, tracker, overflow)
        assert scaling.state_dict(scale, tracker) == torchs.scaler.state_dict()
    assert (scale.dtype, tracker.dtype, scale.shape, tracker.shape) == (torch.float32, torch.int32, (), ())


def test_the_scale_does_not_grow_beyond_float32() -> None:
    scaling = LossScaling(initial=3e38, interval=1)
    scale, tracker = step(scaling, *scaling.state(), overflow=False)
    assert (float(scale), int(tracker)) == (torch.tensor(3e38).item(), 0)


def test_state_of_a_grad_scaler_gives_the_scaling_too() -> None:
    scaling = LossScaling(1024.0, 3.0, 0.25, 7)
    torchs = Torchs(scaling)
    torchs.step(False)
    found, scale, tracker = LossScaling.load_state_dict(torchs.scaler.state_dict())
    assert (found, float(scale), int(tracker)) == (scaling, 1024.0, 1)
    assert replace(found, interval=5).state_dict(scale, tracker)["growth_interval"] == 5


def test_repeated_overflows_are_an_error_that_says_so() -> None:
    scaling = LossScaling(initial=1.0)
    scale, tracker = scaling.state()
    for _ in range(14):
        scale, tracker = step(scaling, scale, tracker, True)
        scaling.check(scale)
    scale, tracker = step(scaling, scale, tracker, True)
    with pytest.raises(
        OverflowingError,
        match=re.escape(
            "the loss scale has fallen to 3.05176e-05, below 6.10352e-05: gradients overflow at every scale\n  look "
            "for inf"
        ),
    ):
        scaling.check(scale)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"growth": 1.0}, "growth=1.0: the scale rises, by a factor above 1"),
        ({"backoff": 1.5}, "backoff=1.5: the scale falls, by a factor between 0 and 1"),
        ({"interval": 0}, "interval=0: the scale rises after a number of steps, at least 1"),
        (
            {"initial": float("inf")},
            "initial=inf, minimum=6.103515625e-05: a scale is finite, and begins at its minimum or above",
        ),
    ],
)
def test_scalings_that_make_no_sense_are_refused(options: dict[str, float], text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        LossScaling(**options)


def test_states_that_lack_an_entry_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"the state of a loss scale has scale, growth_factor.*; this one lacks scale, growth_factor"
    ):
        LossScaling.load_state_dict(torch.amp.GradScaler("cpu", enabled=False).state_dict())


def test_the_op_is_a_node_with_a_rule() -> None:
    """Numbers without dims: nothing is split, and nothing is pending."""
    prove(
        updated_scale,
        (torch.tensor(4.0), torch.tensor(1, dtype=torch.int32), torch.tensor(0.0)),
        LossScaling().constants,
    )
    program = Program.parse(
        "program placed on dp=2\n  scale : f32[] = state(next_scale)\n  tracker : i32[] = state(next_tracker)\n  "
        "found_inf : f32[] = input\nupdate:\n"
        "  updated : (f32[], i32[]) = autopar::updated_scale(scale, tracker, found_inf, growth=2.0, backoff=0.5, "
        "interval=2000)\n"
        "  next_scale : f32[] = updated[0]\n  next_tracker : i32[] = updated[1]\n"
    )
    verify(program)
    assert Program.parse(str(program)) == program
