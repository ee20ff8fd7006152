"""What a step has beside the loop, it has in stages too: mixed precision, recompute, ZeRO, norms, averages, states."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import steps
import torch
from equality import relative
from pipelined_steps import MESHES, MODELS, adamw, differences, made, pipelined_alike
from steps import narrow, run
from torch import nn

import autopar
from autopar import Mesh
from autopar.ir import transfers
from autopar.plan.loss_scaling import LossScaling
from autopar.timetable import Entry

PP4, DP2, TP2 = MESHES["pp4"], MESHES["pp2 dp2"], MESHES["pp2 tp2"]
SWEEP = pytest.mark.sweep("another mesh shows it")


def frozen(*modules: str) -> Callable[[nn.Module], None]:
    def freeze(model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            if name.startswith(modules):
                parameter.requires_grad_(False)

    return freeze


def pair(name: str = "layers", microbatches: int = 3, policy: str = "1f1b", layers: int = 4, float32: bool = False,
         **options: Any) -> tuple[Any, Any, Callable[[int], Any]]:  # fmt: skip
    """A step in four stages, the same step on one rank, and batches."""
    steps = []
    for sizes in (PP4, {"dp": 1}):
        torch.manual_seed(0)
        model = MODELS[name][0](layers)
        parallel = autopar.parallelize(model.float() if float32 else model, Mesh(sizes), {})
        schedule = {"schedule": policy} if sizes is PP4 else {}
        steps.append(parallel.train_step(adamw(parallel), microbatches=microbatches, **schedule, **options))
    batches = MODELS[name][1](2 * microbatches)
    return *steps, lambda k: narrow(batches(k)) if float32 else batches(k)


def same(ours: Any, theirs: Any) -> None:
    """Bit for bit: parameters, buffers and the optimizer's state."""
    kinds = ("named_parameters", "named_buffers")
    pairs = [
        (name, a, b)
        for kind in kinds
        for (name, a), (_, b) in zip(getattr(ours.parallel, kind)(), getattr(theirs.parallel, kind)(), strict=True)
    ]
    one, other = ours.optimizer.state_dict()["state"], theirs.optimizer.state_dict()["state"]
    assert one.keys() == other.keys()
    pairs += [(f"{k}.{name}", one[k][name], value) for k, state in other.items() for name, value in state.items()]
    assert [name for name, a, b in pairs if not torch.equal(a, b)] == []


# -- mixed precision


@pytest.mark.parametrize("amp", ["bf16-O1", "bf16-O2", "fp16-O1", "fp16-O2"])
def test_mixed_precision(amp: str) -> None:
    """The casts are those of one rank, bit for bit; what crosses is in low precision."""
    ours, theirs, batches = pair(float32=True, amp=amp)
    for k in range(3):
        assert torch.equal(run(ours, batches(k), promoted=False), run(theirs, batches(k), promoted=False))
    same(ours, theirs)
    assert f"addmm : {amp[:4].rstrip('-').replace('fp16', 'f16')}[" in str(ours.program) or amp.endswith("O1")


@pytest.mark.long
@pytest.mark.parametrize("policy", ["1f1b", "zb-v"])
def test_an_overflow_is_skipped_on_all_stages(policy: str) -> None:
    """The scale begins far too large, falls until gradients fit, and rises again."""
    scaling = LossScaling(initial=2.0**30, growth=2.0**8, backoff=2.0**-8, interval=3)
    ours, theirs, batches = pair(policy=policy, layers=8, float32=True, amp="fp16-O2", loss_scale=scaling)
    skipped = []
    for k in range(7):
        before = [p.detach().clone() for p in ours.parallel.parameters()]
        run(ours, batches(k), promoted=False), run(theirs, batches(k), promoted=False)
        assert torch.equal(ours.scaler[0], theirs.scaler[0]) and bool(ours.skipped) == bool(theirs.skipped)
        skipped.append(bool(ours.skipped))
        changed = {not torch.equal(a, b) for a, b in zip(before, ours.parallel.parameters(), strict=True)}
        assert changed == {not skipped[-1]}, "all stages or none"
    assert set(skipped) == {True, False}
    if policy == "1f1b":
        same(ours, theirs)


# -- recompute


@pytest.mark.parametrize("what", ["blocks", "min-cut", "layers.1", ["layers.0", "layers.3"]], ids=str)
def test_recompute(what: Any) -> None:
    """Dropout draws the same again. Stages without a block, or without what a glob matches, recompute nothing."""
    ours, theirs, batches = pair("noisy", recompute=what)
    for step in (ours, theirs):
        torch.manual_seed(1)
        run(step, batches(0))
    same(ours, theirs)
    assert "_again : " in str(ours.program)


