"""Values of modules that forward itself imports: where one has changed, a call captures anew."""

from __future__ import annotations

import importlib
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import autopar
from autopar import Mesh
from autopar.capture.guards.imported import modules_named

IMPORTING = {
    "import": "import {m}; return x * {m}.K",
    "from": "from {m} import K; return x * K",
    "as": "import {m} as other; return x * other.K",
    "in a function inside": "def inner():\n    from {m} import K\n    return K\nreturn x * inner()",
    "by a string": "return x * importlib.import_module('{m}').K",
    "loaded": "return x * sys.modules['{m}'].K",
}


@pytest.mark.parametrize("loaded", [True, False])
@pytest.mark.parametrize("way", IMPORTING)
def test_a_module_that_forward_imports(way: str, loaded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else names the module, and the first call may load it."""
    name = f"imported_by_forward_{len(way)}_{loaded}"
    (tmp_path / f"{name}.py").write_text("K = 2.0\n")
    body = textwrap.indent(IMPORTING[way].format(m=name), " " * 8)
    (tmp_path / f"reads_{name}.py").write_text(
        f"import importlib, sys, torch\n\nclass Reads(torch.nn.Module):\n    def forward(self, x):\n{body}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, name, raising=False)
    model = importlib.import_module(f"reads_{name}").Reads()
    if loaded or way == "loaded":
        importlib.import_module(name)
    parallel, x = autopar.parallelize(model, Mesh(dp=2)), torch.ones(4)
    assert torch.equal(parallel.simulate(x), x * 2)
    sys.modules[name].K = 5.0
    assert torch.equal(parallel.simulate(x), x * 5)
    assert torch.equal(parallel.simulate(x), x * 5) and len(parallel.guards) > 0
    monkeypatch.delitem(sys.modules, name)


def test_names_of_imported_modules() -> None:
    code = compile("from . import a\nfrom ..b import c\nimport d.e, f\nfrom g import *\n", "<test>", "exec")
    assert list(modules_named(code, "p.q")) == [
        "p", "p.q", "p.q.a", "p", "p.b", "p.b.c", "d", "d.e", "f", "g", "g.*",
    ]  # fmt: skip
    many = "".join(f"x = {k}.5\n" for k in range(300))  # numbers of constants beyond a byte
    assert "late" in list(modules_named(compile(f"{many}from late import K\n", "<test>", "exec"), ""))
    assert "late.K" in list(modules_named(compile(f"{many}from late import K\n", "<test>", "exec"), ""))
    for refused in ("from . import a\n", "from ...b import a\n"):  # in no package, and beyond the outermost
        assert list(modules_named(compile(refused, "<test>", "exec"), "p" * ("..." in refused))) == []
    assert list(modules_named(compile("x = 'sys'\n", "<test>", "exec"), "")) == []
