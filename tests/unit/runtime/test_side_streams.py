"""Start collectives from side streams: recorded and timed on streams that stand for those of CUDA."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cuda_streams import Cuda, fake_cuda

from autopar.ir.program import Program
from autopar.runtime.lowering.lower import Lowered, lower, lower_function
from autopar.runtime.lowering.side_streams import SideStreams
from autopar.scheduling.programs.donated import Donated
from autopar.scheduling.programs.run_parts import part_of

HEAD = """\
program scheduled on dp=2 at dp=0
{}  x : f32[4] = input
forward:
"""
COMPUTE_FIRST = """\
  y : f32[4] = relu(x)
  s : f32[4] = sin(x)
  c : f32[4] = cos(s)
  y_dp_start : f32[4] = start all_reduce(y, dp) on dp
  y_dp : f32[4] = wait(y_dp_start)
  z : f32[4] = mul.Tensor(y_dp, c)
  return z
"""
GROUPS = {(0, 1): "g", ((0, 1), "late"): "h"}
CUDA, CPU = torch.device("cuda"), torch.device("cpu")


def program(lines: str, *streams: str) -> Program:
    made = Program.parse(HEAD.format("".join(f"stream {name}\n" for name in streams or ["dp"])) + lines)
    made.verify()
    return made


def run(lines: str | Program, device: torch.device = CUDA, sides: Callable[[Any], SideStreams] = SideStreams,
        **seconds: float) -> tuple[Cuda, str, list[torch.Tensor]]:  # fmt: skip
    """What is enqueued, the generated code, and the results, for x = 1, 2, 3, 4."""
    given = program(lines) if isinstance(lines, str) else lines
    with fake_cuda(sides, **seconds) as cuda:
        forward = lower(given, GROUPS, device=device)["forward"]
        found = forward.run([torch.arange(1.0, 5.0)])
    return cuda, code(forward), found


def code(lowered: Lowered) -> str:
    """The lines without the names of modules, and without what is freed."""
    lines = lowered.graph.python_code("self").src.split("args_list.clear()\n")[1].splitlines()
    return "\n".join(re.sub(r"autopar_\w*?(?=recorded|start_|wait|finish_)", "", line.split(";")[0].strip())
                     for line in lines).strip()  # fmt: skip


def test_the_code_records_starts_aside_and_waits() -> None:
    cuda, lines, _ = run(COMPUTE_FIRST)
    assert (
        lines
        == """\
y = torch.ops.aten.relu.default(x)
y_ready = recorded()
s = torch.ops.aten.sin.default(x)
c = torch.ops.aten.cos.default(s)
y_dp_start = start_all_reduce_in_place_aside(y, 'sum', 'g', ready = y_ready)
wait_aside = wait_aside(y_dp_start, 'g')
y_dp = wait(y_dp_start)
z = torch.ops.aten.mul.Tensor(y_dp, c)
return [z]"""
    )
    assert cuda.log == ["record on compute", "side 1 waits for an event", "start on side 1", "compute waits for side 1",
                        "wait on side 1", "compute waits for side 1"]  # fmt: skip
    assert not cuda.races


def test_compute_first_takes_4_and_not_8() -> None:
    """{all-reduce 4 and its wait, op 2, op 2}, enqueued, with the operations before the start."""
    seconds = {"sin": 2.0, "cos": 2.0, "collective": 4.0}
    aside, _, found = run(COMPUTE_FIRST, CUDA, **seconds)
    called, _, expected = run(COMPUTE_FIRST, CPU, **seconds)
    assert (aside.makespan, called.makespan) == (4.0, 8.0)
    assert torch.equal(found[0], expected[0])


def test_a_start_right_behind_its_operand_needs_no_side_stream() -> None:
    start = "  y_dp_start : f32[4] = start all_reduce(y, dp) on dp\n"
    first = COMPUTE_FIRST.replace(start, "").replace("relu(x)\n", "relu(x)\n" + start)
    cuda, lines, _ = run(first, sin=2, cos=2, collective=4)
    assert "aside" not in lines and "recorded" not in lines
    assert cuda.makespan == 4.0 and not cuda.races


def test_nothing_changes_on_a_cpu() -> None:
    forward = lower(program(COMPUTE_FIRST), GROUPS)["forward"]
    assert "aside" not in code(forward) and "recorded" not in code(forward)
    assert code(forward) == code(lower(program(COMPUTE_FIRST), GROUPS, device=CPU)["forward"])


def test_a_transfer_that_waits_at_once_is_as_it_was() -> None:
    local = Program.parse("program local on dp=2 at dp=0\n  x : f32[4] = input\nforward:\n  y : f32[4] = relu(x)\n"
                          "  s : f32[4] = sin(x)\n  y_dp : f32[4] = all_reduce(y, dp)\n  return s, y_dp\n")  # fmt: skip
    assert code(lower(local, GROUPS, device=CUDA)["forward"]) == code(lower(local, GROUPS)["forward"])


CASES = {
    "an input": """\
  s : f32[4] = sin(x)
  a_start : f32[4] = start all_reduce(x, dp) on dp
  a : f32[4] = wait(a_start)
  c : f32[4] = mul.Tensor(a, s)
  return c
