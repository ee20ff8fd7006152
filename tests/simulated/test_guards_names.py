"""A value of the script that has the name of an attribute of the model's is no guard: nothing is captured anew."""

from __future__ import annotations

import sys
import textwrap
import types
import warnings
from typing import Any

import pytest
import torch

import autopar
from autopar import Mesh
from autopar.capture import capture

BESIDE = {  # how forward reads an attribute; what the script has; how it changes in each step
    "a number": ("x.mean() * self.step", "step = 0", "step += 1"),
    "a float": ("x * self.scale", "scale = 0.5", "scale *= 0.9"),
    "a list": ("x * len(self.losses)", "losses = []", "losses.append(1.0)"),
    "a method": ("self.total(x)", "total = 0.0", "total += 0.5"),
    "in a function inside": ("(lambda z: z.total(x) * z.step)(self)", "total = 1", "total += 1"),
    "in a class that it calls": ("Helper.twice(x) * self.step", "class Helper(Twice): step = 0", "Helper.step += 1"),
    "in a module that it imports": ("helper.twice(x) * self.step", "import helper_of_names as helper; helper.step = 0",
                                    "helper.step += 1"),
}  # fmt: skip
READ = {
    "a number": ("x * step", "step = 1", "step += 1"),
    "in a function inside": ("(lambda y: y * step)(x)", "step = 1", "step += 1"),
    "in a class": ("x * Helper.step", "class Helper(Twice): step = 1", "Helper.step += 1"),
    "in a class, by a text": ("x * getattr(Helper, 'step')", "class Helper(Twice): step = 1", "Helper.step += 1"),
    "in a module": ("x * helper.step", "import helper_of_names as helper; helper.step = 1", "helper.step += 1"),
    "of an argument that is a class": ("times(Helper, x)", "class Helper(Twice): step = 1", "Helper.step += 1"),
    "where self is another": ("self.of(Helper, x)", "class Helper(Twice): step = 1", "Helper.step += 1"),
}  # fmt: skip
SCRIPT = """
import torch

class Twice:
    @staticmethod
    def twice(x):
        return 2 * x

{top}

def times(owner, x):
    return x * owner.step

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.step, self.scale, self.losses = 3, 2.0, [1, 2]

    def total(self, x):
        return x + 1

    def of(self, other, x):
        self = other
        return x * self.step

    def forward(self, x):
        return {read}
"""


def script(monkeypatch: pytest.MonkeyPatch, read: str, top: str) -> Any:
    for name, source in (
        ("helper_of_names", "def twice(x):\n    return 2 * x\n"),
        ("script_of_names", SCRIPT.format(read=read, top=top)),
    ):
        module = types.ModuleType(name)
        monkeypatch.setitem(sys.modules, name, module)
        exec(compile(textwrap.dedent(source), f"/{name}.py", "exec"), vars(module))
    return module


def captures(space: Any, change: str) -> int:
    model, x = space.Net(), torch.randn(4, 4)
    parallel = autopar.parallelize(model, Mesh(dp=2), dynamic=False)
    for _ in range(3):
        torch.testing.assert_close(parallel.simulate(x), model(x))
        exec(change, vars(space))
    return parallel.captures


@pytest.mark.parametrize("case", BESIDE)
def test_names_of_attributes_are_no_globals(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    *of_script, change = BESIDE[case]
    assert captures(script(monkeypatch, *of_script), change) == 1  # and warnings are errors


@pytest.mark.parametrize("case", READ)
def test_what_is_read_is_guarded(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    *of_script, change = READ[case]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # each new value captures the step anew
        assert captures(script(monkeypatch, *of_script), change) == 3


def test_what_one_rank_appends_is_no_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks compare their guards: a list that the first rank alone fills would end the training."""
    space = script(monkeypatch, *BESIDE["a list"][:2])
    words = [guard.place.words for guard in capture(space.Net(), (torch.randn(4, 4),)).guards.entries]
    assert "losses" in words and not any("global" in each for each in words), words
