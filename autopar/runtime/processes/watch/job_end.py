"""End this rank with one message of the whole job: the ranks agree through the store on who prints it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Iterable
from typing import Any, NoReturn

from autopar.runtime.current_op import CurrentOp, where
from autopar.runtime.processes.watch.alarm import Alarm
from autopar.runtime.processes.watch.beat import FAILED, STOPPED, Beat
from autopar.runtime.processes.watch.ending import leave, say, say_for_host
from autopar.runtime.processes.watch.followed_ranks import INTERVAL, FollowedRanks
from autopar.runtime.processes.watch.launcher import Holder, LauncherWatch, is_launched
from autopar.runtime.processes.watch.verdict import LOST, LOST_HOST, Verdict, failed
from autopar.runtime.processes.watch.wording import HostNames, at, last_seen


class JobEnd:
    """Prints the last message of the job, or follows the rank that does, and leaves.

    Attributes:
        failure: how this rank has ended: its state, where it was, and the error; ``None`` while it goes on.
        unprinted: the traceback of an exception that may be a consequence.

    Args:
        store: the part of the job's store that has the beats.
        rank: this rank.
        launcher: the watch of this host's launcher, if the job has several hosts.
    """

    def __init__(
        self, store: Any, rank: int, followed: FollowedRanks, holder: Holder, launcher: LauncherWatch | None,
        alarm: Alarm,
    ) -> None:  # fmt: skip
        self._store, self._rank, self._followed, self._holder, self._launcher, self._alarm = (
            store, rank, followed, holder, launcher, alarm,
        )  # fmt: skip
        self.failure: tuple[str, CurrentOp, str] | None = None
        self.unprinted = ""
        self._ending = threading.RLock()  # held forever by the thread that ends this process
        self._leaving = threading.Lock()  # the same, for an end without the store, which a thread may wait for

    # -- with the store ----------------------------------------------------------------------------------------------

    def report(self, verdict: Verdict) -> None:
        """Print the verdict, unless another rank does, and leave."""
        with self._ending:
            if self._store.add("elected", 1) > 1:
                for _ in range(30):
                    self.follow()
                    time.sleep(0.1)  # if nothing comes, the elected rank was killed in between
            raised = verdict.ranks if verdict.raised else ()  # errors of other ranks are consequences
            if self._rank in raised:
                self.print_own()
            if not is_launched():
                say_for_host(verdict.text + "\n")
            own = self._followed.other_hosts.own
            done = {"text": verdict.text, "ranks": verdict.ranks, "raised": raised, "host": own}
            self._store.set("done", json.dumps(done))
            if self._launcher is not None:
                self._launcher.kill_if_stopped()
            self._kill_stopped(verdict.ranks)
            self._leave_last()

    def report_failure(self) -> None:
        """Print that this rank failed, unless another rank prints a verdict, and leave."""
        self.report(self._own_failure())

    def follow(self) -> None:
        """Leave if another rank has printed the verdict. The first rank of another host prints it there, too."""
        if not self._store.check(["done"]):
            return
        with self._ending:
            done = json.loads(self._store.get("done"))
            if self._rank in done["raised"]:
                self.print_own()
            own = self._followed.other_hosts.own
            if tuple(done["host"]) != own and self._store.add(f"told/{own}", 1) == 1:
                say_for_host(done["text"] + "\n")
            self._kill_stopped(done["ranks"])
            self._store.add("followed", 1)
            self._leave_last()

    def let_others_notice(self) -> None:
        """Wait until the others have noticed that rank 0 ends normally, because its end may end the store."""
        for _ in range(20):
            if all(self._store.check([f"noticed/{rank}"]) for rank in self._followed.still_there()):
                return
            time.sleep(0.1)

    def _kill_stopped(self, ranks: Iterable[int]) -> None:
        """Kill the ranks to blame that are stopped on this host: they cannot leave by themselves."""
        for rank in ranks:
            beat = self._followed.ranks[rank].beat
            if rank != self._rank and beat is not None and beat.process.state() == STOPPED:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(beat.process.pid, signal.SIGKILL)

    def _leave_last(self) -> NoReturn:
        """Leave; who may end the store by that first waits until the others have read the verdict."""
        if self._launcher is not None:
            self._leave_together()
        if self._rank == 0 and self._holder.is_rank_0:
            with contextlib.suppress(RuntimeError):
                for _ in range(20):
                    others = len(self._followed.ranks) - 1
                    if not self._followed.still_there() or self._store.add("followed", 0) >= others:
                        break
                    time.sleep(0.1)
        leave()

    def _leave_together(self) -> NoReturn:
        """Leave when the ranks of all hosts have read the verdict, or after some seconds.

        The store may end with the first launcher that ends. And a launcher with restarts must see that its own ranks
        have failed before it hears that another host starts again: otherwise the two count their restarts differently,
        and the new ranks do not find each other.
        """
        with contextlib.suppress(RuntimeError):
            self._store.add("followed together", 1)
            there = self._followed.that_leave()
            for _ in range(30):
                if self._store.add("followed together", 0) >= there:
                    break
                time.sleep(0.1)
        if self._alarm.is_terminated:  # the launcher of this host knows already
            time.sleep(INTERVAL)
        leave()

    # -- without the store -------------------------------------------------------------------------------------------

    def store_is_gone(self, how: str = LOST) -> None:
        """Leave without a common verdict. The lowest rank that is left on the host prints the message.

        A rank that failed by itself says so: the store ended because of it.
        """
        if not self._leaving.acquire(blocking=False):
            threading.Event().wait()  # another thread ends this process
        if self.failure is not None and self.failure[0] == FAILED:
            say_for_host(self._own_failure().text + "\n")
            leave()
        gone = self._followed.gone() | ({0} if self._holder.is_rank_0 else set())
        here = self._rank - int(os.environ.get("LOCAL_RANK", self._rank))  # the first rank of this host
        if gone >= set(range(here, self._rank)):
            first, names = self._followed.first, self._followed.names()
            place = where() if self.failure is None else self.failure[1]
            several = self._launcher is not None
            say_for_host(
                lost_store(how, self._rank, place, holder=self._holder, names=names, first=first, several=several)
            )
            holder = self._holder.process(first)
            if holder is not None and holder.state() == STOPPED:
                os.kill(holder.pid, signal.SIGKILL)
            elif self._holder.is_elsewhere and self._launcher is not None:
                self._launcher.end_if_stuck()
        leave()

    # -- the exception of this rank ----------------------------------------------------------------------------------

    def _own_failure(self) -> Verdict:
        assert self.failure is not None
        _, place, line = self.failure
        return failed(self._rank, place, line, self._followed.names().named(self._rank))

    def print_own(self) -> None:
        """Print the traceback of this rank, once."""
        text, self.unprinted = self.unprinted, ""
        say(text, prefix="" if is_launched() and self._rank != 0 else f"[rank {self._rank}] ")


# -- the last message without the store --------------------------------------------------------------------------------


ENDED = "ended"

UNANSWERED = "has given no answer"  # it is followed by the seconds


def lost_store(
    how: str, rank: int, place: CurrentOp, *, holder: Holder, names: HostNames, first: Beat | None, several: bool
) -> str:
    """Return the message.

    Args:
        how: how the owner of the store ended.
        rank: this rank, and ``place`` where it is.
        first: the newest beat of rank 0.
        several: whether the job has several hosts.
    """
    text, remedy = "the launcher of this job was lost, and the job's store with it", ""
    if holder.is_rank_0:
        text = f"{names.named(0)}, which holds the store of the job, {how}"
        text += "" if first is None or how == ENDED else f"; {last_seen(first)}"
    elif several:
        own, theirs = (names.with_ranks(names.of(one)) for one in (rank, 0))
        text = f"the launcher of {theirs}, which holds the store of the job, {how}"
        remedy = LOST_HOST if holder.is_elsewhere else ""
        if how.startswith(UNANSWERED):
            text = f"{own} has lost {theirs}, which holds the store of the job and {how}"
    return f"autopar: {text}; {names.named(rank)} was {at(place)}{remedy}\n"
