"""The parts in which factors can be split, in chains of views and products that are written by hand."""

from __future__ import annotations

import pytest
from searched import traced

from autopar.ir.nodes import operands
from autopar.rules.binding import bind_node
from autopar.search.problem.cuts import CutSearch, part_sizes

FLATTENED = """
  x : f32[4 6 8] = input
  w : f32[8 10] = input
forward:
  v : f32[24 8] = view(x, [24, 8])
  t : f32[8 24] = t(v)
  m : f32[24 10] = mm(v, w)
  n : f32[8 10] = mm(t, m)
  return n
"""
HEADS = """
  x : f32[6 8] = input
  q : f32[8 12] = input
  o : f32[12 8] = input
forward:
  m : f32[6 12] = mm(x, q)
  v : f32[6 3 4] = view(m, [6, 3, 4])
  p : f32[3 6 4] = permute(v, [1, 0, 2])
  r : f32[3 6 4] = relu(p)
  s : f32[6 3 4] = permute(r, [1, 0, 2])
  c : f32[6 12] = view(s, [6, 12])
  y : f32[6 8] = mm(c, o)
  return y
"""
TWO_VIEWS = """
  x : f32[24] = input
forward:
  a : f32[4 6] = view(x, [4, 6])
  b : f32[8 3] = view(x, [8, 3])
  c : f32[12 2] = view(x, [12, 2])
  r : f32[24] = relu(x)
  return (a, b, c, r)
"""
NESTED = """
  x : f32[24] = input
forward:
  r : f32[24] = relu(x)
  a : f32[4 6] = view(r, [4, 6])
  s : f32[4 6] = relu(a)
  b : f32[4 2 3] = view(s, [4, 2, 3])
  return b
"""
CASES = {
    "a flattened batch and sequence": (
        FLATTENED, {"t": {"d0": (4, 6)}, "m": {"m": (4, 6)}, "n": {"k": (4, 6)}},
    ),
    "heads and their size": (HEADS, {"m": {"n": (3, 4)}, "y": {"k": (3, 4)}}),
    "a cut inside a part": (NESTED, {"r": {"...0": (4, 2, 3)}, "a": {"f1": (2, 3)}, "s": {"...0": (2, 3)}}),
}  # fmt: skip


def parts(lines: str) -> dict[str, dict[str, tuple[int, ...]]]:
    """The parts of the factors of each op, where they are several; each node is one value."""
    program, search = traced(lines), CutSearch()
    numbers = {node: k for k, node in enumerate(program.nodes)}
    bounds = {node: bind_node(node) for node in program.nodes if node.op == "call_function"}
    for node, bound in bounds.items():
        search.add(numbers[node], bound, [numbers[value] for value in operands(node)], [numbers[node]])
    search.run()
    found = {node.name: search.of(numbers[node], bound) for node, bound in bounds.items()}
    return {name: factors for name, factors in found.items() if factors}


@pytest.mark.parametrize("name", CASES)
def test_cuts_reach_all_ops_of_a_chain(name: str) -> None:
    lines, wanted = CASES[name]
    assert parts(lines) == wanted


def test_cuts_that_do_not_divide_each_other_have_no_parts_in_common() -> None:
    """Of 4, 8 and 12 pieces, 12 is no multiple of 8: the parts are those of 4 and 8."""
    found = parts(TWO_VIEWS)
    assert found["r"] == {"...0": (4, 2, 3)}
    assert part_sizes(24, {4, 6}) == (4, 6)
    assert part_sizes(24, {5}) == (24,)
    assert part_sizes(4096, {32, 8}) == (8, 4, 128)


def test_a_value_that_no_view_merges_has_one_part() -> None:
    assert parts("  x : f32[4 6] = input\nforward:\n  r : f32[4 6] = relu(x)\n  return r") == {}
