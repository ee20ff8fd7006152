"""Forward reads a value in an odd way, and the next start has another value there: it is never a hit.

The code of forward is the same each time. So either the value is compared, or nothing is kept.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

import autopar
from autopar.cache import cache as cache_room
from autopar.cache.folder import Folder

HEAD = """
import array, contextvars, decimal, fractions, functools, itertools, logging, operator, os, re, sys, threading, weakref
import numpy as np
import torch
from torch import nn
from os import environ as ENVIRON, getenv as GETENV

V = {value}
ENV = os.environ
{top}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x):
        return self.up(x) * {read}
"""
COMPARED = {  # what it is → how it is made of V, how forward reads it
    "a tensor": ("T = torch.full((8,), V)", "T"),
    "a tensor of one number": ("T = torch.tensor(V)", "T"),
    "a fraction": ("T = fractions.Fraction(V)", "float(T)"),
    "a decimal": ("T = decimal.Decimal(V)", "float(T)"),
    "a pattern": ("T = re.compile(str(V))", "float(T.pattern)"),
    "a bound built-in": ("T = {'v': V}.get", "T('v')"),
    "a context variable": ("T = contextvars.ContextVar('t', default=V)", "T.get()"),
    "a thread local": ("T = threading.local(); T.v = V", "T.v"),
    "an array of Python": ("T = array.array('d', [V])", "T[0]"),
    "bytes": ("T = bytearray([int(V)])", "T[0]"),
    "a logger": ("T = logging.getLogger('autopar of tests'); T.setLevel(int(V) * 10)", "float(T.level)"),
    "a function of torch": ("T = torch.relu if V == 2.0 else torch.tanh", "T(x)"),
    "a class of torch": ("T = nn.ReLU if V == 2.0 else nn.Tanh", "T()(x)"),
    "a cached function": ("@functools.lru_cache\ndef T(): return V", "T()"),
    "an environment with another name": ("", "float(ENVIRON['AUTOPAR_TEST_VALUE'])"),
    "getenv with another name": ("", "float(GETENV('AUTOPAR_TEST_VALUE'))"),
    "a global environment": ("", "float(ENV.get('AUTOPAR_TEST_VALUE', '1'))"),
}
NOT_KEPT = {
    "a large array": ("T = np.full(2000, V)", "float(T[0])"),
    "a getter": ("T = operator.attrgetter('v')\nclass O: v = V", "T(O)"),
    "an iterator": ("T = itertools.repeat(V)", "next(T)"),
    "a weak reference": ("class O: pass\nO = O(); O.v = V; T = weakref.ref(O)", "T().v"),
    "a cached function that was called before": ("@functools.lru_cache\ndef T(): return V\nT()", "T()"),
    "a computed attribute": ("", "float(getattr(os, 'environ')['AUTOPAR_TEST_VALUE'])"),
    "arguments of the program": ("sys.argv[1:] = [str(V)]", "float(sys.argv[-1])"),
    "variables in a path": ("", "float(os.path.expandvars('$AUTOPAR_TEST_VALUE'))"),
    "whether a file exists": ("FILE = f'no-such-file-{V}'", "(1.0 + os.path.exists(FILE))"),
    "a file of NumPy": ("FILE = 'FOLDER/v.npy'; np.save(FILE, V)", "float(np.load(FILE))"),
    "a computed global": ("T = V", "globals()[''.join('T')]"),
    "threads of torch": ("", "float(torch.get_num_threads())"),
    "bytes of the environment": ("", "float(os.environb[b'AUTOPAR_TEST_VALUE'])"),
}


def model(folder: Path, name: str, top: str, read: str, value: float) -> Any:
    source = HEAD.format(value=value, top=top.replace("FOLDER", str(folder)), read=read)
    path = folder / f"{name}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    module = sys.modules[name] = types.ModuleType(name)
    module.__file__ = str(path)
    exec(compile(source, str(path), "exec"), vars(module))
    torch.manual_seed(0)
    return module.Net()  # type: ignore[attr-defined]


def note(cache: Path, net: torch.nn.Module) -> str:
    """What came of the look into the cache; the numbers are those of the model in any case."""
    x = torch.randn(4, 8)
    parallel = autopar.parallelize(net, autopar.Mesh(dp=2), "ddp", example=(x,), cache=cache)
    torch.testing.assert_close(parallel.simulate(x), net(x))
    return parallel.reports["cache"].notes[0]


@pytest.mark.parametrize("what", (*COMPARED, *NOT_KEPT))
def test_another_value_is_never_a_hit(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["program"])
    name, notes = f"odd_values_{abs(hash(what))}", []
    for value in (2.0, 2.0, 3.0):
        monkeypatch.setenv("AUTOPAR_TEST_VALUE", str(value))
        notes.append(note(tmp_path / "c", model(tmp_path, name, *{**COMPARED, **NOT_KEPT}[what], value)))
    sys.modules.pop(name)
    if what in COMPARED:
        assert "; kept as" in notes[0] and notes[1].startswith("hit: ") and notes[2].startswith("miss: "), notes
    else:
        assert all(text.startswith("miss: ") and "not kept: " in text for text in notes), notes


def test_global_tensors_are_guarded_in_one_process_too(tmp_path: Path) -> None:
    net, x = model(tmp_path, "odd_values_of_one_process", "T = torch.full((8,), V)", "T", 2.0), torch.randn(4, 8)
    module: Any = sys.modules.pop("odd_values_of_one_process")
    parallel = autopar.parallelize(net, autopar.Mesh(dp=2), "ddp", cache=False)
    torch.testing.assert_close(parallel.simulate(x), net(x))
    module.T.fill_(3.0)
    torch.testing.assert_close(parallel.simulate(x), net(x))
    module.T = torch.full((8,), 4.0)
    with pytest.warns(UserWarning, match="each new value captures the step anew"):
        torch.testing.assert_close(parallel.simulate(x), net(x))
    assert parallel.captures == 3


def test_what_fails_to_be_described_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache ends no run."""

    def failing(*_: Any) -> Any:
        raise KeyError("a defect")

    net = torch.nn.Linear(8, 8)
    with monkeypatch.context() as patch:
        patch.setattr(cache_room, "texts_of", failing)
        assert "not kept: KeyError: 'a defect'" in note(tmp_path, net)
    with monkeypatch.context() as patch:
        patch.setattr(cache_room, "surroundings", failing)
        assert note(tmp_path, net) == "not used: KeyError: 'a defect'"
    assert Folder(tmp_path).entries() == []


def test_attributes_named_like_hooks(tmp_path: Path) -> None:
    net: Any = torch.nn.Sequential(torch.nn.Linear(8, 8))
    net.step_hooks, k = [], 2.0
    net.forward = lambda x: (lambda y: y * k)(net[0](x))
    assert note(tmp_path, net)