@pytest.mark.parametrize(("what", "words"), [
    ("blocks", r'recompute="blocks" takes the numbered modules'),
    ("layer.9", r"recompute's glob 'layer\.9' matches no"),
])  # fmt: skip
def test_nothing_that_is_recomputed(what: str, words: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    parallel = autopar.parallelize(Mean(model), Mesh(pp=2), {})
    step = parallel.train_step(torch.optim.SGD(parallel.parameters()), schedule="1f1b", recompute=what)
    with pytest.raises(ValueError, match=words):
        step.simulate(torch.randn(4, 4))


class Mean(nn.Module):
    """Its loss is a mean that no count is needed for."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).square().mean()


# -- ZeRO, norms, what is trained


@pytest.mark.parametrize(("zero", "policy"), [(1, "1f1b"), (2, "zb-v"), (3, "1f1b"), (3, "zb-v")])
def test_zero(zero: int, policy: str) -> None:
    step = pipelined_alike("shared", DP2, policy, 3, count=3, zero=zero, clip_norm=0.5)
    assert "/dp" in str(step.program)


@pytest.mark.parametrize(("zero", "policy"), [(1, "zb-v"), (2, "v-half")])
def test_other_layouts_on_the_same_ranks(zero: int, policy: str) -> None:
    """No message goes between the stages at the point of the V: their values are re-laid, forward and backward."""
    step = pipelined_alike("wide", DP2, policy, 2, count=2, rows=8, zero=zero, plan="search")
    made = dict(re.findall(r"^  (\w+) : [^=]* @s[12] = (\w+)\(", str(step.program), re.MULTILINE))
    sent = re.findall(r"@s[12] = send\((\w+), s[12]\)", str(step.program))
    assert sorted(made[value] for value in sent) == ["all_gather", "slice"]
    assert not step.pipeline.times.transfer[1] and not step.pipeline.sizes.boundary[1]


UNLIKE = {  # what some stages have, and others do not
    "frozen first": frozen("layers.0"),
    "frozen first stages": frozen("layers."),
    "frozen last": frozen("layers.3", "head"),
    "one in the middle": frozen("layers.0", "layers.2", "layers.3", "head"),
    "unused": lambda model: setattr(model, "more", nn.Linear(3, 3).double()),
}


@pytest.mark.parametrize("clip_norm", [None, 0.5])
@pytest.mark.parametrize("what", UNLIKE)
def test_what_is_trained(what: str, clip_norm: float | None) -> None:
    """A stage that trains nothing counts steps and clips with the others; nothing comes back to stages that need no
    gradient."""
    step = pipelined_alike("layers", PP4, "1f1b", 3, count=3, prepare=UNLIKE[what], clip_norm=clip_norm)
    micro, _ = step._current().pair
    if what == "frozen first stages":
        assert [list(stage.cut.down) for stage in micro.stages[:3]] == [[]] * 3


class Counted(nn.Module):
    """Losses of two stages, each divided by the number of its own labels."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8, dtype=torch.float64) for _ in range(2))
        self.aside, self.head = (nn.Linear(8, 4, dtype=torch.float64) for _ in range(2))

    def forward(self, x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x).tanh()
        aside = nn.functional.cross_entropy(self.aside(x), z)
        return nn.functional.cross_entropy(self.head(self.layers[1](x)), y) + 0.5 * aside


def test_counts_of_several_stages() -> None:
    torch.manual_seed(0)
    model, x = Counted(), torch.randn(8, 8, dtype=torch.float64)
    y, z = torch.tensor([1, -100, 2, 3, -100, -100, 1, 0]), torch.tensor([-100, 1, -100, 3, 2, 2, 1, -100])
    expected = model(x, y, z).item()
    parallel = autopar.parallelize(model, autopar.Mesh(pp=2), {})
    stages = [["layers.0", "aside"], ["layers.1", "head"]]
    step = parallel.train_step(torch.optim.SGD(parallel.parameters()), microbatches=2, schedule="1f1b", stages=stages)
    assert float(step.simulate(x, y, z)) == pytest.approx(expected, rel=1e-12)


def test_what_is_shown_of_a_rank_is_what_it_runs() -> None:
    """Also of the counts, which one stage alone divides by."""
    step, _, batches = made("layers", {"pp": 2}, "1f1b", 2)
    step.simulate(batches(0))
    for rank in range(2):
        entries = {line.program for line in step.timetable.of(rank) if isinstance(line, Entry)}
        assert entries == step.local(rank).programs.keys() - {"micro"}


@pytest.mark.parametrize("mesh", [TP2, pytest.param(DP2, marks=SWEEP)], ids=str)
def test_a_frozen_tied_parameter(mesh: dict[str, int]) -> None:
    """It goes to its readers, and no sum of it comes home."""
    step = pipelined_alike("shared", mesh, "zb-h1", 3, count=3, prepare=frozen("layers.0.0.weight"), clip_norm=0.5)
    copy, update = step.program.programs["copy"], step.program.programs["update"]
    sent = [[node.all_input_nodes[0].name for node in program.nodes if node.target is transfers.send]
            for program in (copy, update)]  # fmt: skip
    assert sent == [["layers_0_0_weight"], ["loss"]]


@pytest.mark.parametrize(("mesh", "clip_parameters"), [
    (PP4, "all"), (DP2, "optimizer"), pytest.param(DP2, "all", marks=SWEEP),
], ids=str)  # fmt: skip
def test_the_norm_of_parameters_that_the_optimizer_does_not_have(mesh: dict[str, int], clip_parameters: str) -> None:
    """Also of a tied one, whose sums come home to be measured."""

    def some(model: nn.Module) -> torch.optim.Optimizer:
        own = [p for name, p in model.named_parameters() if name.startswith(("layers.1.0.bias", "head"))]
        return torch.optim.AdamW(own, lr=1e-2)

    step, alone, batches = made("shared", mesh, "1f1b", 3, make_optimizer=some, clip_norm=0.05,
                                clip_parameters=clip_parameters)  # fmt: skip
    for k in range(3):
        run(step, batches(k))
        alone.model.zero_grad()
        own = [p for group in alone.optimizer.param_groups for p in group["params"]]
        alone.model(**batches(k)).backward()
        norm = nn.utils.clip_grad_norm_(list(alone.model.parameters()) if clip_parameters == "all" else own, 0.05)
        alone.optimizer.step()
        assert relative(step.grad_norm, norm) <= 1e-9
    assert max(differences(step, alone).values()) <= 1e-9


def test_a_loss_without_counts() -> None:
    torch.manual_seed(0)
    model = Mean(nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)))).double()
    alone = copy.deepcopy(model)
    parallel = autopar.parallelize(model, Mesh(DP2), "ddp")
    step = parallel.train_step(torch.optim.SGD(parallel.parameters(), lr=0.1), microbatches=2, schedule="1f1b")
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for _ in range(3):
        x = torch.randn(8, 4, dtype=torch.float64)
        optimizer.zero_grad()
        loss = alone(x)
        loss.backward()
        optimizer.step()
        assert relative(run(step, x), loss) <= 1e-12
    assert all(relative(a, b) <= 1e-12 for a, b in zip(model.parameters(), alone.parameters(), strict=True))
    assert "count" not in step.program.programs


