"""Errors show an object by its name or type, and never by its address."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import autopar
from autopar import Mesh
from autopar.errors import shown
from autopar.pipeline.policies import named as named_policy


class Odd:
    pass


class Unprintable:
    def __repr__(self) -> str:
        raise ValueError("no text")


def named() -> None:
    pass


def test_names_and_types_instead_of_addresses() -> None:
    assert shown(named) == "<function named>"
    assert shown(Odd()) == "<test_shown.Odd object>"
    assert shown([functools.partial(named), 1.5, "x"]) == "[functools.partial(<function named>), 1.5, 'x']"
    assert shown(Unprintable()) == "a Unprintable"
    assert shown("x" * 1000) == f"'{'x' * 199}…"


MODEL = torch.nn.Linear(4, 4)
CALLS: dict[str, Callable[[Any], Any]] = {
    "size of an axis": lambda odd: Mesh(dp=odd),
    "name of a stage": lambda odd: Mesh(dp=2, name=odd),
    "ranks": lambda odd: Mesh(dp=2, ranks=odd),
    "plan": lambda odd: autopar.parallelize(MODEL, Mesh(tp=2), odd),
    "axis in a plan": lambda odd: autopar.parallelize(MODEL, Mesh(tp=2), {"weight": (odd, None)}),
    "timeout": lambda odd: autopar.parallelize(MODEL, Mesh(tp=2), timeout=odd),
    "inputs": lambda odd: autopar.parallelize(MODEL, Mesh(tp=2), inputs=odd),
    "recapture": lambda odd: autopar.parallelize(MODEL, Mesh(tp=2), recapture=odd),
    "policy": lambda odd: named_policy(odd),
}


@pytest.mark.parametrize("what", CALLS)
@pytest.mark.parametrize("odd", [Odd(), named], ids=["object", "function"])
def test_errors_have_no_addresses(what: str, odd: Any) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        CALLS[what](odd)
    assert not re.search("0x[0-9a-f]+", str(caught.value)) and re.search("Odd|named", str(caught.value)), str(
        caught.value
    )
