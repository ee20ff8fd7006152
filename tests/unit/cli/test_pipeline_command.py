"""``autopar schedule``: what it prints and writes, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from autopar.cli.app import app
from autopar.cli.schedule import Request, run
from autopar.pipeline import POLICIES, PipelineSchedule, build


def asked(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["schedule", *arguments])
    return result.exit_code, result.stdout, result.stderr


def test_it_prints_the_table_the_figures_and_the_verification() -> None:
    status, out, _ = asked("onnx", "--ranks", "3", "--batches", "4")
    assert status == 0
    assert build("onnxruntime", 3, 4).table() in out
    assert "onnxruntime on 3 ranks, 4 micro-batches: makespan 18, bubble 6 (33.33%)" in out
    assert "24 computations, 16 messages; finishes on asynchronous, 1-buffered, grouped, blocking channels" in out
    assert "rank 2 → rank 1: at most 2 send and 1 receive buffers" in out


@pytest.mark.parametrize("policy", POLICIES)
def test_what_it_saves_it_loads(policy: str, tmp_path: Path) -> None:
    for suffix in ("json", "csv"):
        path = tmp_path / f"schedule.{suffix}"
        status, _, _ = asked(policy, "--ranks", "2", "--batches", "3", "--save", str(path))
        assert status == 0
        loaded = PipelineSchedule.load(path)
        assert [(t.kind, t.stage, t.batch) for _, r, t in loaded.tasks() if r == 1] == [
            (t.kind, t.stage, t.batch) for _, r, t in build(policy, 2, 3).tasks() if r == 1
        ]
        status, out, _ = asked(
            str(path), "--forward", "3", "--transfer", "0.5", *(["--recompute"] if suffix == "csv" else [])
        )
        assert status == 0 and "on 2 ranks" in out


def test_it_draws_and_traces(tmp_path: Path) -> None:
    svg, trace = tmp_path / "a.svg", tmp_path / "a.trace.json"
    status, _, _ = asked("zb-v", "--ranks", "2", "--batches", "2", "--draw", str(svg), "--trace", str(trace))
    assert status == 0 and svg.read_text().startswith("<?xml") and json.loads(trace.read_text())["traceEvents"]


def test_it_optimises() -> None:
    status, out, _ = asked(
        "optimised", "--forward", "2,2,2,3", "--backward", "2,2,2,3", "--transfer", "0.2", "--limit", "5"
    )
    assert (
        status == 0
        and "lower bound" in out
        and "best fixed   zb-h1: 66.2, 1.015 times as long" in out
        and "of  5 5 5 5" in out
    )


def test_it_optimises_the_longest_span() -> None:
    arguments = ("optimised", "--ranks", "2", "--batches", "3", "--for-weights", "0.5", "--limit", "2", "--objective")
    status, out, _ = asked(*arguments, "span")
    assert status == 0 and "longest span 10\n" in out and "of the longest span" in out
    status, out, _ = asked(*arguments, "makespan")
    assert status == 0 and "of the makespan" in out


@pytest.mark.parametrize(("arguments", "text"), [
    (["optimised", "--objective", "time"], "optimise: objective is 'makespan' or 'span', not 'time'"),
    (["1f1b", "--objective", "span"], "--objective is for autopar schedule optimised: 1f1b has a fixed order"),
    (["optimised", "--for-weights", "2", "--limit", "9"], "for_weights is 2 on stage 0, and activation 1: optimise"),
    (["1f1b", "--for-weights", "x"], "--for-weights x: write a number, or one for each stage"),
    (["optimised", "--chunks", "0"], "optimise: chunks=0; there is at least one"),
    (["v-min", "--chunks", "3"], "v-min has 2 stages on a rank, not 3"),
    (["1f1b", "--forward", "nan"], "Times(forward=…) is nan: a finite number from 0"),
    (["optimised", "--limit", "nan"], "limit is nan; it must be a number from 0"),
    (["optimised", "--limit", "-1"], "limit is -1.0; it must be a number from 0"),
    (["1f1b", "--ranks", "0"], "1f1b: ranks=0; there is at least one"),
    (["optimised", "--limit", "0.5"], "no schedule keeps within limit=0.5 on rank 0"),
    (["1f1b", "--limit", "2"], "--limit is for autopar schedule optimised: 1f1b has a fixed memory need"),
    (["zb-h3"], "there is no policy 'zb-h3'; did you mean"),
    (["1f1b", "--batches", "0"], "1f1b: batches=0; there is at least one"),
    (["--forward", "fast"], "--forward fast: write a number, or one for each stage: 18.5,18.5,22"),
    (["--forward", "1,2"], "forward has 2 numbers, and there are 4"),
    (["none.json"], "none.json"),
    (["--save", "schedule.txt"], "schedule.txt: its name ends in .json, .csv"),
    (["--draw", "schedule.txt"], "schedule.txt: its name ends in .svg"),
    (["--trace", "nowhere/x.json"], "there is no folder nowhere for --trace nowhere/x.json; make it first"),
    (["a.json", "--ranks", "9"], "--ranks is not for a file: a.json has its own; leave it out"),
    (["a.JSON", "--recompute"], "--recompute is not for a file: a.JSON has its own"),
    (["optimised", "--recompute"], "--recompute is not for optimised"),
])  # fmt: skip
def test_what_it_refuses(arguments: list[str], text: str) -> None:
    status, _, error = asked(*arguments)
    assert status == 2 and text in error and error.startswith("autopar: ") and "Traceback" not in error


def test_a_wrong_file_is_told_with_its_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "wrong.csv"
    path.write_text("0F0,0B0\n1F0,1X0\n")
    assert run(Request(source=str(path))) == 2
    error = capsys.readouterr().err
    assert "wrong.csv" in error and "line 2" in error and "column 5" in error and "1X0" in error


def test_the_options_and_their_defaults_are_those_of_the_request() -> None:
    status, out, _ = asked("--help")
    assert status == 0 and all(
        f"--{name}" in out for name in ("ranks", "batches", "chunks", "forward", "boundary", "draw", "trace", "save")
    )
    assert all(name in out for name in POLICIES)
