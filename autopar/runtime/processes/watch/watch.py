"""Watch all ranks from a thread of each, and end the whole job with one message when a rank fails or hangs.

A process that is blocked in a collective cannot be interrupted: no exception and no signal handler reaches it. So each
rank has a thread that tells the others through the store that it lives, and that leaves with ``os._exit``.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import multiprocessing.util
import os
import sys
import threading
import time
from types import TracebackType
from typing import Any

import torch.distributed as dist

from autopar.runtime.current_op import where, where_raised
from autopar.runtime.processes.watch.alarm import Alarm, end_by_sigterm
from autopar.runtime.processes.watch.beat import (
    ALIVE,
    CUT,
    DEAD,
    ENDED,
    FAILED,
    STOPPED,
    TERMINATED,
    UNKNOWN,
    Beat,
    broke_off,
    process_of,
)
from autopar.runtime.processes.watch.ending import leave
from autopar.runtime.processes.watch.followed_ranks import INTERVAL, WITNESSES, FollowedRanks
from autopar.runtime.processes.watch.job_end import JobEnd
from autopar.runtime.processes.watch.launcher import Holder, LauncherWatch
from autopar.runtime.processes.watch.other_hosts import has_several_hosts
from autopar.runtime.processes.watch.traces import one_line, short_traceback
from autopar.runtime.processes.watch.verdict import GRACE, SILENCE, Verdict, judge
from autopar.runtime.processes.watch.wording import at

UNANSWERED = 15.0  # seconds without an answer of the store, after which this host ends if the store is elsewhere
PREFIX = "autopar/watch"


class Watch:
    """Watches all ranks of a job from the thread of one: a context manager, or ``start`` and ``stop``.

    Args:
        store: a store that all ranks share; it is cloned, so that nothing else waits for its connection.
        rank: the rank of this process.
        ranks: the number of ranks.
        timeout: the watch ends the job after so many seconds without progress of any rank, while one is inside a step.

    Attributes:
        followed: what this rank knows of all.
    """

    def __init__(self, store: dist.Store, rank: int, ranks: int, *, timeout: float = 60.0) -> None:
        self._holder = Holder(store, rank)
        copied: Any = store  # the stubs know neither its clone, nor that a value may be bytes
        own: Any = dist.PrefixStore(PREFIX, copied.clone())
        self._store = own
        self._rank, self._ranks, self._timeout = rank, ranks, timeout
        self._process = process_of(os.getpid())
        self._several_hosts = has_several_hosts()
        launcher = self._holder.launcher if self._several_hosts else None
        self._launcher = LauncherWatch(launcher, min(timeout, SILENCE)) if launcher is not None else None
        self._alarm = Alarm()
        self.followed = FollowedRanks(own, rank, ranks, self._alarm, several=self._several_hosts)
        self._end = JobEnd(own, rank, self.followed, self._holder, self._launcher, self._alarm)
        self._sequence = self._rounds = 0
        self._over = threading.Event()
        self._lock = threading.Lock()  # for the beat, which two threads write at the end
        self._thread: threading.Thread | None = None
        self._usual_hook = sys.excepthook

    def start(self) -> None:
        if self._thread is not None:
            return
        self._post()
        self._usual_hook, sys.excepthook = sys.excepthook, self._raised
        atexit.register(self.stop)
        if multiprocessing.parent_process() is not None:  # it may end without atexit, and asks no sys.excepthook
            multiprocessing.util.Finalize(self, self._child_ends, exitpriority=0)
        self._alarm.start()
        self._thread = threading.Thread(target=self._run, name="autopar watch", daemon=True)
        self._thread.start()
        if self._several_hosts or (self._holder.is_rank_0 and self._rank != 0):
            threading.Thread(target=self._guard, name="autopar watch of the store", daemon=True).start()

    def stop(self) -> None:
        """Stop watching, because this rank ends normally."""
        if self._thread is None or os.getpid() != self._process.pid:  # a fork of this process ends
            return
        thread, self._thread = self._thread, None
        self._over.set()
        self._alarm.stop()
        atexit.unregister(self.stop)
        if sys.excepthook == self._raised:
            sys.excepthook = self._usual_hook
        thread.join(10 * INTERVAL)  # a thread inside the store must not meet the end of the interpreter
        if self._end.failure is None:
            with contextlib.suppress(RuntimeError):  # the store may have ended already
                self._end.failure = (ENDED, where(), "")
                self._post()
                if self._rank == 0 and self._holder.is_rank_0:
                    self._end.let_others_notice()

    def __enter__(self) -> Watch:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None and error is not None and issubclass(kind, (Exception, KeyboardInterrupt)):
            self._raised(kind, error, trace)  # the caller may catch it, and then the other ranks would not know
        self.stop()

    # -- the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        last, lost = time.monotonic(), False
        while not self._pause():
            now = time.monotonic()
            self.followed.clock += min(now - last, 2 * INTERVAL)
            last = now
            try:
                self._round()
                lost = False
                if self._rank_0_ended():
                    self._store.set(f"noticed/{self._rank}", "")
                    self._alone()
                    return
            except RuntimeError:  # the store failed
                if self._rank_0_ended():
                    self._alone()
                    return
                if lost and not self._over.is_set():
                    self._end.store_is_gone()
                lost = True
            self._rounds += 1

    def _pause(self) -> bool:
        """Wait until the next beat is due, or a process of this host ends. Return whether the watch is over."""
        self._alarm.wait(INTERVAL)
        if self._alarm.is_terminated and not self._over.is_set():
            self._terminated()
        return self._over.is_set()

    def _terminated(self) -> None:
        """End this process by SIGTERM, which came because a rank was lost, or for an unknown reason.

        The rank that holds the store ends last, so that the others read that it was ended by SIGTERM, too.
        """
        try:
            if self._end.failure is None:
                self._end.failure = (TERMINATED, where(), "")
            if self._rank == 0 and self._holder.is_rank_0:
                self._post()
                time.sleep(INTERVAL)
            for _ in range(20):
                self._round()
                if not any(self.followed.can_judge(rank) for rank in range(min(self._rank, WITNESSES))):
                    break  # else a lower rank prints the verdict
                time.sleep(0.1)
        except RuntimeError:
            if self._holder.is_elsewhere:  # the launcher of this host ends because the other one was lost
                self._end.store_is_gone()
        end_by_sigterm()

    def _guard(self) -> None:
        """Notice that the store gives no answer, which the other thread may wait for forever."""
        rounds, waited = -1, 0.0
        while not self._over.wait(INTERVAL) and not self._rank_0_ended():
            waited = waited + INTERVAL if rounds == self._rounds else 0.0
            rounds = self._rounds
            how = self._silence_of_store(waited)
            if how:
                self._end.store_is_gone(how)

    def _silence_of_store(self, waited: float) -> str:
        """Return how the store was lost; empty if nothing is wrong. ``waited``: seconds for an answer."""
        if waited < min(self._timeout, UNANSWERED):
            return ""
        first = self.followed.first
        holder = self._holder.process(first)
        state = holder.state() if holder is not None else UNKNOWN
        # a failed rank waits for the lock of its beat
        needed = where().inside or self._end.failure is not None or self._several_hosts
        if state == STOPPED and waited >= min(self._timeout, SILENCE) and needed:
            return "was stopped (SIGSTOP)"
        if state == UNKNOWN and (first is not None or self._holder.is_elsewhere) and needed:
            return f"has given no answer for {waited:.0f} s"
        return ""

    def _round(self) -> None:
        self._post()
        self._end.follow()
        if self._launcher is not None:
            self._look_at_launcher(self._launcher)
        witness = self._rank < WITNESSES
        others = range(self._ranks) if witness else range(self._rank)
        if witness:
            self.followed.look(others)
        for rank in () if witness else others:
            self.followed.look([rank])
            if self.followed.can_judge(rank):
                return
        if any(self.followed.can_judge(rank) for rank in range(self._rank)):
            return
        if not witness:
            self.followed.look(range(self._rank, self._ranks))
        verdict = judge(self.followed.states(), self._timeout)
        if verdict is not None:
            self._end.report(verdict)

    def _post(self) -> None:
        holder = self._holder.process(self.followed.first)
        if self._rank_0_ended() or (holder is not None and holder.state() == DEAD):  # torch would complain at length
            raise RuntimeError("the store is gone")
        with self._lock:
            state, place, error = self._end.failure or (ALIVE, where(), "")
            self._sequence += 1
            other_hosts = self.followed.other_hosts
            who = other_hosts.own, other_hosts.listener.address, self.followed.neighbours()
            self._store.set(f"beat/{self._rank}", Beat(self._sequence, state, place, self._process, error, *who).dump())

    def _look_at_launcher(self, launcher: LauncherWatch) -> None:
        self._alarm.look_at(launcher.process)
        how = launcher.failure(INTERVAL)
        if how:
            names = self.followed.names()
            host = names.of(self._rank)
            text = f"the launcher of {names.with_ranks(host)} {how}; rank {self._rank} was {at(where())}"
            self._end.report(Verdict(names.ranks(host) or (self._rank,), f"autopar: {text}"))

    # -- the end ---------------------------------------------------------------------------------------------------

    def _raised(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Replace ``sys.excepthook``: report an exception that reached the top, and leave."""
        if os.getpid() != self._process.pid or self._thread is None or not self._thread.is_alive():
            self._usual_hook(kind, error, trace)
            return
        line = one_line(error)
        if broke_off(error):
            self._end.failure = (CUT, where_raised(error), line)  # at once, for this thread is at no op any more
        self._end.unprinted = "" if kind is KeyboardInterrupt else self._printed(error)
        if not broke_off(error):
            self._end.print_own()
        self._end.failure = (CUT if broke_off(error) else FAILED, where_raised(error), line)
        try:
            self._post()
            if self._end.failure[0] == FAILED:
                self._end.report_failure()
        except RuntimeError:
            pass  # the store is gone: the thread notices it too, and reports it
        self._over.wait(10 * GRACE)  # the thread finds the rank to blame, and ends this process
        self._end.print_own()
        leave()

    def _printed(self, error: BaseException) -> str:
        """Return the traceback of an error; one line if another rank prints the same."""
        text = short_traceback(error)
        if broke_off(error):
            return text
        try:
            key = hashlib.sha256(text.encode(errors="replace")).hexdigest()
            if self._store.add(f"printed/{key}", 1) > 1:
                return f"raises the same: {one_line(error)}\n"
        except RuntimeError:
            pass  # the store is gone
        return text

    def _child_ends(self) -> None:
        """Report the exception that ends this child of multiprocessing, or stop if there is none."""
        error = sys.exc_info()[1]
        if isinstance(error, SystemExit) and error.code:  # ``torch.multiprocessing.spawn`` raises it for another one
            error = error.__context__
        if isinstance(error, (Exception, KeyboardInterrupt)):
            self._raised(type(error), error, error.__traceback__)
        self.stop()

    def _rank_0_ended(self) -> bool:
        first = self.followed.first
        return self._holder.is_rank_0 and self._rank != 0 and first is not None and first.state == ENDED

    def _alone(self) -> None:
        """Go on without the store, which ended with rank 0, as long as this rank needs no other."""
        while self._end.failure is None:
            if self._pause():
                return
        self._end.store_is_gone("ended")
