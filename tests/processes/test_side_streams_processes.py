"""Collectives from side streams have the numbers of those from the calling stream: on gloo, and on a GPU with NCCL."""

from __future__ import annotations

import os
import socket
from typing import Any

import pytest
import sides_on_ranks
import torch
from processes import ranks
from torch import distributed

from autopar.ir.program import Program
from autopar.runtime.lowering import side_streams
from autopar.runtime.lowering.lower import lower

CASES: list[tuple[str, dict[str, int], dict[str, Any], list[Any]]] = [
    ("mlp", {"dp": 2}, {"zero": 1, "grad_norm": True}, ["today", 1, 2]),
    ("mlp", {"dp": 2}, {"zero": 3, "microbatches": 2}, [3, 4]),
    ("mlp", {"dp": 2}, {"across": True}, ["longest-tail", "today"]),
]


@pytest.mark.parametrize(("name", "sizes", "options", "overlaps"), CASES, ids=str)
def test_steps_have_the_same_numbers(name: str, sizes: dict[str, int], options: dict[str, Any],
                                     overlaps: list[Any]) -> None:  # fmt: skip
    """In the order of a policy, and in random ones (given by their seeds)."""
    waited = ranks(2).run(sides_on_ranks.steps_are_alike, name, sizes, options, overlaps)
    assert min(waited) > 0 or "across" in options


# -- on a GPU ----------------------------------------------------------------------------------------------------------

TEXT = """\
program scheduled on dp=2 at dp=0
stream dp
  x : f32[1024 1024] = input
forward:
  y : f32[1024 1024] = mm(x, x)
  s : f32[1024 1024] = mm(y, x)
  c : f32[1024 1024] = mm(s, x)
  a_start : f32[1024 1024] = start all_reduce(y, dp) on dp
  b_0_start : f32[524288] = start all_reduce(s, dp) on dp from 0 to 524288
  b_1_start : f32[524288] = start all_reduce(s, dp) on dp from 524288 to 1048576
  e : f32[1024 1024] = mm(c, x)
  a : f32[1024 1024] = wait(a_start)
  b_0 : f32[524288] = wait(b_0_start)
  b_1 : f32[524288] = wait(b_1_start)
  b : f32[1024 1024] = join_chunks([b_0, b_1], shape=(1024, 1024))
  d : f32[1024 1024] = add.Tensor(a, b)
  f_start : f32[1024 1024] = start all_reduce(c, dp) on dp in dp_0
  h_start : f32[1024 1024] = start all_reduce(d, dp) on dp in dp_0
  g : f32[1024 1024] = mm(e, x)
  f : f32[1024 1024] = wait(f_start)
  h : f32[1024 1024] = wait(h_start)
  return f, h, g
"""


def one_rank_on_nccl(_: int, port: int) -> None:
    """A program of two ranks, on a group of one, which a sum leaves as it is; beside starts from the calling stream."""
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "RANK": "0", "WORLD_SIZE": "1"}
    torch.cuda.set_device(0)
    distributed.init_process_group("nccl")
    try:
        world = distributed.group.WORLD
        assert world is not None
        program, groups = Program.parse(TEXT), {(0, 1): world.group_name}
        aside = lower(program, groups, device=torch.device("cuda"))["forward"]
        called = lower(program, groups)["forward"]
        assert "_aside(" in aside.graph.python_code("self").src
        for seed in range(20):  # memory that is reused too early shows in later rounds
            torch.manual_seed(seed)
            x = torch.randn(1024, 1024, device="cuda") / 32
            for found, expected in zip(aside.run([x]), called.run([x]), strict=True):
                assert torch.equal(found, expected)
        assert len(side_streams.SIDES._streams) == 1
    finally:
        distributed.destroy_process_group()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_one_rank_on_nccl() -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(one_rank_on_nccl, (port,), nprocs=1)
