"""Dropout inside attention kernels: each draws its own mask, its backward and a recomputation draw the same one.

On a GPU the fused kernels run, each in its dtype; elsewhere the math kernel does, with the same tests. An identity as
``v`` shows the mask: the output is then the probabilities that are kept.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from equality import relative
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from transformers import GPT2Config, GPT2LMHeadModel

import autopar
from autopar import Mesh

B, H, S, P = 4, 4, 64, 0.5


@functools.cache
def has_gpu() -> bool:
    """Whether there is a GPU that computes; a stand-in for one computes nothing."""
    return torch.cuda.is_available() and float(torch.ones(3, device="cuda").sum()) == 3.0


ON_A_GPU = pytest.mark.skipif("not has_gpu()", reason="runs on a GPU")
KERNELS = [
    pytest.param((SDPBackend.MATH, "cpu", torch.float64, 1e-10), id="math"),
    pytest.param((SDPBackend.EFFICIENT_ATTENTION, "cuda", torch.float32, 2e-3), id="efficient", marks=ON_A_GPU),
    pytest.param((SDPBackend.EFFICIENT_ATTENTION, "cuda", torch.bfloat16, 3e-2), id="efficient-bf16", marks=ON_A_GPU),
    pytest.param((SDPBackend.FLASH_ATTENTION, "cuda", torch.bfloat16, 3e-2), id="flash", marks=ON_A_GPU),
    pytest.param((SDPBackend.CUDNN_ATTENTION, "cuda", torch.bfloat16, 3e-2), id="cudnn", marks=ON_A_GPU),
]


class Attention(nn.Module):
    """Attention of three arguments with dropout."""

    def __init__(self, causal: bool = False, again: bool = False) -> None:
        super().__init__()
        self.causal, self.again = causal, again

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if self.again:
            return checkpoint(self.attend, q, k, v, use_reentrant=False)
        return self.attend(q, k, v)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=P, is_causal=self.causal)


@pytest.fixture
def kernel(request: pytest.FixtureRequest) -> Iterator[tuple[str, torch.dtype, float]]:
    backend, device, dtype, tolerance = request.param
    with sdpa_kernel(backend):
        yield device, dtype, tolerance


def operands(device: str, dtype: torch.dtype, rows: int = B) -> list[torch.Tensor]:
    return [torch.randn(rows, H, S, S, device=device, dtype=dtype) for _ in range(3)]


def plan(rows: str | None, heads: str | None) -> dict[str, tuple[str | None, ...]]:
    return dict.fromkeys(("q", "k", "v"), (rows, heads, None, None))


def kept(parallel: autopar.Parallel, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Where the mask keeps a probability: with an identity as ``v`` the output is the probabilities that are kept."""
    eye = torch.eye(S, device=q.device, dtype=q.dtype).expand(q.shape).contiguous()
    return parallel.simulate(q, k, eye).detach() != 0


