"""A small explicit program, and a profile of it whose times are made up."""

from __future__ import annotations

from autopar import Program
from autopar.costs.calls import EXCHANGE, calls_of, group_of, kind_of
from autopar.costs.machine import machine
from autopar.costs.profile import Profile
from autopar.costs.profile_row import ProfileRow
from autopar.ir.program import program_digest

TEXT = """\
program explicit on dp=2 tp=2
  x : f32[8/dp 64] = input
  w : f32[128/tp 64] = param
  v : f32[64 128/tp] = param
  t : f32[64 128/tp] = t(w)
  mm : f32[8/dp 128/tp] = mm(x, t)
  t_1 : f32[128/tp 64] = t(v)
  mm_1 : f32[8/dp 64] +tp = mm(mm, t_1)
  mm_1_tp : f32[8/dp 64] = all_reduce(mm_1, tp)
  relu : f32[8/dp 64] = relu(mm_1_tp)
  sum_1 : f32[1 64] +dp = sum.dim_IntList(relu, [0], True)
  sum_1_dp : f32[1 64] = all_reduce(sum_1, dp)
  sum_1_tp : f32[1 64/tp] = slice(sum_1_dp, 1, tp)
  return (relu, sum_1_tp)
"""
MICROSECONDS = {"op": 7.0, "local": 3.0, "exchange": 250.0}


def program(text: str = TEXT) -> Program:
    return Program.parse(text)


def profile(text: str = TEXT, **changed: object) -> Profile:
    """Each call takes a microsecond more than the one before, from a number on that its kind has."""
    found, rows = program(text), {}
    for k, (node, call) in enumerate(calls_of(found)):
        kind, before = kind_of(node), rows.get(call)
        seconds = (MICROSECONDS[kind] + k) * 1e-6 if before is None else before.seconds
        group, startup = (group_of(node), 150e-6) if kind == EXCHANGE else ("", 0.0)
        times = 1 if before is None else before.times["forward"] + 1
        rows[call] = ProfileRow(call, kind, seconds, 5e-6, {"forward": times}, group, startup)
    fields = {
        "machine": machine("cpu"), "device": "cpu", "backend": "gloo", "ranks": 4, "threads": 1, "torch": "2.13.0",
        "mesh": "dp=2 tp=2", "programs": {"micro": program_digest(found)}, "launch": 2e-6, "interference": 0.25,
        "rows": rows,
    }  # fmt: skip
    return Profile(**{**fields, **changed})  # type: ignore[arg-type]
