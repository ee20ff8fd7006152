"""Ops that are seldom in models, in a model: on a mesh they give the single device's numbers, forward and backward."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import autopar
from autopar import CaptureError, Mesh

Function = Callable[[Tensor], Tensor]


def pairs(y: Tensor) -> Tensor:
    return y.reshape(-1, 2, 2)


def positive(y: Tensor) -> Tensor:
    return pairs(y) @ pairs(y).mT + torch.eye(2, dtype=y.dtype)


def written(y: Tensor) -> Tensor:
    """A write into a view by strides is seen in what it is a view of."""
    z = y * 2
    z.as_strided((4, 3), (8, 2), 1).mul_(3)
    return z


def number(y: Tensor) -> Tensor:
    """What has no dims may be asked for its first."""
    total = y.sum()
    first = torch.tensor([0])
    looked_up = (
        total.gather(0, first) + total.index_select(0, first[0]) + total.index_add(0, first, total) + total.mean(-1)
    )
    return looked_up + torch.var_mean(total, 0, correction=0)[1]


def padded(y: Tensor) -> Tensor:
    targets = torch.tensor([[3, 0, -1, 1, 2, 4, 5, 6], [-1] * 8, [7, 1, 2, -1, -1, -1, -1, -1], list(range(8))])
    return torch.stack([F.multilabel_margin_loss(y, targets, reduction=how) for how in ("mean", "sum")])


CONSTANT = torch.linspace(1, 2, 8, dtype=torch.float64)


def of_a_constant(y: Tensor) -> Tensor:
    """In place, on a copy of a tensor that is no part of the model."""
    copy = CONSTANT.clone()
    copy.add_(y[0])
    return F.cosine_similarity(y, CONSTANT.expand(4, 8)) * copy.sum()


CASES: dict[str, Function] = {
    "as_strided, windows": lambda y: y.as_strided((4, 7, 2), (8, 1, 1)),
    "as_strided, a transpose": lambda y: y.as_strided((8, 4), (1, 8)),
    "as_strided, a part": lambda y: y.as_strided((2, 3), (8, 2), 5),
    "as_strided, of a transpose": lambda y: y.t().as_strided((4, 2), (8, 3)),
    "as_strided, written": written,
    "circular padding": lambda y: F.pad(y[None], (1, 2), mode="circular"),
    "stft": lambda y: torch.stft(
        y.reshape(2, 16), 8, 4, window=torch.ones(8, dtype=y.dtype), return_complex=True
    ).abs(),
    "fft": lambda y: torch.fft.rfft(y).abs(),
    "fft over the split dim": lambda y: torch.fft.ifft(torch.fft.fft(y, dim=0), dim=1).real,
    "polar": lambda y: torch.view_as_real(torch.polar(y.abs(), y)).sum(-1),
    "lists": lambda y: sum(torch._foreach_mul(torch._foreach_add([y, y * 2], 1.0), [2.0, 3.0])),
    "norms of lists": lambda y: torch.stack(torch._foreach_norm([y, y * 2])),
    "grouped convolution": lambda y: F.conv1d(y.reshape(4, 4, 2), torch.ones(4, 2, 1, dtype=y.dtype), groups=2),
    "group norm": lambda y: F.group_norm(y.reshape(4, 4, 2), 2),
    "rms norm": lambda y: F.rms_norm(y, (8,)),
    "distances": lambda y: torch.cdist(y, y * 2 + 1),
    "distances of rows": torch.pdist,
    "dist": lambda y: torch.dist(y, y * 2),
    "renorm": lambda y: torch.renorm(y, 2, 0, 1.0),
    "unfold": lambda y: y.unfold(1, 3, 2),
    "cummax": lambda y: y.cummax(1)[0],
    "median": lambda y: y.median(1)[0],
    "quantile": lambda y: y.quantile(0.3, dim=1),
    "aminmax": lambda y: sum(y.aminmax(dim=1)),
    "nansum": lambda y: y.nansum(0),
    "solve": lambda y: torch.linalg.solve(positive(y), pairs(y)),
    "solve, of a slice": lambda y: torch.linalg.solve(y[:, 1:5], y[:, 4:]),
    "det": lambda y: torch.linalg.det(pairs(y)),
    "det, of a slice": lambda y: torch.linalg.det(y[:, 1:5]),
    "slogdet, of a transpose": lambda y: torch.linalg.slogdet(y[:, :4].mT)[1],
    "variance of complex numbers": lambda y: sum(
        part.abs().sum() for part in torch.var_mean(torch.view_as_complex(y.reshape(4, 4, 2)), 0)
    ),
    "truth of complex numbers": lambda y: y * torch.view_as_complex(y.reshape(4, 4, 2)).all(0).any(),
    "multilabel margin": padded,
    "margin of one target": lambda y: torch.stack(
        [F.multi_margin_loss(y, torch.arange(4), weight=y.detach()[0].exp(), reduction=how) for how in ("mean", "sum")]
    ),
    "gaussian loss": lambda y: F.gaussian_nll_loss(y, y.detach() + 1, y.exp(), full=True),
    "a number": number,
    "a constant": of_a_constant,
    "inverse": lambda y: torch.linalg.inv(positive(y)),
    "cholesky": lambda y: torch.linalg.cholesky(positive(y)),
    "svd": lambda y: torch.linalg.svd(pairs(y))[1],
    "eigh": lambda y: torch.linalg.eigh(positive(y))[0],
    "cross": lambda y: torch.linalg.cross(y[:, :3], y[:, 3:6]),
    "grid_sample": lambda y: F.grid_sample(
        y.reshape(2, 2, 2, 4), torch.tanh(y.reshape(2, 2, 4, 2)), align_corners=False
    ),
    "interpolate": lambda y: F.interpolate(y.reshape(4, 2, 2, 2), scale_factor=2, mode="bilinear"),
    "max_unpool": lambda y: F.max_unpool1d(*F.max_pool1d(y.reshape(4, 2, 4), 2, return_indices=True), 2),
    "kron": lambda y: torch.kron(y, y),
    "rot90": lambda y: y.rot90(),
    "diag_embed": torch.diag_embed,
    "scatter_reduce": lambda y: torch.zeros(4, 3, dtype=y.dtype).scatter_reduce(
        1, torch.arange(8).repeat(4, 1) % 3, y, "amax"
    ),
    "embedding_bag": lambda y: F.embedding_bag(torch.arange(8).reshape(2, 4) % 4, y),
    "masked_scatter": lambda y: y.masked_scatter(y > 0, y * 2),
}
if torch.__version__.startswith("2.11."):  # there one has no derivative, and the other reads values
    del CASES["aminmax"], CASES["quantile"]


class Model(torch.nn.Module):
    """A layer whose weight is split, and the op."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(6, 8).double()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.layer(x))


@pytest.mark.parametrize("name", CASES)
def test_an_op_in_a_model(name: str) -> None:
    torch.manual_seed(0)
    model, x = Model(CASES[name]), torch.randn(4, 6, dtype=torch.float64)
    want = model(x)
    gradients = torch.autograd.grad(want.square().sum(), list(model.parameters()))
    parallel = autopar.parallelize(model, Mesh(dp=2, tp=2), {"*.layer.weight": ("tp", None)}, example=(x,), strict=True)
    have = parallel.simulate(x)
    assert torch.allclose(have, want, rtol=1e-10, atol=1e-10)
    for a, b in zip(torch.autograd.grad(have.square().sum(), list(model.parameters())), gradients, strict=True):
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "function,says",
    [
        (lambda y: y[:, :4].as_strided((2, 2), (8, 1)), "gaps in its memory"),
        (lambda y: y[:2].as_strided((4, 8), (8, 1)), "a part of"),
    ],
)
def test_strides_that_reach_outside_are_refused(function: Function, says: str) -> None:
    with pytest.raises(CaptureError, match=says):
        autopar.parallelize(Model(function), Mesh(dp=2), "ddp", example=(torch.randn(4, 6, dtype=torch.float64),))
