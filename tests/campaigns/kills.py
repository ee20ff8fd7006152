"""``kill -9`` of a rank under torchrun: in how many runs the message names the rank, and the op that it was in.

Four ranks take steps without end. Another rank is killed in each run, at another moment. The message is printed by the
ranks that are left, between the kill and the SIGTERM with which torchrun ends them.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter

from killed_jobs import killed_run, told


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
