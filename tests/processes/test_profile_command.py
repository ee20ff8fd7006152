"""``autopar profile step``: the file that it writes, by itself and under torchrun, and what it refuses."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import autopar
from autopar.cli.app import app
from autopar.cli.train.optimizers import OPTIMIZERS
from autopar.costs.durations import durations
from autopar.costs.profile import Profile

JOB = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "autopar"]
MODEL = """\
import torch

class Pair(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up_proj = torch.nn.Linear(64, 256, bias=False)
        self.down_proj = torch.nn.Linear(256, 64, bias=False)

    def forward(self, x):
        return self.down_proj(torch.relu(self.up_proj(x))).square().mean()

def make():
    with torch.device("meta"):
        return Pair(), (torch.empty(32, 64),)
"""


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in JOB:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "a_pair.py"
    path.write_text(MODEL)
    return f"{path}:make"


def asked(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["profile", "step", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def under_torchrun(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in JOB} | {"OMP_NUM_THREADS": "1"}
    command = [*TORCHRUN, "profile", "step", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=400, env=environment)


def test_all_processes_of_torchrun_measure_and_one_speaks(model: str, tmp_path: Path) -> None:
    file = tmp_path / "step.json"
    done = under_torchrun(model, "--mesh", "tp=2", "--seconds", "0.001", "--interference", "--save", str(file))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("measured on cpu, 2 gloo processes of 1 thread") == 1
    assert f"{file} has the times of" in done.stdout and "have their prices" not in done.stdout
    found = Profile.load(file)
    assert (found.ranks, found.backend, found.mesh, found.threads) == (2, "gloo", "tp=2", 1)
    exchanges = [row for row in found.rows.values() if row.kind == "exchange"]
    assert exchanges and all(0 < row.startup <= row.seconds and not row.why for row in exchanges)
    assert {row.group for row in exchanges} == {"all_reduce over tp"} and found.interference >= 0
    assert all(row.seconds > 0 for row in found.rows.values() if row.kind == "op")
    scope: dict[str, object] = {}
    exec(MODEL, scope)
    made, example = scope["make"]()  # type: ignore[operator]
    parallel = autopar.parallelize(made, autopar.Mesh(tp=2), "megatron")
    step = parallel.train_step(OPTIMIZERS["adamw"](parallel.parameters(), 1e-3, 0.0))
    step.capture(example)
    assert durations(step.program.micro, file).source.startswith(f"the profile {file}"), "of the same step, here"


def test_one_process_measures_the_ops_of_the_first_rank(model: str, tmp_path: Path) -> None:
    file = tmp_path / "step.json"
    options = ("--mesh", "dp=2,tp=2", "--zero", "1", "--microbatches", "2", "--optimizer", "sgd", "--clip-norm", "1")
    status, out, _ = asked(model, *options, "--seconds", "0", "--machine", "cpu", "--save", str(file))
    assert status == 0 and "measured on cpu, 1 process of" in out
    assert "distinct calls have their prices: one process is alone; under torchrun, all processes time them" in out
    found = Profile.load(file)
    assert found.machine.name == "cpu" and found.programs.keys() == {"micro", "update", "last"}
    assert {row.kind for row in found.rows.values() if not row.why} == {"op", "local"}
    stages = ("--mesh", "pp=2,dp=2", "--schedule", "zb-h1", "--microbatches", "2")
    status, out, _ = asked(model, *stages, "--seconds", "0", "--save", str(file))
    assert status == 0 and "messages of 8192 bytes from stage 0 to stage 1" in out
    parts = {f"stage {stage} {part}" for stage in (0, 1) for part in ("micro", "update")}
    assert Profile.load(file).programs.keys() == parts
    status, out, _ = asked(model, "--mesh", "dp=2", "--seconds", "0")
    assert status == 0 and out.endswith("--save FILE writes these times to a file, from which durations are taken\n")


def test_a_job_of_another_size_is_refused(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it meets the other processes."""
    for name, value in zip(JOB, ("0", "2", "0", "2"), strict=True):
        monkeypatch.setenv(name, value)
    status, _, error = asked(model, "--mesh", "dp=2,tp=2")
    assert status != 0 and "--mesh dp=2,tp=2 has 4 ranks, and the job has 2 processes; start it" in error


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--interference"], "--interference times ops beside a collective, and one process has none; start several "
                             "with torchrun --nproc-per-node 4 -m autopar profile step"),
        (["--seconds", "-1"], "--seconds -1.0 must be 0 or more, for each call"),
        (["--seconds", "nan"], "--seconds nan must be 0 or more, for each call"),
        (["--microbatches", "0"], "--microbatches 0 must be at least 1"),
        (["--zero", "4"], "--zero 4 must be 0, 1, 2 or 3"),
        (["--optimizer", "adm"], "did you mean adam?"),
        (["--device", "tpu"], "--device tpu is unknown"),
        (["--schedule", "zb-h1"], "--schedule zb-h1 is for the stages of a pipeline, and --mesh dp=2,tp=2 has no axis"),
        (["--mesh", "pp=2", "--schedule", "zb"], "--schedule zb: there is no policy"),
        (["--machine", "cpus"], "there is no machine 'cpus'; did you mean 'cpu'?"),
        (["--save", "no/step.json"], "there is no folder no for --save no/step.json; make it first"),
        (["huge"], "the model huge is unknown; choose from tiny, small, medium, large, llama-2-7b, "),
        (["--plan", "megatorn"], "did you mean megatron?"),
    ],
)  # fmt: skip
def test_refused(arguments: list[str], said: str) -> None:
    status, _, error = asked(*arguments)
    assert status == 2
    assert said in error and error.startswith("autopar: ") and error.count("\n") == 1


def test_a_device_that_is_not_there(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    status, _, error = asked(model, "--device", "cuda")
    assert status == 2 and "--device cuda needs a GPU for each process of this machine, and there are 0" in error
