"""Parameters and their state on the stages of a mesh."""

from __future__ import annotations

from pathlib import Path

import calls_of_stages
import pytest
import stage_checkpoints
import stage_training
import torch
from calls_of_stages import MESHES, Net
from processes import ranks
from safetensors.torch import save_model


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


WAYS = [["pp4", "dp2 tp2", "pp2 tp2", "zero dp4", "pp4"], ["zero dp4", "dp2 pp2", "dp2 tp2", "tp2 pp2"]]


@pytest.mark.parametrize("names", WAYS, ids=" - ".join)
def test_checkpoints_from_mesh_to_mesh(tmp_path: Path, names: list[str]) -> None:
    ranks(4).run(stage_checkpoints.through_checkpoints, str(tmp_path), names)


@pytest.mark.parametrize("names", WAYS, ids=" - ".join)
def test_torchs_checkpoints_from_mesh_to_mesh(tmp_path: Path, names: list[str]) -> None:
    ranks(4).run(stage_checkpoints.through_torchs_checkpoints, str(tmp_path), names)


@pytest.mark.parametrize("names", WAYS, ids=" - ".join)
def test_states_are_loaded_from_any_mesh(names: list[str]) -> None:
    ranks(4).run(stage_checkpoints.directly, names)


def test_a_training_goes_on_on_other_stages() -> None:
    ranks(4).run(stage_checkpoints.goes_on, "pp2 tp2", "pp4")


@pytest.mark.parametrize("mesh", ["pp4", "tp2 pp2"])
def test_averages_in_the_place_of_weights(mesh: str) -> None:
    ranks(4).run(stage_checkpoints.in_place_of_its_weights, mesh)


@pytest.mark.parametrize("mesh", ["pp4", "pp2 tp2", "dp2 pp2"])
def test_torchs_state_dicts(mesh: str) -> None:
    ranks(4).run(stage_checkpoints.with_torchs_functions, mesh)


def test_safetensors_are_read_onto_stages(tmp_path: Path) -> None:
    torch.manual_seed(0)
    save_model(Net().double(), str(tmp_path / "model.safetensors"))
    for mesh in ("pp4", "pp2 tp2"):
        ranks(4).run(stage_checkpoints.reads_weights, str(tmp_path / "model.safetensors"), mesh)


def test_one_parameter_on_two_stages_is_refused(tmp_path: Path) -> None:
    answers = ranks(4).run(stage_checkpoints.told_apart, str(tmp_path))
    for answer in answers:
        assert answer.startswith(
            "CheckpointError: the ranks bring different states\n    w   ranks 0 1 3: float64 [9 6] "
        )


def test_a_copy_of_the_model_is_on_its_stages() -> None:
    ranks(4).run(stage_checkpoints.copied, "pp2 tp2")
