"""Where paces of an emulated wire are written between the lines of a function."""

from __future__ import annotations

import collections
from typing import Any

import pytest
from torch import fx

from autopar.ir.program import Program
from autopar.runtime.lowering.lower import lower_function
from autopar.scheduling.programs.functions import functions_of

RECEIVED = """
program scheduled on pp=2 at pp=0
stage s0 on ()
stage s1 on () ranks 1
  w : f32[4] = state(n, 'w')
update:
  n : f32[4] = mul.Tensor(w, 2.0)
  loss : f32[] = recv(None, None, splits=(), shape=(), source=(), home=s1)
  return (loss,)
"""
REDUCED = """
program scheduled on dp=2 at dp=0
stream dp
  w : f32[4] = state(n, 'w')
update:
  r_start : f32[4] = start all_reduce(w, dp) on dp
  m : f32[4] = mul.Tensor(w, 2.0)
  r : f32[4] = wait(r_start)
  n : f32[4] = add.Tensor(m, r)
  return ()
"""


class Written:
    """Writes calls that name the ends of segments."""

    def start(self, graph: fx.Graph) -> None:
        graph.call_function(begin)

    def end(self, graph: fx.Graph) -> None:
        graph.call_function(computed)

    def add(self, node: fx.Node) -> None:
        pass


def begin() -> None: ...


def computed() -> None: ...


@pytest.mark.parametrize(("text", "expected"), [
    (RECEIVED, "begin mul computed exchange_between_stages begin computed"),
    (REDUCED, "begin computed start_all_reduce mul computed wait begin add computed"),
], ids=["a message", "a collective"])  # fmt: skip
def test_waits_are_no_computing(text: str, expected: str) -> None:
    """A rank that waits for another one is not late."""
    program = Program.parse(text.lstrip())
    pacing: Any = Written()
    *_, function = functions_of(program, False)
    graph = lower_function(function, program, collections.defaultdict(lambda: "0"), pacing=pacing).graph
    called = [getattr(node.target, "__name__", "") for node in graph.nodes if node.op == "call_function"]
    assert " ".join(name.partition(".")[0] for name in called) == expected
