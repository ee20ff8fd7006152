"""In the plain loop an optimizer that cannot step DTensors steps whole parameters, and one device's state is loaded."""

from __future__ import annotations

import re

import pytest
import whole_steps_on_ranks
from processes import ranks
from whole_steps_on_ranks import PLANS, WHOLE

SAID = (
    "whole_steps_on_ranks.py: Rows cannot step the pieces of parameters that ranks hold (RuntimeError: aten.add_."
    "Tensor got mixed torch.Tensor and DTensor, need to convert all torch.Tensor to DTensor before calling distributed "
    "operators!): each of its steps gathers the parameters and gradients, and each rank keeps whole states; AdamW, and "
    "others that work element by element on tensors made by zeros_like(p), keep pieces"
)

REFUSED = [
    "Twice calls its closure several times in a step of whole parameters\n    whole_steps_on_ranks.py  return closure()"
    "\n  the closure computes with the pieces, which change only at the end of the step: write its states with "
    "zeros_like(p), so that it steps pieces",
    "no step today",
    "the ranks make different calls\n    rank 0: first step of Rows\n    rank 1: call (input float64[4, 4]) in train\n"
    "  whole_steps_on_ranks.py  said.append(refused(RuntimeError, lambda: optimizer.step()))\n  let all ranks make the "
    "steps of the optimizer",
]


@pytest.mark.parametrize("plan", PLANS)
def test_they_step_as_on_one_device(plan: str) -> None:
    said, nothing = ranks(2).run(whole_steps_on_ranks.stepped, plan)
    assert len(said) == len(WHOLE) and not nothing and SAID in said


@pytest.mark.sweep("imports transformers on ranks; its steps are those of the others")
def test_of_transformers() -> None:
    assert len(ranks(2).run(whole_steps_on_ranks.stepped_of_transformers)[0]) == 1


def test_what_is_refused() -> None:
    first, second = ranks(2).run(whole_steps_on_ranks.refusals)
    assert [re.sub(r"py:\d+", "py", text) for text in first] == REFUSED and first == second


@pytest.mark.parametrize("plan", PLANS)
def test_states_of_one_device(plan: str) -> None:
    ranks(2).run(whole_steps_on_ranks.loaded, plan)
