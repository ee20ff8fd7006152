"""How many files a reader meets on the way from the inputs of a call to what runs it."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import autopar
from autopar.capture.model_state import model_state

ROOT = Path(autopar.__file__).parent
# At version 0.2.0 these were 169, 187 and 46 in a process that has compiled nothing before; the aim is two thirds. What
# is kept in memory of an earlier program, as orders and rules, only makes them fewer. A file more is one more to read:
# put what has one reader beside it, and compute what is only printed when it is printed.
WITHOUT_CACHE, MISS, HIT = 121, 134, 37


@pytest.fixture(autouse=True)
def round_trip() -> None:
    """Leave out what other tests do after each pass: printing and parsing."""


def entered(cache: Any) -> set[str]:
    """Return the files of autopar whose functions run, between the inputs of a call and its capture."""
    model = torch.nn.Sequential(torch.nn.Linear(6, 14), torch.nn.ReLU(), torch.nn.Linear(14, 10))
    calls = autopar.parallelize(model, autopar.Mesh(dp=2), cache=cache)._calls
    inputs = calls.inputs(calls.bound((torch.randn(18, 6),), {}))
    call = calls.call(inputs, model_state(calls.module))
    files: set[str] = set()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            files.add(frame.f_code.co_filename)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        calls.captures.compiled(inputs, call)
    finally:
        sys.setprofile(before)
    return {
        file for file in files if Path(file).is_relative_to(ROOT) or Path(file).is_relative_to(ROOT.parent / "passes")
    }


def test_few_files_are_entered_from_inputs_to_a_compiled_call(tmp_path: Path) -> None:
    without_cache, miss, hit = entered(False), entered(tmp_path), entered(tmp_path)
    assert len(without_cache) <= WITHOUT_CACHE, sorted(without_cache)
    assert len(miss) <= MISS and len(hit) <= HIT, sorted(miss | hit)
    assert any(file.endswith("reshard.py") for file in without_cache), "passes count, too"
    assert not any("/cache/" in file for file in without_cache), "how a call is made is read without how it is kept"
    # a hit captures nothing and places nothing
    assert not any("/passes/" in file or "/search/" in file or file.endswith("trace.py") for file in hit)
