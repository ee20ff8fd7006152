"""Call models on processes as users do, on each rank beside the model on a single device."""

from __future__ import annotations

import copy
from typing import Any

import torch
from casts import PromotedCasts
from equality import TOLERANCE, loss_of, relative
from error_texts import refused
from loops import VOCABULARY, text, whole
from models import COLUMN_ROW, Language, Residual
from processes import device_mesh
from torch import distributed, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint
from transformers_models import llama

import autopar
from autopar import Mesh
from autopar.runtime.dtensors import is_dtensor

MESH = Mesh(dp=2, tp=2)


def language() -> tuple[nn.Module, nn.Module, torch.Tensor, torch.Tensor]:
    """Two of the same, ids, and labels that are unequally many in the halves of the batch."""
    torch.manual_seed(0)
    model = Language(11, layers=1).double()
    ids = torch.randint(11, (4, 6))
    labels = ids.clone()
    labels[0] = -100
    labels[1, 1:] = -100
    return model, copy.deepcopy(model), ids, labels


class Dropped(nn.Module):
    """Random ops of both phases, on split and on whole values."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = nn.functional.dropout(torch.relu(self.up(x)), 0.3)
        h = checkpoint(lambda h: nn.functional.dropout(self.down(h), 0.3), h, use_reentrant=False)
        return h + torch.rand(8, dtype=h.dtype)


def randomness() -> None:
    """Ranks that are seeded differently draw as the first does; each call anew."""
    rank = distributed.get_rank()
    plan = {"up.weight": ("tp", None), "up.bias": ("tp",), "down.weight": (None, "tp")}
    model, x = Dropped().double(), torch.randn(6, 8, dtype=torch.float64)
    eager = copy.deepcopy(model)
    single = autopar.parallelize(model, MESH, plan, random="single", outputs="global")
    for seed in (3, 4):
        torch.manual_seed(seed)
        wanted = eager(x)
        torch.manual_seed(seed + 100 * rank)
        found = single(x)
        assert relative(found, wanted) <= TOLERANCE
        wanted.square().sum().backward()
        found.square().sum().backward()
        same_gradients(single, eager)
    parallel = autopar.parallelize(model, MESH, plan, outputs="global")
    made = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed + 100 * rank)
        made.append(parallel(x))
    alike = torch.stack([y.detach() for y in made])
    every = [torch.empty_like(alike) for _ in range(4)]
    distributed.all_gather(every, alike)
    assert all(torch.equal(one, every[0]) for one in every)
    assert torch.equal(made[0], made[1]) and not torch.equal(made[1], made[2])


def same_gradients(ours: nn.Module, theirs: nn.Module) -> None:
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        if b.grad is not None:
            assert a.grad.placements == a.placements and relative(whole(a.grad), b.grad) <= TOLERANCE, name
            a.grad = b.grad = None


def inputs_and_outputs() -> None:
    """The same batch, pieces, DTensors; sharded and gathered outputs: the loss is the mean over all tokens."""
    model, eager, ids, labels = language()
    wanted = eager(ids, labels)
    (wanted["loss"] + wanted["logits"].square().sum()).backward()
    gradients = [p.grad for p in eager.parameters()]
    mesh = device_mesh(MESH)
    half = slice(None, 2) if MESH.coordinates(distributed.get_rank())["dp"] == 0 else slice(2, None)
    split = [distribute_tensor(x, mesh, (Shard(0), Replicate())) for x in (ids, labels)]
    other = [distribute_tensor(x, mesh, (Replicate(), Shard(0))) for x in (ids, labels)]
    given: list[tuple[str, Any]] = [("global", (ids, labels)), ("local", (ids[half], labels[half])), ("global", split),
                                    ("local", split), ("global", other), ("global", (split[0], labels))]  # fmt: skip
    for inputs, (x, y) in given:
        for outputs in ("sharded", "global") if x is ids else ("sharded",):
            parallel = autopar.parallelize(model, mesh, COLUMN_ROW, inputs=inputs, outputs=outputs)
            found = parallel(x, labels=y)
            assert type(found["loss"]) is torch.Tensor and relative(found["loss"], wanted["loss"]) <= TOLERANCE
            assert type(found["logits"]) is (DTensor if outputs == "sharded" else torch.Tensor)
            assert (
                found["logits"].shape == (4, 6, 11) and relative(whole(found["logits"]), wanted["logits"]) <= TOLERANCE
            )
            (found["loss"] + whole(found["logits"].square().sum())).backward()
            for p, gradient in zip(eager.parameters(), gradients, strict=True):
                p.grad = gradient
            same_gradients(parallel, eager)


def inputs_with_gradients() -> None:
    torch.manual_seed(0)
    model = Residual(8, 12).double()
    eager, mesh = copy.deepcopy(model), device_mesh(MESH)
    x = torch.randn(5, 8, dtype=torch.float64)
    theirs = x.clone().requires_grad_()
    loss_of(eager(theirs)).backward()
    parallel = autopar.parallelize(model, MESH, COLUMN_ROW)
    ours = x.clone().requires_grad_()
    loss_of(whole(parallel(ours))).backward()
    assert type(ours.grad) is torch.Tensor and relative(ours.grad, theirs.grad) <= TOLERANCE
    laid = distribute_tensor(x, mesh, (Replicate(), Shard(1))).requires_grad_()
    loss_of(whole(parallel(laid))).backward()
    assert laid.grad.placements == laid.placements and relative(whole(laid.grad), theirs.grad) <= TOLERANCE


def gradients_of_some_outputs() -> None:
    """Whatever is differentiated, also other than the last time; twice with retain_graph; summed over two forwards."""
    model, eager, ids, labels = language()
    parallel = autopar.parallelize(model, MESH, COLUMN_ROW)
    for what in ("loss", "logits", "both", "loss", "both", "loss", "loss"):
        for run in (parallel, eager):
            outputs = run(ids, labels)
            parts = {"loss": outputs["loss"], "logits": loss_of(whole(outputs["logits"]))}
            (sum(parts.values()) if what == "both" else parts[what]).backward()
        same_gradients(parallel, eager)
    for run in (parallel, eager):
        first, second = run(ids, labels)["loss"], run(labels.clamp_min(0), ids)["loss"]
        (first * 2).backward(retain_graph=True)
        first.backward()
        second.backward()
        assert "retain_graph" in refused(RuntimeError, first.backward)
    same_gradients(parallel, eager)
    loss = parallel(ids, labels)["loss"]
    with torch.no_grad():
        next(parallel.parameters()).add_(1.0)
    assert "modified by an inplace operation" in refused(RuntimeError, loss.backward)
    loss = parallel(ids, labels)["loss"]
    assert "differentiated once" in refused(RuntimeError, lambda: loss.backward(create_graph=True))


def frozen_and_tied() -> None:
    torch.manual_seed(0)
    model = llama(tie_word_embeddings=True)
    for name, parameter in model.named_parameters():
        parameter.requires_grad = "mlp" not in name
    eager = copy.deepcopy(model)
    parallel = autopar.parallelize(model, Mesh(tp=2), "megatron")
    assert [n for n, _ in parallel.named_parameters()] == [n for n, _ in eager.named_parameters()]
    assert parallel.get_parameter("lm_head.weight") is parallel.get_parameter("model.embed_tokens.weight")
    for step in range(2):
        for run in (parallel, eager):
            run(**text(step)).loss.backward()
        for (name, a), b in zip(parallel.named_parameters(), eager.parameters(), strict=True):
            assert (a.grad is None) == (b.grad is None) == ("mlp" in name), name
            assert a.grad is None or relative(whole(a.grad), b.grad) <= 1e-6
    parallel.requires_grad_(True)
    parallel(**text(0)).loss.backward()
    assert all(p.grad is not None for p in parallel.parameters()) and parallel.captures == 2


def captured_again() -> None:
    model, eager, ids, labels = language()
    parallel = autopar.parallelize(model, Mesh(dp=2), "ddp", example=(ids, labels), dynamic=False)
    for rows in (4, 3, 1, 4, 3):
        assert relative(parallel(ids[:rows], ids[:rows])["loss"], eager(ids[:rows], ids[:rows])["loss"]) <= TOLERANCE
    assert parallel.captures == 3
    parallel(ids[:2], ids[:2])
    assert "capture 4 of this model: ids is int64[2, 6] on cpu, it was int64[1, 6] on cpu" in str(parallel.reports)
    many = autopar.parallelize(model, Mesh(dp=2), "ddp", example=(ids, labels))
    for rows in (4, 3, 2, 4):
        assert relative(many(ids[:rows], ids[:rows])["loss"], eager(ids[:rows], ids[:rows])["loss"]) <= TOLERANCE
    assert many.captures == 2  # with numbers, and with symbols
    fixed = autopar.parallelize(model, Mesh(dp=2), "ddp", example=(ids, labels), recapture=False)
    fixed(ids, labels)
    fixed.eval()
    with torch.no_grad():
        fixed(ids, labels)
    fixed.train()
    said = refused(RuntimeError, lambda: fixed(ids[:3], labels[:3]))
    assert "recapture=False: ids is int64[3, 6] on cpu, it was int64[4, 6] on cpu, labels is" in said, said
    fixed(ids, labels)


def sizes_of_one() -> None:
    """Axes of one rank among others."""
    model, eager, ids, labels = language()
    parallel = autopar.parallelize(model, Mesh(dp=1, tp=4, cp=1), COLUMN_ROW)
    for run in (parallel, eager):
        run(ids, labels)["loss"].backward()
    same_gradients(parallel, eager)
    assert all(is_dtensor(p) for p in parallel.parameters())


def cache() -> None:
    """A cache that comes back is passed in again."""
    torch.manual_seed(0)
    model = llama(use_cache=True)
    eager = copy.deepcopy(model).eval()
    parallel = autopar.parallelize(model, Mesh(tp=2), "megatron").eval()
    ids = torch.randint(1, VOCABULARY, (4, 6))
    with torch.no_grad():
        ours, theirs = parallel(ids), eager(ids)
        again, wanted = (
            parallel(ids[:, :1], past_key_values=ours.past_key_values),
            eager(ids[:, :1], past_key_values=theirs.past_key_values),
        )
    assert relative(whole(again.logits), wanted.logits) <= 1e-6


def wrapped_layers() -> None:
    """Adapters and parametrizations: outputs, gradients, and where the parameters lie."""
    from wrapped import HAS_PEFT, PARAMETRIZED, Fed, lora_llama

    torch.manual_seed(0)
    x = torch.randn(4, 8, dtype=torch.float64)
    made: list[tuple[nn.Module, dict[str, Any]]] = [
        (Fed(PARAMETRIZED[name]).double(), {"x": x}) for name in ("weight norm", "spectral norm")
    ]
    if HAS_PEFT:
        made.append((lora_llama(), text(0)))
    for model, batch in made:
        eager = copy.deepcopy(model)
        parallel = autopar.parallelize(model, Mesh(tp=2), "megatron", outputs="global")
        with PromotedCasts():
            wanted, found = eager(**batch), parallel(**batch)
            loss_of(wanted).backward()
            loss_of(found).backward()
        assert relative(loss_of(found), loss_of(wanted)) <= TOLERANCE
        same_gradients(parallel, eager)
    if HAS_PEFT:
        placements = {name: parameter.placements for name, parameter in parallel.named_parameters()}
        (name,) = (name for name in placements if "q_proj.lora_B" in name)
        assert placements[name] == (Shard(0),)
