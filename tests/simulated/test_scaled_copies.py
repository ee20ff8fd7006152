"""``verify=True``: a scaled-down copy has the numbers of a single device, or is refused with the first that differs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar import Mesh, VerifyError
from autopar.ir.program import Program
from autopar.model import compared
from autopar.model.compared import Numbers, layouts_in, scaled_mesh, uneven_axes
from autopar.rules import register_rule

SPLIT = {"*.up.weight": ("tp", None), "*.up.bias": ("tp",), "*.down.weight": (None, "tp")}


class MLP(nn.Module):
    def __init__(self, wide: int = 50) -> None:
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(6, wide), nn.Dropout(0.5), nn.Linear(wide, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.drop(torch.relu(self.up(x))))


class Rows(nn.Module):
    """Two layers, of which the second has the rule that may be wrong."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


@torch.library.custom_op("scaled_copies::counted", mutates_args=())
def counted(x: torch.Tensor) -> torch.Tensor:
    return x + torch.arange(x.shape[0], dtype=x.dtype, device=x.device)[:, None]


counted.register_fake(torch.empty_like)
counted.register_autograd(lambda context, gradient: gradient)


class Counted(MLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(counted(x))


def verified(model: nn.Module, mesh: Mesh, plan: Any = SPLIT, rows: int = 130, **options: Any) -> str:
    parallel = autopar.parallelize(model, mesh, plan, example=(torch.randn(rows, 6),), verify=True, **options)
    (note,) = parallel.reports["numbers"].notes
    return str(note)


def test_a_copy_of_a_few_ranks_is_compared() -> None:
    """130 rows on 64 ranks, and 50 columns on 8: both are uneven, and three ranks of ``dp`` leave room for two."""
    model = MLP()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.get_rng_state()
    note = verified(model, Mesh(dp=64, tp=8))
    assert note.startswith(
        "5 outputs and gradients of a copy on (dp=3 tp=2), in float64 and in evaluation, are those of"
    )
    assert model.training and all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    del state


def test_even_sizes_and_a_model_on_meta() -> None:
    with torch.device("meta"):
        model = MLP(64)
    note = verified(model, Mesh(dp=64, tp=8), rows=128)
    assert "a copy on (dp=2 tp=2)" in note and next(model.parameters()).is_meta


def test_a_wrong_rule_is_found() -> None:
    """Pieces count from 0 again: programs are consistent, and only numbers show it."""
    register_rule("b d -> b d", "scaled_copies::counted")
    assert autopar.parallelize(Counted(), Mesh(dp=64), "ddp", example=(torch.randn(130, 6),)).program is not None
    with pytest.raises(VerifyError) as found:
        verified(Counted(), Mesh(dp=64), "ddp")
    said = str(found.value)
    assert said.startswith("a scaled-down copy on (dp=3) has other numbers than a single device: output 0[")
    assert " on a single device; the largest relative difference is " in said and "more than 1e-09\n" in said
    assert said.endswith("at the rules that parallel.reports names as found by running")


def test_a_searched_plan_gives_the_copy_its_layouts() -> None:
    """On so small a model another search would split nothing."""
    plan = ["search", {"x": ("dp", None), "*.up.weight": ("tp", None)}]
    note = verified(MLP(), Mesh(dp=3, tp=4), plan, machine="cpu")
    assert "5 outputs and gradients of a copy on (dp=3 tp=3)" in note or "a copy on (dp=3 tp=2)" in note
    parallel = autopar.parallelize(MLP(), Mesh(dp=3, tp=4), plan, example=(torch.randn(130, 6),), machine="cpu")
    layouts = layouts_in(parallel.program)
    assert layouts[".x"] == (("dp",), None) and layouts[".up.weight"] == (("tp",), None)
    assert "5 outputs and gradients of a copy on (dp=3" in verified(MLP(), Mesh(dp=3, tp=4), parallel.solution)
    register_rule("b d -> b d", "scaled_copies::counted")
    with pytest.raises(VerifyError, match="has other numbers than a single device: output 0"):
        verified(Counted(), Mesh(dp=3, tp=4), plan, machine="cpu")


def test_what_is_not_compared_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compared, "MOST_PARAMETERS", 100)
    assert verified(MLP(), Mesh(dp=2, tp=2)) == (
        "numbers were not compared with a single device: the model has 656 parameters, more than 100; compare one with "
        "fewer layers and smaller sizes"
    )
    monkeypatch.undo()
    with pytest.raises(ValueError, match=r"verify=True compares a call with a single device; give its arguments"):
        autopar.parallelize(MLP(), Mesh(dp=2), verify=True)
    with pytest.raises(TypeError, match="verify"):
        autopar.parallelize(MLP(), Mesh(dp=2), example=(torch.randn(8, 6),), verify="yes")


