"""``autopar train``: the losses of a mesh beside those of a single device; its text, its help, its processes."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from train_command import (
    alone,  # noqa: F401  # a fixture of all tests here
    command,
    one_layer,  # noqa: F401
)

from autopar.cli.app import app
from autopar.cli.train import run as running
from autopar.cli.train.check import check
from autopar.cli.train.curve import Comparison
from autopar.cli.train.launched import Launched, launched
from autopar.cli.train.options import TrainOptions, options_of
from autopar.cli.train.presets import TRAININGS
from autopar.cli.train.refused import Refused
from autopar.cli.train.text import Text, read
from autopar.runtime.processes import launch as launcher

SHORT = ("--simulate", "--steps", "4", "--batch", "4", "--sequence", "16")
SHORTER = (*SHORT, "--steps", "3")
LOSSES = re.compile(r"^ *(\d+) +([\d.]+|nan) +([\d.]+|nan) +(\S+)", re.MULTILINE)


# -- in this process


@pytest.mark.long
def test_simulated_ranks_and_a_single_device_have_the_same_losses(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(*SHORT) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "mesh dp=2 tp=2, plan megatron: 4 simulated ranks on cpu" in out
    assert "capture: the preset megatron splits 16 parameters" in out
    assert re.search(
        r"^all_reduce +tp +forward +2 +[\d,]+ +model\.layers\.\*\.mlp\.down_proj +modeling_llama\.py:\d+ *$", out, re.M
    )
    assert re.search(r"^  step 4/4  loss \d\.\d{4} +[\d,]+ tokens/s$", out, re.M)
    rows = LOSSES.findall(out)
    assert [row[0] for row in rows] == ["1", "2", "3", "4"]
    for _, parallel, single, difference in rows:
        assert 4 < float(single) < 6 and float(parallel) == pytest.approx(float(single), rel=1e-5)
        assert float(difference) < 1e-5
    assert float(rows[-1][1]) < float(rows[0][1])
    assert re.search(
        r"^the same numbers: 4 losses differ by \S+ at most \(step \d\), the tolerance is 1e-04$", out, re.M
    )
    assert re.search(
        r"^the norms of their gradients differ by \d\.\de-0[6-9] at most \(step \d\), the tolerance is 1e-04$",
        out,
        re.M,
    )
    assert max(map(len, out.splitlines())) <= 100


@pytest.mark.long
@pytest.mark.usefixtures("one_layer")
def test_a_saved_plan_is_taken(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = str(tmp_path / "plan.json")
    sizes = ("--batch", "4", "--sequence", "16", "--mesh", "dp=2")
    with pytest.raises(SystemExit) as end:
        app(["plan", "tiny", "--optimizer", "adamw", "--machine", "cpu", "--save", file, *sizes])
    assert end.value.code == 0
    content = json.loads(Path(file).read_text())
    content["search_seconds"] = 123.4  # nothing is searched again
    Path(file).write_text(json.dumps(content))
    arguments = ("--simulate", "--steps", "2", *sizes)
    assert command(*arguments, "--plan", file) == 0
    out = capsys.readouterr().out
    assert re.search(r"^searched in 123.4 s: [\d.]+ ms a step on cpu, and how much cheaper a plan could be ", out, re.M)
    assert "another update (AdamW; here it is AdamW, clip_norm=inf)" in out  # the command measures the gradients
    assert re.search(r"^the same numbers: 2 losses differ by ", out, re.M)
    assert command("--simulate", "--plan", file) == 2
    assert "is for the mesh (dp=2), and this one is (dp=2 tp=2); use --mesh dp=2, or" in capsys.readouterr().err
    del content["graph"]
    Path(file).write_text(json.dumps(content))
    assert command(*arguments, "--plan", file) == 2
    assert "plan.json: graph: missing" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.usefixtures("one_layer")
def test_a_searched_plan_is_shown_by_module(capsys: pytest.CaptureFixture[str]) -> None:
    """With its certificate, once; and it has the numbers of the single device."""
    arguments = ("--simulate", "--steps", "2", "--batch", "8", "--sequence", "64", "--mesh", "dp=2")
    assert command(*arguments, "--plan", "search") == 0
    out, _ = capsys.readouterr()
    assert "mesh dp=2, plan search: 2 simulated ranks on cpu" in out
    assert re.search(r"^│ model.embed_tokens +│ weight f32\[256 64\] +│ +[\d.]+ │ +[\d.]+ │$", out, re.M)
    certificate = (
        r"^searched in [\d.]+ s: [\d.]+ ms a step on cpu, and no plan is (cheaper|more than [\d.]+% cheaper.*)$"
    )
    assert len(re.findall(certificate, out, re.M)) == out.count("ms a step on cpu") == 1
    assert "preset" not in out and re.search(r"^bytes that a rank receives in a step, by axis: ", out, re.M)
    assert re.search(r"^the same numbers: 2 losses differ by ", out, re.M)


@pytest.mark.long
@pytest.mark.usefixtures("one_layer")
def test_gradients_that_are_too_large_by_one_factor_fail(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """AdamW does the same with them, so the losses alone are the same."""

    def clip(parameters: Iterable[torch.nn.Parameter], limit: float) -> torch.Tensor:
        parameters = list(parameters)
        for parameter in parameters:
            parameter.grad *= 2
        return original(parameters, limit)

    original = torch.nn.utils.clip_grad_norm_
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", clip)
    assert command(*SHORTER, "--mesh", "dp=2") == 1
    out = capsys.readouterr().out
    assert float(re.search(r"losses differ by (\S+) at most", out)[1]) < 1e-4
    assert "the norms of their gradients differ by 5.0e-01 at most" in out


@pytest.mark.long
@pytest.mark.usefixtures("one_layer")
def test_a_model_that_differs_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The second model, that of the single device, has a head that is a little stronger."""
    built: list[torch.nn.Module] = []

    def llama(*args: Any) -> torch.nn.Module:
        model = original(*args)
        if built:
            with torch.no_grad():
                model.lm_head.weight *= 1.1
        built.append(model)
        return model

    original = running.llama
    monkeypatch.setattr(running, "llama", llama)
    assert command(*SHORTER, "--mesh", "dp=1") == 1
    assert re.search(r"^NOT the same numbers: 3 losses differ by \S+ at most", capsys.readouterr().out, re.M)


