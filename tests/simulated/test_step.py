"""A training step as one static program has the numbers of a single device's loop: all ranks simulated."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import steps
import torch
from equality import relative
from steps import Single, adamw, differences, run, steps_alike
from torch import nn

import autopar
from autopar import Mesh
from autopar.step.program import Step

MESHES: list[dict[str, int]] = [{"dp": 4}, {"dp": 2, "tp": 2}, {"dp": 2, "cp": 2, "tp": 2}]
CASES = [*((name, MESHES[k], zero, count) for name, k, zero, count in [
    ("mlp", 1, 1, 10), ("mlp", 2, 2, 5), ("llama", 1, 3, 4), ("bert", 0, 0, 4),
])]  # fmt: skip
MORE = [
    (name, MESHES[k], zero, 10) for name, k, zero in [
        ("llama", 0, 1), ("llama", 1, 2), ("gpt2", 0, 2), ("gpt2", 2, 0), ("bert", 1, 0), ("bert", 2, 1),
        ("mlp", 0, 0), ("llama", 2, 3), ("gpt2", 1, 3), ("bert", 0, 3),
    ]
]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "sizes", "zero", "count"),
    [
        *CASES,
        *(
            pytest.param(*case, marks=pytest.mark.sweep("its model, its mesh and its stage of ZeRO are there apart"))
            for case in MORE
        ),
    ],
    ids=str,
)
def test_steps(name: str, sizes: dict[str, int], zero: int, count: int) -> None:
    """Rows have unequal numbers of labels; parameter groups, clipping, a schedule of the learning rate that changes it
    behind the third step."""
    steps_alike(name, sizes, {"microbatches": 2, "zero": zero, "clip_norm": 0.5}, count)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_every_stage_of_zero(zero: int) -> None:
    steps_alike("mlp", {"dp": 2, "tp": 2}, {"microbatches": 3, "zero": zero, "clip_norm": 0.1}, count=3)


def test_uneven_pieces() -> None:
    """Five rows a micro-batch and seven features, over four and three ranks."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 5), nn.GELU(), nn.Linear(5, 3))
    model = steps.Squared(model).double()
    alone = copy.deepcopy(model)
    for zero in (1, 2):
        parallel = autopar.parallelize(
            model, Mesh(dp=4, tp=3), {"*.0.weight": ("tp", None), "*.2.weight": (None, "tp")}
        )
        step, single = parallel.train_step(adamw(parallel), microbatches=3, zero=zero), Single(alone, adamw(alone))
        for k in range(3):
            torch.manual_seed(k)
            x = torch.randn(15, 7, dtype=torch.float64)
            assert relative(step.simulate(x), single(x)[0]) <= 1e-12
        assert max(differences(step, single).values()) <= 1e-9


OPTIMIZERS: dict[str, Any] = {
    "adam amsgrad": lambda model: torch.optim.Adam(model.parameters(), lr=1e-2, amsgrad=True, weight_decay=0.1),
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=1e-2),
    "sgd nesterov": lambda model: torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, nesterov=True),
    "sgd dampened": lambda model: torch.optim.SGD(
        model.parameters(), lr=1e-2, momentum=0.9, dampening=0.5, weight_decay=0.1
    ),
    "adagrad": lambda model: torch.optim.Adagrad(
        model.parameters(), lr=1e-2, lr_decay=0.1, initial_accumulator_value=0.2
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name: str) -> None:
    make, batches, plan = steps.MODELS["mlp"]
    torch.manual_seed(0)
    model = make()
    alone = copy.deepcopy(model)
    parallel = autopar.parallelize(model, Mesh(dp=2, tp=2), plan)
    step, single = (
        parallel.train_step(OPTIMIZERS[name](parallel), microbatches=2, zero=1),
        Single(alone, OPTIMIZERS[name](alone)),
    )
    for k in range(4):
        assert relative(step.simulate(batches(k)), single(**batches(k))[0]) <= 1e-11
    ours, theirs = step.optimizer.state_dict()["state"], single.optimizer.state_dict()["state"]
    for k, state in theirs.items():
        assert set(state) <= set(ours[k])
        assert all(relative(ours[k][n], value) <= 1e-9 for n, value in state.items())
    assert all(relative(a, b) <= 1e-9 for a, b in zip(model.parameters(), alone.parameters(), strict=True))


