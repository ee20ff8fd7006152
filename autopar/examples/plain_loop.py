"""Train in the loop that you have: a DataLoader with a DistributedSampler, a shorter last batch, and an evaluation.

    python -m autopar.examples.plain_loop
    torchrun --nproc-per-node 4 -m autopar.examples.plain_loop

Each rank loads its own shard of a batch (``inputs="local"``). The loss is the mean over the whole batch, on all ranks.
"""

import tempfile

import torch
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

import autopar
from autopar.examples.on_ranks import compare, is_first, on_ranks

MESH = autopar.Mesh(dp=2, tp=2)
PLAN = {"*.up.weight": ("tp", None), "*.up.bias": ("tp",), "*.down.weight": (None, "tp")}
BATCH, EPOCHS = 8, 2  # rows of a batch on all ranks together


class Classifier(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(16, 64), torch.nn.Linear(64, 4)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.down(torch.relu(self.up(x)))
        return torch.nn.functional.cross_entropy(logits, labels), (logits.argmax(-1) == labels).sum()


def model() -> Classifier:
    torch.manual_seed(0)
    return Classifier()


def data(rows: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 16, generator=generator)
    return TensorDataset(x, x[:, :4].argmax(-1))


TRAIN, TEST = data(22, 1), data(21, 2)  # the last batches have 6 and 5 rows


def train(model: torch.nn.Module, shards: int, shard: int, folder: str | None = None) -> list[float]:
    """The loop, for both: return the losses of all steps, and then the accuracy on the test data."""
    sampler: DistributedSampler = DistributedSampler(TRAIN, shards, shard, seed=3)
    loader = DataLoader(TRAIN, BATCH // shards, sampler=sampler)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    model.train()
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for x, labels in loader:
            loss, _ = model(x, labels)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if folder is not None:
                autopar.log(folder, model, loss=loss)  # tokens a second, MFU, memory, loss: tensorboard --logdir FOLDER
    return [*losses, evaluate(model, shards, shard)]


@torch.no_grad()
def evaluate(model: torch.nn.Module, shards: int, shard: int) -> float:
    """Return the accuracy. Each row is on one shard: a DistributedSampler would repeat a row to make shards equal."""
    model.eval()
    right = 0
    for x, labels in DataLoader(Subset(TEST, range(shard, len(TEST), shards)), BATCH // shards):
        right += int(model(x, labels)[1])  # counted over all ranks, whose pieces may differ in size
    return right / len(TEST)


def main() -> None:
    parallel = autopar.parallelize(model(), MESH, PLAN, inputs="local")
    shard = MESH.coordinates(torch.distributed.get_rank())["dp"]  # ranks that differ in tp load the same rows
    with tempfile.TemporaryDirectory() as folder:
        ours = train(parallel, MESH.sizes["dp"], shard, folder)
    parallel.close()
    if is_first():
        steps = [f"step {k}" for k in range(1, len(ours))]
        compare("loss", ours, train(model(), shards=1, shard=0), [*steps, "test accuracy"])


if __name__ == "__main__":
    on_ranks(main)
