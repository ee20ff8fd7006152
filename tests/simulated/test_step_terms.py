"""What a loss is made of: with several micro-batches it is that of the whole batch, or a person is told that it is
not."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from presets import preset_of
from torch import nn

import autopar
from autopar import Mesh

CLASSES = 5
Loss = Callable[..., torch.Tensor]


class Scores(nn.Module):
    """A classifier with a loss of its scores, labels, a mask of rows, and the model itself."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.linear, self.loss = nn.Linear(4, CLASSES), loss
        self.register_buffer("weight", torch.tensor([0.5, 1.0, 2.0, 0.25, 1.5]))

    def forward(self, x: torch.Tensor, y: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
        return self.loss(self.linear(x), y, m, self)


def each(z: torch.Tensor) -> torch.Tensor:
    """A number for each row."""
    return z.square().mean(1)


ce = F.cross_entropy

MEANS: dict[str, Loss] = {  # equal to the whole batch's, and nobody is told anything
    "cross entropy": lambda z, y, m, s: ce(z, y),
    "by a buffer, clamped": lambda z, y, m, s: z.square().mean() / s.weight.sum().clamp(min=20),
    "by a buffer and a number": lambda z, y, m, s: ce(z, y) / (s.weight.sum() + 1),
    "by a count times a size": lambda z, y, m, s: (z.square() * m[:, None]).sum() / (m.sum() * CLASSES),
    "by twice a count": lambda z, y, m, s: (z.square() * m[:, None]).sum() / (2 * m.sum()),
    "by half a count": lambda z, y, m, s: (z.square() * m[:, None]).sum() / (m.sum() / 2),
    "by a count, then a size": lambda z, y, m, s: (z.square() * m[:, None]).sum() / m.sum() / CLASSES,
    "by a count of elements": lambda z, y, m, s: (z.square() * m[:, None]).sum() / m[:, None].expand_as(z).sum(),
    "by a count and a number": lambda z, y, m, s: (each(z) * m).sum() / (m.sum() + 1e-6),
    "a mean by a mean": lambda z, y, m, s: (each(z) * m).mean() / m.mean(),
    "a mean by a mean, by hand": lambda z, y, m, s: (each(z) * m).mean() / (m.sum() * (1 / len(m))),
    "by a mean, times rows": lambda z, y, m, s: (each(z) * m).sum() / (m.mean() * len(m)),
    "sums over a dim": lambda z, y, m, s: (each(z) * m).sum(0) / m.sum(0),
    "sums over all dims": lambda z, y, m, s: (z.square() * m[:, None]).sum((0, 1)) / m.sum(),
    "by the number of rows": lambda z, y, m, s: z.square().sum() / len(z),
    "times one by the number of rows": lambda z, y, m, s: z.square().sum() * (1 / len(z)),
    "by twice the number of rows": lambda z, y, m, s: z.square().sum() / (2 * len(z)),
    "by rows times a size": lambda z, y, m, s: z.square().sum() / (len(z) * 7),
    "by rows as a tensor": lambda z, y, m, s: z.square().sum() / torch.tensor(len(z)),
    "by rows as a full tensor": lambda z, y, m, s: z.square().sum() / z.new_full((), float(len(z))),
    "times a tensor": lambda z, y, m, s: z.square().sum() * torch.tensor(0.5 / len(z)) + 0.1 * ce(z, y),
    "batchmean": lambda z, y, m, s: F.kl_div(z.log_softmax(1), s.weight.softmax(0).expand_as(z), reduction="batchmean"),
    "stacked": lambda z, y, m, s: torch.stack([ce(z, y), ce(z, y, s.weight)]).mean(),
    "stacked, added": lambda z, y, m, s: torch.stack([ce(z, y), ce(z, y, s.weight)]).sum(),
    "unsqueezed": lambda z, y, m, s: ce(z, y).unsqueeze(0).mean(),
    "shifted by a mean of inputs": lambda z, y, m, s: ce(z, y) - m.mean(),
    "and nothing of a sum": lambda z, y, m, s: ce(z, y) + 0.0 * z.sum(),
    "and nothing of a mean": lambda z, y, m, s: ce(z, y) + 0.0 * z.mean() - (z.sum() / (len(z) - 1)) * 0,
    "with learned weights": lambda z, y, m, s: (-s.linear.bias[0]).exp() * ce(z, y) + s.linear.bias[0],
    "smoothed, weighted": lambda z, y, m, s: ce(z, y, s.weight, label_smoothing=0.1),
    "focal": lambda z, y, m,
    s: ((1 - torch.exp(-ce(z, y, reduction="none"))) ** 2 * ce(z, y, reduction="none") * m).sum() / m.sum(),
    "and the scale of scores": lambda z, y, m, s: ce(z, y) + 1e-2 * z.logsumexp(1).square().mean(),
    "huber": lambda z, y, m, s: F.huber_loss(z, torch.ones_like(z)),
    "binary": lambda z, y, m, s: F.binary_cross_entropy_with_logits(z[:, 0], m, pos_weight=s.weight[0]),
    "triplet": lambda z, y, m, s: F.triplet_margin_loss(z, z + 1, z * 2),
    "cosine": lambda z, y, m, s: F.cosine_embedding_loss(z, torch.ones_like(z), 2 * m - 1),
    "margin": lambda z, y, m, s: F.multi_margin_loss(z, y),
    "gaussian": lambda z, y, m, s: F.gaussian_nll_loss(z[:, 0], m, z[:, 1].exp()),
    "times ones": lambda z, y, m, s: (z * torch.ones(len(z), 1)).mean(),
}  # fmt: skip

SUMS: dict[str, Loss] = {  # the parts of the micro-batches add up, and nobody is told anything
    "a sum": lambda z, y, m, s: z.square().sum(),
    "a sum by a buffer": lambda z, y, m, s: z.square().sum() / s.weight.sum(),
    "a sum by a constant": lambda z, y, m, s: z.square().sum() / torch.tensor(100.0),
    "a sum by a number": lambda z, y, m, s: z.square().sum() / 101,
    "a sum by infinity": lambda z, y, m, s: z.square().sum() / float("inf"),
    "a sum by a number as of rows": lambda z, y, m, s: z.square().sum() / 6,  # a micro-batch has six rows
    "a sum by a number as of elements": lambda z, y, m, s: z.square().sum() * (1 / 30.0),
    "a sum by a mean": lambda z, y, m, s: (each(z) * m).sum() / m.mean(),
    "a sum by a mean, by hand": lambda z, y, m, s: (each(z) * m).sum() / (m.sum() * (1 / len(m))),
    "a sum of means of rows": lambda z, y, m, s: z.repeat(1, 6).square().mean(1).sum(),
    "a mean times rows": lambda z, y, m, s: ce(z, y) * len(z) - each(z).mean() / (2 / len(z)),
    "two sums": lambda z, y, m, s: ce(z, y, reduction="sum") / s.weight.sum() - 0.3 * z.sum(),
    "a sum by a buffer, beside a mean": lambda z, y, m, s: z.square().sum() / s.weight.sum() + ce(z, y),
    "a sum by a buffer, and a penalty": lambda z, y, m, s: z.sum() / s.weight.sum() + s.linear.weight.norm(),
}  # fmt: skip

NO_MEANS: dict[str, Loss] = {  # terms that are not divided by what grows with the batch, or by more than that
    "a sum beside a mean": lambda z, y, m, s: z.square().sum() + ce(z, y),
    "a sum and a penalty": lambda z, y, m, s: z.square().sum() + s.linear.weight.square().sum(),
    "both by one buffer": lambda z, y, m, s: z.square().sum() / (w := s.weight.sum()) + ce(z, y) / w,
    "by a root of a count": lambda z, y, m, s: (each(z) * m).sum() / m.sum().sqrt(),
    "by a square of a count": lambda z, y, m, s: (each(z) * m).sum() / m.sum() ** 2,
    "by a count twice": lambda z, y, m, s: (each(z) * m).sum() / m.sum() / m.sum(),
    "by less than a count": lambda z, y, m, s: (each(z) * m).sum() / (m.numel() - (1 - m).sum()),
    "by itself": lambda z, y, m, s: ce(z, y) / ce(z, y).detach(),
    "by another mean": lambda z, y, m, s: ce(z, y) / z.square().mean(),
    "shifted by a count": lambda z, y, m, s: ce(z, y) - m.sum(),
    "bent": lambda z, y, m, s: ce(z, y).tanh(),
    "a root": lambda z, y, m, s: z.square().mean().sqrt(),
    "a count in the forward": lambda z, y, m, s: (each(z * m[:, None] / (n := m.sum()) * m.sum()) * m).sum() / n,
}  # fmt: skip

FROM_ROWS: dict[str, Loss] = {  # numbers that follow from the rows in another way than as their number
    "by rows without one": lambda z, y, m, s: z.square().sum() / (len(z) - 1),
    "by a root of the rows": lambda z, y, m, s: z.square().sum() / len(z) ** 0.5,
    "by at least eight": lambda z, y, m, s: z.square().sum() / max(len(z), 8),
    "by a clamped tensor": lambda z, y, m, s: z.square().sum() / torch.as_tensor(len(z)).clamp(min=1),
    "by a sum of ones": lambda z, y, m, s: z.square().sum() / torch.ones(len(z)).sum(),
    "scaled before the loss": lambda z, y, m, s: (z * len(z) ** -0.25).square().mean(),
    "and the number of rows": lambda z, y, m, s: ce(z, y) + len(z),
    "where a loss bends": lambda z, y, m, s: F.huber_loss(z, 0 * z, delta=1 / len(z)),
    "beside a variance": lambda z, y, m, s: F.layer_norm(z, z.shape[1:], eps=1 / len(z)).pow(4).mean(),
    "a number within and outside": lambda z, y, m, s: (z * (k := torch.tensor(1 / len(z)))).square().sum() * k,
    "made within and outside": lambda z, y, m, s: (z * (k := z.new_full((), 1 / len(z)))).square().sum() * k,
    "with a power of rows": lambda z, y, m, s: ce(z, y) * 0.9 ** len(z),
    "a mean by a count with rows": lambda z, y, m, s: (each(z) * m).sum() / (m.sum() + 1 / len(z)),
}  # fmt: skip

MEETINGS: dict[str, Loss] = {  # rows are read by others
    "a mean of inputs in the forward": lambda z, y, m, s: (each(z) * (m / m.mean())).mean(),
    "each against all": lambda z, y, m, s: ce(z @ z.T, torch.arange(len(z))),
    "a sum, squared": lambda z, y, m, s: z.sum(0).square().mean() / len(z),
    "running sums": lambda z, y, m, s: z.cumsum(0).square().mean(),
    "over rows": lambda z, y, m, s: z.softmax(0).square().mean(),
    "variance": lambda z, y, m, s: ((z - z.mean(0)) ** 2).mean(),
    "distances": lambda z, y, m, s: torch.cdist(z, z).mean(),
    "neighbours": lambda z, y, m, s: (z.roll(1, 0) * z).mean(),
    "places of rows": lambda z, y, m, s: (z * torch.arange(len(z))[:, None]).mean(),
    "a table of rows": lambda z, y, m, s: ce(z, y) + (z * torch.eye(len(z), CLASSES)).mean(),
    "statistics of targets": lambda z, y, m, s: ((z.mean(1) - m) / m.std()).square().mean(),
}


def compared(loss: Loss, microbatches: int, sizes: dict[str, int]) -> tuple[float, list[str]]:
    """How far the loss and the gradients of a step are from those of the whole batch, and what a person is told."""
    torch.manual_seed(0)
    model = Scores(loss).double()
    alone, rows = copy.deepcopy(model), 12
    x, y, m = (
        torch.randn(rows, 4, dtype=torch.float64),
        torch.arange(rows) % CLASSES,
        (torch.arange(rows) % 3 != 1).double(),
    )
    y[rows // 2 : -1], m[: rows // 2] = (
        -100 if loss in (MEANS["cross entropy"], MEANS["stacked"]) else y[rows // 2 : -1],
        1,
    )
    parallel = autopar.parallelize(model, Mesh(sizes), preset_of(sizes))
    step = parallel.train_step(torch.optim.SGD(parallel.parameters(), lr=1.0), microbatches=microbatches)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ours = step.simulate(x, y, m)
    expected = alone(x, y, m)
    expected.backward()
    pairs: list[Any] = [
        (ours, expected),
        *((b - a, b.grad) for a, b in zip(model.parameters(), alone.parameters(), strict=True)),
    ]
    return max(float((a - b).detach().abs().max()) for a, b in pairs if b is not None), [
        str(one.message) for one in caught
    ]


# of which the micro-batches of one row are run; each other is a row of theirs, or has no count
OF_ONE_ROW = ("cross entropy", "a mean by a mean, by hand", "batchmean", "stacked", "times ones")
OTHERS = pytest.mark.sweep("micro-batches of six rows show its terms, and OF_ONE_ROW those of one row")


@pytest.mark.parametrize(
    ("name", "microbatches"),
    [
        *((name, 2) for name in MEANS),
        *(pytest.param(name, 12, marks=[] if name in OF_ONE_ROW else OTHERS) for name in MEANS),
    ],
)
def test_means(name: str, microbatches: int) -> None:
    """Of six rows each, and of one."""
    off, told = compared(MEANS[name], microbatches, {"dp": 2} if microbatches == 2 else {"tp": 2})
    assert off < 1e-9 and not told, (off, told)


def test_what_divides_is_unknown_where_other_sizes_fail() -> None:
    """The model cannot be captured with twice the rows, so that nobody can tell what its number is."""
    _, told = compared(lambda z, y, m, s: z.square().sum() / {4: 4, 12: 4}[len(z)], 3, {"dp": 2})
    assert len(told) == 1 and WHY[2] in told[0] and "as in loss.sum() / len(x)" in told[0], told


@pytest.mark.parametrize("name", SUMS)
def test_sums(name: str) -> None:
    off, told = compared(SUMS[name], 2, {"dp": 2})
    assert off < 1e-9 and not told, (off, told)


class Counted(nn.Module):
    """Its loss is divided by a number that counts over all micro-batches."""

    def __init__(self, beside: bool) -> None:
        super().__init__()
        self.up, self.down, self.beside = nn.Linear(4, 6), nn.Linear(6, CLASSES), beside

    def forward(self, x: torch.Tensor, y: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        z = self.down(self.up(x).tanh())
        loss = ce(z, y, reduction="sum") / count
        return loss + z.square().mean() if self.beside else loss


@pytest.mark.parametrize(
    ("sizes", "options"),
    [({"dp": 2}, {}), ({"dp": 2}, {"zero": 2, "across": True}), ({"pp": 2}, {"schedule": "1f1b"})],
    ids=str,
)
def test_a_count_that_is_passed_in(sizes: dict[str, int], options: dict[str, Any]) -> None:
    """Alone, and beside a mean; other counts need no new capture."""
    for beside in (False, True):
        torch.manual_seed(0)
        model = Counted(beside).double()
        alone = copy.deepcopy(model)
        parallel = autopar.parallelize(model, Mesh(sizes), preset_of(sizes) if "dp" in sizes else {})
        step = parallel.train_step(torch.optim.SGD(parallel.parameters(), lr=1.0), microbatches=2, **options)
        optimizer = torch.optim.SGD(alone.parameters(), lr=1.0)
        for count in (8.0, 5.0):
            x, y = torch.randn(8, 4, dtype=torch.float64), torch.arange(8) % CLASSES
            ours, expected = step.simulate(x, y, torch.tensor(count)), alone(x, y, torch.tensor(count))
            optimizer.zero_grad()
            expected.backward()
            optimizer.step()
            torch.testing.assert_close(ours, expected.detach())
        step.finish() if options.get("across") else None
        torch.testing.assert_close(dict(model.named_parameters()), dict(alone.named_parameters()))
        assert step.captures == 1


WHY = (
    "one of its terms is not a sum over the batch that is divided by a count",
    "the forward mixes rows of the batch",
    "one of its numbers follows from the number of rows, or may do so",
)
BESIDE = (
    "a sum over the batch, beside others that are not",
    "divide the sum by a count that forward takes as a tensor, or by the number of its rows, or use microbatches=1",
)


@pytest.mark.parametrize("name", [*NO_MEANS, *FROM_ROWS, *MEETINGS])
def test_what_is_told(name: str) -> None:
    """With the line of the loss; where rows have met in a term, that it is no mean, too."""
    loss = {**NO_MEANS, **FROM_ROWS, **MEETINGS}[name]
    off, told = compared(loss, 2, {"dp": 2})
    assert off > 1e-6, "it is a mean"
    assert len(told) == 1 and "test_step_terms.py" in told[0], told
    if name in ("a sum beside a mean", "a sum and a penalty", "both by one buffer", "shifted by a count"):
        assert BESIDE[0] in told[0] and told[0].endswith(f"\n  {BESIDE[1]}"), told
    else:
        kinds = (2,) if name in FROM_ROWS else (0, 1) if name in MEETINGS else (0,)
        assert any(WHY[kind] in told[0] for kind in kinds), told


ALONE = ("by a root of a count", "shifted by a count", "bent", "each against all", "variance")


@pytest.mark.parametrize(
    "name",
    [
        *ALONE,
        *(
            pytest.param(name, marks=pytest.mark.sweep("the losses in ALONE show that one micro-batch is told nothing"))
            for name in {**NO_MEANS, **MEETINGS}
            if name not in ALONE
        ),
    ],
)
def test_one_micro_batch_is_the_whole_batch(name: str) -> None:
    off, told = compared({**NO_MEANS, **MEETINGS}[name], 1, {"dp": 2})
    assert off < 1e-9 and not told, (off, told)


@pytest.mark.parametrize("cell", [nn.LSTM, nn.GRU, nn.RNN])
def test_layers_that_begin_with_zeros(cell: Any) -> None:
    """A first state of as many rows, alike in all of them."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = cell(4, 6, batch_first=True, bidirectional=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.cell(x)[0].square().mean()

    model, x = Recurrent().double(), torch.randn(8, 2, 4, dtype=torch.float64)
    expected = model(x).detach()
    parallel = autopar.parallelize(model, Mesh(dp=2, tp=2), "megatron")
    step = parallel.train_step(torch.optim.SGD(parallel.parameters(), lr=1.0), microbatches=2)
    assert abs(step.simulate(x) - expected) < 1e-12


class Noised(nn.Module):
    """Looks into a table for each row, by numbers that are drawn or given."""

    def __init__(self, rows: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.linear, self.rows, self.embedding = nn.Linear(4, 4), rows, nn.Embedding(12, 4)
        self.register_buffer("steps", torch.linspace(0.1, 1.0, 12))
        self.register_buffer("table", torch.randn(12, 4))

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return (self.linear(x) + self.rows(self, x, t)).square().mean()


def drawn(x: torch.Tensor, *more: int) -> torch.Tensor:
    return torch.randint(12, (x.shape[0], *more))


LOOKED_UP: dict[str, Callable[..., torch.Tensor]] = {  # each row by a number of its own
    "drawn": lambda m, x, t: m.steps[drawn(x)].sqrt().view(-1, 1),
    "drawn rows of a table": lambda m, x, t: m.table[drawn(x)],
    "drawn rows of a parameter": lambda m, x, t: m.embedding.weight[drawn(x)],
    "computed of what is drawn": lambda m, x, t: m.steps[(2 * drawn(x)).clamp(max=11)][:, None],
    "several for each row": lambda m, x, t: m.steps[drawn(x, 3)].sum(1, keepdim=True),
    "two numbers for each row": lambda m, x, t: m.table[drawn(x), drawn(x) % 4][:, None],
    "drawn with replacement": lambda m, x, t: m.steps[torch.multinomial(m.steps, x.shape[0], replacement=True)][
        :, None
    ],
    "gathered": lambda m, x, t: m.steps.gather(0, drawn(x))[:, None],
    "embedded": lambda m, x, t: m.embedding(drawn(x)),
    "given": lambda m, x, t: m.table[t],
    "given, of a parameter": lambda m, x, t: m.embedding.weight[t] * m.steps.gather(0, t)[:, None],
}
MET: dict[str, Callable[..., torch.Tensor]] = {  # which numbers a row gets depends on the others
    "other rows": lambda m, x, t: x[drawn(x) % x.shape[0]],
    "other rows in another order": lambda m, x, t: x[torch.randperm(x.shape[0])],
    "all different": lambda m, x, t: m.embedding(torch.randperm(x.shape[0])),
    "drawn without replacement": lambda m, x, t: m.table[torch.multinomial(m.steps, x.shape[0])],
    "sorted": lambda m, x, t: m.table[drawn(x).sort().values],
    "counted": lambda m, x, t: m.table[torch.arange(x.shape[0])],
}


def told_of(rows: Callable[..., torch.Tensor]) -> list[str]:
    parallel = autopar.parallelize(Noised(rows), Mesh(dp=2), "ddp")
    step = parallel.train_step(torch.optim.SGD(parallel.parameters(), lr=0.1), microbatches=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step.capture(torch.randn(8, 4), torch.randint(12, (8,)))
    return [str(one.message) for one in caught]


@pytest.mark.parametrize("name", LOOKED_UP)
def test_a_look_up_for_each_row_is_no_meeting(name: str) -> None:
    assert told_of(LOOKED_UP[name]) == []


@pytest.mark.parametrize("name", MET)
def test_a_look_up_that_depends_on_other_rows_is_one(name: str) -> None:
    (told,) = told_of(MET[name])
    assert WHY[1] in told and "test_step_terms.py" in told


def test_batch_norm_is_as_in_a_loop() -> None:
    """Its statistics are those of a micro-batch, and everybody knows."""
    model = Scores(lambda z, y, m, s: ce(z, y))
    model.linear = nn.Sequential(nn.Linear(4, CLASSES), nn.BatchNorm1d(CLASSES))
    alone = copy.deepcopy(model.double())
    parallel = autopar.parallelize(model, Mesh(dp=2), "ddp")
    step = parallel.train_step(torch.optim.SGD(parallel.parameters(), lr=1.0), microbatches=2)
    batch = torch.randn(12, 4, dtype=torch.float64), torch.arange(12) % CLASSES, torch.ones(12, dtype=torch.float64)
    loss = step.simulate(*batch)
    optimizer = torch.optim.SGD(alone.parameters(), lr=1.0)
    losses = [alone(*micro) / 2 for micro in zip(*(value.chunk(2) for value in batch), strict=True)]
    for each_loss in losses:
        each_loss.backward()
    optimizer.step()
    torch.testing.assert_close(loss, sum(losses).detach())
    for ours, theirs in zip(
        [*model.parameters(), *model.buffers()], [*alone.parameters(), *alone.buffers()], strict=True
    ):
        torch.testing.assert_close(ours, theirs)
