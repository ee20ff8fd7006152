"""Records are written and read by their annotations."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch

from autopar import Layout, Mesh, Program
from autopar.cache.records import LATER, Leaf, Records, given
from autopar.ir.layout import DistAttr
from autopar.ir.record import TensorType

MESH = Mesh(dp=2)
SPLIT = Layout(MESH, DistAttr((((4, ("dp",)),), ((3, ()),))))
PROGRAM = """\
program explicit on dp=2
  x : f32[4/dp 3] = input
forward:
  relu : f32[4/dp 3] = relu(x)
  return relu
"""


class Pair(NamedTuple):
    name: str
    dim: int | str | None


@dataclass(frozen=True)
class Inner:
    type: TensorType
    attr: DistAttr
    layout: Layout
    mesh: Mesh
    dtype: torch.dtype


@dataclass(frozen=True)
class Outer:
    program: Program
    again: Program
    later: LATER
    inner: Inner | None
    none: Inner | None
    pairs: tuple[Pair, ...]
    fixed: tuple[int, float]
    names: frozenset[str]
    table: Mapping[str, Pair]
    given: object


@dataclass(frozen=True)
class Unknown:
    value: complex


def outer() -> Outer:
    program = Program.parse(PROGRAM)
    inner = Inner(TensorType((4, 3), torch.float32, SPLIT), SPLIT.attr, SPLIT, MESH, torch.bfloat16)
    pairs = (Pair("a", 1), Pair("b", "x"), Pair("c", None))
    return Outer(program, program, lambda: program, inner, None, pairs, (1, 2.5), frozenset("ba"), {"p": pairs[0]}, 7j)


def round_trip(made: Any, kind: Any, leaves: Mapping[Any, Leaf]) -> tuple[Any, Any]:
    content = json.loads(json.dumps(Records(leaves).to_json(made, kind)))
    return content, Records(leaves, content).read(content["record"], kind)


def test_a_record_is_read_as_it_was_written() -> None:
    made = outer()
    content, read = round_trip(made, Outer, {object: given(7j)})
    for name in ("inner", "none", "pairs", "fixed", "names", "table", "given"):
        assert getattr(read, name) == getattr(made, name), name
    assert str(read.program) == str(made.program) and isinstance(read.table["p"], Pair)
    assert read.program is read.again is read.later(), "a program that several fields have is one program"
    assert len(content["shared"]["Program"]) == 1


def test_a_field_without_a_form_is_a_type_error() -> None:
    """Such an error is one of autopar's developers: a record has got a field of a new class."""
    with pytest.raises(TypeError, match=r"complex.* has no form in the cache; give it a leaf"):
        Records({}).to_json(Unknown(1j), Unknown)
    assert round_trip(Unknown(1j), Unknown, {complex: Leaf(str, complex)})[1] == Unknown(1j)
