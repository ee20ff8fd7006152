"""Values of modules that forward itself imports: where one has changed, a call captures anew."""

from __future__ import annotations

import dis
import importlib
import sys
import textwrap
import types
import typing
from pathlib import Path

import pytest
import torch

import autopar
from autopar import Mesh
from autopar.capture.guards.bytecode import instructions, modules_named, names_in

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


def imported(source: str, package: str = "") -> list[str]:
    return list(modules_named(names_in(compile(source, "<test>", "exec")), package))


def test_names_of_imported_modules() -> None:
    assert imported("from . import a\nfrom ..b import c\nimport d.e, f\nfrom g import *\n", "p.q") == [
        "p", "p.q", "p.q.a", "p", "p.b", "p.b.c", "d", "d.e", "f", "g", "g.*",
    ]  # fmt: skip
    many = "".join(f"x = {k}.5\n" for k in range(300))  # numbers of constants beyond a byte
    assert imported(f"{many}from late import K\n") == ["late", "late.K"]
    for refused in ("from . import a\n", "from ...b import a\n"):  # in no package, and beyond the outermost
        assert imported(refused, "p" * ("..." in refused)) == []
    assert imported("x = 'sys'\n") == []


def test_names_are_those_of_dis() -> None:
    """Instructions of each Python have other numbers."""
    codes = [
        value.__code__ for value in {**vars(dis), **vars(typing)}.values() if isinstance(value, types.FunctionType)
    ]
    assert len(codes) > 50
    for code in codes:
        theirs = [(each.opname, each.argval) for each in dis.get_instructions(code) if each.opcode in dis.hasname]
        ours = [(op, value) for op, value in instructions(code) if dis.opmap[op] in dis.hasname]
        assert [value for _, value in ours] == [value for _, value in theirs]
