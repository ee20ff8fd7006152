"""The sizes of a stage are the bytes of what a step keeps: of each storage once, however many views it has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar import Mesh
from autopar.runtime.lowering.bundles import Bundle
from autopar.runtime.running.slots import SlotRunner
from autopar.step.pipelined.reports.sizes import stage_sizes

LAYERS, WIDE, ROWS, COUNT = 6, 8, 16, 4


class Chain(nn.Module):
    """Layers with an op after each."""

    def __init__(self, op: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDE, WIDE) for _ in range(LAYERS))
        self.op = getattr(nn.functional, op)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.op(layer(x))
        return nn.functional.mse_loss(x, y)


class Blocks(nn.Module):
    """Blocks that end with an op whose backward reads its result, so that a stage keeps what it sends."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDE, WIDE), nn.Tanh()) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return nn.functional.mse_loss(x, y)


class Skipped(Chain):
    """A value of the first stage is read on all later ones, so that messages have several values."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        first = x = self.layers[0](x)
        for layer in self.layers[1:]:
            x = self.op(layer(x) + first)
        return nn.functional.mse_loss(x, y)


def storages(tensors: Any) -> dict[int, int]:
    """Address → bytes."""
    each = (tensor.untyped_storage() for tensor in tensors if tensor is not None)
    return {storage.data_ptr(): storage.nbytes() for storage in each}


def kept_by(step: Any, given: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, int], int]:
    """Pass and stage → the bytes that a micro-batch keeps after it, beside messages, in a simulated step."""
    compute, found = SlotRunner._compute, dict[tuple[str, int], int]()

    def counted(loop: Any, task: Any) -> Any:
        at, rank = (task.stage, task.batch), loop.rank
        yield from compute(loop, task)
        if task.batch:
            return  # only the first has all readers still before it
        boxes = [tensor for box in rank.boxes.values() for tensor in box.values()]
        elsewhere = storages((*rank.held.values(), *boxes, *rank.inputs[task.stage][task.batch].values()))
        made = loop._made.get(task, ()) if task.of == "F" else ()
        goes = [loop.facts.rank_of[stage] for stage in (task.stage, task.stage + 1)] if made else []
        # one value that goes to another rank is sent from its own memory; others are copied, or stay
        sent = storages(made) if len(made) == 1 and len(set(goes)) == 2 else {}
        others = elsewhere.keys() | sent.keys() | storages(loop._buffers.get(at, ())).keys()  # the last is received
        kept = storages(rank.kept[("micro", *at)].values())
        found[task.of, task.stage] = sum(bytes for place, bytes in kept.items() if place not in others)

    with monkeypatch.context() as patch:
        patch.setattr(SlotRunner, "_compute", counted)
        step.simulate(**given)
    return found


@pytest.mark.parametrize("policy", ["1f1b", "zb-h1", "zb-v"])
@pytest.mark.parametrize("model", [Chain("gelu"), Blocks(), Skipped("tanh")], ids=["gelu", "tanh", "skip"])
def test_sizes_are_what_a_step_keeps(model: nn.Module, policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    parallel = autopar.parallelize(model, Mesh(pp=2), {})
    step = parallel.train_step(torch.optim.SGD(parallel.parameters(), 0.1), microbatches=COUNT, schedule=policy)
    given = {name: torch.randn(ROWS * COUNT, WIDE) for name in ("x", "y")}
    step.capture(**given)
    micro, update = step._current().pair
    kept = kept_by(step, given, monkeypatch)
    for number, stage in enumerate(stage_sizes(micro, update)):
        assert stage.activation == kept["F", number]
        if micro.schedule.is_split:
            assert stage.for_weights == kept["B", number]


@pytest.mark.parametrize(("axis", "rows"), [("tp", ROWS), ("dp", ROWS // 2)])
def test_pairs_and_bytes_between_stages(axis: str, rows: int) -> None:
    """Each rank exchanges with the rank of the same coordinates: its whole copy over tp, its rows over dp."""
    parallel = autopar.parallelize(Blocks(), Mesh({"pp": 2, axis: 2}), "ddp" if axis == "dp" else {})
    step = parallel.train_step(torch.optim.SGD(parallel.parameters(), 0.1), microbatches=COUNT, schedule="1f1b")
    step.capture(x=torch.randn(ROWS * COUNT, WIDE), y=torch.randn(ROWS * COUNT, WIDE))
    micro, _ = step._current().pair
    bytes = rows * WIDE * 4
    for values, pairs in ((micro.forward_values(0), [(0, 2), (1, 3)]), (micro.backward_values(0), [(2, 0), (3, 1)])):
        sent = {(rank, other): n for rank in range(4) for other, n in Bundle(values, rank).sends.items()}
        assert sent == dict.fromkeys(pairs, bytes)
