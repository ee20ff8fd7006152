"""Generated code calls the kernels of ops by names that are bound once, line for line as its source shows."""

from __future__ import annotations

import re
import sys
from collections import Counter
from types import FrameType
from typing import Any

import pytest
import torch

from autopar.ir.program import Program
from autopar.runtime.lowering.lower import lower

TEXT = """\
program scheduled on dp=1 at dp=0
  x : f32[4 4] = input
forward:
  a : f32[4 4] = tanh(x)
  b : f32[4 4] = mul.Tensor(a, x)
  c : f32[4 4] = tanh(b)
  d : f32[4 4] = mm(b, c)
  return d
"""


def test_no_python_runs_beyond_the_function() -> None:
    forward = lower(Program.parse(TEXT), {})["forward"]
    x, calls = torch.randn(4, 4), Counter[str]()

    def count(frame: FrameType, event: str, _: Any) -> None:
        calls[frame.f_code.co_filename] += event == "call"

    sys.setprofile(count)
    try:
        (found,) = forward.run([x])
    finally:
        sys.setprofile(None)
    b = x.tanh() * x
    assert torch.equal(found, b @ b.tanh())
    assert not [file for file, times in calls.items() if times and "torch" in file], "ops are called as kernels"
    assert sum(calls.values()) == 2, "the function, and what adds the op to its errors"


def test_errors_quote_the_line_of_the_op() -> None:
    forward = lower(Program.parse(TEXT), {})["forward"]
    with pytest.raises(RuntimeError, match=re.escape("mat1 and mat2")) as caught:
        forward.run([torch.randn(2, 4)])
    frame = caught.traceback[-1]
    assert "torch.ops.aten.mm.default(b, c)" in str(frame.statement)
