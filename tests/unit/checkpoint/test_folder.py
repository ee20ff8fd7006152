"""A folder of checkpoints: which are kept, which paths name one, and what a second job does to it."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import loaded, saved, whole

from autopar import checkpoint
from autopar.checkpoint import files
from autopar.errors import CheckpointError


def test_old_ones_go_when_the_new_one_is_whole(tmp_path: Path) -> None:
    def there() -> list[str]:
        return sorted(path.name for path in tmp_path.iterdir())

    assert checkpoint.latest(tmp_path) is None and checkpoint.latest(tmp_path / "none") is None
    first = saved(str(tmp_path), 1, "one process")
    copy = tmp_path / "best"
    Path(first).rename(copy)  # a name of one's own is left alone
    for step in range(2, 5):
        path = Path(saved(str(tmp_path), step, "one process"))
        assert checkpoint.latest(tmp_path) == path
        assert (tmp_path / "latest").read_text() == f"{path.name}\n"
    assert there() == ["best", "checkpoint-000002", "checkpoint-000003", "latest"]
    (tmp_path / ".writing-000007-12ab").mkdir()
    checkpoint.save(tmp_path, whole(5), keep=None)
    assert there() == ["best", "checkpoint-000002", "checkpoint-000003", "checkpoint-000008", "latest"]
    checkpoint.save(tmp_path, whole(6), keep=1)
    assert there() == ["best", "checkpoint-000009", "latest"]
    loaded(str(copy), 1, "one process")
    for keep in (0, -1, True, 1.5):
        with pytest.raises(
            ValueError, match=r"keep=.* would leave no checkpoint; keep 1 or more, or all with keep=None"
        ):
            checkpoint.save(tmp_path, whole(7), keep=keep)


def test_paths_as_a_shell_has_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder in the user's own, relative ones, and links: to a folder, to a checkpoint, and among checkpoints."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    state = {"step": 1}
    assert checkpoint.save("~/own", state) == tmp_path / "own" / "checkpoint-000001" == checkpoint.latest("~/own")
    (tmp_path / "link").symlink_to("own")
    (tmp_path / "one").symlink_to("own/checkpoint-000001")
    assert checkpoint.save("link", state | {"step": 2}) == Path("link/checkpoint-000002")
    assert [checkpoint.load(path, state)["step"] for path in ("~/own", "own", "link", "one")] == [2, 2, 2, 1]
    (tmp_path / "own" / "checkpoint-000001").rename("elsewhere")
    (tmp_path / "own" / "checkpoint-000001").symlink_to(tmp_path / "elsewhere")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        checkpoint.save("own", state, keep=1)
    assert not [one for one in warned if "tidied" in str(one.message)]
    assert sorted(path.name for path in (tmp_path / "own").iterdir()) == ["checkpoint-000003", "latest"]
    assert checkpoint.load("elsewhere", state)["step"] == 1


def test_two_jobs_in_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The save of the second one ends that of the first with an error; what is there is whole."""
    create = files.create

    def while_the_other_saves(path: Path) -> Any:
        monkeypatch.setattr(files, "create", create)
        checkpoint.save(tmp_path, {"w": torch.ones(2), "step": 9})
        return create(path)

    monkeypatch.setattr(files, "create", while_the_other_saves)
    with pytest.raises(
        CheckpointError,
        match=r"/\.writing-000001-\w+ was removed while it was written, as a save of another job does; give each job "
        r"a folder of its own$",
    ):
        checkpoint.save(tmp_path, {"w": torch.zeros(2), "step": 1})
    assert checkpoint.load(tmp_path, {"w": torch.zeros(2), "step": 0})["step"] == 9


def test_a_folder_that_cannot_be_tidied_is_told(tmp_path: Path) -> None:
    (tmp_path / "latest").mkdir()
    with pytest.warns(
        UserWarning,
        match=r"checkpoint-000001 is complete, but old checkpoints could not be removed: "
        r".*latest",
    ):
        saved(str(tmp_path), 1, "one process")
    loaded(str(tmp_path), 1, "one process")
