"""One rank of a large job in this process alone: what it needs, what it does, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conv_net import Residual as Block
from models import Residual
from torch import distributed, nn
from transformers_models import llama

import autopar
from autopar import Mesh
from autopar.step.reports.op_classes import COMMUNICATION, MATMUL, OPTIMIZER


class Convolutions(nn.Sequential):
    """Two blocks of convolutions with batch norm."""

    def __init__(self) -> None:
        pooled = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 5))
        super().__init__(Block(16, 32, 2), Block(32, 32), pooled)


IDS = torch.zeros(1, 1, dtype=torch.int64).expand(512, 33)
MODELS: dict[str, tuple[Callable[[], nn.Module], Mesh, Any, dict[str, torch.Tensor]]] = {
    "mlp": (lambda: Residual(64, 256, layers=4), Mesh(dp=128, tp=2), "megatron", {"x": torch.ones(1024, 64)}),
    # oneDNN pads channels to 16 in buffers of its own, which are not predicted: with fewer channels they are large
    "conv net": (lambda: Convolutions(), Mesh(dp=64), "ddp", {"x": torch.ones(256, 16, 17, 17)}),
    "llama": (
        lambda: llama(heads=8, kv=8, head=16, hidden=176, layers=2).float(), Mesh(dp=64, tp=8), "megatron",
        {"input_ids": IDS, "labels": IDS},
    ),
}  # fmt: skip


class WithLoss(nn.Module):
    """A model whose outputs are made a number."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x).square().mean()


def reported(name: str, rank: int, **options: Any) -> Any:
    make, mesh, plan, batch = MODELS[name]
    with torch.device("meta"):
        model = make() if name == "llama" else WithLoss(make())
    with autopar.one_rank(mesh, rank) as only:
        parallel = autopar.parallelize(model, mesh, plan)
        parallel.initialize(only.fill)
        step = parallel.train_step(torch.optim.AdamW(parallel.parameters(), lr=1e-3), **options)
        return step.rank_report(batch)


CASES = [
    ("mlp", 17, {}), ("mlp", 255, {"zero": 3}), ("conv net", 5, {"zero": 1}),
    ("llama", 511, {"zero": 3, "microbatches": 2}),
    ("llama", 17, {"recompute": "blocks"}),
    *(pytest.param(*case, marks=pytest.mark.sweep("its options are there with another model")) for case in [
        ("mlp", 1, {"zero": 1}), ("conv net", 63, {}), ("conv net", 0, {"zero": 3}), ("llama", 0, {"zero": 1}),
        ("mlp", 3, {"recompute": "blocks"}), ("llama", 100, {"clip_norm": 1.0, "microbatches": 4})]),
]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize(("name", "rank", "options"), CASES, ids=str)
def test_measured_memory_is_that_predicted(name: str, rank: int, options: dict[str, Any]) -> None:
    report = reported(name, rank, **options)
    assert abs(report.apart) <= 0.10, report
    assert 0 < report.held < report.measured
    assert report.alone and not distributed.is_initialized()


@pytest.mark.long
def test_members_of_buckets_have_their_own_bytes() -> None:
    """Gradients are scattered in a bucket, and its members gathered in another one."""
    mesh = Mesh(dp=8, tp=8)
    with torch.device("meta"):
        model = WithLoss(Residual(1024, 2816, layers=3))
    plan = {"*up.weight": ("tp", None), "*up.bias": ("tp",), "*down.weight": (None, "tp")}
    with autopar.one_rank(mesh, 17, ranks_per_host=8) as only:
        parallel = autopar.parallelize(model, mesh, plan, machine="NVIDIA H100 80GB HBM3")
        parallel.initialize(only.fill)
        step = parallel.train_step(torch.optim.AdamW(parallel.parameters()))
        report = step.rank_report(torch.ones(8, 1024))
    several = {row.op for row in report.communication if len(row.values) > 1}
    assert {"reduce_scatter", "all_gather"} <= several, report
    assert abs(report.apart) <= 0.10, report  # gloo, which is not here, has buffers of its own for gathers


@pytest.mark.long
def test_what_a_rank_does() -> None:
    """Llama on dp=64 tp=8 with two micro-batches: its ops by class, and its messages in their order."""
    report = reported("llama", 17, microbatches=2, zero=1)
    kinds = report.classes
    assert {MATMUL, "attention", "pointwise", OPTIMIZER, COMMUNICATION} <= kinds.keys()
    assert sum(kinds.values()) == pytest.approx(report.seconds) and min(kinds.values()) >= 0
    assert {row.part for row in report.communication} == {"first", "last"}
    tp = [row for row in report.communication if row.axes == ("tp",)]
    dp = [row for row in report.communication if row.axes == ("dp",)]
    assert {row.ranks for row in tp} == {"16-23"} and {row.ranks for row in dp} == {"1-505:8"}
    assert all(row.bytes > 0 and row.seconds > 0 and row.times == 1 for row in report.communication)
    gathered = [row for row in dp if row.op == "all_gather"]
    assert gathered and report.communication.index(gathered[0]) > report.communication.index(dp[0])
    text = str(report)
    assert text.startswith("rank 17 (dp=2 tp=1) of dp=64 tp=8\nmemory: predicted ")
    assert "there are no other ranks, and nothing is exchanged" in text and "the figures of" in text
    figures = report.figures()
    assert figures["coordinates"] == {"dp": 2, "tp": 1} and len(figures["communication"]) == len(report.communication)


