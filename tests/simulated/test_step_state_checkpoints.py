"""A checkpoint goes into a step that has not run, or is refused with what helps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from step_states import adamw, batch, made, sgd
from steps import run

from autopar import CheckpointError, checkpoint


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
