"""What torch.compile compiles with the backend autopar has on a mesh the numbers of eager."""

from __future__ import annotations

import copy
import re
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch
from compiled_by_backend import PLAN, check, net

import autopar
from autopar import Mesh

MESH = Mesh(dp=2, tp=2)
X = torch.randn(8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def _compiled_anew() -> Any:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def compiled(model: Any, **options: Any) -> Any:
    given = {"mesh": MESH, "simulate": True, **options}
    return torch.compile(model, backend=autopar.compile_backend, options=given)


@pytest.mark.parametrize("plan", [PLAN, None, "search"])
def test_numbers_gradients_and_statistics_are_those_of_eager(plan: Any) -> None:
    model = net()
    eager = copy.deepcopy(model)
    function = compiled(model, plan=plan)
    for rows, scale in ((8, 1.0), (6, 1.0), (4, 1.0), (8, 0.5)):
        check(function, model, eager, X[:rows], scale)
    model.eval()
    eager.eval()
    with torch.no_grad():
        torch.testing.assert_close(function(X), eager(X), rtol=1e-10, atol=1e-12)


def test_each_graph_after_a_break_is_on_the_mesh() -> None:
    model = net(breaks=True)
    eager = copy.deepcopy(model)
    with pytest.warns(
        UserWarning, match=r"'\*\.(up|down)\.weight' matches nothing in this graph of torch.compile"
    ) as told:
        check(compiled(model, plan=PLAN), model, eager, X)
    assert len(told) == 2


def test_the_plan_places_parameters_by_their_names() -> None:
    graphs: list[Any] = []

    def watched(graph: Any, arguments: Any, **options: Any) -> Any:
        graphs.append(autopar.compile_backend(graph, arguments, **options))
        return graphs[-1]

    model = net()
    options = {"mesh": MESH, "simulate": True, "plan": PLAN}
    torch.compile(model, backend=watched, options=options)(X)
    program = str(graphs[0].parallel.program)
    assert "up_weight : f64[16/tp 8] = input" in program and "down_weight : f64[4 16/tp] = input" in program
    assert "x : f64[8/dp 8] = input" in program and "norm_running_mean : f64[16] = state(" in program
    lines = {(line.module, line.source.partition(":")[0]) for line in graphs[0].parallel.transfers.lines}
    assert {module for module, _ in lines} >= {"down", "norm"}
    assert {file for _, file in lines} == {"compiled_by_backend.py"}


def test_torch_finds_the_backend_by_its_name() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    value = re.search(r'\[project.entry-points.torch_dynamo_backends\]\nautopar = "(.*)"', text)
    assert value is not None
    assert EntryPoint("autopar", value[1], "torch_dynamo_backends").load() is autopar.compile_backend


REFUSED = [
    ({}, "the backend autopar takes a mesh, and no mode: torch.compile"),
    ({"simulate": "yes"}, "\"simulate\" is 'yes', and not True or False: torch.compile"),
    ({"mesh": MESH, "outputs": "sharded"}, "the backend autopar has no option 'outputs'; it takes mesh, simulate"),
    ({"mesh": Mesh(pp=2)}, "is not cut into the stages of a pipeline; use a mesh without pp"),
    ({"mesh": MESH}, r"the mesh \(dp=2 tp=2\) needs 4 processes, and this one is alone; start them with torchrun "
                     r"--nproc-per-node 4, or add \"simulate\": True"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "words"), REFUSED)
def test_what_is_refused(options: Any, words: str) -> None:
    with pytest.raises(Exception, match=words):
        torch.compile(net(), backend=autopar.compile_backend, options=options)(X)


def test_a_preset_is_refused() -> None:
    with pytest.raises(TypeError, match="takes a plan of globs, or 'search', and not 'megatron'"):
        compiled(net(), plan="megatron")(X)


def test_writes_into_arguments_are_refused() -> None:
    with pytest.raises(autopar.CaptureError, match=r"chang|writ"):
        compiled(lambda x: x.add_(1) * 2)(X.clone())
