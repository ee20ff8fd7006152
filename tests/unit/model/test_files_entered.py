"""How many files a reader meets on the way from the inputs of a call to what runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "support" / "files_entered.py"
# At version 0.2.0 these were 169, 187 and 46; the aim is two thirds. A file more is one more to read: put what has one
# reader beside it, and compute what is only printed when it is printed.
WITHOUT_CACHE, MISS, HIT = 112, 124, 30


def entered(*folder: Path) -> list[str]:
    """Return the files that are entered in a process of its own."""
    command = [sys.executable, str(SCRIPT), *map(str, folder)]
    files: list[str] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return files


@pytest.mark.long
def test_few_files_are_entered_from_inputs_to_a_compiled_call(tmp_path: Path) -> None:
    without_cache, miss, hit = (entered(*folder) for folder in ((), (tmp_path,), (tmp_path,)))
    assert len(without_cache) <= WITHOUT_CACHE, without_cache
    assert len(miss) <= MISS and len(hit) <= HIT, (miss, hit)
    assert any(file.endswith("reshard.py") for file in without_cache), "passes count, too"
    assert not any("/cache/" in file for file in without_cache), "how a call is made is read without how it is kept"
    # a hit captures nothing and places nothing
    assert not any("/passes/" in file or "/search/" in file or file.endswith("trace.py") for file in hit)
