"""The Trainer of transformers on four processes, beside the same Trainer in a process that is alone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import trainers
from processes import ranks
from safetensors.torch import load_file
from trainers import MODELS, TRAININGS, trained

from autopar import Mesh

TOLERANCE = {"best": 1e-5, "adapters": 1e-5, "adafactor": 1e-5, "low precision": 1e-2}


@pytest.mark.filterwarnings("ignore")  # of PEFT and transformers
@pytest.mark.parametrize("name", TRAININGS)
def test_a_training_has_the_numbers_of_one_device(name: str, tmp_path: Path) -> None:
    """With uneven labels, short last batches, and the best of two checkpoints at the end."""
    (mesh, single), tolerance = (str(tmp_path / kind) for kind in ("mesh", "single")), TOLERANCE[name]
    every = ranks(4).run(trained, name, mesh, True)
    expected = trained(name, single, False)
    said = [found.pop("said") for found in every]
    assert said[0] > 0 and said[1:] == [0, 0, 0]  # only the first process logs
    for found in every:
        assert found.keys() == expected.keys() and len(found["loss"]) > 2
        assert found.pop("best", None) == expected.get("best")
        for key, numbers in found.items():
            torch.testing.assert_close(
                torch.tensor(numbers), torch.tensor(expected[key]), rtol=tolerance, atol=tolerance
            )
    if "best" in expected:
        assert sorted(os.listdir(mesh)) == sorted(os.listdir(single)) == ["checkpoint-2", "checkpoint-4"]


def test_accelerate_counts_the_processes_of_a_mesh_as_one(tmp_path: Path) -> None:
    """Until other arguments are made: a Trainer of another model is then as ever."""
    assert ranks(4).run(trainers.counted, str(tmp_path)) == [[4, 1, rank, 1, 4] for rank in range(4)]


def test_what_is_refused(tmp_path: Path) -> None:
    every = ranks(4).run(trainers.refusals, str(tmp_path))
    assert {told["local"] for told in every} == {
        'ValueError: transformers.Trainer passes the same batch on each process, so the model takes inputs="global", '
        'the default of parallelize, and not "local"'
    }
    assert all(told["checkpoints"].startswith("ValueError: Resuming is not supported") for told in every)
    assert every[0]["full"] == "OSError: the disk is full"
    assert {told["full"] for told in every[1:]} == {"RuntimeError: rank 0 cannot save: OSError: the disk is full"}


@pytest.mark.parametrize(("name", "mesh"), [("llama tied", Mesh(dp=2, tp=2)), ("gpt2", Mesh(tp=4))])
def test_a_folder_is_that_of_the_model(name: str, mesh: Mesh, tmp_path: Path) -> None:
    """Tied weights are there once, and a merged dim is whole."""
    ranks(4).run(trainers.saved, name, mesh, str(tmp_path / "mesh"))
    torch.manual_seed(0)
    MODELS[name][0]().save_pretrained(tmp_path / "single")
    for file in ("config.json", "generation_config.json"):
        assert (tmp_path / "mesh" / file).read_text() == (tmp_path / "single" / file).read_text()
    ours, theirs = (load_file(tmp_path / kind / "model.safetensors") for kind in ("mesh", "single"))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)
