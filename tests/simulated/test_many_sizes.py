"""One capture for many sizes: the numbers of a single device, the programs of a fresh capture, guards, recaptures."""

from __future__ import annotations

import copy
import functools
import re
from typing import Any

import pytest
import torch
from casts import promoted_casts  # noqa: F401
from equality import TOLERANCE
from hypothesis import given, settings
from hypothesis import strategies as st
from sized_models import MODELS, Mlp, difference, loss_of, made
from torch import nn

import autopar
from autopar import Mesh

d = torch.float64
pytestmark = pytest.mark.usefixtures("promoted_casts")

MESHES: list[tuple[Mesh, Any]] = [
    (Mesh(dp=2), "ddp"), (Mesh(dp=2, tp=2), None), (Mesh(dp=3), "ddp"), (Mesh(tp=4), "megatron"),
]  # fmt: skip


def notes(parallel: Any, words: str = "") -> list[str]:
    return [note for report in parallel.reports for note in report.notes if words in note]


@pytest.mark.long
@pytest.mark.parametrize(("mesh", "plan"), MESHES, ids=lambda value: str(value).replace(" ", "") if value else "")
def test_one_capture_serves_batches_and_lengths(mesh: Mesh, plan: Any) -> None:
    model, inputs = made("llama")
    parallel = autopar.parallelize(model, mesh, plan, dynamic=True)
    for batch, length in ((8, 64), (3, 64), (17, 100), (3, 100), (2, 7)):
        assert difference(parallel, parallel.simulate, model, inputs(batch, length)) <= 1e-9
    assert parallel.captures == 1 and not notes(parallel, "anew")
    if "dp" in mesh.sizes:
        assert "input_ids : i64[s0/dp s1] = input\n" in str(parallel.program)
    assert "nothing was traced" in notes(parallel)[0]
    assert autopar.Program.parse(str(parallel.program)) == parallel.program


@functools.cache
def one_capture(name: str, at: int) -> tuple[autopar.Parallel, nn.Module, Any]:
    model, inputs = made(name)
    mesh, plan = MESHES[at]
    return autopar.parallelize(model, mesh, plan, dynamic=True), model, inputs


@pytest.mark.long
@settings(max_examples=6, deadline=None)
@given(st.sampled_from(sorted(MODELS)), st.integers(0, 3), st.integers(1, 9), st.sampled_from([1, 2, 7, 10, 16]))
def test_any_sizes_have_the_numbers_of_a_single_device(name: str, at: int, batch: int, length: int) -> None:
    """Conv nets and others have no names of the preset megatron, so there they take another mesh."""
    parallel, model, inputs = one_capture(name, at if name in ("llama", "gpt2", "bert") else at % 3)
    if name == "conv" and batch == 1:
        return  # torch refuses a batch norm of one value
    given_inputs = inputs(batch, length)
    if not loss_of(model(**given_inputs)).isfinite():
        return  # BERT masks all of a short sequence, and no label counts
    assert difference(parallel, parallel.simulate, model, given_inputs) <= 1e-9


@pytest.mark.long
@pytest.mark.parametrize("name", ["mlp", "lstm", "conv", "llama", "bert"])
@pytest.mark.parametrize(("mesh", "plan"), MESHES[:2], ids=lambda value: str(value).replace(" ", "") if value else "")
def test_local_programs_are_those_of_a_fresh_capture(name: str, mesh: Mesh, plan: Any) -> None:
    if name == "lstm" and torch.__version__.startswith(("2.11.", "2.12.")):
        pytest.skip("before torch 2.13 the products of a recurrence make numbers of sizes: each size is captured alone")
    model, inputs = made(name)
    parallel = autopar.parallelize(model, mesh, plan, dynamic=True)
    for batch, length in ((8, 16), (3, 10), (5, 16)):
        given_inputs = inputs(batch, length)
        parallel.capture(**given_inputs)
        fresh = autopar.parallelize(copy.deepcopy(model), mesh, plan, dynamic=False)
        fresh.capture(**given_inputs)
        for rank in mesh.ranks:
            assert fresh.local(rank).diff(parallel.local(rank)) == ""
        assert parallel.reports["capture"].notes and parallel.captures == 1


