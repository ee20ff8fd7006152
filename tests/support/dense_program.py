"""A program whose few lines have nearly every form of the grammar."""

from __future__ import annotations

DENSE = """\
program explicit on dp=2 tp=2
stage s0 on dp=2
stage s1 on dp=2 ranks 2 3
  w : f32[8/dp 4] = state(w_dp, 'up.weight')
  b : bf16[(3 4/dp) 6] +tp = param("it's # b")
  d_out : i64[5/dp/tp] +max:tp = tangent(0)
  x : f32[8 4] @s1 = input
forward:
  c : f32[2] = constant((0.5, -0.0))
  ln : (f32[4 4/tp], None, bool[]) = native_layer_norm(w as [8 4], [4], None, c, 1e-05)
  y : f32[4 4/tp] = ln[0]
backward:
  cat : f32[8 4] = cat([y as bf16[4/dp 4], w as [8/tp 4]], -1, dim=0, dtype=f32, device=device('cpu'))
  w_dp : f32[8 4] = all_gather(w, 0, dp, parts=((8,), (4,)))
update:
  b_tp : bf16[12 6] = all_reduce(b, tp, op=max)
  return {'loss': b_tp as [12 6/tp], 'n': (3, Out(x=y))}
  grad b = b
  state w = w_dp as [8/dp 4]
"""
