"""The emulated wire on real processes: gloo's values, times that all ranks agree on, and errors instead of hangs."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import wired
import wired_operations
from processes import forked, ranks
from torch import distributed

import autopar
from autopar.runtime.wire.shared_file import SharedFile

FAST = ["times_of_a_group", "a_small_one_waits_for_an_earlier_one", "messages", "distributed_data_parallel",
        "fully_sharded", "own_step", "in_order", "nothing_is_kept", "again_after_destroy"]  # fmt: skip


@pytest.mark.parametrize("count", [2, 3])
def test_values_are_those_of_gloo(count: int) -> None:
    ranks(count, wired.fast).run(wired_operations.equal_values)


@pytest.mark.parametrize("name", FAST)
def test_on_the_wire(name: str) -> None:
    ranks(2, wired.fast).run(getattr(wired, name))


def test_rooted_operations_begin_when_all_have_come() -> None:
    ranks(3, wired.fast).run(wired_operations.rooted_operations_begin_together)


@pytest.mark.parametrize(("prepare", "shared"), [(wired.slow, False), (wired.slow_ranks, True)])
def test_groups_share_links_or_do_not(prepare: Any, shared: bool) -> None:
    world = ranks(2, prepare)
    world.run(wired.two_groups_at_once, shared)
    world.run(wired.ways_of_a_link)


@pytest.mark.parametrize("how", ["wait", "future", "receive", "ddp"])
def test_a_killed_rank_is_an_error(how: str) -> None:
    world = ranks(2, wired.fast)
    with pytest.raises(AssertionError) as error:
        world.run(wired.killed_rank, how)
    killed, watched = (
        ["rank 1:", "rank 1 has ended, with the exit code -9"],
        ["rank 0:", "rank 0 has ended, with the exit code 1"],
    )
    said = str(error.value).splitlines()
    assert said in (killed, watched + killed)  # rank 0 has answered, or its watch was faster than the operation


def _other_wire(rank: int, store: str, told: Any) -> None:
    autopar.emulate(1e-3 * (1 + rank), 1e9)
    try:
        distributed.init_process_group(init_method=f"file://{store}", rank=rank, world_size=2)
    except RuntimeError as error:
        told.send(str(error))
    told.close()
    time.sleep(60)  # until it is killed: the other one waits for it


def test_ranks_with_other_wires_are_refused(tmp_path: Path) -> None:
    ours, theirs = torch.multiprocessing.Pipe()
    processes = [forked(_other_wire, rank, str(tmp_path / "store"), theirs) for rank in range(2)]
    try:
        assert ours.poll(60)
        assert ours.recv() == (
            "rank 1 emulates another wire than rank 0: latency=0.002, bandwidth=1000000000.0, links='rank', not "
            "latency=0.001, bandwidth=1000000000.0, links='rank'; all ranks must call autopar.emulate with the same "
            "arguments"
        )
    finally:
        for process in processes:
            process.kill()


def _beside_the_wire(store: str, told: Any) -> None:
    autopar.emulate(1e-3, math.inf)
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    try:
        autopar.parallelize(torch.nn.Linear(2, 2), autopar.Mesh(dp=1), {})
    except RuntimeError as error:
        told.send(str(error))


def test_groups_beside_the_wire_are_refused(tmp_path: Path) -> None:
    ours, theirs = torch.multiprocessing.Pipe()
    process = forked(_beside_the_wire, str(tmp_path / "store"), theirs)
    try:
        assert ours.poll(60)
        assert ours.recv() == (
            "autopar.emulate was called, but the default process group has the backend 'gloo'; call "
            "init_process_group without a backend, or with 'autopar_wire'"
        )
    finally:
        process.kill()


def _holds(path: str, told: Any) -> None:
    file = SharedFile(path, 4096, 1, timeout=5.0)
    with file.locked():
        file.buffer[8] = 7
        told.send("locked")
        time.sleep(60)


def test_a_killed_rank_leaves_nothing_locked(tmp_path: Path) -> None:
    path = tmp_path / "table"
    path.write_bytes(bytes(4096))
    mine = SharedFile(str(path), 4096, 0, timeout=0.2)
    ours, theirs = torch.multiprocessing.Pipe()
    process = forked(_holds, str(path), theirs)
    assert ours.poll(60)
    assert ours.recv() == "locked"
    assert mine.is_alive(0)
    assert mine.is_alive(1)
    with pytest.raises(RuntimeError, match=r"another rank has kept the table of the emulated wire for 0\.2 s"):
        mine.locked().__enter__()
    process.kill()
    process.join()
    with mine.locked():
        assert mine.buffer[8] == 7
    assert not mine.is_alive(1)
