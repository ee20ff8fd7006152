"""Trainings on the stages of a pipeline go on on other stages, on other meshes, and in the plain model."""

from __future__ import annotations

from pathlib import Path

import pytest
import stage_pipelines
from processes import ranks


@pytest.mark.parametrize(
    "names", [["pp4", "dp2 tp2", "pp2 tp2", "dp4", "pp4"], ["dp4", "dp2 pp2", "dp2 tp2"]], ids=" - ".join
)
def test_a_training_goes_on_on_other_meshes(tmp_path: Path, names: list[str]) -> None:
    ranks(4).run(stage_pipelines.goes_on, str(tmp_path), names)


@pytest.mark.parametrize("frozen", [1, 3])
def test_counts_where_a_stage_is_frozen(frozen: int) -> None:
    ranks(4).run(stage_pipelines.where_a_stage_is_frozen, frozen)


def test_one_model_is_cut_in_two_ways() -> None:
    ranks(4).run(stage_pipelines.cut_again)


def test_a_state_is_loaded_from_other_meshes() -> None:
    ranks(4).run(stage_pipelines.same_everywhere, ["pp4", "dp2 pp2", "dp2 tp2", "pp2 tp2"])