def test_averages() -> None:
    ours, theirs, batches = pair(ema=0.9)
    for k in range(3):
        run(ours, batches(k)), run(theirs, batches(k))
    one, other = ours.ema, theirs.ema
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in other)
    assert any(not torch.equal(one[name], p) for name, p in ours.parallel.named_parameters())


# -- states


def test_parameters_with_other_numbers_of_steps() -> None:
    """One is frozen during the first two steps."""
    step, alone, batches = made("layers", PP4, "1f1b", 3, clip_norm=0.5)
    for k in range(4):
        for model in (step.parallel.module, alone.model):
            model.layers[1][0].weight.requires_grad_(k >= 2)
        run(step, batches(k)), alone(**batches(k))
    assert max(differences(step, alone).values()) <= 1e-9
    counts = {float(state["step"]) for state in step.optimizer.state.values()}
    assert counts == {2.0, 4.0}


@pytest.mark.parametrize("sizes", [{"dp": 2}, PP4, pytest.param(DP2, marks=SWEEP)], ids=str)
def test_states_go_to_other_meshes(sizes: dict[str, int]) -> None:
    """State dicts of a step in four stages, in a step on another mesh, or in the order of another policy."""
    step, alone, batches = made("shared", PP4, "1f1b", 3)
    for k in range(2):
        run(step, batches(k)), alone(**batches(k))
    model, state = copy.deepcopy(step.parallel.state_dict()), copy.deepcopy(step.optimizer.state_dict())
    assert model.keys() == alone.model.state_dict().keys() and len(state["state"]) == len(alone.optimizer.state)
    torch.manual_seed(1)
    parallel = autopar.parallelize(MODELS["shared"][0](4), Mesh(sizes), "ddp" if "dp" in sizes else {})
    options = {"schedule": "zb-h1"} if "pp" in sizes else {}
    other = parallel.train_step(adamw(parallel), microbatches=3, **options)
    parallel.load_state_dict(model)
    other.optimizer.load_state_dict(state)
    for k in range(2, 4):
        assert relative(run(other, batches(k)), alone(**batches(k))[0]) <= 1e-9
    assert max(differences(other, alone).values()) <= 1e-9


