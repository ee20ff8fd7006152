"""A rank of a job on several hosts: it trains on dp=2 tp=2, saves checkpoints, and goes on from the newest one.

Each rank appends a line to a file of its own with the number of each step, its loss and when it ended: the time is
that of the machine's monotonic clock, which all hosts of a test share.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from typing import Any

import torch
from torch import nn

import autopar

SKEW = "AUTOPAR_TEST_SKEW"  # seconds by which the clock of a process is wrong
ROWS, FEATURES = 8, 8
PLAN = {"up.weight": ("tp", None), "up.bias": ("tp",), "down.weight": (None, "tp")}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(FEATURES, 16), nn.Linear(16, FEATURES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.down(torch.relu(self.up(x))) - x).square().mean()


def batch(step: int) -> torch.Tensor:
    """The rows of a step, the same on all ranks and after each restart."""
    return torch.randn(ROWS, FEATURES, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def made() -> Model:
    torch.manual_seed(0)
    return Model().double()


def losses_of_one_process(steps: int) -> list[float]:
    """The losses of plain torch."""
    model = made()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    found = []
    for k in range(steps):
        loss = model(batch(k))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def read_losses(folder: str | os.PathLike[str], rank: int) -> list[tuple[int, float, float]]:
    """The steps of a rank in their order: number, loss, and when it ended."""
    path = os.path.join(folder, f"losses-{rank}.txt")
    if not os.path.exists(path):
        return []
    with open(path) as file:
        rows = [line.split() for line in file if line.endswith("\n")]
    return [(int(number), float.fromhex(loss), float(when)) for number, loss, when in rows]


def skew_clock(seconds: float) -> None:
    """Let the wall clock of this process be wrong: nothing may compare those of two hosts."""
    right, right_ns = time.time, time.time_ns
    time.time = lambda: right() + seconds
    time.time_ns = lambda: right_ns() + int(seconds * 1e9)


def slow_down(options: argparse.Namespace, step: int) -> None:
    """Let this rank stand for some seconds where it first touches the files of a checkpoint, and say so by a file."""
    waits = [True]

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if waits[0] and event == "os.rename" and str(args[0]).startswith(options.checkpoints):
            waits[0] = False
            open(os.path.join(options.folder, f"saving-{step}"), "w").close()
            time.sleep(options.slow_save)

    sys.addaudithook(hook)


def train(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    skew_clock(float(os.environ.get(SKEW, "0")))
    mesh = autopar.Mesh(dp=2, tp=2)
    parallel = autopar.parallelize(made(), mesh, PLAN, timeout=options.timeout)
    step = parallel.train_step(torch.optim.AdamW(parallel.parameters(), lr=0.01))
    step.capture(batch(0))
    first = 0
    if options.every and autopar.checkpoint.latest(options.checkpoints) is not None:
        state = autopar.checkpoint.load(options.checkpoints, {"training": step.state_dict(), "next": 0})
        step.load_state_dict(state["training"])
        first = state["next"]
    with open(os.path.join(options.folder, f"losses-{os.environ['RANK']}.txt"), "a") as file:
        for k in range(first, options.steps):
            loss = step(batch(k))
            file.write(f"{k} {float(loss).hex()} {time.monotonic()}\n")
            file.flush()
            if options.every and (k + 1) % options.every == 0:
                if options.slow_save:
                    slow_down(options, k + 1)
                autopar.checkpoint.save(options.checkpoints, {"training": step.state_dict(), "next": k + 1})
            time.sleep(options.pause)  # as if a batch were read


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", help="for the losses")
    parser.add_argument("--checkpoints", default="")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--every", type=int, default=0, help="steps between two checkpoints; 0 saves none")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds between two steps")
    parser.add_argument("--slow-save", type=float, default=0.0, help="seconds that a rank stands still in each save")
    parser.add_argument("--timeout", type=float, default=60.0)
    return parser


if __name__ == "__main__":
    train(arguments().parse_args())
