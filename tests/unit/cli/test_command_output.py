"""What every command writes: one JSON object, nothing, or text; what completes a word in the shell; and the exit status
of an interruption."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from autopar.checkpoint import save
from autopar.cli.app import app
from autopar.cli.output import OutputOptions, finite, output_of
from autopar.cli.status import INTERRUPTED, status_of
from autopar.report.rules import page


def asked(*arguments: str, **environment: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, [*arguments], prog_name="autopar", env=environment)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture
def checkpoint(tmp_path: Path) -> str:
    save(tmp_path / "runs", {"w": torch.ones(2, 3), "step": 7})
    return str(tmp_path / "runs")


def requests(checkpoint: str) -> dict[str, tuple[list[str], Any]]:
    """A call of each quick command, and what its JSON object has."""
    return {
        "schedule": (["schedule", "gpipe", "--ranks", "2", "--batches", "3"], {"makespan": 12.0, "peak": [3.0, 3.0]}),
        "rules": (["rules", "mm"], {"rules": [
            {"op": "mm", "factors": "m k, k n -> m n", "sums": "0, 1", "table": "matmul", "proven": True}]}),
        "checkpoint": (["checkpoint", checkpoint], {"step": 7, "tensors": {"w": {"shape": [2, 3], "dtype": "f32"}}}),
    }  # fmt: skip


@pytest.mark.parametrize("command", ["schedule", "rules", "checkpoint"])
def test_json_is_one_object_and_quiet_is_nothing(command: str, checkpoint: str) -> None:
    arguments, has = requests(checkpoint)[command]
    status, out, error = asked(*arguments, "--json")
    assert status == 0 and error == "" and out.count("\n") == 1
    found = json.loads(out)
    assert {name: found[name] for name in has} == has
    status, out, error = asked(*arguments)
    assert status == 0 and error == "" and out.count("\n") > 1
    for quiet in ("--quiet", "-q"):
        assert asked(*arguments, quiet) == (0, "", "")
    assert asked(*arguments, "--quiet", "--json") == (0, json.dumps(found, ensure_ascii=False) + "\n", "")


def test_every_command_has_both_options() -> None:
    _, out, _ = asked("--help")
    commands = [line.split()[1] for line in out.splitlines() if line.startswith("│ ") and line[2].isalpha()]
    assert commands == [
        "train", "plan", "report", "page", "verify", "schedule", "calibrate", "rules", "profile", "cache", "checkpoint",
    ]  # fmt: skip
    inner = {"profile": [["step"]], "cache": [["list"], ["clear"]], "checkpoint": [["show"], ["import"], ["export"]]}
    for command in commands:
        for more in inner.get(command, [[]]):
            status, out, _ = asked(command, *more, "--help")
            assert status == 0 and "--json" in out and "--quiet" in out, (command, more)


def test_remarks_go_beside_the_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    for options, out, error in (
        (OutputOptions(), "a table\na remark\n", ""),
        (OutputOptions(json=True), '{"seconds": null}\n', "a remark\n"),
        (OutputOptions(quiet=True), "", ""),
        (OutputOptions(json=True, quiet=True), '{"seconds": null}\n', ""),
    ):
        output = output_of(options)
        output.text.print("a table")
        output.notes.print("a remark")
        output.give({"seconds": float("inf")})
        assert capsys.readouterr() == (out, error)
    silent = output_of(OutputOptions(json=True), speaks=False)
    silent.notes.print("of another rank")
    silent.give({})
    assert capsys.readouterr() == ("", "")


def test_json_has_no_infinities() -> None:
    assert finite({"a": [float("nan"), (1.5, float("-inf"))], 2: True}) == {"a": [None, [1.5, None]], "2": True}


def completed(words: str) -> list[str]:
    """The words that the shell offers for the last one."""
    count = len(words.split(" ")) - 1
    _, out, _ = asked(_AUTOPAR_COMPLETE="complete_bash", COMP_WORDS=words, COMP_CWORD=str(count))
    return out.split("\n")[:-1] if out.endswith("\n") else out.split("\n")


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("autopar ver", ["verify"]),
        ("autopar plan --html", ["--html"]),
        ("autopar plan --plan mega", ["megatron", "megatron+sp"]),
        ("autopar plan llama-3", ["llama-3-8b", "llama-3-70b"]),
        ("autopar report --machine Tesla", None),
        ("autopar plan --optimizer s", ["sgd"]),
        ("autopar schedule zb-h", ["zb-h1", "zb-h2"]),
    ],
)
def test_words_complete_in_the_shell(words: str, offered: list[str] | None) -> None:
    found = completed(words)
    if offered is None:
        assert len(found) > 1 and all(name.startswith("Tesla") for name in found)
    else:
        assert found == offered


def test_completion_can_be_installed() -> None:
    _, out, _ = asked("--help")
    assert "--install-completion" in out and "--show-completion" in out


def test_an_interruption_has_its_own_status(capsys: pytest.CaptureFixture[str]) -> None:
    def follow() -> int:
        raise KeyboardInterrupt

    assert status_of(follow) == INTERRUPTED == 130
    assert capsys.readouterr().err == "autopar: interrupted\n"


def test_a_defect_keeps_its_traceback() -> None:
    def follow() -> int:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        status_of(follow)


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("mn", "no op with a rule matches mn; near it: "),
        ("convolve*", "no op with a rule matches convolve*; near it: convolution"),
        ("nosuch*", "no op with a rule matches nosuch*; autopar rules prints all"),
        ("zzzzzzzz", "no op with a rule matches zzzzzzzz; autopar rules prints all"),
    ],
)
def test_a_pattern_that_matches_no_op(pattern: str, said: str) -> None:
    status, out, error = asked("rules", pattern)
    assert status == 2 and out == "" and error.startswith(f"autopar: {said}") and error.count("\n") == 1


def test_patterns_match_ops_with_and_without_their_overload() -> None:
    def ops(pattern: str) -> list[str]:
        return [row["op"] for row in json.loads(asked("rules", pattern, "--json")[1])["rules"]]

    assert ops("add") == ops("aten::add") == ["add.Scalar", "add.Tensor"]
    assert ops("add.T*") == ["add.Tensor"]
    assert {"mm", "addmm", "bmm"} <= {*ops("*mm")}
    _, out, _ = asked("rules", "add.T*")
    assert out.splitlines()[-1].split() == ["add.Tensor", "...,", "...", "->", "...", "0+1", "pointwise"]


def test_without_a_pattern_the_page_is_printed() -> None:
    assert asked("rules") == (0, page(), "")


def test_a_file_without_a_function_says_which_ones_it_has(tmp_path: Path) -> None:
    file = tmp_path / "m.py"
    file.write_text(
        "class Net:\n    def __init__(self):\n        pass\n"
        "class Wide:\n    def __init__(self, width):\n        pass\n"
        "def make(depth=2):\n    pass\n"
        "def layer(width, *, depth):\n    pass\n"
    )
    said = f"autopar: {file} names no function or class; write one of {file}:Net, {file}:make\n"
    assert asked("plan", str(file)) == (2, "", said)
    (tmp_path / "n.py").write_text("x = 1\n")
    assert asked("plan", str(tmp_path / "n.py"))[2].endswith("write FILE.py:FUNCTION, as in model.py:make\n")
