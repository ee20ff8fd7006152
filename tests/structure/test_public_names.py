"""Compare the public names and their signatures with those that are written down: a change is one on purpose."""

from __future__ import annotations

import importlib
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

MODULES = ("autopar", "autopar.checkpoint", "autopar.data", "autopar.elastic", "autopar.optimizers", "autopar.passes",
           "autopar.pipeline", "autopar.rules", "autopar.scheduling")  # fmt: skip
NAMES = Path(__file__).with_name("public_names.txt")
ROOT = Path(__file__).parent.parent.parent


def signature(function: Any) -> str:
    """Parameters with kinds and defaults; annotations are the type checker's business."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return "(…)"
    text = ", ".join(str(parameter.replace(annotation=inspect.Parameter.empty)) for parameter in parameters)
    return re.sub(r" at 0x[0-9a-f]+", "", f"({text})")


def members(cls: type) -> set[str]:
    """The public members that autopar's own classes give a class."""
    return {
        name
        for base in cls.__mro__
        if base.__module__.startswith("autopar")
        for name in vars(base)
        if not name.startswith("_")
    }


def lines_of(module: ModuleType) -> Iterator[str]:
    """``autopar.Mesh(sizes, …)``, ``autopar.Mesh.group(self, rank, axis)``, …"""
    for name in sorted(getattr(module, "__all__", [name for name in vars(module) if not name.startswith("_")])):
        value, path = getattr(module, name), f"{module.__name__}.{name}"
        yield path + (signature(value) if callable(value) else "")
        if inspect.isclass(value):
            for member in sorted(members(value)):
                attribute = inspect.getattr_static(value, member)
                function = attribute.__func__ if isinstance(attribute, (staticmethod, classmethod)) else attribute
                yield f"{path}.{member}" + (signature(function) if callable(function) else "")


def test_public_names_and_signatures(update_goldens: bool) -> None:
    text = "".join(f"{line}\n" for name in MODULES for line in lines_of(importlib.import_module(name)))
    if update_goldens:
        NAMES.write_text(text)
    assert text == NAMES.read_text()


ALONE = """
import sys, types
if "whole" not in sys.argv:  # the packages, without what importing the package loads
    sys.modules["autopar"] = package = types.ModuleType("autopar")
    package.__path__ = [sys.argv[1]]
else:
    from autopar import parallelize
import torch
from autopar.ir.layout import DistAttr
from autopar.ir.record import TensorType
import autopar.rules
from autopar.rules.binding import bind
torch.library.custom_op("alone::twice", lambda x: x * 2, mutates_args=(), schema="(Tensor x) -> Tensor")
x = TensorType((4, 6), torch.float64)
print(str(bind(torch.ops.alone.twice.default, (x,), {}, (x,), autopar.rules.registry.rule_of(torch.ops.alone.twice.default)).pattern.text))
print(any(name.startswith("autopar.runtime") for name in sys.modules))
"""  # noqa: E501


def bound_by(*words: str) -> list[str]:
    """The pattern of an op without a rule, and whether the runtime was loaded, in a process of its own."""
    command = [sys.executable, "-c", ALONE, str(ROOT / "autopar"), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout.split("\n")[:2]


@pytest.mark.processes
def test_rules_load_alone_and_discovery_registers_itself() -> None:
    assert bound_by() == ["x0d0! x0d1! -> y0d0! y0d1!", "False"]
    assert "!" not in bound_by("whole")[0]


def test_importing_loads_little() -> None:
    """autopar alone loads no torch, nor do schedules: names load when they are first used."""
    code = (
        "import sys, autopar; autopar.Mesh, autopar.PlanError; import autopar.pipeline, autopar.scheduling; "
        "print('torch' in sys.modules, 'matplotlib' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert run.stdout.split() == ["False", "False"]
