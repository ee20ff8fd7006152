"""The last message of a host is printed by one of its ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.runtime.processes.watch.ending import say_for_host


def test_one_rank_of_a_host_speaks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Also the ranks of the next start of the job, which have a folder of their own."""
    for start in ("attempt_0", "attempt_1"):
        for rank in range(2):
            folder = tmp_path / start / str(rank)
            folder.mkdir(parents=True)
            monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(folder / "error.json"))
            say_for_host(f"{start} {rank}\n")
    assert capfd.readouterr().err == "attempt_0 0\nattempt_1 0\n"


@pytest.mark.parametrize("file", ["", "/no/such/folder/0/error.json"])
def test_without_a_folder_every_rank_speaks(
    file: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", file)
    say_for_host("a\n")
    say_for_host("b\n")
    assert capfd.readouterr().err == "a\nb\n"