""",
    "a message of two": """\
  y : f32[4] = relu(x)
  s : f32[4] = sin(y)
  c : f32[4] = cos(x)
  a_start : f32[4] = start all_reduce(y, dp) on dp in dp_0
  b_start : f32[4] = start all_reduce(s, dp) on dp in dp_0
  a : f32[4] = wait(a_start)
  b : f32[4] = wait(b_start)
  d : f32[4] = mul.Tensor(a, b)
  e : f32[4] = mul.Tensor(c, d)
  return e
""",
    "chunks": """\
  y : f32[4] = relu(x)
  s : f32[4] = sin(x)
  a_0_start : f32[2] = start all_reduce(y, dp) on dp from 0 to 2
  c : f32[4] = cos(s)
  a_1_start : f32[2] = start all_reduce(y, dp) on dp from 2 to 4
  a_0 : f32[2] = wait(a_0_start)
  a_1 : f32[2] = wait(a_1_start)
  a : f32[4] = join_chunks([a_0, a_1], shape=(4,))
  d : f32[4] = mul.Tensor(a, c)
  return d
""",
    "a gather": """\
  y : f32[4] = relu(x)
  s : f32[4] = sin(x)
  a_start : f32[8] = start all_gather(y, 0, dp, sizes=(4, 4)) on dp
  c : f32[4] = cos(s)
  a : f32[8] = wait(a_start)
  d : f32[8] = sin(a)
  return c, d
""",
    "a maximum, which is reduced as integers": """\
  y : f32[4] = relu(x)
  s : f32[4] = sin(x)
  a_start : f32[4] = start all_reduce(y, dp, op=max) on dp
  a : f32[4] = wait(a_start)
  d : f32[4] = mul.Tensor(a, s)
  return d
""",
    "the result of another": """\
  y : f32[4] = relu(x)
  a_start : f32[4] = start all_reduce(y, dp) on dp
  s : f32[4] = sin(x)
  a : f32[4] = wait(a_start)
  c : f32[4] = cos(s)
  b_start : f32[4] = start all_reduce(a, dp) on dp
  e : f32[4] = sin(c)
  b : f32[4] = wait(b_start)
  d : f32[4] = mul.Tensor(e, b)
  return d
""",
    "gathers that follow each other, of copies": """\
  y : f32[4] = relu(x)
  s : f32[4] = sin(x)
  c : f32[4] = cos(s)
  a_start : f32[8] = start all_gather(y, 0, dp, sizes=(4, 4)) on dp in dp_0
  b_start : f32[8] = start all_gather(s, 0, dp, sizes=(4, 4)) on dp in dp_0
  e : f32[4] = sin(c)
  a : f32[8] = wait(a_start)
  b : f32[8] = wait(b_start)
  d : f32[8] = mul.Tensor(a, b)
  f_start : f32[8] = start all_gather(c, 0, dp, sizes=(4, 4)) on dp in dp_1
  h_start : f32[8] = start all_gather(e, 0, dp, sizes=(4, 4)) on dp in dp_1
  i : f32[8] = sin(d)
  f : f32[8] = wait(f_start)
  h : f32[8] = wait(h_start)
  j : f32[8] = mul.Tensor(f, h)
  k : f32[8] = mul.Tensor(i, j)
  return k
""",
}


@pytest.mark.parametrize("name", CASES)
def test_all_kinds_of_messages(name: str) -> None:
    aside, lines, found = run(CASES[name])
    called, _, expected = run(CASES[name], CPU)
    assert not aside.races and not called.races
    assert re.findall(r"start_\w+_aside\(", lines), "a start overtakes"
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_what_is_done_to_an_operand_stands_before_the_event() -> None:
    _, lines, _ = run(CASES["a maximum, which is reduced as integers"])
    names = [line.split(" ")[0] for line in lines.splitlines()]
    assert names.index("a_operand") < names.index("y_ready") < names.index("s") < names.index("a_start")


def test_each_group_has_its_own_side_stream() -> None:
    two = """\
  y : f32[4] = relu(x)
  s : f32[4] = sin(x)
  a_start : f32[4] = start all_reduce(y, dp) on late
  b_start : f32[4] = start all_reduce(y, dp) on dp
  d_start : f32[4] = start all_reduce(s, dp) on late
  a : f32[4] = wait(a_start)
  b : f32[4] = wait(b_start)
  d : f32[4] = wait(d_start)
  c : f32[4] = mul.Tensor(a, b)
  e : f32[4] = mul.Tensor(c, d)
  return e
