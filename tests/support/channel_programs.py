"""Schedules of several ranks for the deadlock verifier, what it says of them, and local programs to break."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import strategies as st

from autopar.errors import ChannelError
from autopar.ir.program import Program
from autopar.runtime.localize import LocalPrograms
from autopar.verify.channels import (
    ALL,
    ASYNCHRONOUS,
    BLOCKING,
    GROUPED,
    Channels,
    Collective,
    Group,
    Receive,
    Send,
    Task,
    buffered,
    check,
)  # fmt: skip

Tasks = dict[int, list[Task]]
MODELS = (ASYNCHRONOUS, buffered(2), buffered(1), GROUPED, BLOCKING)


def reason(tasks: Mapping[int, Sequence[Task]], models: Sequence[Channels] = ALL) -> str:
    with pytest.raises(ChannelError) as found:
        check(tasks, models)
    return str(found.value)


def passes(tasks: Mapping[int, Sequence[Task]], models: Sequence[Channels]) -> bool:
    try:
        check(tasks, models)
    except ChannelError:
        return False
    return True


def finishing(tasks: Mapping[int, Sequence[Task]]) -> list[str]:
    """The models on which the ranks finish, each asked alone."""
    return [model.name for model in MODELS if passes(tasks, [model])]


@st.composite
def schedules(draw: st.DrawFn, ranks: int = 4, length: int = 12) -> Tasks:
    """One global order of collectives and messages, as each rank sees it."""
    tasks: Tasks = {rank: [] for rank in range(ranks)}
    for number in range(draw(st.integers(0, length))):
        value = draw(st.sampled_from((f"v{number}", "again")))
        members = draw(st.permutations(range(ranks)))
        if draw(st.booleans()):
            group = tuple(sorted(members[: draw(st.integers(1, ranks))]))
            op = draw(st.sampled_from(("all_reduce", "all_gather")))
            for rank in group:
                tasks[rank].append(Collective(value, op, group))
        else:
            sender, receiver = members[:2]
            tasks[sender].append(Send(value, receiver, number))
            tasks[receiver].append(Receive(value, sender, number))
    return tasks


def grouped(tasks: Sequence[Task], choose: random.Random) -> list[Task]:
    """Some neighbouring messages put into one group: that only posts them earlier."""
    found: list[Task] = []
    for task in tasks:
        last = found[-1] if found else None
        if isinstance(task, Collective) or choose.random() < 0.4:
            found.append(task)
        elif isinstance(last, Group):
            found[-1] = Group((*last.tasks, task))
        else:
            found.append(Group((task,)))
    return found


GOLDEN = Path(__file__).parents[1] / "golden" / "localize"


def local_programs(name: str) -> dict[int, Program]:
    program = Program.parse((GOLDEN / f"{name}.txt").read_text().partition("---\n")[0])
    return dict(LocalPrograms(program, Program.verify))


def one_each(
    programs: Mapping[int, Program], edit: Callable[[int, str], str] = lambda rank, text: text
) -> dict[int, Program]:
    """The programs read back from text, so that none shares its graph."""
    return {rank: Program.parse(edit(rank, str(program))) for rank, program in programs.items()}


def swapped(text: str, first: str, second: str) -> str:
    """The lines of two values change places."""
    lines = text.splitlines(keepends=True)
    i, j = (next(k for k, line in enumerate(lines) if line.startswith(f"  {name} :")) for name in (first, second))
    lines[i], lines[j] = lines[j], lines[i]
    return "".join(lines)


EXCHANGES = """program explicit on rank=3
stage a on dp=2
stage b on tp=2 ranks 1 2
  x : f32[4/dp] @a = input
  y : f32[4/tp] @b = input
forward:
  x_b : f32[4/dp] @a = send(x, b)
  x_b_b : f32[4/tp] @b = recv(x_b, b, splits=((tp,),))
  y_a : f32[4/tp] @b = send(y, a)
  y_a_a : f32[4/dp] @a = recv(y_a, a, splits=((dp,),))
  return (x_b_b, y_a_a)
"""
