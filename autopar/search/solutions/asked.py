"""Check what users pass to the methods of a solution: a ``TypeError`` says what was given, and what is wanted."""

from __future__ import annotations

import os
from collections.abc import Mapping

from autopar.errors import class_of, shown

LAYOUTS = 'a dict from names to layouts, as in {"up.weight": ("tp", None)}'
MARKS = 'a dict from inputs to the symbols of their dims, as in {"x": ("batch", None)}'
NAME = 'the name of a parameter, an input or another value, as "up.weight"'
SYMBOL = 'the name of a symbol, as "batch"'
PATH = 'the path of a file, as "plan.json"'
OTHER = "another solution, as that of parallelize(model, mesh, plan, example=…).solution"


def check_layouts(plan: object) -> None:
    """Raise ``TypeError`` if this is no dict from names to layouts."""
    _check(isinstance(plan, Mapping) and all(isinstance(name, str) for name in plan), "fix", LAYOUTS, plan)


def check_marks(marks: object) -> None:
    """Raise ``TypeError`` if this is no dict from names of inputs."""
    right = marks is None or (isinstance(marks, Mapping) and all(isinstance(name, str) for name in marks))
    _check(right, "expression", MARKS, marks)


def check_name(name: object) -> None:
    """Raise ``TypeError`` if this is no name of a value."""
    _check(isinstance(name, str), "explain", NAME, name)


def check_symbol(symbol: object) -> None:
    """Raise ``TypeError`` if this is no name of a symbol."""
    _check(isinstance(symbol, str), "crossovers", SYMBOL, symbol)


def check_path(path: object) -> None:
    """Raise ``TypeError`` if this is no path."""
    _check(isinstance(path, (str, os.PathLike)), "save", PATH, path)


def check_other(method: str, is_solution: bool, other: object) -> None:
    """Raise ``TypeError`` if this is no solution."""
    _check(is_solution, method, OTHER, other)


def _check(right: bool, method: str, wanted: str, given: object) -> None:
    if not right:
        what = "None" if given is None else f"{class_of(given)}: {shown(given)}"
        raise TypeError(f"solution.{method} takes {wanted}, not {what}")
