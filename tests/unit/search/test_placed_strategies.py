"""The strategies of an op, beside an enumeration of what its factors allow; and the homes, beside DTensor's."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from searched import MESHES, bound_rules
from torch.distributed.tensor import Replicate, Shard

from autopar import Mesh
from autopar.ir.dtensor import attr_of, placements_of
from autopar.ir.layout import Dim, DistAttr, chunk_lengths
from autopar.search.problem.strategies import homes, strategies

RULES = bound_rules("""
  x : f32[6 8] = input
  w : f32[8 2] = input
  b : f32[2] = input
  c : f32[8] = input
  z : f32[8 5] = input
  u : f32[1 3] = input
forward:
  mm : f32[6 2] = mm(x, w)
  addmm : f32[6 2] = addmm(b, x, w)
  add : f32[6 8] = add.Tensor(x, c)
  view : f32[4 2 5] = view(z, [4, 2, 5])
  softmax : f32[6 8] = _softmax(x, -1, False)
  total : f32[8] = sum.dim_IntList(x, [0])
  relu : f32[1 3] = relu(u)
  return mm
""")
# op → the factors of the dims of operands and results, the factors that may be split with the sizes of their parts,
# the operands through which sums pass, and (factor, operand): splits of this factor need this operand pending
OPS = {
    "mm": ((["m", "k"], ["k", "n"], ["m", "n"]), {"m": (6,), "k": (8,), "n": (2,)}, ({0}, {1}), ()),
    "addmm": ((["n"], ["m", "k"], ["k", "n"], ["m", "n"]), {"m": (6,), "k": (8,), "n": (2,)}, ({0, 1}, {0, 2}),
              (("k", 0),)),
    "add": ((["m", "n"], ["n"], ["m", "n"]), {"m": (6,), "n": (8,)}, ({0, 1},), ()),
    "view": ((["pq", "r"], ["p", "q", "r"]), {"p": (4,), "q": (2,), "r": (5,)}, ({0},), ()),
    "softmax": ((["m", "n"], ["m", "n"]), {"m": (6,)}, (), ()),
    "total": ((["m", "n"], ["n"]), {"m": (6,), "n": (8,)}, ({0},), ()),
    "relu": ((["i", "m"], ["i", "m"]), {"m": (3,)}, (), ()),
    "mm in parts": ((["m", "k"], ["k", "n"], ["m", "n"]), {"m": (3, 2), "k": (2, 4), "n": (2,)}, ({0}, {1}), ()),
}  # fmt: skip
PARTS = {"mm in parts": {"m": (3, 2), "k": (2, 4)}}
SHAPES = {"m": 6, "k": 8, "n": 8, "pq": 8, "p": 4, "q": 2, "r": 5, "i": 1}

Placed = tuple[tuple[DistAttr, ...], DistAttr]


def splits_well(size: int, axes: tuple[str, ...], mesh: Mesh) -> bool:
    """Every axis makes the largest piece smaller, and more than half of its ranks have one."""
    for axis in axes:
        pieces = chunk_lengths(size, mesh.sizes[axis])
        if pieces[0] == size or 2 * sum(map(bool, pieces)) <= len(pieces):
            return False
        size = pieces[0]
    return True


def enumerated(op: str, mesh: Mesh) -> set[Placed]:
    """All placements of an op by the definition: what each axis does, and the orders of axes that split one part."""
    _, sizes, linear, _ = OPS[op]
    places = [(factor, k) for factor, parts in sizes.items() for k in range(len(parts))]
    found: set[Placed] = set()
    for does in itertools.product([None, *places, *range(len(linear))], repeat=len(mesh.names)):
        for order in itertools.permutations(mesh.names):
            axes = {place: tuple(axis for axis in order if does[mesh.names.index(axis)] == place) for place in places}
            if all(splits_well(sizes[f][k], split, mesh) for (f, k), split in axes.items()):
                found.add(placed(op, mesh, dict(zip(mesh.names, does, strict=True)), axes))
    return found


def placed(op: str, mesh: Mesh, does: dict[str, object], axes: dict[tuple[str, int], tuple[str, ...]]) -> Placed:
    values, sizes, linear, carried = OPS[op]
    bound = RULES[op.split()[0]]
    shapes = [*bound.operand_shapes, bound.result_shapes[0]]
    attrs = []
    for position, (dims, shape) in enumerate(zip(values, shapes, strict=True)):
        result = position == len(values) - 1
        pending = set()
        for axis, what in does.items():
            if isinstance(what, int):
                if result or position in linear[what]:
                    pending.add(axis)
            elif what is not None:
                lacks = all(what[0] not in dim for dim in dims)
                if (result and lacks) or (not result and (what[0], position) in carried):
                    pending.add(axis)
        assert shape is not None
        rows = tuple(dim_of(dim, sizes, axes, size) for dim, size in zip(dims, shape, strict=True))
        attrs.append(DistAttr(rows, tuple((axis, "sum") for axis in sorted(pending))).normalize(shape, mesh))
    return tuple(attrs[:-1]), attrs[-1]


def dim_of(
    factors: str, sizes: dict[str, tuple[int, ...]], axes: dict[tuple[str, int], tuple[str, ...]], size: int
) -> Dim:
    return tuple(
        (part, axes.get((factor, k), ())) for factor in factors for k, part in enumerate(sizes.get(factor, (size,)))
    )


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("op", OPS)
def test_strategies_are_all_that_the_factors_allow(op: str, mesh: Mesh) -> None:
    bound = RULES[op.split()[0]]
    found = strategies(bound, mesh, PARTS.get(op, {}))
    pairs = [(placed.needs, placed.gives[0]) for placed in found]
    assert len(set(pairs)) == len(pairs)
    assert set(pairs) == enumerated(op, mesh)


@pytest.mark.parametrize("op", OPS)
def test_strategies_keep_the_rule(op: str) -> None:
    bound, mesh = RULES[op.split()[0]], Mesh(a=2, b=2)
    for placed in strategies(bound, mesh, PARTS.get(op, {})):
        assert bound.check(mesh, placed.needs, placed.gives, ["x", "y", "z"][: len(placed.needs)]) is None
        split = {factor: dim for factor, dim in bound.splits(placed.needs, placed.gives, mesh).items()}
        priced = {factor: dim for factor, dim in split.items() if any(axes for _, axes in dim)}
        assert priced.keys() == dict(placed.split).keys()  # the op is priced by the one, its program by the other


def test_an_axis_of_one_rank_has_no_strategies() -> None:
    assert len(strategies(RULES["mm"], Mesh(a=2, b=1), {})) == len(strategies(RULES["mm"], Mesh(a=2), {}))


def by_dtensor(shape: tuple[int, ...], mesh: Mesh) -> Iterator[DistAttr]:
    for placements in itertools.product([Replicate(), *map(Shard, range(len(shape)))], repeat=len(mesh.names)):
        attr = attr_of(placements, mesh, shape)
        rows = [
            tuple(n for n, p in zip(mesh.names, placements, strict=True) if p == Shard(d)) for d in range(len(shape))
        ]
        if all(splits_well(size, row, mesh) for size, row in zip(shape, rows, strict=True)):
            yield attr


@pytest.mark.parametrize("shape", [(), (8,), (3,), (2, 5), (1, 4, 8)], ids=str)
@pytest.mark.parametrize("mesh", [*MESHES, Mesh(a=4, b=2)], ids=str)
def test_homes_are_all_that_dtensor_says(shape: tuple[int, ...], mesh: Mesh) -> None:
    found = homes(shape, mesh)
    assert found[0].is_replicated and len(set(found)) == len(found)
    assert set(found) == set(by_dtensor(shape, mesh))
    for attr in found:
        assert attr_of(placements_of(attr, mesh, shape), mesh, shape) == attr
