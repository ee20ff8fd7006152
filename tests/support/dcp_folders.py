"""Trainings that write folders of ``torch.distributed.checkpoint`` and go on from them, with FSDP2 and with autopar."""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard

import autopar

STEPS = 2  # before a checkpoint, and behind it


class Tied(nn.Module):
    """The embedding of small numbers is the last product too; a buffer counts in no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 6)
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)
        self.head = nn.Linear(6, 6, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor([1.5]))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        return (self.head(self.down(self.up(x).relu())) * self.scale - x.detach()).pow(2).mean()


def model(seed: int) -> Tied:
    torch.manual_seed(seed)
    return Tied().double()


def batch(step: int) -> torch.Tensor:
    return (torch.arange(8) * (step + 1)) % 6


OPTIMIZERS = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.05, betas=(0.8, 0.95), weight_decay=0.1),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
}


class Sharded:
    """A training with FSDP2 on all ranks."""

    def __init__(self, kind: str, seed: int) -> None:
        self.model = model(seed)
        mesh = distributed.init_device_mesh("cpu", (distributed.get_world_size(),))
        fully_shard(self.model, mesh=mesh)
        self.optimizer = OPTIMIZERS[kind](self.model.parameters())

    def train(self, first: int) -> None:
        rank, ranks = distributed.get_rank(), distributed.get_world_size()
        for step in range(first, first + STEPS):
            self.model(batch(step).chunk(ranks)[rank]).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def state(self, torchtitan: bool) -> dict[str, Any]:
        options = StateDictOptions(flatten_optimizer_state_dict=torchtitan)
        own, optimizer = (
            get_model_state_dict(self.model),
            get_optimizer_state_dict(self.model, self.optimizer, options=options),
        )
        if not torchtitan:
            return {"app": {"model": own, "optim": optimizer}}
        return {
            **own,
            "optimizer": optimizer,
            "lr_scheduler": {"last_epoch": STEPS, "base_lrs": [0.05]},
            "dataloader": {"dp_rank_0": b"\x80\x00", "world_size": 2},
            "train_state": {"step": torch.tensor(STEPS, dtype=torch.int32), "ntokens_seen": torch.tensor(64)},
        }

    def load(self, folder: str, torchtitan: bool) -> None:
        options = StateDictOptions(flatten_optimizer_state_dict=torchtitan)
        state = self.state(torchtitan)
        state = (
            {name: value for name, value in state.items() if name not in ("lr_scheduler", "dataloader")}
            if torchtitan
            else state["app"]
        )
        if not torchtitan:
            state["optimizer"] = state.pop("optim")
        else:
            state["train_state"] = {"step": torch.tensor(0, dtype=torch.int32)}
        dcp.load(state, checkpoint_id=folder)
        if torchtitan:
            assert state["train_state"]["step"] == STEPS
        set_model_state_dict(
            self.model, {name: state[name] for name in self.model.state_dict()} if torchtitan else state["model"]
        )
        set_optimizer_state_dict(self.model, self.optimizer, state["optimizer"], options=options)

    def weights(self) -> dict[str, torch.Tensor]:
        return {
            name: tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            for name, tensor in self.model.state_dict().items()
        }


def sharded_writes(folder: str, kind: str, torchtitan: bool) -> dict[str, torch.Tensor]:
    """FSDP2 writes a DCP folder, and goes on: its weights at the end."""
    training = Sharded(kind, 1)
    training.train(0)
    dcp.save(training.state(torchtitan), checkpoint_id=folder)
    training.train(STEPS)
    return training.weights()


def sharded_reads(folder: str, kind: str, torchtitan: bool) -> dict[str, torch.Tensor]:
    """FSDP2 goes on from a DCP folder: its weights at the end."""
    training = Sharded(kind, 2)
    training.train(7)  # so that its optimizer has a state, another one
    training.load(folder, torchtitan)
    training.train(STEPS)
    return training.weights()


class Simulated:
    """The same training with autopar, of all ranks in this process."""

    def __init__(self, kind: str, seed: int) -> None:
        self.parallel = autopar.parallelize(model(seed), autopar.Mesh(dp=2), "ddp")
        self.step = self.parallel.train_step(OPTIMIZERS[kind](self.parallel.parameters()), zero=1)
        self.step.capture(batch(0))

    def train(self, first: int) -> None:
        for step in range(first, first + STEPS):
            self.step.simulate(batch(step))

    def weights(self) -> dict[str, torch.Tensor]:
        return dict(self.parallel.state_dict())
