"""List the files of autopar whose functions run between the inputs of a call and what runs it, in a process that has
compiled nothing before.

    python files_entered.py             without a cache
    python files_entered.py FOLDER      with the cache in a folder: an empty one, or one that has the call
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import autopar
from autopar.capture.model_state import model_state

ROOT = Path(autopar.__file__).parent


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


if __name__ == "__main__":
    print(json.dumps(sorted(entered(sys.argv[1] if len(sys.argv) > 1 else False))))
