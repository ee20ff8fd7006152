"""Kill one of two hosts of a job under torchrun, and measure the seconds until the next step is done.

Both are agents on this machine with two ranks each, on dp=2 tp=2; the job goes on with dp=1 tp=2. The seconds are
split into noticing (until the ranks of the other host have ended), rendezvous (until torchrun starts them again),
imports, the model and its plan, capture and loading of the checkpoint, and the first step. torchrun gives a host up
after the keep-alives that it has missed, and then waits for others to join: both times are options of its rendezvous.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from elastic_hosts import Host, two_hosts, wait
from profilers import positive
from tables import printed

PROFILES_ITSELF = True  # in other processes
SCRIPT = Path(__file__).with_name("elastic_ranks.py")
CONFS = {  # --rdzv-conf
    "quick": "keep_alive_interval=1,keep_alive_max_attempt=5,last_call_timeout=1",
    "torchrun's own": "",
}
PHASES = ("noticing", "rendezvous", "imports", "model and plan", "capture and load", "first step")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size", default="tiny", help="of the Llama")
    parser.add_argument("--kills", type=positive, default=3, help="jobs of which a host is killed, for each row")
    parser.add_argument("--only", choices=list(CONFS), help="one row")


def times_of(host: Host) -> list[dict[str, Any]]:
    lines = host.log.read_text().splitlines()
    return [json.loads(line.partition(" ")[2]) for line in lines if line.startswith("times ") and line.endswith("}")]


def killed(size: str, conf: str) -> dict[str, float]:
    """The seconds of each phase, with the steps that were lost."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with two_hosts(SCRIPT, [str(folder / "saved"), size, "0.1"], conf, folder) as (left, lost):
            wait(lambda: "step 12\n" in left.log.read_text(), left)
            ranks = left.ranks()
            kill = time.time()
            lost.kill()
            ended = wait(lambda: not set(ranks) & set(left.ranks()), left)
            wait(lambda: len(times_of(left)) == 2, left)
            times = times_of(left)[1]
    ends = [kill, ended, *(times[name] for name in ("started", "imported", "parallelized", "loaded", "stepped"))]
    seconds = [after - before for before, after in itertools.pairwise(ends)]
    return {**dict(zip(PHASES, seconds, strict=True)), "total": ends[-1] - kill, "lost": times["lost"]}


def restart_seconds(size: str = "tiny", kills: int = 3, only: str | None = None) -> dict[str, dict[str, float]]:
    """The medians of each row: what ``torchrun --rdzv-conf`` says → the seconds of each phase, and of all."""
    found = {}
    for name, conf in CONFS.items():
        if only in (None, name):
            runs = [killed(size, conf) for _ in range(kills)]
            found[name] = {phase: statistics.median(run[phase] for run in runs) for phase in runs[0]}
    return found


def run(options: argparse.Namespace) -> str:
    found = restart_seconds(options.size, options.kills, options.only)
    columns = ("rendezvous of torchrun", *PHASES, "total", "steps lost")
    rows = [
        [name, *(f"{row[phase]:.1f}" for phase in (*PHASES, "total")), f"{row['lost']:.0f}"]
        for name, row in found.items()
    ]
    confs = "".join(f"{name}: --rdzv-conf {CONFS[name]}\n" for name in found if CONFS[name])
    title = (
        f"seconds from the kill of one of two hosts to the next step, medians of {options.kills}; Llama {options.size}"
        f", a checkpoint every 5 steps of 0.1 s"
    )
    return f"{printed(title, columns, rows)}{confs}"