def test_by_default_the_second_size_has_symbols() -> None:
    model, inputs = made("mlp")
    parallel = autopar.parallelize(model, Mesh(dp=2), "ddp")
    for batch, captures, dim in ((8, 1, "8/dp"), (3, 2, "s0/dp"), (17, 2, "s0/dp"), (8, 2, "8/dp"), (4, 2, "s0/dp")):
        assert difference(parallel, parallel.simulate, model, inputs(batch, 0)) <= TOLERANCE
        assert parallel.captures == captures and f"x : f64[{dim} 8] = input" in str(parallel.program)
    assert notes(parallel, "nothing was traced") == [
        "sizes s0=4 of a capture with s0 is dim 0 of x; nothing was traced"
    ]
    assert parallel.guards.captures == 2 and parallel.guards.symbols == ("s0 is dim 0 of x: used for sizes 3 times",)


def test_without_symbols_each_size_is_captured() -> None:
    model, inputs = made("mlp")
    parallel = autopar.parallelize(model, Mesh(dp=2), "ddp", dynamic=False)
    for captures, batch in enumerate((8, 3, 17), 1):
        parallel.simulate(**inputs(batch, 0))
        assert parallel.captures == captures and f"{batch}/dp" in str(parallel.program)
    with pytest.raises(TypeError, match=r"^dynamic='yes' is neither True nor False$"):
        autopar.parallelize(model, Mesh(dp=2), "ddp", dynamic="yes")  # type: ignore[arg-type]


def test_sizes_that_are_served_are_not_refused() -> None:
    model, inputs = made("mlp")
    parallel = autopar.parallelize(model, Mesh(dp=2), "ddp", dynamic=True, recapture=False)
    parallel.simulate(**inputs(8, 0))
    assert difference(parallel, parallel.simulate, model, inputs(3, 0)) <= TOLERANCE
    with pytest.raises(RuntimeError, match="recapture=False: x is float32"):
        parallel.simulate(x=torch.randn(8, 8))


class Branching(nn.Module):
    """Takes another way for long sequences, and makes a number of a size."""

    def __init__(self, specialize: bool = False) -> None:
        super().__init__()
        self.weight, self.specialize = nn.Parameter(torch.randn(6, 6, dtype=d)), specialize

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x @ self.weight
        if self.specialize:
            y = y * float(int(x.shape[0]))
        if x.shape[1] > 5:
            y = y.relu()
        return (y / x.shape[1]).sum() / x.shape[0]


def test_guards_count_what_fails_and_what_is_captured_for_it() -> None:
    model = Branching()
    parallel = autopar.parallelize(model, Mesh(dp=2), "ddp", dynamic=True)
    for length, captures in ((4, 1), (5, 1), (7, 2), (9, 2), (3, 2), (1, 3)):
        inputs = {"x": torch.randn(4, length, 6, dtype=d)}
        assert difference(parallel, parallel.simulate, model, inputs) <= TOLERANCE
        assert parallel.captures == captures
    (row,) = [row for row in parallel.guards if row.guard == "s1 <= 5"]
    assert (row.failed, row.recaptures) == (1, 1) and "if x.shape[1] > 5:" in row.source
    parallel.simulate(torch.randn(4, 7, 6, dtype=d))
    assert "s1 <= 5" in str(parallel.guards) and parallel.guards.recaptures >= 1
    model = Branching()
    parallel = autopar.parallelize(model, Mesh(dp=2), "ddp", dynamic=True)
    parallel.simulate(torch.randn(4, 4, 6, dtype=d))
    parallel.simulate(torch.randn(4, 7, 6, dtype=d))
    (note,) = notes(parallel, "captured anew")
    assert re.match(
        r"captured anew, because s0 is 4, s1 is 7, and the capture is for s1 <= 5\n    test_many_sizes", note
    )


def test_a_size_that_python_makes_a_number_stays() -> None:
    """The batch is fixed with its line, and the length is still a symbol."""
    model = Branching(specialize=True)
    parallel = autopar.parallelize(model, Mesh(dp=2), "ddp", dynamic=True)
    for batch, length, captures in ((4, 4, 1), (4, 3, 1), (6, 3, 2), (6, 4, 2)):
        inputs = {"x": torch.randn(batch, length, 6, dtype=d)}
        assert difference(parallel, parallel.simulate, model, inputs) <= TOLERANCE
        assert parallel.captures == captures
    (row,) = [row for row in parallel.guards if row.guard == "dim 0 of x is 4"]
    assert "y = y * float(int(x.shape[0]))" in row.source and (row.failed, row.recaptures) == (1, 1)


