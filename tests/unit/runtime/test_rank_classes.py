"""Ranks are grouped by the sizes of their pieces."""

from __future__ import annotations

import random
from typing import Any

from channel_programs import EXCHANGES
from hypothesis import given, settings
from hypothesis import strategies as st
from random_transfers import random_transfers

from autopar.ir.nodes import record_of
from autopar.ir.program import Program
from autopar.runtime.localize import rank_classes

MESHES = ({"dp": 2, "tp": 3}, {"dp": 5, "tp": 2}, {"a": 2, "b": 2, "c": 3})


def one_by_one(program: Program) -> list[list[int]]:
    """The classes, rank by rank: those whose pieces of all values have equal shapes, on the same stages."""
    classes: dict[tuple[Any, ...], list[int]] = {}
    for rank in program.mesh.ranks:
        shapes: list[Any] = []
        for node in program.nodes:
            types = record_of(node).type
            for type in types if isinstance(types, tuple) else (types,):
                if type is not None and type.layout is not None:
                    mesh = type.layout.mesh
                    there = rank in mesh
                    shapes.append(type.attr.local_parts(type.shape, mesh, mesh.coordinates(rank)) if there else None)
        sizes = tuple(None if parts is None else tuple(size for _, size in parts) for parts in shapes)
        classes.setdefault(sizes, []).append(rank)
    return list(classes.values())


@settings(max_examples=80, deadline=None)
@given(st.randoms(use_true_random=False), st.sampled_from(MESHES))
def test_classes_are_those_of_equal_pieces(choose: random.Random, mesh: dict[str, int]) -> None:
    """A class may be finer: pieces are cut axis by axis, and sizes in between count, too."""
    program = random_transfers(choose, mesh, 5)
    coarse = {rank: k for k, ranks in enumerate(one_by_one(program)) for rank in ranks}
    found = rank_classes(program)
    assert sorted(rank for ranks in found for rank in ranks) == list(program.mesh.ranks)
    assert all(len({coarse[rank] for rank in ranks}) == 1 for ranks in found)


def test_ranks_of_other_stages() -> None:
    assert rank_classes(Program.parse(EXCHANGES)) == [[0], [1], [2]]
