"""On each rank of real processes: programs with several streams over the same ranks, each a process group."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import closing
import pytest
import torch
from torch import distributed

from autopar import Parallel
from autopar.ir.mesh import Mesh
from autopar.ir.program import Program
from autopar.runtime.lowering.lower import lower
from autopar.runtime.processes.groups import process_groups
from autopar.runtime.processes.streams import groups_for

MESH = Mesh(pod=2, tp=2)  # not dp: no other test has this mesh, and so this job
SCHEDULED = """\
program scheduled on pod=2 tp=2 at pod={} tp={}
stream pod
stream late
stream urgent
  x : f32[4] = input
forward:
  y : f32[4] = mul.Tensor(x, 10.0)
  z : f32[4] = mul.Tensor(x, 1.0)
{}  c : f32[4] = all_reduce(z, (pod, tp)) on late
  wait : f32[4] = wait(a)
  wait_1 : f32[4] = wait(b)
  return wait, wait_1, c
"""
STARTS = [
    "  a : f32[4] = start all_reduce(x, pod) on late\n",
    "  b : f32[4] = start all_reduce(y, pod) on urgent\n",
    "  d : f32[4] = all_reduce(x, pod) on pod\n",
]
MADE = [  # in the order of their keys
    ((0, 1, 2, 3), "late"), ((0, 2), "late"), ((0, 2), "urgent"), ((1, 3), "late"), ((1, 3), "urgent"),
]  # fmt: skip


def programs(crossed: bool = False) -> dict[int, Program]:
    """The programs of all ranks. Crossed, ranks with pod=1 start in the other order."""
    found = {}
    for rank in MESH.ranks:
        at = MESH.coordinates(rank)
        starts = STARTS[::-1] if crossed and at["pod"] else STARTS
        found[rank] = Program.parse(SCHEDULED.format(at["pod"], at["tp"], "".join(starts)))
        found[rank].verify()
    return found


def on_own_mesh() -> Parallel:
    """A model on a mesh that no other test has: a job that others share would keep the groups of further streams."""
    return closing.on(pod=2, tp=2)


@contextmanager
def new_groups() -> Iterator[list[tuple[int, ...]]]:
    """The ranks of the groups that are made meanwhile, in their order."""
    made, new_group = [], distributed.new_group

    def noted(ranks: list[int], **options: Any) -> distributed.ProcessGroup:
        made.append(tuple(ranks))
        return new_group(ranks, **options)

    with mock.patch.object(distributed, "new_group", noted):
        yield made


def two_streams() -> None:
    """Orders that cross between streams give right sums, because each stream is a group of its own."""
    before = len(process_groups())
    parallel, rank, count = on_own_mesh(), distributed.get_rank(), len(process_groups())
    own = programs(crossed=True)
    with new_groups() as made:
        names = groups_for(parallel.job, own.values(), parallel.compiler.context.agreement)
    assert made == [ranks for ranks, _ in MADE] and len(process_groups()) == count + 5
    peers = tuple(sorted({rank, (rank + 2) % 4}))
    used = [names[peers], names[peers, "late"], names[peers, "urgent"], names[(0, 1, 2, 3), "late"]]
    assert len({*used, names[0, 1, 2, 3]}) == 5
    forward = lower(own[rank], names)["forward"]
    source = forward.graph.python_code("self").src
    assert [f"{name!r}" in source for name in used] == [True] * 4
    x = torch.arange(4.0)
    for k in range(20):  # on one group the sums of x and of 10 · x would cross
        late, urgent, all_four = forward.run([(rank + 1 + k) * x])
        both, four = sum(one + 1 + k for one in peers), sum(range(1 + k, 5 + k))
        for found, expected in ((late, both), (urgent, 10 * both), (all_four, four)):
            torch.testing.assert_close(found, expected * x, rtol=0, atol=0)
    parallel.close()
    assert len(process_groups()) == before


def shared_and_closed() -> None:
    """Two meshes on the same ranks share the groups of a stream; the last model closes them."""
    before = len(process_groups())
    first = on_own_mesh()
    second = closing.on(ep=2, tp=2)
    other = {rank: Program.parse(re.sub(r"\bpod\b", "ep", str(program))) for rank, program in programs().items()}
    one = groups_for(first.job, programs().values(), first.compiler.context.agreement)
    count = len(process_groups())
    with new_groups() as made:
        assert groups_for(first.job, programs().values(), first.compiler.context.agreement) is one
        two = groups_for(second.job, other.values(), second.compiler.context.agreement)
    assert not made and len(process_groups()) == count and one == two
    first.close()
    assert len(process_groups()) == count
    rank = distributed.get_rank()
    lower(other[rank], two)["forward"].run([torch.ones(4)])
    second.close()
    assert len(process_groups()) == before


def made_when_a_call_is_compiled() -> None:
    """A model whose local programs name a stream: its first call makes the groups, and ``close`` ends them."""
    before = len(process_groups())
    parallel = on_own_mesh()
    parallel.capture(closing.X)
    local, count = parallel._current().local, len(process_groups())
    for number, program in local._made.items():
        lines = [
            re.sub(r" on \w+( in \w+)?$", r" on late\1", line) if "all_reduce(" in line else line
            for line in str(program).splitlines()
        ]
        lines[1:1] = ["stream late"]
        local._made[number] = Program.parse("\n".join(lines) + "\n")
    with new_groups() as made:
        closing.same_numbers(parallel)
    assert made == [(0, 1), (0, 2), (1, 3), (2, 3)] and len(process_groups()) == count + 4
    own = [name for key, name in parallel.job.groups.items() if key[1:] == ("late",)]
    functions = parallel._current().here.program.functions
    lowered = (functions.lowered(functions.phases[phase], False) for phase in ("forward", "backward"))
    source = "".join(one.graph.python_code("self").src for one in lowered if one is not None)
    assert len(own) == 2 and all(f"{name!r}" in source for name in own)
    with new_groups() as made:
        closing.same_numbers(parallel)
    assert not made
    parallel.close()
    assert len(process_groups()) == before


def other_streams_on_one_rank() -> None:
    """All ranks get an error, and no group is made."""
    parallel, rank, count = on_own_mesh(), distributed.get_rank(), len(process_groups())
    own = [
        Program.parse(str(program).replace("urgent", "soon" if rank == 1 else "urgent"))
        for program in programs().values()
    ]
    with pytest.raises(
        RuntimeError,
        match=r"the ranks make different calls\n(.*\n)*.*rank 1: make the process groups "
        r"late of ranks 0 1 2 3, late of ranks 0 2, soon of ranks 0 2",
    ):
        groups_for(parallel.job, own, parallel.compiler.context.agreement)
    assert len(process_groups()) == count
    closing.same_numbers(parallel)
    parallel.close()


def default_streams_need_nothing() -> None:
    """Streams that are called like their axes have the groups of the mesh."""
    parallel = on_own_mesh()
    names = dict(parallel.job.groups)
    text = "program scheduled on pod=2 tp=2 at pod=0 tp=0\nstream pod\nstream pod_tp\n  x : f32[4] = input\nforward:\n"
    text += (
        "  z : f32[4] = mul.Tensor(x, 1.0)\n  a : f32[4] = all_reduce(x, pod) on pod\n"
        "  b : f32[4] = all_reduce(z, (pod, tp)) on pod_tp\n  return a, b\n"
    )
    program = Program.parse(text).at(MESH.coordinates(distributed.get_rank()))
    with new_groups() as made:
        assert groups_for(parallel.job, [program], None) == names
    assert not made
    _, four = lower(program, names)["forward"].run([torch.ones(4)])
    assert four.tolist() == [4.0] * 4
    parallel.close()
