"""Jobs over several hosts, which the environment of torchrun fakes: numbers, programs, and what the report says."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from processes import ranks
from torch import distributed

import autopar
from autopar import Mesh
from autopar.costs.machine import Link, Machine
from autopar.runtime.processes.hosts import NODE_VARIABLES
from autopar.runtime.wire.wire_groups import WIRE_GROUPS

# bytes between hosts decide; how many ranks share a host, the job says, and not the machine
FAR = Machine("far hosts", "cpu", 64, Link(1e-6, 1e10), Link(1e-6, 1e5), Link(1e-9, 1e10))
EVEN, UNEVEN, IN_TURNS = (0, 0, 0, 0, 1, 1, 1, 1), (0, 0, 0, 0, 0, 1, 1, 1), (0, 1, 0, 1, 0, 1, 0, 1)


@contextlib.contextmanager
def on_nodes(nodes: tuple[int, ...]) -> Iterator[None]:
    os.environ[NODE_VARIABLES[0]] = str(nodes[distributed.get_rank()])
    try:
        yield
    finally:
        del os.environ[NODE_VARIABLES[0]]


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(24, 36)
        self.down = torch.nn.Linear(36, 7, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x))).square().mean()


@functools.cache
def alone() -> list[float]:
    torch.manual_seed(0)
    model = Net().double()
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for x in batches():
        loss = model(x)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    return losses


def batches() -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    return [torch.randn(16, 24, dtype=torch.float64, generator=draw) for _ in range(3)]


def trained(nodes: tuple[int, ...], axes: dict[str, int], zero: int) -> dict[str, Any]:
    torch.manual_seed(0)
    with on_nodes(nodes):
        parallel = autopar.parallelize(Net().double(), Mesh(axes), "ddp", machine=FAR)
    step = parallel.train_step(torch.optim.AdamW(parallel.parameters(), lr=1e-2), clip_norm=0.1, zero=zero)
    losses = [float(step(x)) for x in batches()]
    notes = [note for row in step.reports if row.name.endswith("levels") for note in row.notes]
    text = f"{step.program.micro}{step.program.update}"
    parallel.close()
    return {"losses": losses, "notes": notes, "text": text, "hosts": parallel.job.hosts.ranks_per_host}


@pytest.mark.parametrize("zero", [0, 3])
def test_two_hosts_of_four_ranks_reduce_level_by_level(zero: int) -> None:
    first, *others = ranks(8).run(trained, EVEN, {"dp": 8}, zero)
    assert first["losses"] == pytest.approx(alone(), abs=1e-12)
    assert all(other == first for other in others)
    assert first["hosts"] == 4 and first["text"].count("dp.within4") >= 6
    assert "dp crosses hosts (2 hosts of 4 ranks)" in first["notes"]
    assert any("level by level, within hosts first" in note for note in first["notes"])


def test_an_axis_within_a_host_is_reduced_at_once() -> None:
    first, *_ = ranks(8).run(trained, EVEN, {"dp": 2, "tp": 4}, 0)
    assert first["losses"] == pytest.approx(alone(), abs=1e-12) and "within" not in first["text"]
    assert "dp crosses hosts (2 hosts of 4 ranks); tp stays within a host" in first["notes"]


@pytest.mark.parametrize(
    ("nodes", "why"),
    [
        (UNEVEN, "hosts have different numbers of ranks ({0} has 5 and {1} has 3): collectives run at once, and count "
                 "as between hosts; start equally many processes on each host, so that they can run within hosts "
                 "first"),
        (IN_TURNS, "the ranks of a host do not follow each other ({0} has 0 2 4 6 and {1} has 1 3 5 7): collectives "
                   "run at once, and count as between hosts; number them host by host, as torchrun does, so that they "
                   "can run within hosts first"),
    ],
    ids=["uneven", "in turns"],
)  # fmt: skip
def test_other_hosts_reduce_at_once_and_say_why(nodes: tuple[int, ...], why: str) -> None:
    first, *others = ranks(8).run(trained, nodes, {"dp": 8}, 0)
    assert first["losses"] == pytest.approx(alone(), abs=1e-12)
    assert all(other == first for other in others) and "within" not in first["text"] and first["hosts"] is None
    name = os.uname().nodename
    assert why.format(f"{name} (node 0)", f"{name} (node 1)") in first["notes"]


def wired() -> None:
    autopar.emulate(1e-3, 1e8, ranks_per_host=2, between=(3e-3, 1e7))


def carried() -> tuple[list[float], int | None]:
    """The seconds of all-reduces of 4,000 bytes, over all ranks, within a host, and between hosts; the job's hosts."""
    wire = autopar.runtime.wire.emulate.present()
    groups = [distributed.group.WORLD]
    for sets in ([[0, 1], [2, 3]], [[0, 2], [1, 3]]):
        made = [distributed.new_group(members) for members in sets]
        groups.append(
            next(group for group, members in zip(made, sets, strict=True) if distributed.get_rank() in members)
        )
    seconds = []
    for group in groups:
        wire.reset()
        distributed.all_reduce(torch.ones(1000), group=group)
        seconds.append(wire.records[-1].end - wire.records[-1].begin)
    used = [WIRE_GROUPS[group.group_name]._links("out", [0, 1, 2, 3], members)
            for group, members in zip(groups, ([0, 1, 2, 3], [0, 1], [0, 2]), strict=True)]  # fmt: skip
    assert set(used[0]) == set(used[2]) and set(used[1]).isdisjoint(used[2])  # they do not wait for each other
    return seconds, autopar.parallelize(torch.nn.Linear(2, 2), Mesh(dp=4)).job.hosts.ranks_per_host


def test_the_emulated_wire_has_hosts() -> None:
    for seconds, per_host in ranks(4, wired).run(carried):
        far = min(2 * 3 * 3e-3 + 1.5 * 4000 / 1e7, 2 * (3e-3 + 4000 / 1e7))
        assert seconds == pytest.approx([far, 1e-3 + 4000 / 1e8, 3e-3 + 4000 / 1e7])
        assert per_host == 2