class Returns(nn.Module):
    """Returns a size, which a captured program cannot say with a symbol."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6, dtype=d))

    def forward(self, x: torch.Tensor) -> Any:
        return (x @ self.weight).sum(), x.shape[0]


def test_what_has_no_symbols_is_captured_with_numbers() -> None:
    model = Returns()
    parallel = autopar.parallelize(model, Mesh(dp=2), "ddp", dynamic=True)
    for captures, batch in enumerate((4, 3), 1):
        assert parallel.simulate(torch.ones(batch, 6, dtype=d))[1] == batch and parallel.captures == captures
        assert notes(parallel, "each size is captured by itself, because the model returns a SymInt")
    assert "each size is captured by itself, because the model returns a SymInt" in str(parallel.guards)


class Dropped(Mlp):
    """Dropout between the layers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(self.up(x).relu(), 0.5, self.training)


@pytest.mark.parametrize("random", ["parallel", "single"])
def test_random_ops_follow_the_size(random: Any) -> None:
    model = Dropped().double()
    parallel = autopar.parallelize(model, Mesh(dp=2), "ddp", dynamic=True, random=random)
    fresh = autopar.parallelize(model, Mesh(dp=2), "ddp", dynamic=False, random=random)
    for batch in (8, 3, 5):
        x = torch.randn(batch, 8, dtype=d)
        drawn = []
        for call in (parallel.simulate, fresh.simulate, model):
            torch.manual_seed(batch)
            drawn.append(call(x))
        assert torch.equal(drawn[0], drawn[1]) and parallel.captures == 1
        assert random == "parallel" or (drawn[0] - drawn[2]).abs().max() <= TOLERANCE
        assert 0.2 < float((drawn[0] == 0).double().mean()) <= 1


@pytest.mark.long
@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("name", ["mlp", "llama"])
def test_steps_of_many_sizes(name: str, microbatches: int) -> None:
    """A shorter last batch has the weights of its own tokens, and the state of the optimizer goes on."""
    model, inputs = made(name)
    eager = copy.deepcopy(model)
    parallel = autopar.parallelize(model, Mesh(dp=2), "ddp", dynamic=True)
    step = parallel.train_step(torch.optim.AdamW(parallel.parameters(), lr=0.01), microbatches=microbatches)
    optimizer = torch.optim.AdamW(eager.parameters(), lr=0.01)
    for batch, length in ((8, 10), (8, 7), (4, 10), (6, 6)):
        given_inputs = inputs(batch, length)
        optimizer.zero_grad()
        expected = loss_of(eager(**given_inputs))
        expected.backward()
        optimizer.step()
        assert abs(step.simulate(given_inputs) - expected.detach()) <= 1e-9
        for own, other in zip(model.parameters(), eager.parameters(), strict=True):
            assert (own - other).abs().max() <= 1e-8
    assert step.captures == 1


def test_a_searched_plan_serves_many_sizes() -> None:
    model, inputs = made("mlp")
    parallel = autopar.parallelize(model, Mesh(dp=2), example=inputs(8, 0), dynamic=True)
    assert parallel.solution is not None
    own = autopar.parallelize(copy.deepcopy(model), Mesh(dp=2), example=inputs(8, 0), dynamic=False)
    assert own.solution is not None and own.solution.graph == parallel.solution.graph
    assert own.solution.values == parallel.solution.values
    for batch in (3, 17):
        assert difference(parallel, parallel.simulate, model, inputs(batch, 0)) <= TOLERANCE
    assert parallel.captures == 1
    assert parallel.solution.reason == "the plan was searched for s0=8, so nothing is proven"
    assert not notes(parallel, "cheaper on")


def test_reports_say_that_another_plan_is_cheaper_now() -> None:
    """Replicas share a small batch for nothing: from some batch on, splitting it is cheaper."""
    model, inputs = nn.Linear(512, 512, bias=False), {"input": torch.zeros(8, 512)}
    whole = {"input": (None, None), "weight": (None, None)}
    parallel = autopar.parallelize(model, Mesh(dp=2), ["search", whole], example=inputs, dynamic=True, machine="cpu")
    other = autopar.parallelize(model, Mesh(dp=2), ["search", {"input": ("dp", None)}], example=inputs, machine="cpu")
    assert parallel.solution is not None and other.solution is not None
    found = parallel.solution.crossovers("batch", other.solution)
    cross = next(each for each in found if not each.cheaper_above)
    parallel.capture(input=torch.zeros(int(cross.at) + 64, 512))
    (note,) = parallel.reports["crossovers"].notes
    assert note == (
        f"the batch is {int(cross.at) + 64}, and from a batch of {cross.at:.0f} on the plan that it was compared with "
        f"is cheaper"
    )
    parallel.capture(input=torch.zeros(max(2, int(cross.at) // 2), 512))
    assert "crossovers" not in [report.name for report in parallel.reports]
