"""``autopar train``: the losses of a mesh beside those of a single device, and every request that is refused."""

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
from autopar.cli.train.check import check, plan_of
from autopar.cli.train.curve import Comparison
from autopar.cli.train.launched import Launched, launched
from autopar.cli.train.options import TrainOptions, options_of
from autopar.cli.train.presets import TRAININGS
from autopar.cli.train.refused import Refused
from autopar.cli.train.text import Text, check_length, read
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
    assert re.search(r"^slice +tp +forward .* lm_head +", out, re.M)  # of what the plan splits


# -- what is refused


def test_plans_of_names_and_files(tmp_path: Path) -> None:
    assert [plan_of(name) for name in ("ddp", "megatron+sp", "search")] == ["ddp", "megatron+sp", "search"]
    file = tmp_path / "plan.json"
    file.write_text('{"*.up.weight": [["dp", "tp"], null]}')
    assert plan_of(str(file)) == [{"*.up.weight": (("dp", "tp"), None)}]
    for text, told in (
        ("{", "is not JSON: .*"),
        ("3", "is not an object of globs; .*"),
        ("[[1]]", "is not an object of globs; .*"),
    ):
        file.write_text(text)
        with pytest.raises(Refused, match=f"--plan {re.escape(str(file))} {told}"):
            plan_of(str(file))


REFUSED = {
    "--mesh dp2": r"--mesh 'dp2' is not a list of different axes with their sizes; write it as in --mesh dp=2,tp=2",
    "--mesh dp=2,dp=2": r"--mesh 'dp=2,dp=2' is not a list of different axes .*",
    "--mesh dp=0": r"--mesh 'dp=0': axis 'dp' has size 0; the size of an axis is an integer ≥ 1; write it as in --mesh "
    r"dp=2,tp=2",
    "--mesh dp=2 --plan "
    "megatron": r"the preset 'megatron' splits over an axis named tp, and the mesh \(dp=2\) has none; .*",
    "--plan "
    "megatorn": r"--plan megatorn is unknown; choose from ddp, fsdp, megatron, megatron\+sp, fsdp\+tp, search, or a "
    r"JSON file of globs; did you mean megatron\?",
    "--plan nowhere.json": r"--plan nowhere\.json: No such file or directory; the names are ddp, fsdp, megatron, "
    r"megatron\+sp, fsdp\+tp, search",
    "--size huge": r"--size huge is unknown; choose from tiny, small, medium, large",
    "--dtype float16": r"--dtype float16 is unknown; choose from float32, float64, bfloat16; did you mean .*\?",
    "--device tpu": r"--device tpu is unknown; choose from cpu, cuda.*",
    "--device cuda": r"--device cuda needs a GPU for each rank, 4 on this machine, which has 0; use --device cpu",
    "--simulate --device "
    "cuda": r"--device cuda needs a GPU for each rank, 1 on this machine, which has 0; use --device cpu",
    "--text nowhere": r"--text nowhere: No such file or directory; give a file that can be read, or leave it out",
    "--text .": r"--text \.: Is a directory; .*",
    "--sequence "
    "100000000": r"Python's standard library has \d+ bytes, but a sequence has 100000000; give a longer text with "
    r"--text, or --sequence \d+",
    "--sequence 1": r"--sequence 1 must be at least 2: a byte and the next one",
    "--steps 0": r"--steps 0 must be at least 1",
    "--batch 0": r"--batch 0 must be at least 1",
    "--lr 0": r"--lr 0\.0 must be above 0, such as 0\.002",
    "--lr nan": r"--lr nan must be above 0, such as 0\.002",
    "--seed -1": r"--seed -1 must be between 0 and 2\*\*32 - 1",
    "--timeout 0": r"--timeout 0\.0 must be above 0, in seconds",
    "--tolerance -1": r"--tolerance -1\.0 must be 0 or more, such as 1e-4",
    "--preset llama": r"--preset llama is unknown; choose from llama-fp16-o2, llama-bf16-zero3, .*",
    "--preset llama-fp16": r"--preset llama-fp16 is unknown; choose from .*; did you mean llama-fp16-o2\?",
    "--microbatches 3": r"--microbatches 3 do not divide --batch 8 into equal pieces; try --microbatches 2",
    "--amp fp16-o2": r"--amp fp16-o2 is unknown; choose from none, bf16-O1, fp16-O1, bf16-O2, fp16-O2; did you mean "
    r"fp16-O2\?",
    "--amp bf16-O1 --dtype bfloat16": r"--amp bf16-O1 needs float32 weights, but --dtype is bfloat16; use one of both",
    "--zero 4": r"--zero 4 must be 0, 1, 2 or 3",
    "--zero 1 --mesh "
    "tp=2": r"--zero 1 splits over a data axis, and --mesh tp=2 has none; use --zero 0, or a mesh such as dp=2,tp=2",
    "--clip-norm 0": r"--clip-norm 0\.0 must be above 0, such as 1; inf only measures",
    "--loss-scale nan": r"--loss-scale nan must be 1 or more, such as 1024",
    "--loss-scale "
    "5": r"--loss-scale is for fp16, whose small gradients are lost, and --amp is none; leave it out, or use --amp "
    r"fp16-O2",
    "--loss-scale 5 --amp "
    "bf16-O1": r"--loss-scale is for fp16, whose small gradients are lost, and --amp is bf16-O1; leave it out, or use "
    r"--amp fp16-O2",
    "--warmup -1": r"--warmup -1 must be 0 or more steps",
    "--weight-decay -1": r"--weight-decay -1\.0 must be 0 or more, such as 0\.01",
    "--optimizer adamww": r"--optimizer adamww is unknown; choose from adamw, adam, sgd; did you mean adamw\?",
    "--every 0": r"--every 0 must be at least 1",
    "--resume": r"--resume continues from a checkpoint, but no folder is named; add --checkpoint FOLDER",
    "--port 99999": r"--port 99999 must be between 1 and 65535",
}


@pytest.mark.parametrize("arguments", REFUSED)
def test_what_is_refused(arguments: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert command(*arguments.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(f"autopar: {REFUSED[arguments]}\n", err), err


def test_without_transformers(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert command(*SHORT) == 2
    told = (
        "autopar: the model is Hugging Face's Llama, and transformers is not installed; "
        "pip install 'autopar[llm]', or pip install -e '.[llm]' in a checkout\n"
    )
    assert capsys.readouterr() == ("", told)


def test_an_empty_text() -> None:
    with pytest.raises(Refused, match=r"x has 0 bytes, but a sequence has 4; give a longer text with --text$"):
        check_length(Text("x", torch.empty(0, dtype=torch.uint8)), 4)


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