"""
    cuda, _, _ = run(program(two, "dp", "late"))
    assert [line for line in cuda.log if line.startswith("start")] == [
        "start on side 1", "start on side 2", "start on side 1",
    ]  # fmt: skip
    assert not cuda.races


UPDATED = """\
program scheduled on dp=2 at dp=0
stream dp
  w : f32[4] = state(w_next)
  g : f32[4] = input
  v : f32[4] = state(v_next)
  lr : f32[] = input
forward:
  n : f32[4] = sin(g)
update:
  sgd : (f32[4], f32[4]) = autopar::sgd.momentum(w, n, v, lr, None, None, momentum=0.5, weight_decay=0.1, nesterov=False, maximize=False)
  w_next : f32[4] = sgd[0]
  v_next : f32[4] = sgd[1]
  c : f32[4] = cos(g)
  a_start : f32[8] = start all_gather(w_next, 0, dp, sizes=(4, 4)) on dp
  e : f32[4] = sin(c)
  a : f32[8] = wait(a_start)
  return a, e
"""  # noqa: E501


def test_what_an_update_has_overwritten_is_sent_behind_the_update() -> None:
    """The gather of a parameter that is updated in place: what is sent is an argument of the function."""
    scheduled = Program.parse(UPDATED)
    donated = Donated.of(scheduled, ["w", "v"])
    with fake_cuda() as cuda:
        lowered = lower_function(part_of(scheduled, "whole"), scheduled, GROUPS, CUDA, donated)
        lowered.run([torch.ones(()) if name == "lr" else torch.ones(4) for name in lowered.takes])
    names = [line.split(" ")[0] for line in code(lowered).splitlines()]
    assert names.index("sgd_in_place") < names.index("w_next_ready") < names.index("c") < names.index("a_start")
    assert not cuda.races


# -- the fake finds what is wrong --------------------------------------------------------------------------------------


class NoEvent(SideStreams):
    """The side stream waits for nothing."""

    def recorded(self) -> Any:
        return self.cuda.streams[0].__class__(self.cuda, "none")._now()


class NoJoin(SideStreams):
    """The calling stream does not wait for the copies of a start."""

    def aside(self, start: Any) -> Any:
        made = super().aside(start)

        def without(*args: Any, ready: Any) -> torch.Tensor:
            calling = self.cuda.current_stream()
            calling.wait_stream = lambda side: None
            try:
                return made(*args, ready=ready)
            finally:
                del calling.wait_stream

        without.__name__, without.__module__ = made.__name__, made.__module__
        return without


class NoWait(SideStreams):
    """The calling stream does not wait for the side stream."""

    def wait_aside(self, started: torch.Tensor, group: str) -> None:
        from autopar.runtime.lowering import side_streams

        with self.cuda.stream(self.of(group)):
            side_streams.FUNCTIONAL.wait_tensor(started)
        started.record_stream(self.cuda.current_stream())


class WaitOnTheCallingStream(SideStreams):
    """The side stream reuses the memory of copies that NCCL still reads."""

    def wait_aside(self, started: torch.Tensor, group: str) -> None:
        from autopar.runtime.lowering import side_streams

        side_streams.FUNCTIONAL.wait_tensor(started)
        started.record_stream(self.cuda.current_stream())


class NoRecordStream(SideStreams):
    """The side stream reuses the memory of results that are still read."""

    def wait_aside(self, started: torch.Tensor, group: str) -> None:
        from autopar.runtime.lowering import side_streams

        with self.cuda.stream(self.of(group)):
            side_streams.FUNCTIONAL.wait_tensor(started)
        self.cuda.current_stream().wait_stream(self.of(group))


@pytest.mark.parametrize(
    ("sides", "said"),
    [
        (NoEvent, r"beside relu on compute"),
        (NoJoin, r"memory of compute is reused beside \w+ on side 1"),
        (NoWait, r"on compute beside collective on group g"),
        (WaitOnTheCallingStream, r"memory of side 1 is reused beside collective on group g"),
        (NoRecordStream, r"memory of side 1 is reused beside \w+ on compute"),
    ],
)
def test_each_precaution_is_needed(sides: type[SideStreams], said: str) -> None:
    races = [race for lines in CASES.values() for race in run(lines, sides=sides)[0].races]
    assert any(re.search(said, race) for race in races), sorted(set(races))
