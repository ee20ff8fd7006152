"""Train in a loop that goes on after a host was lost, on the mesh of the ranks that are left.

    python -m autopar.examples.elastic_loop
    torchrun --nproc-per-node 4 -m autopar.examples.elastic_loop
    torchrun --nnodes 1:2 --nproc-per-node 2 --max-restarts 100 --rdzv-backend c10d --rdzv-endpoint HOST:29400 \\
        -m autopar.examples.elastic_loop                       # on each host, with FOLDER and the variable of the page

Without hosts to lose, it leaves the loop in the middle, as a failure does, and starts the training again.
"""

import os

import torch

import autopar
from autopar.examples.on_ranks import compare, is_first, on_ranks, shared_folder, train_alone

MESHES = ("dp=2,tp=2", "dp=1,tp=2")  # with four ranks, and with two
PLAN = {"*.up.weight": ("tp", None), "*.up.bias": ("tp",), "*.down.weight": (None, "tp")}
ROWS, STEPS, EVERY, LEFT = 16, 12, 4, 7  # the loop is left after step 7: steps 5 to 7 are lost


class Regression(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 32), torch.nn.Linear(32, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.mse_loss(self.down(torch.relu(self.up(x))), y)


def model() -> Regression:
    torch.manual_seed(0)
    return Regression()


def data() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Batches; a ``StatefulDataLoader`` of torchdata is used in the same way."""
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randn(ROWS, 8, generator=generator) for _ in range(5)]
    return [(x, x.sum(1, keepdim=True)) for x in rows]


def train(folder: str, losses: dict[int, float], leave_after: int = STEPS) -> int:
    """Take the steps that are left, note their losses, and return how many steps were taken before."""
    chosen = autopar.elastic.choose(*MESHES, global_batch=ROWS, micro_batch=4)
    parallel = autopar.parallelize(model(), chosen.mesh, PLAN)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2)
    step = parallel.train_step(optimizer, microbatches=chosen.microbatches)
    batches = autopar.elastic.batches(folder, step, data(), steps=STEPS, every=EVERY)
    for batch in batches:
        loss = step(batch)
        losses[step.steps] = loss.item()
        if step.steps == leave_after:
            break
    parallel.close()
    return batches.start.taken


def main() -> None:
    losses: dict[int, float] = {}
    with shared_folder() as own:
        folder = os.environ.get("FOLDER")
        if folder is None:  # nobody can take a host away
            train(str(own), losses, leave_after=LEFT)
        before = train(folder or str(own), losses)
    if is_first():
        print(f"the last start went on after step {before} of {STEPS}")
        single = model()
        batches = [data()[k % len(data())] for k in range(STEPS)]
        alone = train_alone(lambda batch: single(*batch), torch.optim.AdamW(single.parameters(), lr=1e-2), batches)
        taken = sorted(losses)  # by this process; those before a restart were printed by others
        compare("loss", [losses[k] for k in taken], [alone[k - 1] for k in taken], [f"step {k}" for k in taken])


if __name__ == "__main__":
    on_ranks(main)
