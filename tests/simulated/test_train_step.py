"""``autopar train`` with all that a step has: presets, micro-batches, ZeRO, mixed precision, schedules of the learning
rate."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from train_command import alone, command, one_layer  # noqa: F401  # fixtures of all tests here too

from autopar.cli.train import run as running
from autopar.cli.train.check import Checked, check
from autopar.cli.train.loop import TrainedStep
from autopar.cli.train.optimizers import factor, schedule_of
from autopar.cli.train.options import TrainOptions, option, options_of
from autopar.cli.train.presets import TRAININGS

SHORT = ("--simulate", "--steps", "3", "--sequence", "16")

pytestmark = pytest.mark.usefixtures("one_layer")

# -- options and presets


def test_what_is_given_goes_before_the_preset(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it is a default, on the command line that ranks are started with."""
    seen: list[TrainOptions] = []
    monkeypatch.setattr(running, "run", lambda options: seen.append(options) or 0)
    given = ["--preset", "llama-fp16-o2", "--zero", "0", "--amp", "none", "--batch", "16", "--clip-norm", "inf"]
    assert command(*given) == 0
    (options,) = seen
    assert (options.zero, options.amp, options.batch, options.clip_norm) == (0, "none", 16, math.inf)
    # no fp16, no scale
    assert (options.mesh, options.microbatches, options.recompute, options.loss_scale) == (
        "dp=2,tp=2",
        16,
        "blocks",
        None,
    )
    assert command(*options.arguments()) == 0
    assert seen[1] == options
    assert options_of({"preset": "nothing", "steps": 3}) == TrainOptions(preset="nothing", steps=3)


def test_the_preset_of_the_pull_request() -> None:
    asked = options_of({"preset": "llama-fp16-o2"})
    wanted = {"mesh": "dp=2,tp=2", "amp": "fp16-O2", "loss_scale": 1024.0, "recompute": "blocks", "microbatches": 16,
              "zero": 1, "clip_norm": 1.0, "optimizer": "adamw", "weight_decay": 0.01}  # fmt: skip
    assert wanted.items() <= vars(asked).items() and asked.warmup > 0


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    [
        name if k == 0 else pytest.param(name, marks=pytest.mark.sweep("the first preset shows what is printed"))
        for k, name in enumerate(TRAININGS)
    ],
)
def test_presets(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("--preset", name, *SHORT) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"preset {name}: {TRAININGS[name].what}\n")
    assert re.search(r"^recompute: \d+ ops of the forward run again in the backward", out, re.M)
    zero = TRAININGS[name].options["zero"]
    assert f"ZeRO {zero}, norm clipped to 1, 5 steps of warm-up, then a cosine" in " ".join(out.split())
    assert re.search(rf"^all_gather +dp +{'update' if zero < 3 else 'forward'} ", out, re.M)
    assert re.search(r"in a step, by axis: dp [\d,]+.*; \d+ casts$", out, re.M)


# -- beside plain torch

STEPS = {  # options → the tolerance that is printed, of losses and of norms
    "--microbatches 4 --zero 2 --clip-norm 0.5 --warmup 2 --recompute min-cut": ("1e-04", "1e-04"),
    "--optimizer sgd --zero 3 --clip-norm 0.5 --weight-decay 0.1 --mesh dp=3 --batch 6": ("1e-04", "1e-04"),
    "--optimizer adam --weight-decay 0.1 --microbatches 2": ("1e-04", "1e-04"),
    "--dtype bfloat16 --microbatches 2": ("1e-02", "1e-02"),
    "--amp bf16-O1 --microbatches 2": ("1e-02", "1e-01"),
    "--amp fp16-O1 --clip-norm 1": ("2e-03", "5e-02"),
    "--amp bf16-O2 --microbatches 2": ("1e-02", "2e-01"),
    "--amp fp16-O2 --microbatches 4 --clip-norm 1": ("2e-03", "5e-02"),
}