@pytest.mark.long
def test_batch_norm_keeps_its_statistics() -> None:
    steps_alike("resnet", {"dp": 2, "tp": 2}, {"zero": 2}, count=3)


def test_frozen_tied_and_unused_parameters() -> None:
    """Frozen ones stay; those that no gradient reaches stay too, whatever the weight decay; tied ones are one."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head, self.unused, self.frozen = (
                nn.Embedding(11, 8),
                nn.Linear(8, 11, bias=False),
                nn.Linear(3, 3),
                nn.Linear(8, 8),
            )
            self.head.weight = self.embed.weight
            self.frozen.requires_grad_(False)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return nn.functional.cross_entropy(self.head(self.frozen(self.embed(ids))), ids)

    torch.manual_seed(0)
    model = Model().double()
    alone = copy.deepcopy(model)
    parallel = autopar.parallelize(model, Mesh(dp=2, tp=2), {"*.embed.weight": ("tp", None)})
    step, single = (
        parallel.train_step(adamw(parallel), microbatches=2, zero=1, clip_norm=0.2),
        Single(alone, adamw(alone), 0.2),
    )
    for k in range(3):
        ids = torch.randint(11, (8,), generator=torch.Generator().manual_seed(k))
        assert relative(step.simulate(ids), single(ids)[0]) <= 1e-12
    assert max(differences(step, single).values()) <= 1e-9
    assert "unused.weight" not in str(step.program.update) and "frozen.weight" not in str(step.program.update)
    parallel.frozen.requires_grad_(True)  # from now on it is trained: another capture, and another step count
    alone.frozen.requires_grad_(True)
    assert relative(step.simulate(ids), single(ids)[0]) <= 1e-12
    assert max(differences(step, single).values()) <= 1e-9
    assert step.captures == 2 and ".step.1" in str(step.program.update)


def test_state_dicts_both_ways() -> None:
    """Torch's loop goes on from ours, and ours from torch's."""
    make, batches, plan = steps.MODELS["mlp"]
    torch.manual_seed(0)
    model = make()
    alone = copy.deepcopy(model)
    parallel = autopar.parallelize(model, Mesh(dp=2, tp=2), plan)
    step, single = parallel.train_step(adamw(parallel), zero=1), Single(alone, adamw(alone))
    for k in range(2):
        step.simulate(batches(k))
    alone.load_state_dict(parallel.state_dict())
    single.optimizer.load_state_dict(copy.deepcopy(step.optimizer.state_dict()))  # torch takes the tensors themselves
    for k in range(2, 4):
        single(**batches(k))
    parallel.load_state_dict(alone.state_dict())
    step.optimizer.load_state_dict(copy.deepcopy(single.optimizer.state_dict()))
    for k in range(4, 6):
        assert relative(step.simulate(batches(k)), single(**batches(k))[0]) <= 1e-11
    assert max(differences(step, single).values()) <= 1e-9
    assert step.optimizer.state_dict()["state"][0]["step"] == 6


def test_groups_may_change_between_steps() -> None:
    """Learning rates and weight decay are inputs; another ``eps`` is another update, and no other capture."""
    make, batches, plan = steps.MODELS["mlp"]
    torch.manual_seed(0)
    model = make()
    alone = copy.deepcopy(model)
    parallel = autopar.parallelize(model, Mesh(dp=2, tp=2), plan)
    step, single = parallel.train_step(adamw(parallel)), Single(alone, adamw(alone))
    for k in range(4):
        for one in (step, single):
            one.optimizer.param_groups[0]["lr"] = 1e-2 * (k + 1)
            one.optimizer.param_groups[1]["weight_decay"] = 0.1 * k
            one.optimizer.param_groups[1]["eps"] = 1e-8 * (1 + k // 2)
        assert relative(step.simulate(batches(k)), single(**batches(k))[0]) <= 1e-11
    assert max(differences(step, single).values()) <= 1e-9
    assert step.captures == 1 and len(step._captured.updates) == 2


@pytest.mark.parametrize("random", ["single", "parallel"])
def test_dropout(random: str) -> None:
    """With ``random="single"`` each micro-batch draws what a single device draws in its turn."""
    torch.manual_seed(0)
    model = steps.Squared(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8))).double()
    alone = copy.deepcopy(model)
    parallel = autopar.parallelize(model, Mesh(dp=2, tp=2), {"*.0.weight": ("tp", None)}, random=random)
    step, optimizer = parallel.train_step(adamw(parallel), microbatches=2), adamw(alone)
    x = torch.randn(8, 8, dtype=torch.float64)
    torch.manual_seed(5)
    ours = step.simulate(x)
    torch.manual_seed(5)
    losses = [alone(half) / 2 for half in x.chunk(2)]
    sum(losses).backward()
    optimizer.step()
    same = relative(ours, sum(losses).detach()) <= 1e-12 and all(
        relative(a, b) <= 1e-12 for a, b in zip(model.parameters(), alone.parameters(), strict=True)
    )
    assert same == (random == "single")


@pytest.mark.long
def test_the_text_parses_back() -> None:
    make, batches, plan = steps.MODELS["llama"]
    parallel = autopar.parallelize(make(), Mesh(dp=2, tp=2), plan)
    step = parallel.train_step(adamw(parallel), microbatches=2, zero=1, clip_norm=1.0).capture(batches(0))
    text = str(step)
    assert text.startswith("step of 2 micro-batches\ncount program explicit on dp=2 tp=2\n")
    again = Step.parse(text)
    again.verify()
    assert again == step and str(again) == text
    assert Step.parse(text.replace("mul.Scalar(div_", "div.Scalar(div_", 1)) != step


@pytest.mark.long
def test_ways_to_give_a_batch() -> None:
    """A dict, a tuple, a list, or the arguments themselves."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"logits": (z := self.linear(x)), "loss": nn.functional.cross_entropy(z, y)}

    torch.manual_seed(0)
    x, y = torch.randn(4, 4), torch.tensor([0, 2, -100, 1])
    losses = []
    for given, named in [
        ((x, y), {}),
        (((x, y),), {}),
        (([x, y],), {}),
        (({"x": x, "y": y},), {}),
        ((), {"x": x, "y": y}),
    ]:
        model = Model()
        torch.manual_seed(1)
        nn.init.normal_(model.linear.weight)
        nn.init.zeros_(model.linear.bias)
        parallel = autopar.parallelize(model, Mesh(dp=2), "ddp")
        step = parallel.train_step(torch.optim.SGD(parallel.parameters(), lr=0.1), microbatches=2)
        losses.append(run(step, *given, promoted=False, **named))
    assert len({float(loss) for loss in losses}) == 1


class Weighing(nn.Module):
    """An argument is called as a parameter, and another as a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3, dtype=torch.float64))
        self.register_buffer("scale", torch.tensor(2.0, dtype=torch.float64))

    def forward(self, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(weight @ self.weight * self.scale, scale)


@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_names_of_arguments(called: bool, microbatches: int) -> None:
    torch.manual_seed(0)
    model = Weighing()
    alone = copy.deepcopy(model)
    step = autopar.parallelize(model, Mesh(dp=1 if called else 2), "ddp").train_step(
        torch.optim.SGD(model.parameters(), lr=0.1), microbatches=microbatches
    )
    single = Single(alone, torch.optim.SGD(alone.parameters(), lr=0.1))
    for _ in range(2):
        x, y = torch.randn(8, 4, dtype=torch.float64), torch.randint(3, (8,))
        y[0] = -100
        assert relative(run(step, x, y, called=called), single(x, y)[0]) <= 1e-12
    assert max(differences(step, single).values()) <= 1e-12