@pytest.mark.long
def test_evaluation_between_steps() -> None:
    step, alone, batches = made("normed", TP2, "zb-v", 3, rows=8)
    for k in range(3):
        run(step, batches(k)), alone(**batches(k))
        for model in (step.parallel, alone.model):
            model.eval()
        with torch.no_grad():
            assert relative(step.parallel.simulate(**batches(9)), alone.model(**batches(9))) <= 1e-9
        for model in (step.parallel, alone.model):
            model.train()
    assert max(differences(step, alone).values()) <= 1e-9
    assert step.captures == 1


def test_a_call_between_steps_that_writes_buffers() -> None:
    """The model is in training mode: batch norm counts the rows of the call, too."""
    step, alone, batches = made("normed", TP2, "1f1b", 1, rows=8)
    for k in range(2):
        run(step, batches(k)), alone(**batches(k))
        with torch.no_grad():
            assert relative(step.parallel.simulate(**batches(9)), alone.model(**batches(9))) <= 1e-9
        for mine, theirs in zip(step.parallel.module.buffers(), alone.model.buffers(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)
    assert max(differences(step, alone).values()) <= 1e-9


def test_batches_of_another_shape() -> None:
    """Each shape is captured once, and cut on its own."""
    step, alone, _ = made("layers", DP2, "1f1b", 3, clip_norm=0.5)
    for k in range(4):
        batch = {name: tensor[: 12 if k % 2 else 6] for name, tensor in MODELS["layers"][1](12)(k).items()}
        assert relative(run(step, batch), alone(**batch)[0]) <= 1e-9
    assert step.captures == 2 and max(differences(step, alone).values()) <= 1e-9


def test_a_micro_batch_without_labels() -> None:
    """It divides by the count of all."""
    step, alone, batches = made("layers", PP4, "1f1b", 3)
    for k in range(2):
        batch = batches(k)
        batch["y"][2:4] = -100
        assert relative(run(step, batch), alone(**batch)[0]) <= 1e-9
    assert max(differences(step, alone).values()) <= 1e-9


SEED = {"schedule": "1f1b", "recompute": "blocks", "clip_norm": 1.0}


@pytest.mark.long
@pytest.mark.parametrize(("sizes", "options"), [
    pytest.param(TP2, {"microbatches": 4}, marks=pytest.mark.sweep("test_mixed_precision has all modes, bit for bit")),
    pytest.param(DP2, {"microbatches": 2, "zero": 1}, marks=SWEEP),
], ids=str)  # fmt: skip
def test_llama_in_mixed_precision(sizes: dict[str, int], options: dict[str, Any]) -> None:
    """As far from float32 as a single device with a ``GradScaler``."""
    steps.mixed_alike("llama", sizes, "fp16-O2", {**SEED, **options}, count=2)


class Pair(nn.Module):
    """Two layers: the first one has no gradient to hand on, so its backward is that of its weight alone."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8, bias=False), nn.Linear(8, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x))).square().mean()


@pytest.mark.parametrize("policy", ["zb-h1", "zb-v"])
def test_a_stage_without_a_backward_of_activations(policy: str) -> None:
    """It receives a gradient in a pass in which it computes nothing, and computes with it later."""
    torch.manual_seed(0)
    model = Pair().double() if policy == "zb-h1" else nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))).double()
    model = model if policy == "zb-h1" else Mean(model)
    alone = copy.deepcopy(model)
    parallel = autopar.parallelize(model, Mesh(pp=2, dp=2), "ddp")
    step = parallel.train_step(torch.optim.SGD(parallel.parameters(), lr=0.1), microbatches=2, schedule=policy)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for _ in range(3):
        x = torch.randn(8, 4, dtype=torch.float64)
        optimizer.zero_grad()
        loss = alone(x)
        loss.backward()
        optimizer.step()
        assert relative(run(step, x), loss) <= 1e-12
    assert all(relative(a, b) <= 1e-12 for a, b in zip(model.parameters(), alone.parameters(), strict=True))
