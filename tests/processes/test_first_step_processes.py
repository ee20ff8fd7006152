"""Real processes: an optimizer that trains nothing is a warning at its first step, and no other loop has one."""

from __future__ import annotations

import first_steps
import pytest
from processes import ranks

TEXTS = {
    "optimizer": (
        "first_steps.py: the optimizer AdamW has 0.weight of the original model, and the gradients are at the copy "
        "that parallelize has made for this process: it trains nothing; make the optimizer from parallel.parameters()"
    ),
    "original": (
        "first_steps.py: the optimizer SGD has 0.weight of what parallelize returned, and the gradients are at the "
        "original model, which was called in its place: it trains nothing, and each rank computes the whole model; "
        "call parallel(…), not the model"
    ),
    "earlier": (
        "first_steps.py: the optimizer SGD has 0.weight as it was before the model on meta got values, which are in "
        "new parameters: it trains nothing; make the optimizer after parallel.initialize() or load_weights(), from "
        "parallel.parameters()"
    ),
}
TEXTS["dropped"] = TEXTS["optimizer"]


@pytest.mark.parametrize("case", TEXTS)
def test_nothing_is_trained(case: str) -> None:
    """Once, on the first rank, at the line of the user's step."""
    assert ranks(2).run(first_steps.untrained, case) == [([TEXTS[case]], False), ([], False)]


@pytest.mark.parametrize("case", first_steps.LOOPS)
def test_no_other_loop_is_warned(case: str) -> None:
    """After the first step with gradients nothing looks any more."""
    assert ranks(2).run(first_steps.trained, case) == [([], False)] * 2
