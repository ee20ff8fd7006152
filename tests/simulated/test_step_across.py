"""Steps whose communication crosses their end have the numbers of steps that end complete."""

from __future__ import annotations

import copy
from typing import Any

import crossing_steps
import crossing_trainings
import pytest
import steps
import torch

import autopar
from autopar import Mesh
from autopar.ir.nodes import record_of
from autopar.ir.transfers import BY_FUNCTION
from autopar.scheduling import ByteScheduler
from autopar.step.program import RankStep

CASES: list[tuple[str, dict[str, int], dict[str, Any]]] = [
    ("mlp", {"dp": 2}, {}),
    ("mlp", {"dp": 2}, {"overlap": "today"}),
    ("mlp", {"dp": 2}, {"overlap": "p3"}),
    ("mlp", {"dp": 4}, {"overlap": ByteScheduler(64, 256)}),
    ("mlp", {"dp": 4}, {"overlap": {"*_dp": 0}}),
    ("mlp", {"dp": 2}, {"zero": 1}),
    ("mlp", {"dp": 4}, {"zero": 2, "ema": 0.9}),
    ("mlp", {"dp": 2}, {"zero": 3}),
    ("mlp", {"dp": 2, "tp": 2}, {"zero": 1}),
    ("mlp", {"dp": 3}, {"zero": 1}),
    ("mlp", {"dp": 2}, {"zero": 1, "clip_norm": 0.01}),
    ("mlp", {"dp": 2}, {"zero": 1, "amp": "fp16-O1"}),
    ("mlp", {"dp": 2}, {"amp": "bf16-O1"}),
    ("mlp", {"dp": 2}, {"recompute": "*"}),
    ("mlp", {"dp": 2}, {"offload": True, "zero": 1}),
    ("llama", {"dp": 2, "tp": 2}, {"zero": 1}),
    ("llama sequence", {"dp": 2, "tp": 2}, {"returns": "outputs"}),
    ("gpt2", {"dp": 2}, {"zero": 3}),
    ("resnet", {"dp": 2}, {"zero": 1}),
    ("mlp", {"dp": 2}, {"microbatches": 2}),
    ("mlp", {"dp": 2}, {"microbatches": 3, "zero": 1, "overlap": ByteScheduler(64, 256)}),
    ("mlp", {"dp": 2}, {"microbatches": 4, "zero": 2, "ema": 0.9}),
    ("mlp", {"dp": 2}, {"microbatches": 3, "zero": 1, "clip_norm": 0.01}),
    ("mlp", {"dp": 2}, {"amp": "bf16-O2"}),
    ("mlp", {"dp": 2}, {"amp": "bf16-O2", "zero": 1, "microbatches": 3}),
    ("mlp", {"dp": 2}, {"amp": "fp16-O2", "zero": 1, "microbatches": 2}),
    ("llama", {"dp": 2, "tp": 2}, {"microbatches": 2, "zero": 1, "returns": "outputs"}),
    ("resnet", {"dp": 2}, {"microbatches": 2, "zero": 1}),
]


@pytest.mark.parametrize(("name", "sizes", "options"), CASES, ids=str)
def test_equals_complete_steps(name: str, sizes: dict[str, int], options: dict[str, Any]) -> None:
    crossing_steps.alike(name, sizes, options)


@pytest.mark.parametrize(("options", "why"), [
    ({"clip_norm": 1.0}, "the norm of the gradients is measured"),
    ({"grad_norm": True, "zero": 3}, "the norm of the gradients is measured"),
    ({"amp": "fp16-O1"}, "the loss is scaled"),
    ({"microbatches": 2, "zero": 3}, "no gradient is reduced behind the last micro-batch"),
], ids=str)  # fmt: skip
def test_nothing_crosses(options: dict[str, Any], why: str) -> None:
    crossing_steps.nothing_crosses("mlp", {"dp": 2}, options, why)
    crossing_steps.alike("mlp", {"dp": 2}, options, (2,))


def test_one_rank_has_nothing_that_crosses() -> None:
    crossing_steps.nothing_crosses("mlp", {"dp": 1}, {}, "no gradient is reduced")


@pytest.mark.parametrize("name", [name for name in crossing_trainings.BETWEEN if name != "one_after_another"])
@pytest.mark.parametrize("options", crossing_trainings.OPTIONS, ids=str)
def test_trainings(options: dict[str, Any], name: str) -> None:
    crossing_trainings.alike(options, {"dp": 2}, [name])


@pytest.mark.parametrize("name", crossing_steps.BETWEEN)
def test_between_steps(name: str) -> None:
    crossing_steps.between(name)


def test_what_crosses_is_reported_and_printed() -> None:
    step = crossing_steps.made("mlp", {"dp": 2}, {"across": True})
    crossing_steps.taken(step, "mlp", 0, 1)
    made = step.communication
    (note,) = made.notes
    assert note.startswith("12 reductions of gradients cross the end of a step") and note in str(step.reports)
    assert made.parts[0].name == "turn: finish forward backward update" and made.makespan >= made.bound > 0
    local = step.local(1)
    assert list(local.programs) == ["turn"]
    assert RankStep.parse(str(local)) == local
    local.verify()
    assert " = state(" in str(local) and "_next_start) on dp" in str(local)


def test_only_gathers_cross_where_the_norm_is_measured() -> None:
    step = crossing_steps.made("mlp", {"dp": 2}, {"across": True, "zero": 1, "clip_norm": 1.0})
    crossing_steps.taken(step, "mlp", 0, 2)
    (note,) = step.communication.notes
    assert "gathers of parameters cross the end of a step, and no reductions" in note
    assert step.grad_norm is not None


