"""On a rank: steps in which one rank is slower than the others."""

from __future__ import annotations

import time

import torch
from steps import Pair
from torch import distributed, nn

import autopar
from autopar import Mesh
from autopar.step.reports.pace import RankPaces

SLOW, SECONDS = 2, 0.05  # the slow rank, and by how much


@torch.library.custom_op("slow_ranks::slowed", mutates_args=())
def slowed(x: torch.Tensor) -> torch.Tensor:
    if distributed.get_rank() == SLOW:
        time.sleep(SECONDS)
    return x.clone()


@slowed.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


slowed.register_autograd(lambda ctx, gradient: gradient)
autopar.register_rule("... -> ...", "slow_ranks::slowed", linear="0")


def batch() -> dict[str, torch.Tensor]:
    return {"x": torch.ones(8, 8), "y": torch.zeros(8, 8)}


class Slowed(Pair):
    def predicted(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(slowed(torch.relu(self.up(x))))


def paces(model: nn.Module, steps: int, between: bool) -> tuple[RankPaces, str]:
    parallel = autopar.parallelize(model, Mesh(dp=2, tp=2), "ddp")
    step = parallel.train_step(torch.optim.SGD(parallel.parameters(), 1e-3))
    assert not step.ranks.paces and "nothing is known of the ranks" in str(step.ranks)
    for _ in range(steps):
        step(**batch())
        if between and distributed.get_rank() == SLOW:
            time.sleep(SECONDS)
    return step.ranks, str(step.reports)


def one_computes_longer() -> None:
    found, reports = paces(Slowed(), 8, False)
    slowest = found.slow[0]
    assert (slowest.rank, slowest.kind) == (SLOW, "computes"), found
    assert slowest.seconds - slowest.others > SECONDS / 2
    text = f"rank {SLOW} on host {found.hosts.name(SLOW)} computes "
    assert text in str(found) and f"ranks: {text}" in reports, reports
    assert found.steps == 6  # the first is captured; the last is told with the next


def one_is_late() -> None:
    found, _ = paces(Pair(), 8, True)
    slowest = found.slow[0]
    assert (slowest.rank, slowest.kind) == (SLOW, "spends between two steps"), found


def one_stands_still_once() -> None:
    """A rank that stands still in one step is not slow."""
    parallel = autopar.parallelize(Pair(), Mesh(dp=2, tp=2), "ddp")
    step = parallel.train_step(torch.optim.SGD(parallel.parameters(), 1e-3))
    for k in range(12):
        step(**batch())
        if k == 5 and distributed.get_rank() == SLOW:
            time.sleep(1.0)
    assert all(slow.seconds < 0.5 for slow in step.ranks.slow), step.ranks
    assert max(between for _, between in step.ranks.paces.values()) < 0.5
