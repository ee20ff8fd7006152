"""Simulated ranks equal the single device: outputs and every gradient, in float64, on many meshes and plans."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from equality import check_equal
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from models import COLUMN_ROW, Block, Language, Residual
from shared_captures import shared_captures  # noqa: F401
from torch import nn

from autopar import Mesh

MESHES = {
    "2": Mesh(dp=2),
    "2tp": Mesh(tp=2),
    "4": Mesh(dp=4),
    "4tp": Mesh(tp=4),
    "2x2": Mesh(dp=2, tp=2),
    "tp-major": Mesh(tp=2, dp=2),
    "2x2x2": Mesh(dp=2, cp=2, tp=2),
    "3x2": Mesh(dp=3, tp=2),
    "1x2": Mesh(dp=1, tp=2),
    "1": Mesh(dp=1),
}


def plan_for(mesh: Mesh) -> dict[str, Any]:
    plan: dict[str, Any] = dict(COLUMN_ROW) if "tp" in mesh.names else {}
    if "cp" in mesh.names:
        plan["x"] = ("dp", "cp", None)
    return plan


residual, language = (
    functools.cache(lambda *sizes: Residual(*sizes).double()),
    functools.cache(lambda vocabulary: Language(vocabulary).double()),
)
SIZES = {"even": (12, 8, 24), "uneven": (5, 7, 9), "tiny": (1, 3, 2), "odd": (7, 4, 3)}  # batch, dim, hidden
MORE = pytest.mark.sweep("the mesh with uneven sizes, and these sizes on other meshes, are in the list")


@pytest.mark.usefixtures("shared_captures")
@pytest.mark.parametrize(
    ("size", "name"),
    [
        *(("uneven", name) for name in MESHES),
        *((size, name) for size in ("even", "tiny", "odd") for name in ("4", "4tp", "2x2", "2x2x2")),
        *(
            pytest.param(size, name, marks=MORE)
            for size in ("even", "tiny", "odd")
            for name in MESHES
            if name not in ("4", "4tp", "2x2", "2x2x2")
        ),
    ],
)
def test_residual_mlp(size: str, name: str) -> None:
    mesh, (batch, dim, hidden) = MESHES[name], SIZES[size]
    model, x = residual(dim, hidden), torch.randn(batch, 6, dim, dtype=torch.float64, requires_grad=True)
    model.zero_grad()
    check_equal(model, mesh, plan_for(mesh), (x,))


WITHOUT_TP = [name for name, mesh in MESHES.items() if "tp" not in mesh.names]


@pytest.mark.usefixtures("shared_captures")
@pytest.mark.parametrize(
    ("split", "size", "name"),
    [
        *(("batch", size, name) for size in ("even", "uneven") for name in (*WITHOUT_TP, "2x2x2")),
        *(("vocabulary", "uneven", name) for name in MESHES if name not in WITHOUT_TP),
        *(("vocabulary", "even", name) for name in ("4tp", "2x2")),
        *(("tp", size, name) for size in ("even", "uneven") for name in ("4tp", "2x2")),
        *(
            pytest.param(split, size, name, marks=pytest.mark.sweep("a mesh without tp has the same plan as batch"))
            for split in ("tp", "vocabulary")
            for size in ("even", "uneven")
            for name in WITHOUT_TP
        ),
        *(
            pytest.param(split, size, name, marks=pytest.mark.sweep("vocabulary, uneven is on each of these meshes"))
            for split, size, taken in (
                ("batch", "even", ("2x2x2",)),
                ("batch", "uneven", ("2x2x2",)),
                ("tp", "even", ("4tp", "2x2")),
                ("tp", "uneven", ("4tp", "2x2")),
                ("vocabulary", "even", ("4tp", "2x2")),
            )
            for name in MESHES
            if name not in WITHOUT_TP and name not in taken
        ),
    ],
)
def test_language_model(split: str, size: str, name: str) -> None:
    mesh, (batch, vocabulary) = MESHES[name], {"even": (4, 16), "uneven": (5, 11)}[size]
    plan: dict[str, Any] = {}
    if "tp" in mesh.names and split != "batch":
        plan |= COLUMN_ROW
        if split == "vocabulary":
            plan |= {"embed.weight": ("tp", None), "head.weight": ("tp", None)}
    ids = torch.randint(vocabulary, (batch, 6))
    labels = torch.randint(vocabulary, (batch, 6))
    labels[0, :3] = -100
    model = language(vocabulary)
    model.zero_grad()
    check_equal(model, mesh, plan, (ids,), {"labels": labels})


def test_fully_split_parameters() -> None:
    """Parameters split over the batch's own axis: gathered for use, gradients reduce-scattered."""
    parallel = check_equal(Block().double(), Mesh(dp=4), {"*.weight": ("dp",), "*.bias": ("dp",)},
                           (torch.randn(8, 8, dtype=torch.float64),))  # fmt: skip
    text = str(parallel.program)
    assert text.count("reduce_scatter(") == 4 and "all_reduce(" not in text