def test_each_parameter_is_updated_before_its_first_reader() -> None:
    """With a slow network, the last reductions are under way while the forward has begun."""
    from autopar.costs.machine import machine_of

    step = crossing_steps.made("mlp", {"dp": 2}, {"across": True, "overlap": "p3", "machine": machine_of("cpu")})
    step.capture(crossing_steps.steps.vectors(0))
    program = step.local(0)["turn"]
    phases = [crossing_steps.phase(node) for node in program.nodes if node.op == "call_function"]
    assert "finish" in phases[phases.index("forward") :], "an update stands behind an op of the forward"


def test_a_parameter_of_the_model_itself_is_refused_too() -> None:
    model = torch.nn.Linear(4, 4)
    parallel = autopar.parallelize(Loss(model), Mesh(dp=2), "ddp")
    step = parallel.train_step(torch.optim.SGD(parallel.parameters(), lr=0.1), across=True)
    step.simulate(torch.ones(4, 4))
    with pytest.raises(
        RuntimeError, match="the parameter scale is read while the update of the last step is under way"
    ):
        _ = parallel.scale
    step.finish()
    step.finish()
    assert parallel.scale.shape == ()


class Loss(torch.nn.Module):
    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner, self.scale = inner, torch.nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.inner(x) * self.scale).square().mean()


@pytest.mark.parametrize(("options", "text"), [
    ({"across": "yes"}, r"across='yes': True lets communication cross the end of a step, False completes each step"),
    ({"across": 1}, r"across=1: True lets"),
    ({"across": True, "zero": "search"}, r'across=True needs steps that are known before: give zero= a value, and not'),
], ids=str)  # fmt: skip
def test_bad_options(options: dict[str, Any], text: str) -> None:
    parallel = autopar.parallelize(torch.nn.Linear(4, 4), Mesh(dp=2))
    with pytest.raises(ValueError, match=text):
        parallel.train_step(torch.optim.SGD(parallel.parameters(), lr=0.1), **options)


def test_finish_without_across_does_nothing() -> None:
    step = crossing_steps.made("mlp", {"dp": 2}, {})
    crossing_steps.taken(step, "mlp", 0, 1)
    step.finish()


def test_a_deleted_step_is_completed() -> None:
    crossing_trainings.deleted_under_way()


def test_counts_of_all_micro_batches_are_computed_in_the_first_one() -> None:
    """A mean over tokens divides by the tokens of all micro-batches, as without ``across``."""
    crossing, complete = counted(True), counted(False)
    for k in range(3):
        pieces = [steps.MODELS["llama"][1](2 * k + half) for half in range(2)]
        batch = {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}
        batch["labels"][: len(batch["labels"]) // 2, : 2 + k] = -100
        assert torch.equal(steps.run(crossing, batch), steps.run(complete, batch))
    assert ".count.0" in str(crossing.local(0)["turn"]) and crossing._calls.unfinished
    crossing_steps.assert_alike(crossing_steps.state_of(crossing), crossing_steps.state_of(complete), True)


def counted(across: bool) -> Any:
    torch.manual_seed(0)
    parallel = autopar.parallelize(steps.MODELS["llama"][0](), Mesh(dp=2), "ddp")
    return parallel.train_step(steps.adamw(parallel), microbatches=2, zero=1, across=across)


def test_a_replaced_parameter_is_refused() -> None:
    step = crossing_steps.made("mlp", {"dp": 2}, {"across": True})
    crossing_steps.taken(step, "mlp", 0, 1)
    name, parameter = next(iter(step._calls.module.named_parameters()))
    parameter.data = parameter.data.clone()
    with pytest.raises(RuntimeError, match=rf"{name} was written to or replaced while its update was under way"):
        step.finish()


@pytest.mark.parametrize("options", [{"zero": 1}, {"zero": 1, "amp": "bf16-O2"}], ids=str)
def test_transfers_of_the_update_have_a_source(options: dict[str, Any]) -> None:
    step = crossing_steps.made("mlp", {"dp": 2}, {"across": True, **options})
    crossing_steps.taken(step, "mlp", 0, 1)
    programs = [*step.program.programs.values(), *step.local(0).programs.values()]
    transfers = [node for program in programs for node in program.nodes if node.target in BY_FUNCTION]
    assert transfers and all(record_of(node).source for node in transfers)
    assert any("by AdamW" in record_of(node).source for node in transfers)


class Square(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.square().mean()


@pytest.mark.parametrize("overlap", ["today", "p3"])
@pytest.mark.parametrize("zero", [0, 1])
def test_gradients_in_pieces_of_whole_parameters(overlap: Any, zero: int) -> None:
    """A bias that is whole over tp has a gradient of whose rows or columns each rank over tp makes a piece."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 12), torch.nn.Tanh(), torch.nn.Linear(12, 8)).double()
    single = copy.deepcopy(model)
    plan = {"0.weight": ("tp", None), "2.weight": (None, "tp"), "0.bias": (None,), "2.bias": (None,)}
    loss = torch.nn.Sequential(model, Square())
    parallel = autopar.parallelize(loss, Mesh(dp=2, tp=2), {f"*{name}": layout for name, layout in plan.items()})
    step = parallel.train_step(torch.optim.SGD(parallel.parameters(), lr=0.1), across=True, overlap=overlap, zero=zero)
    optimizer = torch.optim.SGD(single.parameters(), lr=0.1)
    for seed in range(3):
        x = torch.randn(8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        found, wanted = step.simulate(x), single(x).square().mean()
        optimizer.zero_grad()
        wanted.backward()
        optimizer.step()
        torch.testing.assert_close(found, wanted.detach())
