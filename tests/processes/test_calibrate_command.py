"""``autopar calibrate``: the machine file that it writes, by itself and under torchrun, and what it refuses."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from autopar.cli.app import app
from autopar.costs.machine import MEASURABLE, Machine, machine, machine_from
from autopar.costs.prices import price

JOB = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
SHORT = ("--rounds", "2", "--sizes", "4,4096,1048576")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "3", "-m", "autopar"]


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in JOB:
        monkeypatch.delenv(name, raising=False)


def asked(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["calibrate", *arguments])
    return result.exit_code, result.stdout, result.stderr


def test_all_processes_of_torchrun_measure_and_one_speaks(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    environment = {name: value for name, value in os.environ.items() if name not in JOB} | {"OMP_NUM_THREADS": "1"}
    arguments = [*TORCHRUN, "calibrate", "-o", str(path), *SHORT]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("3 gloo processes, 2 rounds") == 1 and "1,048,576" in done.stdout
    found = machine_from(str(path))
    assert (found.name, found.kind, found.note) == ("cpu, 3 processes", "cpu", "outside is not measured")
    assert found.source.startswith("autopar calibrate, 3 ranks, torch ")
    assert [fit.operation for fit in found.measured] == [*MEASURABLE] and {fit.ranks for fit in found.measured} == {3}
    for operation in MEASURABLE:
        assert 0 < price(operation, 4096, 2, found) < 1 and operation in done.stdout
    assert dict(found.peak).keys() == {"f64", "f32", "bf16"} and all(flops > 1e8 for flops in dict(found.peak).values())


def test_one_process_measures_ops_only(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    status, out, _ = asked("--ranks", "1", "--name", "mine", "--output", str(path), "--rounds", "2")
    assert status == 0 and out.startswith("1 gloo process, 2 rounds\na local op ")
    assert out.endswith(f"{path} has the figures of 'mine': parallelize(…, machine={str(path)!r})\n")
    found = Machine.load(path)
    assert (found.name, found.measured, found.inside) == ("mine", (), machine("cpu").inside)
    assert found.memory != machine("cpu").memory and found.note == "inside and outside are not measured"


@pytest.mark.parametrize(
    ("arguments", "job", "said"),
    [
        (["--sizes", "4"], {}, "--sizes 4: write two sizes or more, in bytes: 4,4096,1048576"),
        (["--sizes", "4,many"], {}, "--sizes 4,many: write two sizes or more"),
        (["--rounds", "1"], {}, "--rounds 1 must be at least 2, for the fit"),
        (["--ranks", "0"], {}, "--ranks 0 must be at least 1; one process measures ops only"),
        (["--device", "tpu"], {}, "--device tpu is unknown; choose from cpu, cuda"),
        (["--device", "cuda", "--ranks", "999"], {}, "--device cuda needs a GPU for each of 999 processes"),
        (["-o", "no/machine.json"], {}, "there is no folder no for --output no/machine.json; make it first"),
        (["--ranks", "2"], {"RANK": "0", "WORLD_SIZE": "4"}, "--ranks 2: the job has 4 processes, which all measure"),
        ([], {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"},
         "start it on one, with torchrun --nproc-per-node 2: links between machines are not measured"),
    ],
)  # fmt: skip
def test_refused(arguments: list[str], job: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in job.items():
        monkeypatch.setenv(name, value)
    status, _, error = asked(*arguments)
    assert status == 2 and said in error and error.count("\n") == 1
