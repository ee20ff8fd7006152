"""Jobs under torchrun of which a rank is killed, and what they print."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

SCRIPT = Path(__file__).parent / "endless_ranks.py"
STARTED = re.compile(r"rank (\d+) has the pid (\d+)")
LIMIT = 180.0  # seconds until a job is given up


def told(text: str, killed: int) -> str:
    """What a user learns: once, the rank that was killed and the place that it was at."""
    messages = [line for line in text.splitlines() if "autopar: " in line]
    if not messages:
        return "no message"
    if not re.search(
        rf"autopar: rank {killed}(, which holds the store of the job,)? was lost \(killed or crashed\); it was last "
        rf"seen (in|at) ",
        messages[0],
    ):
        return "another message"
    return "named" if len(messages) == 1 else "named, and more than once"


def killed_run(killed: int, moment: float, ranks: int) -> str:
    """What a job prints whose rank is killed some time after all ranks have taken a step."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(ranks),
        str(SCRIPT),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    lines: list[str] = []
    pids: dict[int, int] = {}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as job:
        assert job.stdout is not None
        limit = threading.Timer(LIMIT, _end, [job])
        limit.start()
        for line in job.stdout:
            lines.append(line)
            before = len(pids)
            pids |= {int(rank): int(pid) for rank, pid in STARTED.findall(line)}  # two may print on one line
            if before < len(pids) == ranks:
                time.sleep(moment)
                os.kill(pids[killed], signal.SIGKILL)
        limit.cancel()
        _end(job)
    return "".join(lines)


def _end(job: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(job.pid, signal.SIGKILL)
