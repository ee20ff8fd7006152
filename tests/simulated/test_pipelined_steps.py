"""Pipelined steps have the numbers of a single device: each model on each mesh, in the order of each policy."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from equality import relative
from pipelined_steps import MESHES, MODELS, adamw, made, pipelined_alike
from steps import run
from torch import nn

import autopar
from autopar import Mesh
from autopar.pipeline import POLICIES

PLAIN = ("layers", "skip", "streams", "normed", "shared")
TRANSFORMERS = ("llama", "llama tied", "gpt2", "bert")
GRID = ("pp2 tp2", "pp4", "pp2 dp2")

# every policy, mesh, model and number of micro-batches is drawn; what differs between them shows in unit tests
DRAWN = [
    ("layers", "pp2 tp2", "gpipe", 3),
    ("skip", "pp4", "1f1b", 16),
    ("streams", "pp2 dp2", "eager-1f1b", 3),
    ("shared", "pp2 tp2", "interleaved-1f1b", 3),
    ("normed", "pp4", "looped-bfs", 1),
    ("streams", "pp4", "zb-h1", 3),
    ("shared", "pp4", "zb-h2", 16),
    ("skip", "pp2 dp2", "zb-v", 3),
    ("layers", "pp4", "v-half", 3),
    ("shared", "pp2 dp2", "v-min", 3),
    ("skip", "pp4", "dualpipe-v", 1),
    ("bare", "pp4", "zb-v", 3),
    ("bare", "pp2 dp2", "v-half", 3),
    ("normed", "pp2 dp2", "onnxruntime", 3),
]
LONG = [
    ("llama", "pp2 tp2", "zb-h1", 3),
    ("llama tied", "pp4", "1f1b", 1),
    ("gpt2", "pp2 dp2", "zb-h1", 3),
    ("bert", "pp2 tp2", "1f1b", 3),
]
SWEEP = pytest.mark.sweep("test_steps draws each policy, mesh, model and number of micro-batches")
MORE = [
    (name, mesh, policy, count)
    for name in (*PLAIN, *TRANSFORMERS)
    for mesh in GRID
    for count in (1, 3, 16)
    for policy in POLICIES
    if (name, mesh, policy, count) not in (*DRAWN, *LONG)
]


def layers_for(mesh: str, policy: str, name: str = "") -> int:
    stages = MESHES[mesh]["pp"] * POLICIES[policy].default
    return stages if name in TRANSFORMERS else max(4, stages)


def alike(name: str, mesh: str, policy: str, microbatches: int, **options: Any) -> Any:
    """A norm over two rows would be ± 1, and have no gradient."""
    return pipelined_alike(
        name,
        MESHES[mesh],
        policy,
        microbatches,
        layers=layers_for(mesh, policy, name),
        rows=8 if name == "normed" else 2,
        count=10 if microbatches == 1 else 3,
        clip_norm=0.5,
        **options,
    )


@pytest.mark.parametrize(
    ("name", "mesh", "policy", "microbatches"),
    [
        *(pytest.param(*case, marks=pytest.mark.long) if "normed" in case else case for case in DRAWN),
        *(pytest.param(*case, marks=pytest.mark.long) for case in LONG),
        *(pytest.param(*case, marks=[SWEEP, pytest.mark.long]) for case in MORE),
    ],
    ids=str,
)
def test_steps(name: str, mesh: str, policy: str, microbatches: int) -> None:
    step = alike(name, mesh, policy, microbatches)
    text, micro = str(step.program), str(step.program.programs["micro"])
    stages = MESHES[mesh]["pp"] * POLICIES[policy].default
    assert micro.count("\nstage s") == stages
    assert micro.count(" = send(") == micro.count(" = recv(") >= 2 * (stages - 1)
    if "tp" in mesh:
        assert "/tp" in text, "else this would test nothing"


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "mesh"),
    [pytest.param("llama", "pp2 tp2", marks=SWEEP), pytest.param("gpt2", "pp4", marks=SWEEP), ("shared", "pp2 dp2")],
)
def test_in_float32(name: str, mesh: str) -> None:
    """As people train: nothing is promoted."""
    torch.manual_seed(0)
    make, batches, plan = MODELS[name]
    model = make(4).float()
    alone = copy.deepcopy(model)
    parallel = autopar.parallelize(model, Mesh(MESHES[mesh]), ("megatron" if plan else {}) if "tp" in mesh else "ddp")
    step = parallel.train_step(torch.optim.SGD(parallel.parameters(), lr=0.05), microbatches=3, schedule="1f1b")
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.05)
    for k in range(10):
        batch = {n: t.float() if t.is_floating_point() else t for n, t in batches(6)(k).items()}
        found = alone(**batch)
        loss = found if isinstance(found, torch.Tensor) else found.loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ours = run(step, batch, promoted=False)
        assert ours.dtype == torch.float32 and relative(ours, loss) <= 1e-4
    for (where, a), b in zip(parallel.named_parameters(), alone.parameters(), strict=True):
        assert relative(a, b) <= 1e-4, where


# -- beside a step of one rank


def one_rank(name: str, microbatches: int, layers: int, model: nn.Module, **options: Any) -> Any:
    parallel = autopar.parallelize(model, Mesh(dp=1), {}, random=options.pop("random", "parallel"))
    return parallel.train_step(adamw(parallel), microbatches=microbatches, **options)


def bits(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: t.detach().clone() for name, t in (*model.named_parameters(), *model.named_buffers())}


def same_bits(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


@pytest.mark.parametrize(("name", "policy"), [
    ("layers", "1f1b"), ("normed", "gpipe"), ("streams", "onnxruntime"), ("skip", "eager-1f1b"),
    pytest.param("llama", "1f1b", marks=[pytest.mark.long, pytest.mark.sweep("layers has the same orders")]),
])  # fmt: skip
def test_bitwise_those_of_one_rank(name: str, policy: str) -> None:
    """Where a rank has one stage, and no parameter is on two: a stage runs the ops of the whole program, and adds up
    micro-batches in their order."""
    layers = layers_for("pp4", policy)
    step, _, batches = made(name, MESHES["pp4"], policy, 3, layers=layers, rows=8)
    torch.manual_seed(0)
    whole = one_rank(name, 3, layers, MODELS[name][0](layers))
    for k in range(3):
        assert torch.equal(run(step, batches(k)), run(whole, batches(k)))
        same_bits(bits(step.parallel.module), bits(whole.parallel.module))


@pytest.mark.long
@pytest.mark.parametrize("random", ["parallel", "single"])
def test_no_order_changes_a_draw(random: str) -> None:
    """Dropout draws what it does on one rank, in the order of any policy; each micro-batch has numbers of its own."""
    layers, losses = 8, {}
    batches = MODELS["noisy"][1](6)
    for policy in ("one rank", "zb-v", "looped-bfs"):
        torch.manual_seed(0)
        model = MODELS["noisy"][0](layers)
        if policy == "one rank":
            step = one_rank("noisy", 3, layers, model, random=random)
        else:
            parallel = autopar.parallelize(model, Mesh(pp=4), {}, random=random)
            step = parallel.train_step(adamw(parallel), microbatches=3, schedule=policy)
        torch.manual_seed(1)
        losses[policy] = [float(run(step, batches(k))) for k in range(3)]
    first = losses.pop("one rank")
    assert len(set(first)) == 3
    for policy, of_policy in losses.items():
        assert of_policy == pytest.approx(first, rel=1e-12), policy


def test_what_dropout_draws() -> None:
    """Masks of its own, the same on any number of stages; with ``random="single"`` those of a loop, on any mesh."""
    make, batches = MODELS["noisy"][:2]
    batch = batches(4)(0)

    def loss(random: str, sizes: dict[str, int]) -> float:
        torch.manual_seed(0)
        parallel = autopar.parallelize(make(2), Mesh(sizes), "ddp", random=random)
        step = parallel.train_step(adamw(parallel), microbatches=2, schedule="1f1b" if "pp" in sizes else None)
        torch.manual_seed(1)
        return float(step.simulate(**batch))

    torch.manual_seed(0)
    model, looped = make(2), 0.0
    torch.manual_seed(1)
    for half in range(2):
        rows = {name: tensor.chunk(2)[half] for name, tensor in batch.items()}
        looped += float(model(**rows).detach() * (rows["y"] >= 0).sum() / (batch["y"] >= 0).sum())
    own = loss("parallel", {"dp": 1})
    assert own != pytest.approx(looped, rel=1e-3)
    assert loss("parallel", {"pp": 2}) == pytest.approx(own, rel=1e-12)
    assert loss("parallel", {"pp": 2, "dp": 2}) != pytest.approx(own, rel=1e-3)
    for sizes in ({"pp": 2}, {"pp": 2, "dp": 2}):
        assert loss("single", sizes) == pytest.approx(looped, rel=1e-12)
