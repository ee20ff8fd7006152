"""Random faults of a job on two hosts: kill, stop, cut, slow, a full disk; each ends right or with one clear message.

Four ranks train on two hosts, which are network namespaces, and save a checkpoint every five steps. At a random moment
a rank, a launcher or a host is killed or stopped, a link is cut or slowed down, or the disk of the checkpoints is full.
In some runs the clocks of the hosts differ by an hour. A run ends well if all losses are those of one process; or if
every host that is left has ended within 30 s with one message that names the cause, no process is left, and the job,
started again, has lost no more than one interval and ends with the losses of one process. Needs the rights of root.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed

import host_faults
from host_jobs import forks
from network_hosts import namespaces_are_allowed


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="the seed of the first run")
    parser.add_argument("--at-once", type=int, default=4, help="runs at the same time; most of them wait")
    parser.add_argument("--seconds", type=float, default=7200.0, help="after which no other run begins")


def run(options: argparse.Namespace) -> str:
    if not namespaces_are_allowed():
        return "no runs: this machine allows no network namespaces\n"
    forks()
    host_faults.right_losses()
    begun = time.monotonic()

    def one(seed: int) -> host_faults.End | None:
        return host_faults.run(seed) if time.monotonic() - begun < options.seconds else None

    ends: Counter[tuple[str, str]] = Counter()
    seconds = list[float]()
    with ThreadPoolExecutor(options.at_once) as pool:
        running = {pool.submit(one, options.first + k): options.first + k for k in range(options.runs)}
        for future in as_completed(running):
            end = future.result()
            if end is None:
                continue
            ends[end.fault.kind, end.outcome] += 1
            seconds.append(end.seconds)
            print(
                f"run {running[future]}: {end.fault}: {end.outcome}, {end.seconds:.0f} s", file=sys.stderr, flush=True
            )
            if end.outcome not in ("right", "one error"):
                print(end.printed, file=sys.stderr, flush=True)
    well = sum(count for (_, outcome), count in ends.items() if outcome in ("right", "one error"))
    table = "".join(f"  {kind:26} {outcome:10} {count:4}\n" for (kind, outcome), count in sorted(ends.items()))
    return (
        f"{well} of {ends.total()} runs ended well, in {time.monotonic() - begun:.0f} s, {options.at_once} at once, "
        f"{max(seconds, default=0.0):.0f} s the longest\n{table}"
    )
