"""``autopar plan``, ``report`` and ``page``: the same figures as text, as JSON and on the page; questions to a plan."""

from __future__ import annotations

import json
import math
import os
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from planned_mlp import MLP
from typer.testing import CliRunner

import autopar
from autopar.cli.app import app
from autopar.cli.plan.planning import Planning
from autopar.costs.calibrate import OUTSIDE
from autopar.costs.machine import machine

KEYS = ["title", "seconds", "bound", "gap", "memory", "transfers", "modules", "machine"]
ON = ("--machine", "NVIDIA H100 80GB HBM3", "--inputs", "x=f32[4096,256]")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("models") / "figures_mlp.py"
    path.write_text(MLP)
    return f"{path}:MLP"


def asked(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, [*arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def answered(*arguments: str) -> dict[str, Any]:
    """The JSON object of a call that is done."""
    status, out, _ = asked(*arguments, "--json")
    assert status == 0 and out.count("\n") == 1
    found: dict[str, Any] = json.loads(out)
    return found


def on_page(path: Path) -> Any:
    """The object of a page."""
    script = re.search(r'<script type="application/json" id="autopar">(.*?)</script>', path.read_text(), re.DOTALL)
    assert script is not None
    return json.loads(script[1])


def shown(model: str) -> torch.nn.Module:
    """The model of the command."""
    scope: dict[str, Any] = {}
    exec(Path(model.rpartition(":")[0]).read_text(), scope)
    with torch.device("meta"):
        made: torch.nn.Module = scope["MLP"]()
    return made


@pytest.mark.long
@pytest.mark.parametrize("more", [(), ("--optimizer", "adamw")])
def test_the_command_and_the_page_have_the_same_figures(model: str, more: tuple[str, ...], tmp_path: Path) -> None:
    """Those of the library, too."""
    file = tmp_path / "page.html"
    found = answered("plan", model, *ON, *more, "--plan", "megatron", "--html", str(file))
    assert list(found) == KEYS
    assert on_page(file) == found
    with torch.device("meta"):
        example = (torch.empty(4096, 256),)
    given = (shown(model), autopar.Mesh(dp=2, tp=2), "megatron")
    if more:
        parallel = autopar.parallelize(*given, machine=ON[1])
        planned: Any = parallel.train_step(torch.optim.AdamW(parallel.parameters(), lr=1e-3, weight_decay=0.0))
        planned.capture(example)
    else:
        planned = autopar.parallelize(*given, example=example, machine=ON[1])
    ours = {**json.loads(json.dumps(planned.figures())), "transfers": found["transfers"]}  # lines have another file
    assert found == ours
    assert [row["bytes"] for row in found["transfers"]] == [row["bytes"] for row in planned.figures()["transfers"]]


@pytest.mark.long
def test_the_text_has_the_figures(model: str) -> None:
    found = answered("plan", model, *ON)
    status, out, _ = asked("plan", model, *ON)
    assert status == 0
    lines = [re.split(r"\s{2,}", line.strip()) for line in out.splitlines()]
    transfers = [line for line in lines if line[0] in ("all_reduce", "all_gather", "reduce_scatter", "slice")]
    assert len(transfers) == len(found["transfers"]) > 0
    for line, row in zip(transfers, found["transfers"], strict=True):
        assert line[:4] == [row["transfer"], row["axis"], row["phase"], str(row["times"])]
        assert line[5] == f"{row['seconds'] * 1e6:,.3f} µs" and line[6] == (row["module"] or "the root")
    (up,) = (line for line in lines if line[0] == "up_proj" and len(line) == 4)
    (row,) = (row for row in found["modules"] if row["module"] == "up_proj")
    assert up[1] == f"weight {row['parameters']['weight']}" and up[2] == f"{row['seconds'] * 1e6:,.3f} µs"
    assert up[3] == f"{row['transfer_seconds'] * 1e6:,.3f} µs"
    assert f"search: {found['seconds'] * 1e6:,.3f} µs " in out
    assert found["gap"] == 0 and "no plan is cheaper" in out and found["bound"] <= found["seconds"]


@pytest.mark.long
def test_all_presets_stand_on_the_page_of_the_cheapest(model: str, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    found = answered("plan", model, *ON, "--compare", "--html", str(file))
    assert list(found) == [*KEYS, "plans"]
    rows = {row["plan"]: row for row in found["plans"]}
    assert list(rows) == ["ddp", "fsdp", "hsdp", "megatron", "megatron+sp", "fsdp+tp", "search"]
    assert rows["hsdp"]["seconds"] is None, "the mesh has one axis of the batch"
    assert found["seconds"] == min(row["seconds"] or math.inf for row in rows.values()) == rows["search"]["seconds"]
    assert on_page(file) == {key: found[key] for key in KEYS}
    assert all(name in file.read_text() for name in rows)
    for name in ("ddp", "fsdp+tp"):
        assert answered("plan", model, *ON, "--plan", name)["memory"] == rows[name]["memory"]


@pytest.mark.long
def test_questions_to_a_plan(model: str, tmp_path: Path) -> None:
    saved = tmp_path / "plan.json"
    asked("plan", model, "--machine", "cpu", *ON[2:], "--plan", "search", "--save", str(saved))
    page = tmp_path / "page.html"
    asking = (*ON, "--diff", str(saved), "--explain", "up_proj.weight", "--explain", "x", "--html", str(page))
    found = answered("plan", model, *asking)
    assert list(found) == [*KEYS, "diff", "explain"] and list(found["explain"]) == ["up_proj.weight", "x"]
    rows = found["explain"]["up_proj.weight"]
    assert [row["seconds"] for row in rows] == sorted(row["seconds"] for row in rows)
    drawn = [{"name": "x", "rows": [[row["layout"], row["seconds"], row["chosen"]] for row in found["explain"]["x"]]}]
    assert json.dumps(drawn, separators=(",", ":"))[1:] in page.read_text()
    (chosen,) = (row for row in rows if row["chosen"])
    assert chosen["seconds"] == found["seconds"] == found["diff"]["seconds"][0]
    status, out, _ = asked("plan", model, *asking)
    assert status == 0 and all(row["layout"] in out for row in rows)
    assert found["diff"]["values"] and all(own in out and other in out for _, own, other in found["diff"]["values"])
    status, _, error = asked("plan", model, *ON, "--explain", "up_proj.weigh")
    assert status == 2 and error.startswith("autopar: the plan has no value 'up_proj.weigh'; near it: up_proj.weight")
    status, _, error = asked("plan", model, *ON, "--plan", "ddp", "--explain", "x")
    assert status == 2 and "--explain x asks a search, and none was found; add --plan search" in error
    status, _, error = asked("plan", model, *ON, "--plan", "ddp", "--diff", str(saved))
    assert status == 2 and f"--diff {saved} compares searched plans, and none was found" in error


@pytest.mark.long
def test_devices_choose_the_mesh(model: str) -> None:
    on = ("--machine", "cpu", "--inputs", "x=f32[4096,256]", "--devices", "4")
    found = answered("plan", model, *on)
    with torch.device("meta"):
        parallel = autopar.parallelize(
            shown(model), autopar.devices(4), example=(torch.empty(4096, 256),), machine="cpu"
        )
    assert found["seconds"] == parallel.figures()["seconds"]
    status, out, _ = asked("plan", model, *on)
    assert status == 0 and "4 devices of cpu" in out and "is the fastest of" in out
    rows = answered("plan", model, *on, "--compare")["plans"]
    assert rows[-1]["seconds"] == found["seconds"] and len(rows) == 7
    step = answered("plan", model, *on, "--optimizer", "sgd")
    assert step["seconds"] > found["seconds"]


def test_names_to_explain_are_checked_before_the_search(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def searched(*_: object) -> None:
        raise AssertionError("it is too late")

    monkeypatch.setattr(Planning, "placed", searched)
    for name in ("up_proj.weigh", "upp_proj()", "xx"):
        status, _, error = asked("plan", model, *ON, "--explain", "up_proj.weight", "--explain", name)
        assert status == 2 and error.startswith(f"autopar: the plan has no value {name!r}; near it: ")
    for name in ("up_proj.weight", "x", "up_proj()", "up_proj forward aten::mm"):
        assert "it is too late" in asked("plan", model, *ON, "--explain", name)[2]


@pytest.mark.long
@pytest.mark.parametrize("more", [("--plan", "ddp"), ("--optimizer", "sgd")])
def test_a_report_has_passes_memory_and_communication(model: str, more: tuple[str, ...]) -> None:
    found = answered("report", model, *ON, *more)
    assert list(found) == [*KEYS, "passes", "notes"]
    assert {"capture", "reshard", "share", "schedule"} <= {row["pass"] for row in found["passes"]}
    assert found["transfers"] == answered("plan", model, *ON, *more)["transfers"]
    status, out, _ = asked("report", model, *ON, *more)
    assert status == 0
    for words in ("inserted", "parameters → result", "transfer  ", "most in modules", "exposed ms"):
        assert words in out, words
    what = "a step" if "--optimizer" in more else "a call"
    assert f"{what} takes {found['seconds'] * 1e6:,.3f} µs" in out


@pytest.mark.long
def test_a_page_of_its_own(model: str, tmp_path: Path) -> None:
    file = tmp_path / "plan.html"
    status, out, _ = asked("page", model, *ON, "--plan", "ddp", "--output", str(file))
    assert status == 0 and f"{file} has the page, " in out and "it opens in a browser" in out
    found = answered("page", model, *ON, "--plan", "ddp", "-o", str(file))
    assert found.pop("page") == str(file) and on_page(file) == found


@pytest.mark.parametrize("command", ["plan", "page"])
def test_a_folder_that_cannot_be_written(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused before anything is planned."""
    option = {"plan": "--html", "page": "--output"}[command]

    def refused(**_: Any) -> None:
        raise PermissionError(13, os.strerror(13))

    monkeypatch.setattr(tempfile, "TemporaryFile", refused)
    status, out, error = asked(command, "tiny", option, str(tmp_path / "page.html"))
    assert (status, out) == (2, "")
    assert error == (
        f"autopar: the folder {tmp_path} for {option} {tmp_path}/page.html cannot be written: Permission denied; name "
        f"a file in another one\n"
    )


@pytest.mark.parametrize("command", ["plan", "report", "page", "verify"])
def test_a_program_without_costs(command: str) -> None:
    """On stages, the program of a call is not placed and has no costs; a job's rank plans nothing."""
    if command != "verify":  # it is about stages, too
        status, out, error = asked(command, "tiny", "--mesh", "pp=2,dp=2", "--json")
        assert (status, out) == (2, "")
        assert error == (
            f"autopar: --mesh pp=2,dp=2 has an axis pp, and autopar {command} is about the ranks of one stage: use "
            f"--mesh dp=2; autopar train, verify and schedule are about stages\n"
        )
    result = CliRunner().invoke(app, [command, "tiny"], env={"RANK": "0", "WORLD_SIZE": "2"})
    assert result.exit_code == 2 and result.stderr == (
        f"autopar: autopar {command} runs in one process, but RANK and WORLD_SIZE are set; start it without torchrun\n"
    )


def test_a_mesh_larger_than_the_machine(tmp_path: Path) -> None:
    """A calibrated machine has no figures of what is between machines; those of data sheets have."""
    from dataclasses import replace

    file = tmp_path / "mine.json"
    replace(machine("cpu"), name="mine", ranks_per_node=4, note=OUTSIDE, aliases=()).save(file)
    for given, option in ((("--mesh", "dp=4,tp=2"), "--mesh dp=4,tp=2"), (("--devices", "8"), "--devices 8")):
        status, out, error = asked("plan", "tiny", "--machine", str(file), *given)
        assert (status, out) == (2, "")
        assert error == (
            f"autopar: {option} has 8 ranks, and the machine mine has 4: between such machines nothing was measured; "
            f"use at most 4 ranks, or name another --machine\n"
        )


@pytest.mark.long
def test_a_mesh_of_several_nodes_says_so(model: str) -> None:
    status, out, _ = asked("plan", model, *ON, "--plan", "ddp", "--mesh", "dp=16")
    assert status == 0 and "16 ranks are 2 nodes of 8, by the figures of NVIDIA H100 80GB HBM3" in out


@pytest.mark.long
def test_nothing_that_fits(model: str) -> None:
    status, out, error = asked("plan", model, *ON, "--memory", "1e6", "--plan", "ddp", "--json")
    assert status == 2 and out == "" and re.search(
        r"^autopar: the plan ddp needs [\d.]+ MB a rank, more than 1.0 MB; use more ranks, or --plan search, which",
        error, re.M,
    )  # fmt: skip
    status, out, error = asked("plan", model, *ON, "--memory", "1e3", "--compare", "--quiet")
    assert status == 2 and out == "" and re.search(r"^autopar: the smallest plan, [\w+]+, needs", error)
    status, out, error = asked("plan", model, *ON, "--mesh", "dp=1", "--explain", "x")
    assert status == 2 and "--explain x asks a search, and on one rank there is nothing to search" in error
