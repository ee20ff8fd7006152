"""Runs jobs whose ranks fail on purpose, all at once, for they mostly wait."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from forks import MAY_CAPTURE_BEFORE

Ended = tuple[list[int | None], str]  # how each rank ended (``failing_ranks.ends``), and what all have printed


def ended(script: str, jobs: Sequence[dict[str, Any]], folder: Path) -> dict[str, Ended]:
    """How the ranks of each job ended, by its case. ``script``: one of ``tests/support``, which serves jobs."""
    served = [
        {**job, "output": str(folder / f"{k}.txt"), "file": str(folder / f"store_{k}")} for k, job in enumerate(jobs)
    ]
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parent / script)],
        input="".join(json.dumps(job) + "\n" for job in served),
        capture_output=True,
        text=True,
        timeout=300 if MAY_CAPTURE_BEFORE else 900,
        check=True,
    )
    codes = {answer["case"]: answer["codes"] for answer in map(json.loads, done.stdout.splitlines())}
    return {job["case"]: (codes[job["case"]], Path(job["output"]).read_text()) for job in served}


def told(codes: object, output: str, expected: object, message: object) -> tuple[list[str], int] | None:
    """Check how a job has ended; return its lines, and the number of the one message among them.

    ``None`` if there should be no message, and is none.
    """
    assert codes == expected, output
    if not message:
        assert output == ""
        return None
    lines = output.splitlines()
    said = [k for k, line in enumerate(lines) if line.startswith("autopar: ")]
    assert len(said) == 1, output
    return lines, said[0]
