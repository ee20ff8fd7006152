"""Random faults of a job on two hosts, and the judgement over how it has ended.

The job saves a checkpoint every few steps. It must end with the losses of a single process, or with one message on
each host that is left, which names the cause. Then it is started again, and must end with the right losses.
"""

from __future__ import annotations

import functools
import math
import random
import re
import shutil
import signal
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from host_jobs import RANKS, HostJob
from host_ranks import SKEW, losses_of_one_process
from network_hosts import Host, hosts, namespaces_are_allowed, size_limited_folder

STEPS, EVERY = 40, 5
MOMENTS = 1.5  # seconds from the first step, in which the fault comes
PAUSE = 0.05  # seconds between steps: all of them take longer. Launchers of torchrun wait for each other after them
LONG = 0.7  # seconds between steps of a job whose launcher is stopped: at its end nobody else would miss the launcher
LIMIT = 30.0  # seconds after a fault in which all processes must have ended, or all go on
ROOM = 2000  # kilobytes of the file system of checkpoints

# kind → whether the job must go on to its end, and whether it needs links
KINDS: dict[str, tuple[bool, bool]] = {
    "kill a rank": (False, False),
    "kill an agent": (False, False),
    "kill a host": (False, True),
    "stop a rank": (False, False),
    "stop a rank for a while": (True, False),
    "stop an agent": (False, False),
    "stop an agent for a while": (True, False),
    "cut": (False, True),
    "cut for a while": (True, True),
    "slow": (True, True),
    "disk full": (False, True),
}


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        host: the index of the host.
        rank: a rank on that host.
        moment: seconds from the first step to the fault.
        seconds: how long it lasts, if it is for a while.
        at: where a link is cut.
        skew: seconds by which the clocks of the second host's ranks are ahead.
    """

    kind: str
    host: int
    rank: int
    moment: float
    seconds: float
    at: str
    skew: float

    @staticmethod
    def of(seed: int) -> Fault:
        draw = random.Random(seed)
        kinds = [kind for kind, (_, linked) in KINDS.items() if namespaces_are_allowed() or not linked]
        host = draw.randrange(2)
        return Fault(
            kind=kinds[seed % len(kinds)],
            host=host,
            rank=2 * host + draw.randrange(2),
            moment=draw.uniform(0.0, MOMENTS),
            seconds=draw.uniform(0.5, 5.0),
            at=draw.choice(("switch", "host")),
            skew=draw.choice((0.0, 0.0, 3600.0, -3600.0)),
        )

    def __str__(self) -> str:
        names = ("alpha", "beta")
        what = f"{self.kind} ({self.rank if 'rank' in self.kind else names[self.host]}"
        more = f", {self.seconds:.1f} s" * ("while" in self.kind) + f", at the {self.at}" * self.kind.startswith("cut")
        return f"{what}{more}) after {self.moment:.2f} s" + f", clocks differ by {self.skew:g} s" * bool(self.skew)


@dataclass(frozen=True)
class End:
    """How a run has ended: ``right``, ``one error``, or what is wrong with it."""

    fault: Fault
    outcome: str
    seconds: float
    printed: str = ""


def pattern(fault: Fault, on: int) -> str:
    """What the message must match on a host that is left. ``on``: the index of that host."""
    host = ("alpha", "beta")[fault.host]
    own = rf"host {host} \(ranks {2 * fault.host} {2 * fault.host + 1}\)"
    held = r"(, which holds the store of the job,)?"
    if fault.kind == "kill a rank":
        return rf"rank {fault.rank} on host {host}{held} was lost \(killed or crashed\)"
    if fault.kind == "stop a rank":
        return rf"rank {fault.rank} on host {host}{held} was stopped \(SIGSTOP\)"
    if fault.kind == "kill an agent" or (fault.kind == "kill a host" and fault.host == 0):
        return rf"the launcher of {own}{held} was lost \(killed or crashed\)"
    if fault.kind == "stop an agent":
        beside = rf"has lost {own}, which holds the store of the job and has given no answer"
        return rf"(the launcher of {own}{held} was stopped \(SIGSTOP\)|{beside})"
    if fault.kind == "disk full":
        return r"rank \d on host \w+ failed .*(No space left on device|full)"
    if on == 0:
        return r"host beta \(ranks 2 3\) has given no sign of life for \d+ s: its network or the host is lost"
    return r"host beta \(ranks 2 3\) has lost host alpha \(ranks 0 1\), which holds the store of the job"


def strike(fault: Fault, host: Host, checkpoints: Path) -> None:
    """Let it happen; returns when it is over, or at once if it is for good."""
    ranks, kind = host.ranks(), fault.kind
    pids = host.agents() if "agent" in kind else [ranks[fault.rank]] if fault.rank in ranks else []
    if kind == "kill a host":
        assert host.keeper is not None
        host.send(signal.SIGKILL, [host.keeper])
    elif kind.startswith("kill"):
        host.send(signal.SIGKILL, pids)
    elif kind.startswith("stop"):
        host.send(signal.SIGSTOP, pids)
    elif kind.startswith("cut"):
        host.cut(fault.at)
    elif kind == "slow":
        host.slow()
    elif kind == "disk full":
        fill(checkpoints)
    if "while" in kind:
        time.sleep(fault.seconds)
        host.heal() if kind.startswith("cut") else host.send(signal.SIGCONT, pids)


def fill(folder: Path) -> None:
    """Write until the file system has no room."""
    with (folder.parent / "filler").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"x" * 4096)
        except OSError:
            pass


def run(seed: int) -> End:
    """Run one job with the fault of a seed."""
    fault, begun = Fault.of(seed), time.monotonic()
    with tempfile.TemporaryDirectory() as outer, size_limited_folder(ROOM) as disk:
        folder, checkpoints = Path(outer), disk / "checkpoints"
        outcome, printed = _judged(fault, folder, checkpoints)
        shutil.rmtree(checkpoints, ignore_errors=True)
    return End(fault, outcome, time.monotonic() - begun, printed)


def _judged(fault: Fault, folder: Path, checkpoints: Path) -> tuple[str, str]:
    given = ("--steps", str(STEPS), "--every", str(EVERY), "--checkpoints", str(checkpoints))
    expected = right_losses()
    variables = {"beta": {SKEW: str(fault.skew)}}
    with hosts(2) as both:
        pause = LONG if fault.kind == "stop an agent" else PAUSE
        job = HostJob(both, folder / "first", *given, "--pause", str(pause), variables=variables)
        job.wait_for_steps(1)
        time.sleep(fault.moment)
        before = job.steps()
        strike(fault, both[fault.host], checkpoints)
        goes_on, _ = KINDS[fault.kind]
        ended = job.seconds_until_end(LIMIT + (60.0 if goes_on else 0.0))
        codes = job.codes() if len(ended) == len(both) else {}
        printed = f"{fault}\n" + "".join(f"== {host.name}\n{job.printed(host)}" for host in both)
        if len(ended) < len(both):
            return f"hangs on {' '.join(host.name for host in both if host.name not in ended)}", printed
        if wrong := wrong_losses(job, expected):
            return wrong, printed
        if all(code == 0 for code in codes.values()):
            return ("right" if job.steps() == STEPS else "ended early"), printed
        if wrong := _wrong_messages(fault, job, both):
            return wrong, printed
    if goes_on:
        return "ended, though it could go on", printed
    (checkpoints.parent / "filler").unlink(missing_ok=True)
    with hosts(2) as both:
        again = HostJob(both, folder / "again", *given, variables=variables)
        ended = again.seconds_until_end(LIMIT + 60.0)
        printed += "".join(f"== {host.name}, again\n{again.printed(host)}" for host in both)
        codes = again.codes() if len(ended) == len(both) else {}
        if len(ended) < len(both) or any(codes.values()):
            return "does not start again", f"{printed}exit codes of the launchers, again: {codes}\n"
        if wrong := wrong_losses(again, expected):
            return f"again: {wrong}", printed
        steps = sorted(again.losses())
        first = steps[0] if steps else STEPS
        if steps and steps[-1] != STEPS - 1:
            return "ended early when it was started again", printed
        if before - first > EVERY:
            return f"lost {before - first} steps", printed
    return "one error", printed


@functools.cache
def right_losses() -> list[float]:
    """The losses of one process. They are computed once, before there are threads, because these share a generator."""
    return losses_of_one_process(STEPS)


def wrong_losses(job: HostJob, expected: list[float]) -> str:
    """Compare the steps that were taken with those of one process; empty if they are right."""
    for rank in range(RANKS):
        for step, loss in job.losses(rank).items():
            if not math.isclose(loss, expected[step], rel_tol=1e-10):
                return f"the loss of step {step} on rank {rank} is {loss}, and not {expected[step]}"
    return ""


def _wrong_messages(fault: Fault, job: HostJob, both: list[Host]) -> str:
    for k, host in enumerate(both):
        if fault.kind == "kill a host" and k == fault.host:
            continue
        said = job.messages(host)
        if len(said) != 1:
            return f"{len(said)} messages on {host.name}"
        if not re.search(pattern(fault, k), said[0]):
            return f"another message on {host.name}: {said[0]}"
    return ""
