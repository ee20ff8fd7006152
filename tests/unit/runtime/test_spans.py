"""Spans of profilers: how modules are split, how lines are named, and how a function enters its spans."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autopar import Program
from autopar.runtime.lowering.lower import lower
from autopar.runtime.spans import OpenSpans, Paths, module_parts, span, with_spans

PROGRAM = """\
program scheduled on tp=2 at tp=0
stream tp
  x : f32[4 4] = input
  w : f32[4 4] = param('mlp.down.weight')
forward:
  mm : f32[4 4] = mm(x, w)
  mm_tp_start : f32[4 4] = start all_reduce(mm, tp) on tp
  relu : f32[4 4] = relu(x)
  mm_tp : f32[4 4] = wait(mm_tp_start)
  add : f32[4 4] = add.Tensor(mm_tp, relu)
  return add
"""


LOCAL = """\
program local on dp=1 at dp=0
  x : f32[4 4] = input
forward:
  relu : f32[4 4] = relu(x)
  return relu
"""


@pytest.mark.parametrize(("path", "parts"), [
    ("", ()), ("mlp", ("mlp",)), ("layers.3.mlp", ("layers.3", "mlp")), ("0.1.act", ("0", "1", "act")),
    ("layers.0.2", ("layers.0", "2")), ("model.layers.10.self_attn.q", ("model", "layers.10", "self_attn", "q")),
])  # fmt: skip
def test_modules_are_split_where_modules_run(path: str, parts: tuple[str, ...]) -> None:
    assert module_parts(path) == parts


def test_collectives_are_named_by_axis_and_value() -> None:
    program = Program.parse(PROGRAM)
    nodes = [node for node in program.nodes if node.op == "call_function"]
    paths = list(Paths(program).of(nodes))
    assert paths[1] == (*paths[0], "start all_reduce tp mm")
    assert paths[3] == (*paths[2], "wait all_reduce tp mm")
    assert all(path[0] == "forward" for path in paths)


class Recorded:
    """Stands for ``record_function``, and notes what is entered and left."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def __enter__(self) -> None:
        self.log.append(f"+{self.name}")

    def __exit__(self, *_: object) -> None:
        self.log.append(f"-{self.name}")


def test_spans_enter_and_leave_as_modules_do(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    monkeypatch.setattr(torch.profiler, "record_function", lambda name: Recorded(name, log))
    lines = ["def forward(self, args):\n", "    a = 1\n", "    b = 2\n", "    c = 3\n", "    return [a, b, c]\n"]
    paths = {2: ("forward", "layers.0", "up"), 3: ("forward", "layers.0", "down"), 4: ("forward", "head")}
    source, entered = with_spans(lines, paths.get)
    assert source.count("\n") == len(lines), "the lines keep their numbers"
    scope: dict[str, Any] = {}
    exec(source, scope)
    spans = OpenSpans(entered)
    assert scope["forward"](spans, []) == [1, 2, 3]
    spans.close()
    assert log == ["+forward", "+layers.0", "+up", "-up", "+down", "-down", "-layers.0", "+head", "-head", "-forward"]


def test_without_a_profiler_nothing_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """The function of a step is the one that it always was, and no span is made."""
    made = lower(Program.parse(LOCAL), {})["forward"]

    def refused(*_: object) -> None:
        raise AssertionError("a span was made without a profiler")

    monkeypatch.setattr(torch.profiler, "record_function", refused)
    x = torch.randn(4, 4)
    assert torch.equal(made.run([x])[0], torch.relu(x))
    assert span("step 1") is span("step 2")


def test_an_error_leaves_all_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    monkeypatch.setattr("autopar.runtime.lowering.source.profiler_is_on", lambda: True)
    monkeypatch.setattr(torch.profiler, "record_function", lambda name: Recorded(name, log))
    made = lower(Program.parse(LOCAL), {})["forward"]
    with pytest.raises((RuntimeError, TypeError)) as error:
        made.run(["no tensor"])  # type: ignore[list-item]
    assert log == ["+forward", "-forward"]
    assert any("relu" in note for note in error.value.__notes__), "the error quotes the line as it does without spans"