def expected(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Attention with this mask, in float64."""
    scores = (q.double() @ k.double().transpose(-1, -2)) / S**0.5
    return (scores.softmax(-1) * mask / (1 - P)) @ v.double()


@pytest.mark.parametrize("kernel", KERNELS, indirect=True)
@pytest.mark.parametrize("again", [False, True], ids=["kept", "recomputed"])
def test_the_backward_draws_the_mask_of_the_forward(kernel: tuple[str, torch.dtype, float], again: bool) -> None:
    """Outputs and gradients beside attention with the mask that the forward has shown."""
    device, dtype, tolerance = kernel
    q, k, v = (x.requires_grad_() for x in operands(device, dtype))
    parallel = autopar.parallelize(Attention(again=again), Mesh(dp=2, tp=2), plan("dp", "tp"))
    torch.manual_seed(3)
    mask = kept(parallel, q, k)
    assert 0.4 < mask.double().mean() < 0.6
    torch.manual_seed(3)
    out = parallel.simulate(q, k, v)
    wanted = expected(q, k, v, mask)
    assert relative(out.double(), wanted) <= tolerance
    given = torch.randn_like(out)
    found = torch.autograd.grad(out, (q, k, v), given)
    for gradient, want in zip(found, torch.autograd.grad(wanted, (q, k, v), given.double()), strict=True):
        assert relative(gradient.double(), want.double()) <= tolerance


@pytest.mark.parametrize("kernel", KERNELS, indirect=True)
def test_pieces_and_calls_have_masks_of_their_own(kernel: tuple[str, torch.dtype, float]) -> None:
    """Rows and heads on other ranks, and the same rows in another call; replicas must agree to be joined at all."""
    device, dtype, _ = kernel
    q, k, _ = operands(device, dtype, rows=1)
    q, k = (x[:, :1].expand(B, H, S, S).contiguous() for x in (q, k))
    parallel = autopar.parallelize(Attention(), Mesh(dp=2, tp=2), plan("dp", None))
    first, second = kept(parallel, q, k), kept(parallel, q, k)
    pieces = [first[:2], first[2:], second[:2], second[2:]]
    assert all(not torch.equal(a, b) for n, a in enumerate(pieces) for b in pieces[:n])
    split = autopar.parallelize(Attention(), Mesh(tp=2), plan(None, "tp"))
    heads = kept(split, q, k)
    assert not torch.equal(heads[:, :2], heads[:, 2:])


class Block(nn.Module):
    """Attention with dropout between projections."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(S, 3 * S, bias=False), nn.Linear(S, S, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.into(x).view(*x.shape[:2], 3, 1, S).permute(2, 0, 3, 1, 4)
        return x + self.out(F.scaled_dot_product_attention(q, k, v, dropout_p=P).squeeze(1))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for layer in self.layers:
            x = layer(x)
        return x.float().square().mean(), x


@pytest.mark.long
@pytest.mark.parametrize("kernel", KERNELS, indirect=True)
def test_a_recomputed_block_draws_the_same_mask(kernel: tuple[str, torch.dtype, float]) -> None:
    """A step that recomputes its blocks updates as one that keeps them."""
    device, dtype, tolerance = kernel
    torch.manual_seed(0)
    model, x = Stack().to(device, dtype), torch.randn(B, S, S, device=device, dtype=dtype)
    updated = []
    for recompute in (None, "blocks"):
        own = copy.deepcopy(model)
        parallel = autopar.parallelize(own, Mesh(dp=2), "ddp")
        step = parallel.train_step(torch.optim.SGD(parallel.parameters(), lr=1.0), recompute=recompute)
        torch.manual_seed(1)
        step.simulate(x)
        updated.append([p.detach().clone() for p in own.parameters()])
    for one, other, before in zip(*updated, model.parameters(), strict=True):
        assert relative(one - before, other - before) <= tolerance
        assert not torch.equal(one, before)


@pytest.mark.long
@pytest.mark.parametrize("kernel", KERNELS, indirect=True)
def test_micro_batches_have_masks_of_their_own(kernel: tuple[str, torch.dtype, float]) -> None:
    """Of the same rows in two micro-batches, on each rank."""
    device, dtype, _ = kernel
    model, half = Stack().to(device, dtype), torch.randn(2, S, S, device=device, dtype=dtype)
    parallel = autopar.parallelize(model, Mesh(dp=2), "ddp")
    step = parallel.train_step(torch.optim.SGD(parallel.parameters(), lr=0.0), microbatches=2, returns="outputs")
    _, out = step.simulate(torch.cat([half[:1], half[:1], half[:1], half[:1]]))
    assert all(not torch.equal(out[a], out[b]) for a in range(4) for b in range(a))


@ON_A_GPU
@pytest.mark.long
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("amp", [None, "bf16-O1"])
def test_gpt2_trains_with_its_default_dropout(attention: str, amp: str | None) -> None:
    config = GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=128, n_positions=64, use_cache=False)
    config._attn_implementation = attention
    assert config.attn_pdrop == 0.1
    model, ids = GPT2LMHeadModel(config).cuda(), torch.randint(128, (8, 64), device="cuda")
    parallel = autopar.parallelize(model, Mesh(dp=2, tp=2), "megatron")
    step = parallel.train_step(torch.optim.AdamW(parallel.parameters(), lr=1e-2), amp=amp, recompute="blocks")
    losses = [float(step.simulate({"input_ids": ids, "labels": ids})) for _ in range(20)]
    assert losses[-1] < losses[0] - 0.3
