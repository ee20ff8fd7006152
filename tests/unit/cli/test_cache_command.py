"""``autopar cache`` and ``--cache``: what is kept, listed and removed, and folders that cannot be used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from planned_mlp import PLANNED
from typer.testing import CliRunner

from autopar.cache.folder import Folder, folder_of
from autopar.cli.app import app


def asked(*arguments: str, status: int = 0) -> Any:
    """What a command gives as JSON, or prints as an error."""
    result = CliRunner().invoke(app, [*arguments, "--json"], prog_name="autopar")
    assert result.exit_code == status, result.output
    return json.loads(result.stdout) if status == 0 else result.stderr


def plan(folder: Path, model: Path) -> Any:
    return asked("plan", f"{model}:make", "--mesh", "dp=2,tp=2", "--cache", str(folder))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "kept_mlp.py"
    path.write_text(PLANNED)
    return path


def test_a_second_plan_comes_from_the_cache(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    first = plan(folder, model)
    kept = asked("cache", "list", "--cache", str(folder))
    assert kept["entries"] and kept["folder"] == str(folder)
    assert kept["bytes"] == sum(entry["bytes"] for entry in kept["entries"])
    assert plan(folder, model) == first
    again = asked("cache", "list", "--cache", str(folder))
    assert [entry["entry"] for entry in again["entries"]] == [entry["entry"] for entry in kept["entries"]]


def test_entries_are_removed(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    plan(folder, model)
    count = len(asked("cache", "list", "--cache", str(folder))["entries"])
    assert asked("cache", "clear", "--cache", str(folder)) == {"folder": str(folder), "removed": count}
    assert asked("cache", "list", "--cache", str(folder))["entries"] == []


def test_a_corrupt_entry_is_listed_with_what_is_wrong(model: Path, tmp_path: Path) -> None:
    plan(tmp_path / "kept", model)
    for file in (tmp_path / "kept").rglob("*.json"):
        file.write_text("{")
    rows = asked("cache", "list", "--cache", str(tmp_path / "kept"))["entries"]
    assert rows and all("is corrupt" in row["of"] for row in rows)


def test_an_entry_that_another_job_removes_meanwhile_is_passed_over(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan(tmp_path / "kept", model)
    entries = Folder.entries
    monkeypatch.setattr(Folder, "entries", lambda folder: [*entries(folder), Path(folder.path, "v1", "gone", "gone")])
    assert len(asked("cache", "list", "--cache", str(tmp_path / "kept"))["entries"]) == len(entries(_folder(tmp_path)))


def _folder(path: Path) -> Folder:
    folder = folder_of(str(path / "kept"))
    assert folder is not None
    return folder


def test_a_cache_that_is_switched_off_has_no_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOPAR_CACHE", "")
    assert "AUTOPAR_CACHE is empty; name a folder with --cache" in asked("cache", "list", status=2)


def test_a_file_is_no_folder(model: Path) -> None:
    error = asked("cache", "clear", "--cache", str(model), status=2)
    assert f"{model} is no folder; name another folder with --cache" in " ".join(error.split())
