"""``autopar train`` on the stages of a pipeline: the losses of a single device, on processes and simulated."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from train_command import alone, command, one_layer  # noqa: F401  # fixtures of all tests here

SHORT = ("--batch", "16", "--sequence", "16", "--steps", "4")


@pytest.mark.parametrize("preset", ["llama-pp2-tp2", "llama-pp2-dp2"])
def test_llama_in_two_stages_trains_as_on_one_device(preset: str, capfd: pytest.CaptureFixture[str]) -> None:
    """pp2 × tp2, or pp2 × dp2 with ZeRO 1: fp16-O2, scale 1024, recomputation, 16 micro-batches, AdamW, norm 1."""
    assert command("--preset", preset, "--sequence", "16", "--steps", "10") == 0
    out = capfd.readouterr().out
    assert "1f1b on 2 ranks, 16 micro-batches" in out
    assert re.search(r"^the same numbers: 10 losses differ by \S+ at most", out, re.M)


@pytest.mark.usefixtures("one_layer")
def test_a_training_goes_on_on_other_stages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All losses are compared with those of the single device, those before too."""
    folder = ("--checkpoint", str(tmp_path / "saved"), "--resume", "--simulate")
    assert command(*SHORT, *folder, "--steps", "2", "--mesh", "pp=2", "--microbatches", "4", "--schedule", "zb-h1") == 0
    assert command(*SHORT, *folder, "--mesh", "dp=2,tp=2") == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "after step 2 of 4" in out
    assert "the same numbers: 4 losses" in out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            "--mesh dp=2 --schedule 1f1b",
            "--schedule 1f1b is for the stages of a pipeline, and --mesh dp=2 has no axis pp",
        ),
        ("--mesh dp=2 --chunks 2", "--chunks 2 is for the stages of a pipeline"),
        ("--mesh pp=2 --schedule 1f2b", "did you mean '1f1b'"),
        ("--mesh pp=2 --schedule zb-v --chunks 3", "--schedule zb-v: zb-v has 2 stages on a rank, not 3"),
        ("--mesh pp=2 --chunks 0", "--chunks 0 must be at least 1"),
    ],
)
def test_schedules_that_do_not_fit_are_refused(options: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("--simulate", *options.split()) == 2
    assert words in " ".join(capsys.readouterr().err.split())
