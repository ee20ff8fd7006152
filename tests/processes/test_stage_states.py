"""Parameters and their state on the stages of a mesh."""

from __future__ import annotations

import calls_of_stages
import pytest
import stage_training
from calls_of_stages import MESHES
from processes import ranks


@pytest.mark.parametrize("mesh", MESHES)
def test_parameters_move_between_stages(mesh: str) -> None:
    ranks(4).run(calls_of_stages.moved, MESHES[mesh])


@pytest.mark.parametrize("mesh", MESHES)
def test_the_optimizers_state_is_on_the_stages(mesh: str) -> None:
    ranks(4).run(stage_training.trained, MESHES[mesh], "AdamW")


@pytest.mark.parametrize("optimizer", ["SGD", "NAdam", "Rows"])
def test_states_of_other_optimizers(optimizer: str) -> None:
    ranks(4).run(stage_training.trained, MESHES["pp2 tp2"], optimizer)


def test_a_skipped_step_counts_on_no_rank() -> None:
    ranks(4).run(stage_training.skipped, MESHES["pp4"])
