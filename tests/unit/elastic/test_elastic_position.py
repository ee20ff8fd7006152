"""Positions in the data as plain values, the steps that were reached, and the owner of a folder."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from autopar.checkpoint.values import encode_state
from autopar.elastic.owner import Owner
from autopar.elastic.position import Listed, plain, rows_of, stateful, with_tensors
from autopar.elastic.reached import Reached
from autopar.elastic.start import Start
from autopar.errors import CheckpointError
from autopar.ir.mesh import Mesh


def test_tensors_of_a_position_are_stored_as_plain_values() -> None:
    generator = torch.Generator().manual_seed(3)
    position = {"sampler": {"generator": generator.get_state(), "yielded": 3}, "empty": torch.empty(0, 3),
                "workers": [{"0": (torch.ones(2, 2), None)}]}  # fmt: skip
    stored = plain(position)
    assert encode_state({"position": stored})[0] == {}
    again = with_tensors(stored)
    assert torch.equal(again["sampler"]["generator"], generator.get_state()) and again["sampler"]["yielded"] == 3
    assert torch.equal(again["workers"][0]["0"][0], torch.ones(2, 2)) and again["workers"][0]["0"][1] is None
    assert again["empty"].shape == (0, 3) and type(again["workers"][0]["0"]) is tuple


def test_a_list_of_batches_goes_on_where_it_was() -> None:
    listed = Listed([10, 20, 30])
    taken = iter(listed)
    assert [next(taken), next(taken)] == [10, 20] and listed.state_dict() == {"given": 2, "batches": 3}
    other = Listed([10, 20, 30])
    other.load_state_dict(listed.state_dict())
    assert [*other, *other] == [30, 10, 20, 30]
    with pytest.raises(ValueError, match="the position is in 3 batches, and here are 2; give the batches as they were"):
        Listed([1, 2]).load_state_dict(listed.state_dict())


def test_data_without_a_position_is_refused() -> None:
    with pytest.raises(TypeError, match=r"cannot say where it is and go on there.*use torchdata's StatefulDataLoader"):
        stateful(DataLoader([1, 2]))
    with pytest.raises(ValueError, match="the list of batches is empty"):
        stateful([])
    assert isinstance(stateful([1]), Listed)


def test_the_rows_of_a_batch() -> None:
    assert rows_of({"scale": torch.tensor(2.0), "x": [np.ones(3), torch.ones(4, 2)]}) == 4
    assert rows_of((1, torch.tensor(2.0))) is None


def test_the_last_step_that_any_host_has_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reached = Reached(tmp_path / "runs")
    assert reached.newest() == 0
    for host, step in ((0, 12), (1, 9)):
        monkeypatch.setenv("GROUP_RANK", str(host))
        noting = Reached(tmp_path / "runs")
        for number in range(1, step + 1):
            noting.note(number)
        noting.close()
    monkeypatch.setenv("LOCAL_RANK", "1")  # writes nothing
    Reached(tmp_path / "runs").note(99)
    (tmp_path / "runs" / ".reached-00007").write_text("")  # of a host that was lost while it wrote
    assert len(os.listdir(tmp_path / "runs")) == 3
    assert reached.newest() == 12
    assert reached.newest() == 0, "what was read is forgotten, for a host that is gone would count again"


def test_the_owner_of_a_folder(tmp_path: Path) -> None:
    """The start that was given up learns of it; without the file nobody is told."""
    first, second = Owner(tmp_path / "runs"), Owner(tmp_path / "runs")
    first.claim()
    first.check()
    second.claim()
    second.check()
    with pytest.raises(CheckpointError, match=r"another start of this training has taken .*runs and goes on without"):
        first.check()
    assert os.listdir(tmp_path / "runs") == [".owner"]
    (tmp_path / "runs" / ".owner").unlink()
    first.check()


def test_the_line_that_says_where_a_job_goes_on() -> None:
    mesh = Mesh(dp=1, tp=2)
    assert str(Start("runs/a", True, 20, 3, 50, 10, mesh)) == (
        "step 21 of 50 is next, on dp=1 tp=2, from runs/a; 3 steps lost"
    )
    assert str(Start("runs/a", False, 0, 0, 50, 10, mesh)) == (
        "step 1 of 50 is next, on dp=1 tp=2, and runs/a has no checkpoint"
    )
    assert str(Start("runs/a", False, 0, 1, 50, 10, mesh)).endswith("no checkpoint; 1 step lost")
    assert str(Start("runs/a", True, 50, 0, 50, 10, mesh)).startswith("no step is left, on dp=1 tp=2")
