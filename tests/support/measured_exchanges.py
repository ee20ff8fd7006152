"""On a rank: a profile of a program that has each kind of collective, and the calls that were made ready."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import distributed

from autopar import Program
from autopar.costs.machine import machine
from autopar.costs.profile import Profile
from autopar.ir.hosts import Hosts
from autopar.runtime.localize import LocalPrograms
from autopar.runtime.measuring.clock import Clock, Effort
from autopar.runtime.measuring.interference import measure_interference
from autopar.runtime.measuring.measure import Placed, measure
from autopar.runtime.processes.job import Job

TEXT = """\
program explicit on dp=2
  x : f32[9/dp 64] = input
  h : bf16[8/dp 64] = input
  gathered : f32[9 64] = all_gather(x, 0, dp)
  turned : f32[9 64/dp] = all_to_all(x, 0, 1, dp)
  moved : f32[9 64/dp] = redistribute(x, [(), (dp,)])
  sum_1 : f32[64] +dp = sum.dim_IntList(x, [0])
  scattered : f32[64/dp] = reduce_scatter(sum_1, 0, dp)
  sum_1_dp : f32[64] = all_reduce(sum_1, dp)
  most : bf16[64] +max:dp = amax(h, [0])
  most_dp : bf16[64] = all_reduce(most, dp, max)
  return (gathered, turned, moved, scattered, sum_1_dp, most_dp)
"""


def job() -> Job:
    world, ranks = distributed.group.WORLD, tuple(range(distributed.get_world_size()))
    assert world is not None
    hosts, cpu = Hosts(("here",), (0,) * world.size()), torch.device("cpu")
    return Job(distributed.get_rank(), None, {ranks: world.group_name}, set(), cpu, world, hosts)  # type: ignore[arg-type]


def profiled() -> Profile:
    program = Program.parse(TEXT)
    placed = Placed(program, LocalPrograms(program, lambda _: None), 1)
    return measure({"micro": placed}, machine("cpu"), torch.device("cpu"), job(), effort=Effort(1, 0.001, 1, 2))


def calls_agreed(taken: list[float]) -> list[int]:
    """How often this rank is asked to run a call that takes so many seconds on it, for each of the ranks' numbers."""

    class Slow(Clock):
        def each(self, call: Callable[[], object], count: int) -> list[float]:
            asked.append(count)
            return [taken[distributed.get_rank()]] * count

    asked: list[int] = []
    median = Slow(torch.device("cpu"), Effort(0, 1.0, 1, 100), distributed.group.WORLD).median(lambda: None)
    assert median == max(taken)
    return asked


def interference() -> float:
    return measure_interference(Clock(torch.device("cpu"), Effort(1, 0.0, 1, 1), distributed.group.WORLD))
