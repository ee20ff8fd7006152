"""Layers, losses and functions of torch, one at a time: on a split batch they give what they give on one device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autopar
from autopar import Mesh
from autopar.capture.decompose import table

TOLERANCE = 1e-10
pytestmark = pytest.mark.filterwarnings("ignore:reduction. .mean. divides the total loss")  # KLDivLoss, about its name
BATCH, WIDTH = 8, 6


class Apply(nn.Module):
    """A function as a model."""

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        return self.function(*args)


def real(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64).requires_grad_()


def share(*shape: int) -> torch.Tensor:
    """Numbers between 0.1 and 0.9."""
    return (0.1 + 0.8 * torch.rand(shape, dtype=torch.float64)).requires_grad_()


def kinds(*shape: int, below: int = WIDTH) -> torch.Tensor:
    return torch.randint(0, below, shape)


def fixed(*shape: int) -> torch.Tensor:
    """Targets and weights, which need no gradient."""
    return share(*shape).detach()


def signs(*shape: int) -> torch.Tensor:
    return torch.where(torch.rand(shape) < 0.5, -1.0, 1.0).double()


Arguments = Callable[[], tuple[torch.Tensor, ...]]
Case = tuple[str, Callable[[], nn.Module], Arguments]


def one() -> tuple[torch.Tensor, ...]:
    return (real(BATCH, WIDTH),)


def two() -> tuple[torch.Tensor, ...]:
    return real(BATCH, WIDTH), share(BATCH, WIDTH)


def cube() -> tuple[torch.Tensor, ...]:
    return (real(BATCH, 4, WIDTH),)


def _name(layer: nn.Module) -> str:
    """What a layer prints as; before torch 2.12 a norm does not say that it has no bias."""
    lacks = isinstance(layer, nn.LayerNorm) and layer.bias is None and "bias" not in str(layer)
    return f"{layer}{', without a bias' * lacks}"


LAYERS: list[Case] = [
    (_name(made), layer, one)
    for layer in (
        nn.ReLU, nn.ReLU6, nn.GELU, lambda: nn.GELU(approximate="tanh"), nn.SiLU, nn.Mish, nn.Sigmoid, nn.Tanh, nn.ELU,
        lambda: nn.ELU(1.5), nn.SELU, nn.CELU, lambda: nn.CELU(1.5), nn.LeakyReLU, nn.Hardtanh, nn.Hardsigmoid,
        nn.Hardswish, nn.Hardshrink, nn.Softshrink, nn.Tanhshrink, nn.Softsign, nn.Softplus, lambda: nn.Softplus(2, 1),
        nn.LogSigmoid, lambda: nn.Threshold(0.1, 0.2), nn.GLU, nn.PReLU, lambda: nn.PReLU(WIDTH), lambda: nn.Softmin(1),
        lambda: nn.Softmax(1), lambda: nn.LogSoftmax(1), nn.Identity, nn.Flatten, lambda: nn.Unflatten(1, (2, 3)),
        lambda: nn.Linear(WIDTH, 5), lambda: nn.Linear(WIDTH, 5, bias=False), lambda: nn.LayerNorm(WIDTH),
        lambda: nn.LayerNorm(WIDTH, bias=False), lambda: nn.LayerNorm(WIDTH, elementwise_affine=False),
        lambda: nn.RMSNorm(WIDTH), lambda: nn.RMSNorm(WIDTH, elementwise_affine=False),
    )
    for made in [layer()]
] + [
    ("Linear on a sequence", lambda: nn.Linear(WIDTH, 5), cube),
    ("LayerNorm of two dims", lambda: nn.LayerNorm((4, WIDTH)), cube),
    ("LayerNorm of a sequence", lambda: nn.LayerNorm(WIDTH), cube),
    ("RMSNorm of two dims", lambda: nn.RMSNorm((4, WIDTH)), cube),
    ("Softmax of the middle", lambda: nn.Softmax(1), cube),
    ("Softmax of the batch", lambda: nn.Softmax(0), one),
    ("Embedding", lambda: nn.Embedding(WIDTH, 5), lambda: (kinds(BATCH),)),
    ("Embedding with padding", lambda: nn.Embedding(WIDTH, 5, padding_idx=2), lambda: (kinds(BATCH, 4),)),
    ("Embedding by frequency", lambda: nn.Embedding(WIDTH, 5, scale_grad_by_freq=True), lambda: (kinds(BATCH, 4),)),
    ("Bilinear", lambda: nn.Bilinear(WIDTH, WIDTH, 3), two),
    ("CosineSimilarity", lambda: nn.CosineSimilarity(), two),
    ("PairwiseDistance", lambda: nn.PairwiseDistance(), two),
]  # fmt: skip


def losses(reduction: str) -> list[Case]:
    """Every loss with one reduction."""

    def options(**more: Any) -> dict[str, Any]:
        return {"reduction": reduction, **more}

    weights = torch.linspace(0.2, 1.5, WIDTH, dtype=torch.float64)
    scores = lambda: (real(BATCH, WIDTH), kinds(BATCH))  # noqa: E731
    logs = lambda: (real(BATCH, WIDTH), fixed(BATCH, WIDTH).log())  # noqa: E731
    pair = lambda: (real(BATCH, WIDTH), fixed(BATCH, WIDTH))  # noqa: E731
    shares = lambda: (share(BATCH, WIDTH), fixed(BATCH, WIDTH))  # noqa: E731
    rows: list[Case] = [
        ("CrossEntropy", lambda: nn.CrossEntropyLoss(**options()), scores),
        ("CrossEntropy with weights", lambda: nn.CrossEntropyLoss(**options(weight=weights)), scores),
        ("CrossEntropy smoothed", lambda: nn.CrossEntropyLoss(**options(label_smoothing=0.1)), scores),
        ("CrossEntropy smoothed with "
         "weights", lambda: nn.CrossEntropyLoss(**options(label_smoothing=0.1, weight=weights)), scores),
        ("CrossEntropy that ignores", lambda: nn.CrossEntropyLoss(**options(ignore_index=2)), scores),
        ("CrossEntropy of shares", lambda: nn.CrossEntropyLoss(**options()), pair),
        ("CrossEntropy of places", lambda: nn.CrossEntropyLoss(**options()),
         lambda: (*cube(), kinds(BATCH, WIDTH, below=4))),
        ("NLL", lambda: nn.NLLLoss(**options()), scores),
        ("NLL with weights", lambda: nn.NLLLoss(**options(weight=weights, ignore_index=1)), scores),
        ("MSE", lambda: nn.MSELoss(**options()), pair),
        ("MSE of two", lambda: nn.MSELoss(**options()), two),
        ("L1", lambda: nn.L1Loss(**options()), pair),
        ("SmoothL1", lambda: nn.SmoothL1Loss(**options()), pair),
        ("SmoothL1 with beta", lambda: nn.SmoothL1Loss(**options(beta=0.3)), two),
        ("SmoothL1 without beta", lambda: nn.SmoothL1Loss(**options(beta=0.0)), pair),
        ("Huber", lambda: nn.HuberLoss(**options()), pair),
        ("Huber with delta", lambda: nn.HuberLoss(**options(delta=0.3)), two),
        ("SoftMargin", lambda: nn.SoftMarginLoss(**options()), lambda: (real(BATCH, WIDTH), signs(BATCH, WIDTH))),
        ("BCE", lambda: nn.BCELoss(**options()), shares),
        ("BCE with weights", lambda: nn.BCELoss(**options(weight=weights)), shares),
        ("BCE with logits", lambda: nn.BCEWithLogitsLoss(**options()), pair),
        ("BCE with logits and weights",
         lambda: nn.BCEWithLogitsLoss(**options(weight=weights, pos_weight=weights.flip(0))), pair),
        ("KLDiv", lambda: nn.KLDivLoss(**options()), pair),
        ("KLDiv of logs", lambda: nn.KLDivLoss(**options(log_target=True)), logs),
        ("PoissonNLL", lambda: nn.PoissonNLLLoss(**options()), pair),
        ("MarginRanking", lambda: nn.MarginRankingLoss(**options(margin=0.2)),
         lambda: (real(BATCH), real(BATCH), signs(BATCH))),
        ("HingeEmbedding", lambda: nn.HingeEmbeddingLoss(**options()),
         lambda: (real(BATCH, WIDTH), signs(BATCH, WIDTH))),
        ("CosineEmbedding", lambda: nn.CosineEmbeddingLoss(**options()), lambda: (*two(), signs(BATCH))),
        ("TripletMargin", lambda: nn.TripletMarginLoss(**options()), lambda: (*two(), real(BATCH, WIDTH))),
    ]  # fmt: skip
    return [(f"{name}, {reduction}", make, args) for name, make, args in rows]


LOSSES = [row for reduction in ("mean", "sum", "none") for row in losses(reduction)] + [
    ("KLDiv, batchmean", lambda: nn.KLDivLoss(reduction="batchmean"), lambda: (real(BATCH, WIDTH), fixed(BATCH, WIDTH)))
]


def set_column(a: torch.Tensor) -> torch.Tensor:
    a = a * 1
    a[:, 0] = 2.0
    a[:, 1:3] = a[:, 3:5]
    return a


FUNCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "cat": lambda a, b: torch.cat([a, b], 1),
    "cat of batches": lambda a, b: torch.cat([a, b], 0),
    "stack": lambda a, b: torch.stack([a, b], 1),
    "stack of batches": lambda a, b: torch.stack([a, b]),
    "chunk": lambda a, b: a.chunk(2, 1)[0] * b.chunk(2, 1)[1],
    "chunk of batches": lambda a, b: a.chunk(2, 0)[0] * b.chunk(2, 0)[1],
    "split": lambda a, b: a.split([2, 4], 1)[1] + b.split(4, 1)[0],
    "unbind": lambda a, b: a.unbind(1)[2] + b.unbind(1)[0],
    "slice": lambda a, b: a[:, 1:4] * b[:, ::2],
    "slice of batches": lambda a, b: a[2:5] + b[:3],
    "select": lambda a, b: a[:, 2] * b[:, -1],
    "select of batches": lambda a, b: a[0] + b[3],
    "einsum bi,bj->bij": lambda a, b: torch.einsum("bi,bj->bij", a, b),
    "einsum bi,bi->b": lambda a, b: torch.einsum("bi,bi->b", a, b),
    "einsum bi,ci->bc": lambda a, b: torch.einsum("bi,ci->bc", a, b),
    "einsum bi,bj->ij": lambda a, b: torch.einsum("bi,bj->ij", a, b),
    "bmm": lambda a, b: torch.bmm(a[:, :, None], b[:, None]),
    "baddbmm": lambda a, b: torch.baddbmm(a[:, None], a[:, :, None], b[:, None]),
    "addmm": lambda a, b: torch.addmm(b[:, :1], a, b.T, beta=0.5),
    "matmul": lambda a, b: a @ b.T,
    "mv": lambda a, b: a @ b[0],
    "dot": lambda a, b: torch.dot(a[:, 0], b[:, 1]),
    "outer": lambda a, b: torch.outer(a[:, 0], b[:, 1]),
    "tensordot": lambda a, b: torch.tensordot(a, b, dims=([0], [0])),
    "normalize": lambda a, b: F.normalize(a, dim=1) + F.normalize(b, dim=0),
    "cosine_similarity": lambda a, b: F.cosine_similarity(a, b),
    "norm": lambda a, b: a.norm(dim=1) + torch.linalg.vector_norm(b, dim=1, ord=1) + a.norm() + b.norm(p=3, dim=1),
    "mean": lambda a, b: a.mean() + b.mean(0) + a.mean(1, keepdim=True),
    "var": lambda a, b: a.var() + b.var(0) + a.var(1, keepdim=True) + b.var(0, correction=0),
    "std": lambda a, b: a.std() + b.std(0) + a.std(1, keepdim=True),
    "var_mean": lambda a, b: torch.var_mean(a, 0)[0] + torch.var_mean(b, 0, keepdim=True)[1],
    "max": lambda a, b: a.max(1).values + b.max() + a.amax(1) + b.min(1)[0] + a.amin(),
    "max of batches": lambda a, b: a.max(0).values + b.amax(0) + a.amin(0),
    "order": lambda a, b: a.topk(2, 1)[0] + b.sort(1)[0][:, :2] + a.argmax(1, keepdim=True) * b[:, :2],
    "running": lambda a, b: a.cumsum(1) + b.cumsum(0) + b.cumprod(1),
    "prod": lambda a, b: a.prod(1) + b.logsumexp(1) + a.logsumexp(0).sum(),
    "bounds": lambda a, b: (
        a.clamp(-0.5, 0.5) + b.clamp(min=0.3) + a.clamp(max=0.1) + a.clamp(min=b) + torch.maximum(a, b)
    ),
    "where": lambda a, b: torch.where(a > 0, a, b) + torch.where(a > 0, a, 0.0) + a.masked_fill(b > 0.5, -1.0),
    "masked softmax": lambda a, b: a.masked_fill(b > 0.8, float("-inf")).softmax(1),
    "powers": lambda a, b: a**2 + b**0.5 + b**a + 2**a + 1 / b + (1 - a) / b,
    "exponents": lambda a, b: (
        a.exp() + b.log() + b.log1p() + b.sqrt() + b.rsqrt() + a.expm1() + b.log2() + b.log10() + a.exp2()
    ),
    "angles": lambda a, b: a.sin() + a.cos() + a.tan() + a.atan() + b.asin() + b.acos() + torch.atan2(a, b),
    "hyperbolas": lambda a, b: a.sinh() + a.cosh() + a.asinh() + (b + 1).acosh() + b.atanh() + torch.hypot(a, b),
    "special": lambda a, b: (
        a.erf() + a.erfc() + b.erfinv() + b.lgamma() + b.digamma() + torch.sinc(a) + torch.logit(b) + torch.xlogy(a, b)
    ),
    "rounding": lambda a, b: (
        a.abs() + a.sign() + a.floor() + a.ceil() + a.round() + a.trunc() + a.frac() + a % b + torch.fmod(a, 0.7)
    ),
    "mixtures": lambda a, b: (
        torch.lerp(a, b, 0.3)
        + torch.lerp(a, b, b)
        + torch.addcmul(a, b, b, value=0.5)
        + torch.addcdiv(a, a, b)
        + torch.logaddexp(a, b)
    ),
    "truth": lambda a, b: (
        ((a > b) & (a < 1) | ~(b == a)).double() * a * (b > 0.1).all(1, keepdim=True) + (b > 0.8).any()
    ),
    "numbers": lambda a, b: torch.where(a.isnan() | b.isinf(), 0.0, a) + torch.nan_to_num(b),
    "view": lambda a, b: a.view(2, 4, 6).transpose(0, 1).reshape(8, 6) * b.flatten().unflatten(0, (8, 6)),
    "permute": lambda a, b: a.view(8, 2, 3).permute(0, 2, 1).flatten(1) + b.movedim(0, 1).contiguous().T,
    "squeeze": lambda a, b: a[:, :1].squeeze(1).unsqueeze(0).squeeze() + b[:, None, 1:2].squeeze(),
    "expand": lambda a, b: a[:, None].expand(8, 3, 6) * b[:, None] + b.expand(3, 8, 6).transpose(0, 1),
    "repeat": lambda a, b: a.repeat(1, 2) + torch.tile(b, (1, 2)) + b.repeat_interleave(2, 1),
    "repeat of batches": lambda a, b: a.repeat(2, 1) + torch.cat([b, b]),
    "turns": lambda a, b: a.roll(1, 1) + b.flip(1) + a.tril() + b.triu(1) + b.flip(0),
    "pad": lambda a, b: F.pad(a, (1, 2)) + F.pad(b, (0, 3), value=1.0),
    "gather": lambda a, b: a.gather(1, (b * 5).long()) + torch.take_along_dim(b, (b * 4).long(), 1),
    "index_select": lambda a, b: a.index_select(1, torch.tensor([0, 2])) + b.index_select(1, torch.tensor([3, 3])),
    "index": lambda a, b: (
        a[:, torch.tensor([0, 2])]
        + b[torch.tensor([[0], [2]]), torch.tensor([1, 3])].sum(0)
        + a[torch.arange(8), torch.arange(8) % 6][:, None]
    ),
    "index of batches": lambda a, b: a[torch.tensor([5, 0, 0])] * b[:3],
    "put": lambda a, b: (
        a.index_put((torch.tensor([1, 4]),), b[:2]) + b.index_put((torch.tensor([1, 1]),), a[:2], accumulate=True)
    ),
    "diagonal": lambda a, b: a.diagonal() + b[:, 1:].diagonal(1).sum(),
    "attention": lambda a, b: F.scaled_dot_product_attention(
        a.view(8, 1, 2, 3), b.view(8, 1, 2, 3), a.view(8, 1, 2, 3)
    ),
    "causal attention": lambda a, b: F.scaled_dot_product_attention(
        a.view(8, 1, 2, 3), b.view(8, 1, 2, 3), b.view(8, 1, 2, 3), is_causal=True
    ),
    "one_hot": lambda a, b: F.one_hot((b * 5).long(), 6) * a[:, None],
    "constants": lambda a, b: (
        a + torch.arange(6) + torch.zeros(8, 6) + torch.ones_like(b) + a.new_full((1,), 3.0) + b.new_zeros(6)
    ),
    "softmax of batches": lambda a, b: F.softmax(a, 0) + F.log_softmax(b, 1),
    "casts": lambda a, b: a.float().double() + b.double(),
    "in place": lambda a, b: (a * 1).add_(b).mul_(2).relu_() + (b * 1).masked_fill_(a > 0.5, 0),
    "set": lambda a, b: set_column(a) + b,
    "meshgrid": lambda a, b: torch.meshgrid(a[:, 0], b[0], indexing="ij")[0] + b,
    "clone": lambda a, b: a.clone() + b.detach(),
}

CASES = {
    name: (make, arguments)
    for name, make, arguments in [
        *LAYERS,
        *LOSSES,
        *((name, lambda f=f: Apply(f), two) for name, f in FUNCTIONS.items()),
    ]
}
assert len(CASES) == len(LAYERS) + len(LOSSES) + len(FUNCTIONS)


# functions that take dims apart, or name places in them: another way where pieces are even
EVEN_TOO = (
    "view", "permute", "squeeze", "expand", "repeat of batches", "chunk of batches", "slice of batches", "pad",
    "turns", "einsum bi,bj->ij", "matmul", "index", "put", "in place", "set", "running", "order", "attention",
    "causal attention", "softmax of batches", "tensordot", "unbind", "cat of batches", "stack of batches", "var",
    "Flatten(start_dim=1, end_dim=-1)", "Unflatten(dim=1, unflattened_size=(2, 3))", "Linear on a sequence",
    "Softmax of the batch", "LayerNorm of two dims", "Embedding with padding", "CrossEntropy of places, mean",
)  # fmt: skip


# losses whose mean, or whose sum, is there; layers and functions with other options
ALIKE = {
    *(name for name in CASES if name.endswith(", none") and not name.startswith(("CrossEntropy", "MSE", "KLDiv"))),
    *(name for name in CASES if name.endswith(", sum") and " with" in name),
    "ELU(alpha=1.5)", "CELU(alpha=1.5)", "ReLU6()", "Hardshrink(0.5)", "Softplus(beta=2, threshold=1)",
    "Linear(in_features=6, out_features=5, bias=False)", "LayerNorm of a sequence", "Softmax of the middle",
}  # fmt: skip


def ranks_of(name: str) -> int:
    """How many ranks a case is for; with the other count it is a sweep."""
    return 2 if name.endswith(", sum") else 3


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        *(
            pytest.param(
                name,
                ranks_of(name),
                marks=pytest.mark.sweep("its op and its rule are there in another case") if name in ALIKE else (),
            )
            for name in CASES
        ),
        *((name, 2) for name in EVEN_TOO),
        *(
            pytest.param(
                name,
                5 - ranks_of(name),
                marks=pytest.mark.sweep("the other count is there, or the loss with another reduction"),
            )
            for name in CASES
            if name not in EVEN_TOO
        ),
    ],
)
def test_split_batch_equals_one_device(name: str, ranks: int) -> None:
    """Outputs and all gradients, on batches that come apart evenly (8 over 2) and not (8 over 3)."""
    torch.manual_seed(0)
    make, arguments = CASES[name]
    model, args = make().double(), arguments()
    parallel = autopar.parallelize(copy.deepcopy(model), Mesh(dp=ranks), "ddp", example=args)
    found = []
    for run, owner in ((model, model), (parallel.simulate, parallel.module)):
        own = [a.detach().clone().requires_grad_(a.requires_grad) for a in args]
        output = run(*own)
        if output.requires_grad:
            output.backward(torch.linspace(0.5, 1.5, output.numel(), dtype=output.dtype).reshape(output.shape))
        tensors = {"output": output, **{f"argument {k}": a.grad for k, a in enumerate(own)}}
        found.append({**tensors, **{key: p.grad for key, p in owner.named_parameters()}})
    wanted, have = found
    for key, value in wanted.items():
        assert (value is None) == (have[key] is None), key
        if value is not None:
            torch.testing.assert_close(
                have[key], value, rtol=TOLERANCE, atol=TOLERANCE, msg=lambda m, key=key: f"{key}: {m}"
            )


def test_squeeze_leaves_a_batch_of_one_a_rank() -> None:
    x = real(2, 1, 3, 1)
    parallel = autopar.parallelize(
        Apply(lambda x: x.squeeze() * x.squeeze(0).squeeze(1, 3)), Mesh(dp=2), "ddp", example=(x,)
    )
    torch.testing.assert_close(parallel.simulate(x), x.squeeze() ** 2, rtol=0, atol=0)


EMPTY = {  # on a batch of 4 over 3 ranks, the last of which has nothing of it
    "a maximum": lambda x: x.amax(0) + x.max() + x.amin((0, 1)),
    "attention": lambda x: F.scaled_dot_product_attention(*[x.view(4, 1, 2, 3)] * 3),
    "a loss": lambda x: F.cross_entropy(x, torch.zeros(4, dtype=torch.int64)),
    "layer norm": lambda x: F.layer_norm(x, (WIDTH,)),
}


@pytest.mark.parametrize("function", EMPTY.values(), ids=EMPTY)
def test_ranks_without_a_piece(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = real(4, WIDTH)
    parallel = autopar.parallelize(Apply(function), Mesh(dp=3), "ddp", example=(x,))
    gradients = []
    for run in (function, parallel.simulate):
        output = run(x)
        gradients.append((output, *torch.autograd.grad(output.square().sum(), x)))
    torch.testing.assert_close(*gradients, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_decompositions_of_halves_lose_no_more_than_torch(dtype: torch.dtype) -> None:
    x = (100 * torch.rand(4, 50)).to(dtype)  # squares that float16 cannot hold
    pairs = [
        (table.linalg_vector_norm(10 * x, 2, [1]), torch.linalg.vector_norm(10 * x, dim=1)),
        (table.var(x, [1], correction=1), x.var(1)),
        (table.std(x, [1], correction=1, keepdim=True), x.std(1, keepdim=True)),
    ]
    for have, wanted in pairs:
        torch.testing.assert_close(have, wanted, rtol=torch.finfo(dtype).eps, atol=0)


class HalfPrecision(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.down(torch.relu(self.up(x))).float()


def test_gradients_of_cast_parameters_are_reduced_to_their_pieces() -> None:
    """Before they are cast back, in the narrower dtype; no rank ever holds one whole."""
    parallel = autopar.parallelize(
        HalfPrecision(), Mesh(dp=4), {"*.weight": ("dp", None)}, example=(torch.randn(16, 8),)
    )
    backward = [line for line in parallel.transfers.lines if line.phase == "backward"]
    assert [(line.transfer, line.before.partition("[")[0]) for line in backward if "all_reduce" in line.transfer] == []
    reduced = [line.before for line in backward if line.transfer == "reduce_scatter"]
    assert {"bf16[8 16] +dp", "bf16[16 8] +dp"} <= set(reduced)