PRESET = ("--amp bf16-O1 --microbatches 2", "--amp fp16-O2 --microbatches 4 --clip-norm 1")
APART = ("--optimizer adam --weight-decay 0.1 --microbatches 2", "--amp fp16-O1 --clip-norm 1")


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(options, marks=pytest.mark.sweep("a preset has the same mode"))
        if options in PRESET
        else pytest.param(options, marks=pytest.mark.sweep("each of its options is there in another case"))
        if options in APART
        else options
        for options in STEPS
    ],
)
def test_steps(options: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("--mesh", "dp=2", *SHORT, *options.split()) == 0
    losses, norms = STEPS[options]
    out = capsys.readouterr().out
    assert re.search(
        rf"^the same numbers: 3 losses .*, the tolerance is {losses}\nthe norms .*, the tolerance is {norms}$",
        out,
        re.M,
    )


@pytest.mark.long
@pytest.mark.parametrize(
    "change", ["clip_norm=0.01", "weight_decay=1", "warmup=4", "optimizer=sgd", "amp=bf16-O2", "seed=1"]
)
def test_a_single_device_without_the_option_fails(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So each is heeded on the mesh."""

    def without(checked: Checked, console: Console) -> list[TrainedStep]:
        default = {name: getattr(TrainOptions, name)}
        return original(replace(check(replace(checked.options, **default), None), tolerance=checked.tolerance), console)

    name, value = change.split("=")
    original = running._alone
    monkeypatch.setattr(running, "_alone", without)
    given = ("--mesh", "dp=1", "--batch", "4", "--lr", "0.02", "--tolerance", "1e-4", *SHORT)
    assert command(*given, option(name), value) == 1


@pytest.mark.long
def test_steps_that_both_skip(capsys: pytest.CaptureFixture[str]) -> None:
    """Gradients overflow at such a scale; losses are compared all the same."""
    assert command("--mesh", "dp=2", "--batch", "4", *SHORT, "--amp", "fp16-O2", "--loss-scale", "1e9") == 0
    assert "3 steps were skipped by both: their gradients overflowed" in capsys.readouterr().out


@pytest.mark.long
def test_a_step_that_one_side_skips(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    original = running._alone
    monkeypatch.setattr(
        running, "_alone", lambda *given: [replace(step, skipped=step.number == 2) for step in original(*given)]
    )
    assert command("--mesh", "dp=1", "--batch", "4", *SHORT) == 1
    out = capsys.readouterr().out
    assert (
        "NOT the same numbers: step 3 overflowed on one side alone, at the edge of fp16; try a smaller --loss-scale"
        in " ".join(out.split())
    )


@pytest.mark.long
def test_globs_of_modules(capsys: pytest.CaptureFixture[str]) -> None:
    assert command("--mesh", "dp=2", "--batch", "4", *SHORT, "--recompute", "*.mlp") == 0
    assert command("--mesh", "dp=2", "--batch", "4", *SHORT, "--recompute", "*.mpl") == 2
    assert re.fullmatch(
        r"autopar: --recompute \*\.mpl: .* matches no module .*; or use one of none, blocks, min-cut\n",
        capsys.readouterr().err,
    )


# -- the schedule


def test_the_learning_rate_rises_and_falls() -> None:
    rates = [factor(step, 4, 12) for step in range(13)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0] and rates[4] == 1.0
    assert rates[8] == pytest.approx(0.5) and rates[12] == pytest.approx(0.0)
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert factor(99, 4, 12) == 0.0 and factor(5, 5, 5) == 1.0
    assert {factor(step, 0, 12) for step in range(20)} == {1.0}
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=8.0)
    schedule = schedule_of(optimizer, 4, 12)
    for rate in rates[:3]:
        assert optimizer.param_groups[0]["lr"] == 8.0 * rate
        optimizer.step()
        schedule.step()


@pytest.mark.long
def test_a_folder_with_checkpoints_is_not_begun_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ("--mesh", "dp=1", "--batch", "2", *SHORT, "--checkpoint", str(tmp_path))
    assert command(*given) == 0
    assert command(*given) == 2
    err = capsys.readouterr().err
    assert (
        err
        == f"autopar: --checkpoint {tmp_path} has checkpoint-000001 of another training; continue it with --resume, "
        f"or name another folder\n"
    )