@pytest.mark.parametrize(
    ("mesh", "size", "small"),
    [
        (Mesh(dp=512, tp=8), 4096, "dp=2 tp=2"), (Mesh(dp=512, tp=8), 4095, "dp=3 tp=2"),
        (Mesh(dp=2048, tp=4, cp=2), 4095, "dp=2 tp=2 cp=2"), (Mesh(dp=3, tp=1), 4, "dp=3 tp=1"),
        (Mesh(a=4, b=4, c=4, d=4), 4, "a=2 b=2 c=2 d=1"),
    ],
    ids=str,
)  # fmt: skip
def test_the_mesh_of_the_copy(mesh: Mesh, size: int, small: str) -> None:
    first = mesh.names[0]
    program = Program.parse(f"program explicit on {mesh}\n  x : f32[{size}/{first}] = input\nforward:\n  return x\n")
    assert uneven_axes(program) == ({first} if size % mesh.sizes[first] else set())
    assert str(scaled_mesh(mesh, program)) == small


def test_the_first_number_that_differs() -> None:
    theirs = torch.arange(6.0).reshape(2, 3)
    ours = theirs.clone()
    ours[1, 0] = 7.0
    pairs = [("same", theirs, theirs), ("a", ours, theirs), ("b", ours * 2, theirs), ("c", ours[0], theirs)]
    numbers = Numbers.of_pairs("values", pairs[:3], 1e-9)
    assert (numbers.count, numbers.of, numbers.equal) == (3, "b", False)
    assert numbers.first == "a[1, 0] is 7, and 3 on a single device"
    shapes = Numbers.of_pairs("values", pairs[3:], 1e-9)
    assert shapes.largest == float("inf") and shapes.first == "c has the shape [3], and [2, 3] on a single device"
    nan = Numbers.of_pairs("values", [("n", theirs * float("nan"), theirs)], 1e-9)
    assert not nan.equal and nan.first.startswith("n[0, 0] is nan, and 0")
    assert Numbers.of_pairs("values", pairs[:1], 1e-9) == Numbers("values", 0.0, "same", 1, 1e-9)


class Logarithm(nn.Module):
    """Of random numbers, of which some are negative."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.log(self.up(x))


class Narrowed(Logarithm):
    """Casts to a fixed dtype, which the parameters of a copy in float64 have not."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x.bfloat16())


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (Logarithm(), "numbers were not compared with a single device, where output 0 of random numbers is NaN"),
        (Narrowed().bfloat16(), "numbers were not compared with a single device, where a copy in float64 fails: "
         "RuntimeError: mat1 and mat2 must have the same dtype"),
    ],
)  # fmt: skip
def test_what_has_no_numbers_in_float64_is_said(model: nn.Module, said: str) -> None:
    x = torch.randn(8, 8)
    parallel = autopar.parallelize(model, Mesh(dp=2), "ddp", example=(x,), verify=True)
    assert parallel.reports["numbers"].notes[0].startswith(said)


@pytest.mark.long
def test_stages_of_a_pipeline() -> None:
    """The copy has two stages, and its numbers are compared; a wrong rule on the second one is found."""
    note = verified(Rows(MLP(), MLP()), Mesh(pp=8, dp=16), "ddp")
    assert note.startswith("9 outputs and gradients of a copy on (pp=2 dp=2), in float64 and in evaluation, are those")
    note = verified(Rows(MLP(), MLP()), Mesh(pp=8, dp=16), "search")
    assert note == "numbers were not compared with a single device: train_step searches the layouts of each stage"
    register_rule("b d -> b d", "scaled_copies::counted")
    with pytest.raises(VerifyError, match=r"a scaled-down copy on \(pp=2 dp=2\) has other numbers"):
        verified(Rows(MLP(), Counted()), Mesh(pp=8, dp=16), "ddp")