@pytest.mark.long
@pytest.mark.usefixtures("one_layer")
def test_a_tolerance_of_zero_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(*SHORTER, "--mesh", "dp=2", "--tolerance", "0") == 1
    assert "the tolerance is 0e+00" in capsys.readouterr().out


@pytest.mark.long
@pytest.mark.usefixtures("one_layer")
def test_losses_that_are_not_finite_fail(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(*SHORTER, "--mesh", "dp=1", "--lr", "1e30") == 1
    assert re.search(r"^NOT finite: step [23]; try a smaller --lr$", capsys.readouterr().out, re.M)


@pytest.mark.long
@pytest.mark.usefixtures("one_layer")
@pytest.mark.parametrize(
    "mesh", [pytest.param("dp=1", marks=pytest.mark.sweep("presets run on it in the next test")), "tp=2,dp=3"]
)
def test_meshes(mesh: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(*SHORTER, "--mesh", mesh) == 0
    assert f"mesh {mesh.replace(',', ' ')}, plan {'megatron' if 'tp' in mesh else 'ddp'}" in capsys.readouterr().out


@pytest.mark.long
@pytest.mark.usefixtures("one_layer")
@pytest.mark.parametrize(
    "options",
    [
        "--zero 3",
        "--preset llama-fp16-o2 --batch 16",
        pytest.param("--zero 1", marks=pytest.mark.sweep("the preset has this stage of ZeRO")),
    ],
)
def test_a_data_axis_of_one_rank_has_nothing_to_split(options: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(*SHORTER, *options.split(), "--mesh", "dp=1") == 0
    assert "the same numbers: 3 losses" in capsys.readouterr().out


def test_a_presets_loss_scale_goes_with_its_amp() -> None:
    assert options_of({"preset": "llama-fp16-o2"}).loss_scale == 1024.0
    assert options_of({"preset": "llama-fp16-o2", "amp": "bf16-O1"}).loss_scale is None
    # which is refused
    assert options_of({"preset": "llama-fp16-o2", "amp": "bf16-O1", "loss_scale": 8.0}).loss_scale == 8.0


def test_a_folder_of_checkpoints_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        app(["checkpoint", str(tmp_path / "nix")])
    assert end.value.code == 2
    told = (
        f"autopar: there is no folder {tmp_path / 'nix'}; name the folder that you passed to "
        f"autopar.checkpoint.save, or a checkpoint in it\n"
    )
    assert capsys.readouterr() == ("", told)


def test_a_file_in_place_of_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is refused before anything is captured, too."""
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(SystemExit) as end:
        app(["checkpoint", str(file)])
    assert end.value.code == 2
    assert capsys.readouterr().err.startswith(f"autopar: {file} is a file, and no folder; name the folder that you")
    assert command("--checkpoint", str(file)) == 2
    assert f"--checkpoint {file} is a file, and no folder; name a folder" in " ".join(capsys.readouterr().err.split())


@pytest.mark.long
@pytest.mark.usefixtures("one_layer")
def test_bfloat16() -> None:
    """Has a tolerance of its own."""
    assert command(*SHORTER, "--mesh", "dp=2", "--dtype", "bfloat16") == 0


@pytest.mark.long
@pytest.mark.usefixtures("one_layer")
def test_a_text_and_a_plan_from_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "book.txt").write_text("It is a truth universally acknowledged, " * 3)
    (tmp_path / "plan.json").write_text(json.dumps({"*.lm_head.weight": [None, "tp"]}))
    assert command(*SHORTER, "--text", str(tmp_path / "book.txt"), "--plan", str(tmp_path / "plan.json")) == 0
    out = capsys.readouterr().out
    assert "of book.txt (120 bytes)" in out
    assert re.search(
        r"^slice +tp +forward .* model\.norm +", out, re.M
    )  # what enters the split head is computed in pieces


# -- the text, the batches, the curves


def test_the_text_is_the_same_each_time() -> None:
    first, again = read(None), read(None)
    assert torch.equal(first.data, again.data)
    assert len(first.data) > 1_000_000 and bytes(first.data[:64].tolist()).isascii()


def test_batches_depend_on_the_seed_and_the_step_alone() -> None:
    text = read(None)
    batch = text.batch(3, 5, 4, 16)
    torch.manual_seed(7)
    torch.rand(3)
    again = text.batch(3, 5, 4, 16)
    assert batch["input_ids"].shape == (4, 16) and batch["input_ids"].dtype == torch.int64
    assert batch["labels"] is batch["input_ids"]
    assert torch.equal(batch["input_ids"], again["input_ids"])
    whole = bytes(text.data.tolist())
    assert all(bytes(row.tolist()) in whole for row in batch["input_ids"])
    for seed, step in ((4, 5), (3, 6)):
        assert not torch.equal(batch["input_ids"], text.batch(seed, step, 4, 16)["input_ids"])


def test_a_text_of_one_sequence() -> None:
    text = Text("abc", torch.tensor(list(b"abc"), dtype=torch.uint8))
    assert text.batch(0, 0, 2, 3)["input_ids"].tolist() == [list(b"abc")] * 2


def test_comparisons() -> None:
    curves = Comparison([2.0, 4.0, 3.0], [2.0, 5.0, 3.0])
    assert (curves.worst, curves.largest) == (1, pytest.approx(0.2))
    assert curves.within(0.2) and not curves.within(0.19)
    assert Comparison([0.0], [0.0]).within(0)
    late = Comparison([*[1.0] * 200, 1.0015], [1.0] * 201)
    assert not late.within(1e-4) and not late.within(1e-4, 3.0) and late.within(1e-4, 4.0)
    early = Comparison([1.0015, *[1.0] * 200], [1.0] * 201)
    assert not early.within(1e-4, 4.0)
    assert not Comparison([*[1.0] * 5000, 1.06], [1.0] * 5001).within(1e-4, 4.0)
    assert Comparison([1.0, math.inf], [1.0, math.nan], frozenset({1})).within(0)
    for bad in (math.nan, math.inf):
        assert not Comparison([1.0, bad], [1.0, bad]).within(1e30)
        assert not Comparison([1.0], [bad]).within(math.inf)
    assert Comparison(range(1000), range(1000)).steps()[::8] == [0, 999]
    with pytest.raises(ValueError, match="1 and 2 steps cannot be compared"):
        Comparison([1.0], [1.0, 2.0])


# -- the help


def test_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert command("--help") == 0
    words = " ".join(re.sub(r"\x1b\[[\d;]*m|[│╭╮╰╯─]", " ", capsys.readouterr().out).split())
    for option in TrainOptions.__dataclass_fields__:
        assert f" --{option.replace('_', '-')} " in words
    assert all(f"{name}: {preset.what}" in words for name, preset in TRAININGS.items())
    for said in (
        "Mesh",
        "Training",
        "Step",
        "Checkpoints",
        "Comparison",
        "torchrun --nproc-per-node 4 -m autopar train",
        "Exit status",
    ):
        assert said in words


# -- processes


def test_the_command_starts_itself_for_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same options, but for the device, which is decided."""
    calls: list[tuple[list[str], int, str | None]] = []
    seen: list[TrainOptions] = []

    def launch(entrypoint: list[str], processes: int, *, endpoint: str | None, environment: dict[str, str]) -> None:
        calls.append((entrypoint, processes, endpoint))

    monkeypatch.setattr(launcher, "launch", launch)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    given = TrainOptions(
        mesh="dp=3,tp=2", port=29511, steps=7, lr=1e-3, dtype="float64", tolerance=0.5, seed=9, sequence=32
    )
    assert command(*given.arguments()) == 0
    ((entrypoint, processes, endpoint),) = calls
    assert (processes, endpoint) == (6, "localhost:29511")
    assert entrypoint[:4] == [sys.executable, "-m", "autopar", "train"]
    monkeypatch.setattr(running, "run", lambda options: seen.append(options) or 0)
    assert command(*entrypoint[4:]) == 0
    assert seen == [TrainOptions(**{**vars(given), "device": "cpu"})]


FAILURES = {  # rank, its status → of the command, and whether it tells what the launcher said
    (0, running.REPORTED + 1): (1, False),
    (2, running.REPORTED + 2): (2, False),
    (1, 1): (1, True),
    (None, 143): (143, True),
    (None, 1): (2, True),
}


@pytest.mark.parametrize(("rank", "status"), FAILURES)
def test_a_launch_that_failed(
    rank: int | None, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def launch(*args: Any, **options: Any) -> None:
        raise launcher.LaunchError("autopar: something failed", rank=rank, status=status)

    monkeypatch.setattr(launcher, "launch", launch)
    expected, tells = FAILURES[rank, status]
    assert command("--device", "cpu") == expected
    assert capsys.readouterr().err == ("autopar: something failed\n" if tells else "")


def test_a_plan_of_globs_is_checked_before_processes_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.json"
    file.write_text('{"*.nope.weight": ["tp"]}')
    assert command("--plan", str(file), "--device", "cpu") == 2
    assert re.fullmatch(
        r"autopar: the plan's glob '\*\.nope\.weight' matches no parameter or input; near it: .*\n",
        capsys.readouterr().err,
    )


def test_the_place_in_a_job() -> None:
    assert launched({}) is None
    assert launched({"RANK": "3", "WORLD_SIZE": "4"}) == Launched(3, 4, 3, 4)
    torchrun = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    assert launched(torchrun) == Launched(5, 8, 1, 4)
    with pytest.raises(
        Refused, match="the environment's RANK='x' is not a number; start the job with torchrun, or unset RANK"
    ):
        launched({"RANK": "x", "WORLD_SIZE": "4"})


def test_more_processes_than_the_machine_can_bear(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert command("--mesh", "dp=100000", "--device", "cpu") == 2
    assert capsys.readouterr().err.startswith(
        "autopar: --mesh dp=100000 needs 100000 processes, and this machine has 2 cores; --simulate runs"
    )


def test_jobs_that_do_not_fit() -> None:
    two = Launched(0, 2, 0, 2)
    told = (
        r"the job has 2 processes, but the mesh dp=2 tp=2 has 4 ranks; "
        r"start it with torchrun --nproc-per-node 4, or choose --mesh dp=2$"
    )
    with pytest.raises(Refused, match=told):
        check(TrainOptions(), two)
    with pytest.raises(
        Refused,
        match=r"--simulate runs all ranks in this one process, but RANK and WORLD_SIZE are set; .* without torchrun",
    ):
        check(TrainOptions(mesh="dp=2", simulate=True), two)
    assert check(TrainOptions(mesh="dp=2"), two).processes


PROCESSES = {  # who starts them → the command, the mesh, the plan that it takes by default
    "the command": ([sys.executable, "-m", "autopar"], "dp=2", "ddp"),
    "the command, searching": ([sys.executable, "-m", "autopar"], "tp=2", "search"),
    "torchrun": (
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "autopar"],
        "tp=2",
        "megatron",
    ),
}


@pytest.mark.processes
@pytest.mark.parametrize("start", [
    "the command",
    pytest.param("the command, searching", marks=pytest.mark.sweep("ranks search a plan in test_step_processes")),
    pytest.param("torchrun", marks=pytest.mark.sweep("test_train_resume trains in a job, test_kills under torchrun")),
])  # fmt: skip
def test_processes(start: str) -> None:
    """They have the losses of the single device, and one of them speaks."""
    program, mesh, plan = PROCESSES[start]
    arguments = [*program, "train", "--device", "cpu", "--steps", "4", "--mesh", mesh, "--microbatches", "2"]
    arguments += ["--plan", plan] * (plan == "search")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"mesh {mesh}, plan {plan}: 2 processes on cpu") == 1
    assert len(LOSSES.findall(done.stdout)) == 4
    assert done.stdout.count("the same numbers: 4 losses differ by") == 1
