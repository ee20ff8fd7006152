"""Train a mixture of experts: each rank holds and computes its own experts, and tokens travel to them and back.

    python -m autopar.examples.moe
    torchrun --nproc-per-node 4 -m autopar.examples.moe

The weights of all experts are one tensor, whose dim 0 is split over the axis ``ep``. The batch is split over ``dp`` and
``ep``, as always, so autopar puts an all-to-all before the experts and one after them.
"""

import torch
from torch import nn
from torch.nn.functional import cross_entropy, one_hot

import autopar
from autopar.examples.on_ranks import compare, is_first, on_ranks, train_alone

MESH = autopar.Mesh(dp=2, ep=2)
PLAN = {"*.up": ("ep", None, None), "*.down": ("ep", None, None)}
DIM, HIDDEN, EXPERTS, CLASSES = 8, 16, 4, 5


class Experts(nn.Module):
    """A layer with a capacity (GShard, arXiv:2006.16668): a token that its expert has no place for is left out."""

    def __init__(self, capacity: int = 3) -> None:
        super().__init__()
        self.router = nn.Linear(DIM, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, DIM, HIDDEN) / DIM**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, DIM) / HIDDEN**0.5)
        self.capacity = capacity

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # x: [rows, tokens, dim]
        weight, choice = self.router(x).softmax(-1).max(-1)
        chosen = one_hot(choice, EXPERTS)
        place = (chosen.cumsum(1) - 1) * chosen
        kept = chosen * (place < self.capacity)
        dispatch = (kept.unsqueeze(-1) * one_hot(place * kept, self.capacity)).to(x.dtype)
        tokens = torch.einsum("gnec,gnd->egcd", dispatch, x)
        hidden = torch.relu(torch.einsum("egcd,edh->egch", tokens, self.up))
        done = torch.einsum("egch,ehd->egcd", hidden, self.down)
        return torch.einsum("gnec,egcd->gnd", dispatch * weight[..., None, None], done)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts, self.out = Experts(), nn.Linear(DIM, CLASSES)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.out(x + self.experts(x))
        return cross_entropy(logits.flatten(0, 1), labels.flatten())


def model() -> Model:
    torch.manual_seed(0)
    return Model()


def batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(8, 6, DIM, generator=generator), torch.randint(CLASSES, (8, 6), generator=generator))
        for _ in range(count)
    ]


def main() -> None:
    parallel = autopar.parallelize(model(), MESH, PLAN)
    step = parallel.train_step(torch.optim.SGD(parallel.parameters(), lr=0.5))
    ours = [step(x, labels).item() for x, labels in batches(4)]
    held, program = len(parallel.experts.up.to_local()), str(step.program.micro)
    computes = next(line.strip() for line in str(step.local(0)).splitlines() if "relu :" in line)
    parallel.close()
    if is_first():
        alone = model()
        single = train_alone(lambda batch: alone(*batch), torch.optim.SGD(alone.parameters(), lr=0.5), batches(4))
        compare("loss", ours, single)
        print(f"{EXPERTS} experts, of which each rank holds {held} and computes their places: {computes}")
        print(f"{program.partition('backward:')[0].count('all_to_all(')} all-to-alls forward")


if __name__ == "__main__":
    on_ranks(main)
