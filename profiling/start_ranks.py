"""Train a small GPT for seven steps, of which the last has fewer rows; the first rank prints its times.

``torchrun --nproc-per-node 2 start_ranks.py KIND BEGAN``: ``BEGAN`` is the time before torchrun was started.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

ROWS = (32, 32, 32, 32, 32, 32, 8)
WIDTH, LENGTH, TOKENS = 128, 64, 256


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (y.unflatten(-1, (4, -1)).transpose(1, 2) for y in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class Gpt(nn.Module):
    """Four layers, and the head tied to the embedding; returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(TOKENS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(4)))
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.blocks(self.tokens(ids) + self.places.weight)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def main(kind: str, began: float) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model, whole = Gpt(), torch.randint(0, TOKENS, (max(ROWS), LENGTH))
    if kind == "DDP":
        dist.init_process_group("gloo")
        loop: nn.Module = nn.parallel.DistributedDataParallel(model)
    else:
        import autopar

        loop = autopar.parallelize(model, autopar.Mesh(dp=2), None if kind == "searched step" else "ddp")
    optimizer = torch.optim.AdamW(loop.parameters(), lr=1e-3)
    step = loop.train_step(optimizer) if "step" in kind else None
    ends, took = [], []
    for rows in ROWS:
        ids = whole[:rows]
        start = time.perf_counter()
        if step is not None:
            step(ids, ids)
        else:
            mine = ids.chunk(2)[dist.get_rank()] if kind == "DDP" else ids
            optimizer.zero_grad()
            loop(mine, mine).backward()
            optimizer.step()
        took.append(time.perf_counter() - start)
        ends.append(time.time())
    if not int(os.environ["RANK"]):
        print(
            "times "
            + json.dumps({"first": ends[0] - began, "usual": statistics.median(took[1:-1]), "shorter": took[-1]})
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