@pytest.mark.long
def test_a_model_on_meta_has_the_state_of_its_pieces_alone() -> None:
    """With ``zero=3`` parameters move to smaller pieces after they were initialised."""
    mesh = Mesh(dp=16)
    with torch.device("meta"):
        model = WithLoss(Residual(64, 256, layers=2))
    with autopar.one_rank(mesh, 3) as only:
        parallel = autopar.parallelize(model, mesh, "ddp")
        parallel.initialize(only.fill)
        whole = sum(parameter.numel() for parameter in model.parameters())
        step = parallel.train_step(torch.optim.AdamW(parallel.parameters()), zero=3)
        step(torch.ones(32, 64))
        pieces = [parameter.to_local().numel() for parameter in parallel.parameters()]
        assert sum(pieces) <= 1.1 * whole / 16
        assert set(step.rank_classes) == {"last"} and step.rank_classes["last"][0].ranks == list(range(16))


@pytest.mark.long
def test_a_rank_of_stages() -> None:
    """It has two of eight stages, the first and the fifth: its messages, its memory and the classes of its ops."""
    mesh = Mesh(pp=4, dp=8)
    with torch.device("meta"):
        model = WithLoss(nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(16))))
    with autopar.one_rank(mesh, 5) as only:
        parallel = autopar.parallelize(model, mesh, {})
        parallel.initialize(only.fill)
        optimizer = torch.optim.AdamW(parallel.parameters())
        step = parallel.train_step(optimizer, microbatches=4, schedule="interleaved-1f1b", zero=1, clip_norm=1.0)
        report = step.rank_report(torch.ones(16384, 64))
        assert set(step.local(5).programs) == {"micro", "update"}
    assert abs(report.apart) <= 0.10 and 0 < report.held < report.measured, report
    assert {MATMUL, "pointwise", OPTIMIZER, COMMUNICATION} <= report.classes.keys()
    assert sum(report.classes.values()) == pytest.approx(report.seconds) and min(report.classes.values()) >= 0
    piece = 512 * 64 * 4  # bytes of a micro-batch on a rank
    between = [(row.op, row.ranks, row.bytes) for row in report.communication if row.part == "micro"]
    assert between == [("send", "13", piece), ("recv", "29", piece), ("send", "13", piece),
                       ("recv", "13", piece), ("send", "29", piece), ("recv", "13", piece)]  # fmt: skip
    assert {row.times for row in report.communication if row.part == "micro"} == {4}
    rows = [(row.part, row.op, row.axes, row.ranks) for row in report.communication if row.axes == ("dp",)]
    for op in ("reduce_scatter", "all_gather"):
        assert rows.count(("update", op, ("dp",), "0-7")) == 2, "a bucket of each stage"
    assert all(row.seconds > 0 for row in report.communication if row.axes)


def test_one_rank_after_another() -> None:
    """On another stage than before: no op makes a result on the mesh of the earlier job."""
    mesh = Mesh(pp=2, dp=2)
    for rank in (0, 3, 1):
        with torch.device("meta"):
            model = WithLoss(nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))))
        with autopar.one_rank(mesh, rank) as only:
            parallel = autopar.parallelize(model, mesh, "ddp")
            parallel.initialize(only.fill)
            step = parallel.train_step(torch.optim.SGD(parallel.parameters(), lr=0.1), microbatches=2, schedule="1f1b")
            step(torch.ones(8, 8))
            kept = [value.numel() for value in parallel.parameters() if value.device_mesh.get_coordinate() is not None]
            assert 0 < sum(kept) < 4 * (64 + 8)


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match=r"rank 8 is not on the mesh \(dp=4 tp=2\), whose ranks are 0-7"):
        autopar.one_rank(Mesh(dp=4, tp=2), 8).__enter__()
    with pytest.raises(ValueError, match=r"one_rank takes a mesh with the ranks 0 … 1, as a job has them"):
        autopar.one_rank(Mesh({"dp": 2}, ranks=[1, 2]), 1).__enter__()
    with pytest.raises(ValueError, match="ranks_per_host=0 is no number of ranks above 0"):
        autopar.one_rank(Mesh(dp=2), 1, ranks_per_host=0).__enter__()
    with autopar.one_rank(Mesh(dp=2), 1), pytest.raises(RuntimeError, match="this process belongs to a job already"):
        autopar.one_rank(Mesh(dp=2), 0).__enter__()
    assert not distributed.is_initialized()
    parallel = autopar.parallelize(WithLoss(nn.Linear(4, 4)), Mesh(dp=2), "ddp")
    step = parallel.train_step(torch.optim.SGD(parallel.parameters(), 0.1))
    with pytest.raises(RuntimeError, match=r"or use autopar\.one_rank\(mesh, rank\)"):
        step.rank_report(torch.ones(4, 4))


def test_hosts() -> None:
    with autopar.one_rank(Mesh(dp=8, tp=2), 9, ranks_per_host=4) as only:
        parallel = autopar.parallelize(nn.Linear(4, 4), Mesh(dp=8, tp=2), "ddp")
        assert parallel.job.hosts == only.hosts and len(only.hosts) == 4
        assert parallel.job.hosts.name(9) == "host 2" and only.hosts.ranks_per_host == 4
