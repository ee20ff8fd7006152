"""What a training writes to TensorBoard, read back from the files."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import autopar
from autopar import Mesh

pytest.importorskip("tensorboard")
pytestmark = pytest.mark.simulated


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(10, 4), nn.Linear(4, 10, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return cross_entropy(self.out(self.embed(ids)).flatten(0, 1), ids.flatten())


IDS = torch.arange(24).view(4, 6) % 10
FLOPS = 3 * 2 * 24 * 4 * 10  # a product forward, and two backward


def read(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder)).Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


@pytest.fixture
def writer(tmp_path: Path) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as made:
        yield made


def trained(mesh: Mesh | None = None, **options: Any) -> Any:
    parallel = autopar.parallelize(Words(), mesh or Mesh(dp=1), "ddp")
    return parallel.train_step(torch.optim.SGD(parallel.parameters(), lr=0.5), **options)


def test_a_step_is_written_with_its_numbers(writer: Any, tmp_path: Path) -> None:
    step = trained(microbatches=2, clip_norm=1.0)
    losses, norms = [], []
    for _ in range(2):
        losses.append(step(IDS))
        norms.append(step.grad_norm.item())
        autopar.log(writer, step, loss=losses[-1], seconds=0.5, machine="cpu", epoch=3)
    writer.flush()
    found = read(tmp_path)
    assert found.keys() == {
        "train/loss", "train/epoch", "train/lr", "train/grad_norm", "speed/seconds", "speed/tokens_per_second",
        "speed/tflops_per_rank", "speed/mfu", "memory/peak_bytes",
    }  # fmt: skip
    expected = {
        "train/loss": losses[1].item(), "train/epoch": 3, "train/lr": 0.5, "train/grad_norm": norms[1],
        "speed/seconds": 0.5, "speed/tokens_per_second": 24 / 0.5, "speed/tflops_per_rank": FLOPS / 0.5 / 1e12,
        "speed/mfu": FLOPS / (0.5 * 1e11),
    }  # fmt: skip
    for tag, number in expected.items():
        assert [at for at, _ in found[tag]] == [1, 2]
        assert found[tag][1][1] == pytest.approx(number), tag
    assert found["memory/peak_bytes"][0][1] > 2**20


def test_a_training_that_goes_on_counts_on(writer: Any, tmp_path: Path) -> None:
    """With the steps of the checkpoint, and with each step, also where only some are written."""
    step = trained()
    step(IDS)
    step.load_state_dict({**step.state_dict(), "step": 5})
    for _ in range(2):
        step(IDS)
        autopar.log(writer, step, loss=step(IDS))
    writer.flush()
    assert [at for at, _ in read(tmp_path)["train/loss"]] == [7, 9]


def test_the_time_is_that_between_two_calls(tmp_path: Path) -> None:
    """So the first call has no throughput. The folder's writer is kept from call to call, and ``at`` is the step."""
    from autopar.step.reports.log import _LOGS

    step = trained()
    for at in (10, 20, 30):
        autopar.log(tmp_path / "a", step, loss=step(IDS), at=at)
        autopar.log(str(tmp_path / "b"), step, at=at, tokens=7)
    assert len(_LOGS[step]) == 2
    for log in _LOGS[step].values():
        log.writer.flush()
    a, b = read(tmp_path / "a"), read(tmp_path / "b")
    assert [at for at, _ in a["train/loss"]] == [10, 20, 30] and "train/loss" not in b
    for found, tokens in ((a, 24), (b, 7)):
        assert [at for at, _ in found["speed/seconds"]] == [20, 30]
        for (_, seconds), (_, speed) in zip(found["speed/seconds"], found["speed/tokens_per_second"], strict=True):
            assert seconds > 0 and speed == pytest.approx(tokens / seconds)


def test_a_plain_loop_is_written_too(writer: Any, tmp_path: Path) -> None:
    parallel = autopar.parallelize(Words(), Mesh(dp=1), "ddp")
    loss = parallel(IDS)
    loss.backward()
    autopar.log(writer, parallel, loss=loss, seconds=0.25)  # it requires a gradient
    writer.flush()
    found = read(tmp_path)
    assert found["speed/tokens_per_second"] == [(1, pytest.approx(24 / 0.25))]
    assert found["speed/tflops_per_rank"] == [(1, pytest.approx(FLOPS / 0.25 / 1e12))]
    assert "train/lr" not in found


def test_another_batch_has_its_own_tokens(writer: Any, tmp_path: Path) -> None:
    step = trained()
    for ids in (IDS, IDS[:2], IDS):
        step(ids)
        autopar.log(writer, step, seconds=1.0)
    writer.flush()
    assert [value for _, value in read(tmp_path)["speed/tokens_per_second"]] == [24, 12, 24]


def test_rows_count_where_there_are_no_tokens(writer: Any, tmp_path: Path) -> None:
    class Rows(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).square().mean()

    parallel = autopar.parallelize(Rows(3, 2), Mesh(dp=1))
    parallel(torch.randn(5, 3)).backward()
    autopar.log(writer, parallel, seconds=1.0)
    writer.flush()
    assert read(tmp_path)["speed/tokens_per_second"] == [(1, 5)]


def test_simulated_ranks_have_no_mfu(writer: Any, tmp_path: Path) -> None:
    """They share one process. A machine without listed peaks has none either."""
    step = trained(Mesh(dp=2))
    step.simulate(IDS)
    autopar.log(writer, step, seconds=1.0)
    alone = trained()
    alone(IDS)
    autopar.log(writer, alone, seconds=1.0, machine="generic")
    writer.flush()
    found = read(tmp_path)
    assert len(found["speed/tokens_per_second"]) == 2 and len(found["speed/tflops_per_rank"]) == 1
    assert "speed/mfu" not in found


def test_a_folder_that_is_none() -> None:
    parallel = autopar.parallelize(nn.Linear(2, 2), autopar.Mesh(dp=1), "ddp")
    with pytest.raises(
        TypeError, match=r'writes to a folder, such as "runs/a", or with a SummaryWriter, and not to an int'
    ):
        autopar.log(3, parallel)  # type: ignore[arg-type]


def test_what_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = (
        "autopar.log takes a training step or the result of parallelize, and not a Linear; for other models, use "
        "torch.utils.tensorboard.SummaryWriter"
    )
    with pytest.raises(TypeError, match=f"^{re.escape(text)}$"):
        autopar.log(tmp_path, nn.Linear(2, 2))
    with pytest.raises(RuntimeError, match=r"^nothing has been captured yet"):
        autopar.log(tmp_path, autopar.parallelize(Words(), Mesh(dp=1)), seconds=1.0)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    text = (
        "autopar.log writes files of TensorBoard, and tensorboard is not installed; pip install 'autopar[log]', or pip "
        "install tensorboard"
    )
    with pytest.raises(ImportError, match=f"^{re.escape(text)}$"):
        autopar.log(tmp_path, nn.Linear(2, 2))
