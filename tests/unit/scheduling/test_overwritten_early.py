"""An update in place comes after all that reads the memory that it writes to: a policy knows, and a program in which it
does not is refused."""

from __future__ import annotations

import pytest

from autopar.errors import VerifyError
from autopar.ir.program import Program
from autopar.scheduling.programs.donated import Donated, MemoryReaders
from autopar.scheduling.programs.functions import functions_of, program_ops

SCHEDULED = """\
program scheduled on dp=2 at dp=0
stream dp
  w : f32[4 4] = state(w_next_dp)
  v : f32[4 4] = state(v_next)
  x : f32[4 4] = input
  g : f32[2 4] = input
  h : f32[4 4] = input
  lr : f64[] = input
  scale : f32[] = input
backward:
  v_dp_start : f32[8 4] = start all_gather(v, 0, dp, sizes=[4, 4]) on dp
  t : f32[4 4] = t(w)
  mm : f32[4 4] = mm(x, t)
  v_dp : f32[8 4] = wait(v_dp_start)
  norm : f32[] = sum(h)
update:
  w_dp : f32[2 4] = slice(w, 0, dp, sizes=[2, 2])
  w_next : f32[2 4] = autopar::sgd(w_dp, g, lr, None, None, weight_decay=0.0, maximize=False)
  v_next : f32[4 4] = autopar::sgd(v, h, lr, scale, None, weight_decay=0.0, maximize=False)
  w_next_dp_start : f32[4 4] = start all_gather(w_next, 0, dp, sizes=[2, 2]) on dp
  w_next_dp : f32[4 4] = wait(w_next_dp_start)
  return mm, v_dp, norm
"""
UPDATES = "w_next : f32[2 4] = autopar::sgd(w_dp, g, lr, None, None, weight_decay=0.0, maximize=False)"


def late(*names: str, text: str = SCHEDULED) -> str:
    """The program with these lines behind the updates, in the phase that they had."""
    lines = text.splitlines(keepends=True)
    moved = [line for name in names for line in lines if line.startswith(f"  {name} :")]
    rest = [line for line in lines if line not in moved]
    at = next(k for k, line in enumerate(rest) if line.startswith("  w_next_dp_start"))
    return "".join([*rest[:at], "backward:\n", *moved, "update:\n", *rest[at:]])


def refusal(text: str) -> str:
    program = Program.parse(text)
    program.verify()  # nothing is wrong with it as long as it writes to no memory of its own
    Donated.of(program, [])
    with pytest.raises(VerifyError) as found:
        Donated.of(program, ["w", "v"])
    return str(found.value)


def test_the_program_itself() -> None:
    program = Program.parse(SCHEDULED)
    donated = Donated.of(program, ["w", "v"])
    assert {node.name for node in donated.updates} == {"w_next", "v_next"}


def test_a_reader_behind_the_update() -> None:
    """Through a view, of memory of which the update has a piece."""
    assert refusal(late("mm")) == (
        "this scheduled program is inconsistent at mm\n"
        "    w_next : f32[2 4] = autopar::sgd(w_dp, g, lr, None, None, weight_decay=0.0, maximize=False)\n"
        "    mm : f32[4 4] = mm(x, t)\n"
        "  w_next overwrites the memory of w_dp, which mm reads: put mm before w_next"
    )


def test_a_collective_under_way() -> None:
    """It is started before the update, and waited for behind."""
    assert refusal(late("v_dp")) == (
        "this scheduled program is inconsistent at v_dp\n"
        "    v_next : f32[4 4] = autopar::sgd(v, h, lr, scale, None, weight_decay=0.0, maximize=False)\n"
        "    v_dp_start : f32[8 4] = start all_gather(v, 0, dp, sizes=[4, 4]) on dp\n"
        "    v_dp : f32[8 4] = wait(v_dp_start)\n"
        "  v_next overwrites the memory of v, which v_dp_start reads, which is under way until v_dp: put v_dp before "
        "v_next"
    )


def test_a_gradient_that_is_divided() -> None:
    """The kernel divides it in place where there is a scale."""
    assert refusal(late("norm")).endswith("v_next overwrites the memory of h, which norm reads: put norm before v_next")
    unscaled = SCHEDULED.replace("autopar::sgd(v, h, lr, scale,", "autopar::sgd(v, h, lr, None,")
    Donated.of(Program.parse(late("norm", text=unscaled)), ["w", "v"])


def test_a_view_behind_the_update() -> None:
    assert "put mm before w_next" in refusal(late("t", "mm"))


def test_updates_run_at_the_place_of_the_last() -> None:
    """One kernel for both: what reads between them reads in time only if they have other numbers."""
    alike = SCHEDULED.replace("lr, scale, None", "lr, None, None")
    assert len(Donated.of(Program.parse(alike), ["w", "v"]).buckets) == 1
    assert len(Donated.of(Program.parse(SCHEDULED), ["w", "v"]).buckets) == 2


@pytest.mark.parametrize("extra", ["relu(w)", "relu(t)"])
def test_what_the_update_phase_reads_is_not_overwritten(extra: str) -> None:
    """Nor what is read through a view there: the update has memory of its own."""
    text = SCHEDULED.replace("  w_next_dp_start", f"  seen : f32[4 4] = {extra}\n  w_next_dp_start")
    donated = Donated.of(Program.parse(text), ["w", "v"])
    assert {node.name for node in donated.updates} == {"v_next"}


def test_what_is_not_donated_is_not_overwritten() -> None:
    """Nor is a piece of it."""
    assert {node.name for node in Donated.of(Program.parse(SCHEDULED), ["v"]).updates} == {"v_next"}
    assert not Donated.of(Program.parse(SCHEDULED), []).updates


EXPLICIT = """\
program explicit on dp=2
  w : f32[4 4] = state(w_next_dp)
  x : f32[4 4] = input
  g : f32[4/dp 4] = input
  h : f32[4 4] = input
  lr : f64[] = input
backward:
  t : f32[4 4] = t(w)
  mm : f32[4 4] = mm(x, t)
  cat : f32[4 8] = cat([w, x], 1)
update:
  w_dp : f32[4/dp 4] = slice(w, 0, dp)
  w_next : f32[4/dp 4] = autopar::sgd(w_dp, g, lr, None, None, weight_decay=0.0, maximize=False)
  w_next_dp : f32[4 4] = all_gather(w_next, 0, dp)
  return mm, cat
"""


def test_an_update_depends_on_what_reads_its_memory() -> None:
    """So no policy can put it before: not the reader of a view, not that of the whole where it updates a piece."""
    program = Program.parse(EXPLICIT)
    (function,) = functions_of(program, whole=True)
    ops = {op.name: op for op in program_ops(program, function, {})}
    assert ops["w_next"].after == ("w_dp",) and set(ops["w_next"].behind) == {"mm", "cat"}
    assert ops["mm"].after == ("t",) and not ops["mm"].behind


def test_readers_of_memory() -> None:
    program = Program.parse(SCHEDULED)
    readers = MemoryReaders(program)
    names = {name: [reader.name for reader in readers.of(program.node(name))] for name in ("w", "t", "w_dp", "v", "mm")}
    assert names["w"] == names["t"] == names["w_dp"] == ["mm", "w_next"]
    assert names["v"] == ["v_dp_start", "v_next"] and names["mm"] == ["output"]
