"""``kill -9`` of a rank under torchrun: in how many runs the message names the rank, and the op that it was in.

Four ranks take steps without end. Another rank is killed in each run, at another moment. The message is printed by the ranks that are left,
between the kill and the SIGTERM with which torchrun ends them.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

SCRIPT = Path(__file__).parent.parent / "tests" / "endless_ranks.py"
PROFILES_ITSELF = True  # in other processes
STARTED = re.compile(r"rank (\d+) has the pid (\d+)")
LIMIT = 180.0  # seconds until a run is given up


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=3600.0, help="after which no other run begins")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--moment", type=float, default=2.0, help="at most so many seconds after the first step")


def run(options: argparse.Namespace) -> str:
    ends: Counter[str] = Counter()
    begun = time.monotonic()
    for k in range(options.runs):
        if time.monotonic() - begun > options.seconds:
            break
        random.seed(k)
        killed, moment = k % options.ranks, random.uniform(0.0, options.moment)
        text = killed_run(killed, moment, options.ranks)
        end = told(text, killed)
        ends[end] += 1
        print(f"run {k}: rank {killed} after {moment:.2f} s: {end}", file=sys.stderr, flush=True)
        if end != "named":
            print(text[-3000:], file=sys.stderr)
    return "".join(f"{count:4} of {ends.total()}  {end}\n" for end, count in ends.most_common())


def told(text: str, killed: int) -> str:
    """What a user learns: once, the rank that was killed and the place that it was at."""
    messages = [line for line in text.splitlines() if "autopar: " in line]
    if not messages:
        return "no message"
    if not re.search(rf"autopar: rank {killed}(, which holds the store of the job,)? was lost \(killed or crashed\); it was last seen (in|at) ", messages[0]):
        return "another message"
    return "named" if len(messages) == 1 else "named, and more than once"


def killed_run(killed: int, moment: float, ranks: int) -> str:
    """What a job prints whose rank is killed some time after all ranks have taken a step."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), str(SCRIPT)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    job = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)
    assert job.stdout is not None
    lines: list[str] = []
    pids: dict[int, int] = {}
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
    job.wait()
    return "".join(lines)


def _end(job: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(job.pid, signal.SIGKILL)
