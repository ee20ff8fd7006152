"""No garbage is collected while a plan is searched: the lists of states would be walked again and again."""

from __future__ import annotations

import gc

import pytest
import torch

import autopar
from autopar import Mesh
from autopar.capture import capture
from autopar.costs.machine import machine
from autopar.plan.boundary import Boundary
from autopar.search import search as searches
from autopar.search.solutions import again


@pytest.mark.parametrize("question", ["search", "fix", "explain"])
def test_no_garbage_is_collected_in_a_search_and_in_questions_to_its_plan(
    question: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x, mesh = torch.nn.Linear(64, 64, bias=False), torch.ones(64, 64), Mesh(a=2)
    solution = autopar.parallelize(model, mesh, machine="cpu", example=(x,)).solution
    assert solution is not None
    seen = []
    for module in (searches, again):
        solve = module.solve
        monkeypatch.setattr(module, "solve", lambda *a, f=solve: (seen.append(gc.isenabled()), f(*a))[1])
    assert gc.isenabled()
    if question == "search":
        searches.search(Boundary(capture(model, (x,), {}).program, mesh), machine("cpu"))
    else:
        solution.fix({"weight": ("a", None)}) if question == "fix" else solution.explain("weight")
    assert seen and not any(seen)
    assert gc.isenabled()
