"""A short run of the benchmark ``soak``: what must stay constant over 5,000 steps, over 160."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
COMMAND = "profiling/run.py soak --steps 160 --every 20 --warm 60 --save 20"


def test_nothing_grows_and_a_stopped_rank_is_waited_for() -> None:
    done = subprocess.run([sys.executable, *COMMAND.split()], cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    verdicts = {said: end for said, end in re.findall(r"^(.*): (met|missed)$", done.stdout, re.MULTILINE)}
    assert len(verdicts) == 7, done.stdout
    # allocators still fill in so few steps
    missed = [said for said, end in verdicts.items() if end == "missed" and not said.startswith("resident memory")]
    assert not missed, done.stdout
