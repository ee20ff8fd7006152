"""The search beside an enumeration of all plans of small programs, and beside random plans of models."""

from __future__ import annotations

import random

import pytest
from random_traced import random_traced
from search_oracle import check
from searched import MACHINES, MESHES, traced

from autopar import Mesh


@pytest.mark.simulated
@pytest.mark.parametrize("first", range(0, 40, 10))
def test_the_best_of_all_plans_of_small_programs(first: int) -> None:
    compared = 0
    for seed in range(first, first + 10):
        draw = random.Random(seed)
        mesh, shape = draw.choice([(MESHES[0], (8, 8)), (MESHES[0], (8,)), (MESHES[1], (8,)), (MESHES[1], (8, 8))])
        ops = draw.randint(1, 5) if mesh is MESHES[0] else draw.randint(1, 3) if shape == (8,) else 1
        program = traced(random_traced(draw, ops, shape))
        compared += check(program, mesh, MACHINES[seed % len(MACHINES)], seed)
    assert compared >= 6


BY_HAND = {
    "a sum is reduced once, for the output and for an op": """
  x : f32[256 256] = input
forward:
  s : f32[] = sum.dim_IntList(x, [0, 1])
  e : f32[] = exp(s)
  return (s, e)
""",
    "a sum is reduced once for two results": """
  x : f32[256 256] = input
forward:
  s : f32[] = sum.dim_IntList(x, [0, 1])
  return (s, s)
""",
    "a narrowing cast of a result is kept for the backward": """
  x : f32[64 64] = input
  d_out : bf16[64 64] = tangent(0)
forward:
  r : f32[64 64] = relu(x)
  y : bf16[64 64] = neg(r as bf16)
backward:
  m : bf16[64 64] = mul.Tensor(d_out, r as bf16)
  return y
  grad x = m as f32
""",
    "a sum is reduced once for an op and for its view": """
  x : f32[8 64] = input
forward:
  s : f32[8] = sum.dim_IntList(x, [1])
  e : f32[8] = exp(s)
  v : f32[2 4] = view(s, [2, 4])
  n : f32[2 4] = exp(v)
  return (e, n)
""",
    "a narrowing cast of a parameter is made again": """
  w : f32[64 64] = param
  d_out : bf16[64 64] = tangent(0)
forward:
  y : bf16[64 64] = neg(w as bf16)
backward:
  m : bf16[64 64] = mul.Tensor(d_out, w as bf16)
  return y
  grad w = m as f32
""",
    "an op reads a value twice, beside two others": """
  w : f32[8 8] = param
  x : f32[8 8] = input
forward:
  v0 : f32[8 8] = add.Tensor(x, x)
  v1 : f32[8 8] = neg(x)
  v2 : f32[8 8] = mul.Tensor(x, x)
  return (v0, v1, v2)
""",
}


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("name", BY_HAND)
def test_what_is_shared_counts_once(name: str, mesh: Mesh) -> None:
    assert check(traced(BY_HAND[name]), mesh, MACHINES[0], name) or mesh.size > 2