@pytest.mark.long
@pytest.mark.usefixtures("shared_captures")
@pytest.mark.parametrize(
    "every", ["pair of choices", pytest.param("way", marks=pytest.mark.sweep("each two of three choices meet already"))]
)
def test_every_way_to_split_one_block(every: str) -> None:
    """All ways to split the dims of a block's parameters and input over two axes; of two that differ in the axes'
    names, one. Or of all ways so many that each two choices meet."""
    choices = [None, "dp", "tp"]
    x = torch.randn(5, 3, dtype=torch.float64)
    model = Block(3, 4).double()
    ways = [(a, b) for a in choices for b in choices if a is None or a != b]
    inputs = ((None, None), ("dp", None), ("tp", "dp"), (("tp", "dp"), None), (("dp", "tp"), None))
    other = str.maketrans("dt", "td")
    seen: set[str] = set()
    for (i, up), (j, down), (k, first) in itertools.product(*map(list, map(enumerate, (ways, ways, inputs)))):
        if every == "pair of choices" and (2 * i + j) % len(inputs) != k:  # each i and j, i and k, j and k
            continue
        if repr((up, down, first)).translate(other) not in seen:
            seen.add(repr((up, down, first)))
            model.zero_grad()
            check_equal(model, Mesh(dp=2, tp=2), {"up.weight": up, "down.weight": down, "x": first}, (x,))
    if every == "way":
        assert 7 * 7 * 5 / 2 < len(seen) < 7 * 7 * 5


@pytest.mark.long
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_random_models_meshes_and_plans(data: st.DataObject) -> None:
    sizes = st.integers(1, 6)
    axes = data.draw(st.lists(st.sampled_from(["dp", "tp", "cp", "ep"]), min_size=1, max_size=3, unique=True))
    mesh = Mesh({axis: data.draw(st.integers(1, 3)) for axis in axes})
    dim, hidden, batch = data.draw(sizes), data.draw(sizes), data.draw(sizes)
    layers: list[nn.Module] = []
    for _ in range(data.draw(st.integers(1, 3))):
        layers.append(data.draw(st.sampled_from([
            lambda: nn.LayerNorm(dim), lambda: nn.Tanh(), lambda: nn.ReLU(), lambda: nn.SiLU(), lambda: nn.Softmax(-1),
            lambda: Block(dim, hidden), lambda: nn.Linear(dim, dim), lambda: Residual(dim, hidden, 1),
        ]))())  # fmt: skip
    model = nn.Sequential(*layers).double()
    plan: dict[str, Any] = {}
    for name, parameter in [*model.named_parameters(), ("input", torch.empty(batch, dim))]:
        free = list(axes)
        spec = []
        for _ in parameter.shape:
            taken = data.draw(st.lists(st.sampled_from(free), unique=True, max_size=2)) if free else []
            free = [axis for axis in free if axis not in taken]
            spec.append(tuple(taken))
        plan[name] = tuple(spec)
    x = torch.randn(batch, dim, dtype=torch.float64, requires_grad=True)
    check_equal(model, mesh, plan, (x,))
