"""Watch all ranks from a thread of each, and end the whole job with one message when a rank fails or hangs.

A process that is blocked in a collective cannot be interrupted: no exception and no signal handler reaches it. So each
rank has a thread that tells the others through the store that it lives, and that leaves with ``os._exit``.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import multiprocessing.util
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterable
from types import TracebackType
from typing import Any

import torch.distributed as dist

from autopar.ir.hosts import Hosts
from autopar.runtime.current_op import CurrentOp, where, where_raised
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
from autopar.runtime.processes.watch.ending import leave, say, say_for_host
from autopar.runtime.processes.watch.followed_rank import FollowedRank, RankState
from autopar.runtime.processes.watch.holder import Holder, is_launched
from autopar.runtime.processes.watch.host_names import HostNames
from autopar.runtime.processes.watch.keepalive import has_several_hosts
from autopar.runtime.processes.watch.launcher import LauncherWatch
from autopar.runtime.processes.watch.lost_store import lost_store
from autopar.runtime.processes.watch.other_hosts import OtherHosts, take_neighbours
from autopar.runtime.processes.watch.verdict import GRACE, LOST, SILENCE, Verdict, failed, judge
from autopar.runtime.processes.watch.wording import at

INTERVAL = 0.5  # seconds between beats
UNANSWERED = 15.0  # seconds without an answer of the store, after which this host ends if the store is elsewhere
WITNESSES = 4  # so many ranks watch all others; every other rank only checks that one of these is alive
PREFIX = "autopar/watch"


class Watch:
    """Watches all ranks of a job from the thread of one: a context manager, or ``start`` and ``stop``.

    Args:
        store: a store that all ranks share; it is cloned, so that nothing else waits for its connection.
        rank: the rank of this process.
        ranks: the number of ranks.
        timeout: the watch ends the job after so many seconds without progress of any rank, while one is inside a step.
    """

    def __init__(self, store: dist.Store, rank: int, ranks: int, *, timeout: float = 60.0) -> None:
        self._holder = Holder(store, rank)
        copied: Any = store  # the stubs know neither its clone, nor that a value may be bytes
        own: Any = dist.PrefixStore(PREFIX, copied.clone())
        self._store = own
        self._rank, self._ranks, self._timeout = rank, ranks, timeout
        self._process = process_of(os.getpid())
        self._several_hosts, self._other_hosts = has_several_hosts(), OtherHosts()
        launcher = self._holder.launcher if self._several_hosts else None
        self._launcher = LauncherWatch(launcher, min(timeout, SILENCE)) if launcher is not None else None
        self.hosts: Hosts | None = None  # the hosts of all ranks, once the job has compared them
        self._multi_get: bool = own.has_extended_api()
        self._sequence = 0
        self._failure: tuple[str, CurrentOp, str] | None = None  # state, place, error
        self._unprinted = ""  # the traceback of an exception that may be a consequence
        self._others: dict[int, FollowedRank] = {r: FollowedRank() for r in range(ranks)}
        self._clock = 0.0  # seconds that this thread was awake: time in which a laptop slept does not count
        self._rounds = 0
        self._over = threading.Event()
        self._alarm = Alarm()
        self._lock = threading.Lock()  # for the beat, which two threads write at the end
        self._ending = threading.RLock()  # held forever by the thread that ends this process
        self._leaving = threading.Lock()  # the same, for an end without the store, which a thread may wait for
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
        if self._failure is None:
            with contextlib.suppress(RuntimeError):  # the store may have ended already
                self._failure = (ENDED, where(), "")
                self._post()
                if self._rank == 0 and self._holder.is_rank_0:
                    self._let_others_notice()

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
            self._clock += min(now - last, 2 * INTERVAL)
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
                    self._store_is_gone()
                lost = True
            self._rounds += 1

    def _pause(self) -> bool:
        """Wait until the next beat is due, or a process of this host ends. Return whether the watch is over."""
        self._alarm.wait(INTERVAL)
        if self._alarm.is_terminated and not self._over.is_set():
            self._terminated()
        return self._over.is_set()

    def _terminated(self) -> None:
        """End this process by SIGTERM, which came because a rank was lost, or for an unknown reason."""
        try:
            if self._failure is None:
                self._failure = (TERMINATED, where(), "")
            for _ in range(20):
                self._round()
                if not any(self._can_judge(rank) for rank in range(min(self._rank, WITNESSES))):
                    break  # else a lower rank prints the verdict
                time.sleep(0.1)
        except RuntimeError:
            if self._holder.is_elsewhere:  # the launcher of this host ends because the other one was lost
                self._store_is_gone()
        end_by_sigterm()

    def _guard(self) -> None:
        """Notice that the store gives no answer, which the other thread may wait for forever."""
        rounds, waited = -1, 0.0
        while not self._over.wait(INTERVAL) and not self._rank_0_ended():
            waited = waited + INTERVAL if rounds == self._rounds else 0.0
            rounds = self._rounds
            how = self._silence_of_store(waited)
            if how:
                self._store_is_gone(how)

    def _silence_of_store(self, waited: float) -> str:
        """Return how the store was lost; empty if nothing is wrong. ``waited``: seconds for an answer."""
        if waited < min(self._timeout, UNANSWERED):
            return ""
        first = self._others[0].beat
        holder = self._holder.process(first)
        state = holder.state() if holder is not None else UNKNOWN
        # a failed rank waits for the lock of its beat
        needed = where().inside or self._failure is not None or self._several_hosts
        if state == STOPPED and waited >= min(self._timeout, SILENCE) and needed:
            return "was stopped (SIGSTOP)"
        if state == UNKNOWN and (first is not None or self._holder.is_elsewhere) and needed:
            return f"has given no answer for {waited:.0f} s"
        return ""

    def _round(self) -> None:
        self._post()
        if self._store.check(["done"]):
            self._follow()
        if self._launcher is not None:
            self._look_at_launcher(self._launcher)
        witness = self._rank < WITNESSES
        others = range(self._ranks) if witness else range(self._rank)
        if witness:
            self._look(others)
        for rank in () if witness else others:
            self._look([rank])
            if self._can_judge(rank):
                return
        if any(self._can_judge(rank) for rank in range(self._rank)):
            return
        if not witness:
            self._look(range(self._rank, self._ranks))
        verdict = judge(self._states(), self._timeout)
        if verdict is not None:
            self._report(verdict)

    def _post(self) -> None:
        holder = self._holder.process(self._others[0].beat)
        if self._rank_0_ended() or (holder is not None and holder.state() == DEAD):  # torch would complain at length
            raise RuntimeError("the store is gone")
        with self._lock:
            state, place, error = self._failure or (ALIVE, where(), "")
            self._sequence += 1
            who = self._other_hosts.own, self._other_hosts.listener.address, self._neighbours()
            self._store.set(f"beat/{self._rank}", Beat(self._sequence, state, place, self._process, error, *who).dump())

    def _neighbours(self) -> dict[int, str]:
        """Return the ranks of this host that are stopped or dead: other hosts cannot see it."""
        if not self._several_hosts:
            return {}
        first, found = self._rank - int(os.environ.get("LOCAL_RANK", 0)), {}
        for rank in range(first, first + int(os.environ.get("LOCAL_WORLD_SIZE", 1))):
            if self._others[rank].beat is None:
                self._look([rank])
            beat = self._others[rank].beat
            if rank != self._rank and beat is not None and (state := beat.process.state()) in (STOPPED, DEAD):
                found[rank] = state
        return found

    def _look(self, ranks: Iterable[int]) -> None:
        """Take the newest beats of ranks: all in one message, because a slow link may have seconds of delay."""
        begun = []
        for rank in ranks:
            other = self._others[rank]
            if other.beat is not None:  # first the process, then the beat: a rank posts that it ended before it dies
                other.process = other.beat.process.state()
            elif not self._store.check([f"beat/{rank}"]):  # ``get`` would wait for a missing key
                continue
            begun.append(rank)
        keys = [f"beat/{rank}" for rank in begun]
        texts = self._store.multi_get(keys) if self._multi_get and keys else [self._store.get(key) for key in keys]
        for rank, text in zip(begun, texts, strict=True):
            beat = Beat.load(text)
            self._others[rank].take(beat, self._clock)
            if rank != self._rank:
                self._alarm.look_at(beat.process)
            if self._rank < WITNESSES:
                self._other_hosts.follow(beat, self._clock - self._others[rank].came < INTERVAL)

    def _look_at_launcher(self, launcher: LauncherWatch) -> None:
        self._alarm.look_at(launcher.process)
        how = launcher.failure(INTERVAL)
        if how:
            names = self._names()
            host = names.of(self._rank)
            text = f"the launcher of {names.with_ranks(host)} {how}; rank {self._rank} was {at(where())}"
            self._report(Verdict(names.ranks(host) or (self._rank,), f"autopar: {text}"))

    def _names(self) -> HostNames:
        return HostNames(self._states(), self.hosts)

    def _can_judge(self, rank: int) -> bool:
        other = self._others[rank]
        return (
            other.beat is not None
            and other.beat.state in (ALIVE, CUT)
            and other.process not in (DEAD, STOPPED)
            and self._clock - other.came < GRACE
        )

    def _states(self) -> dict[int, RankState]:
        take_neighbours(self._others)
        lost = self._other_hosts.lost()
        return {
            rank: other.state(self._clock, other.beat is not None and other.beat.host in lost)
            for rank, other in self._others.items()
        }

    # -- the end ---------------------------------------------------------------------------------------------------

    def _raised(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Replace ``sys.excepthook``: report an exception that reached the top, and leave."""
        if os.getpid() != self._process.pid or self._thread is None or not self._thread.is_alive():
            self._usual_hook(kind, error, trace)
            return
        line = f"{kind.__name__}: {error}".strip().partition("\n")[0]  # without its notes
        if broke_off(error):
            self._failure = (CUT, where_raised(error), line)  # at once, for this thread is at no op any more
        self._unprinted = "" if kind is KeyboardInterrupt else "".join(traceback.format_exception(kind, error, trace))
        if not broke_off(error):
            self._print_own()
        self._failure = (CUT if broke_off(error) else FAILED, where_raised(error), line)
        try:
            self._post()
            if self._failure[0] == FAILED:
                self._report(failed(self._rank, self._failure[1], line, self._names().named(self._rank)))
        except RuntimeError:
            pass  # the store is gone: the thread notices it too, and reports it
        self._over.wait(10 * GRACE)  # the thread finds the rank to blame, and ends this process
        self._print_own()
        leave()

    def _child_ends(self) -> None:
        """Report the exception that ends this child of multiprocessing, or stop if there is none."""
        error = sys.exc_info()[1]
        if isinstance(error, SystemExit) and error.code:  # ``torch.multiprocessing.spawn`` raises it for another one
            error = error.__context__
        if isinstance(error, (Exception, KeyboardInterrupt)):
            self._raised(type(error), error, error.__traceback__)
        self.stop()

    def _report(self, verdict: Verdict) -> None:
        """Print the verdict, unless another rank does, and leave."""
        with self._ending:
            if self._store.add("elected", 1) > 1:
                for _ in range(30):
                    if self._store.check(["done"]):
                        self._follow()
                    time.sleep(0.1)  # if nothing comes, the elected rank was killed in between
            raised = verdict.ranks if verdict.raised else ()  # errors of other ranks are consequences
            if self._rank in raised:
                self._print_own()
            if not is_launched():
                say_for_host(verdict.text + "\n")
            done = {"text": verdict.text, "ranks": verdict.ranks, "raised": raised, "host": self._other_hosts.own}
            self._store.set("done", json.dumps(done))
            if self._launcher is not None:
                self._launcher.kill_if_stopped()
            self._kill_stopped(verdict.ranks)
            self._leave_last()

    def _kill_stopped(self, ranks: Iterable[int]) -> None:
        """Kill the ranks to blame that are stopped on this host: they cannot leave by themselves."""
        for rank in ranks:
            beat = self._others[rank].beat
            if rank != self._rank and beat is not None and beat.process.state() == STOPPED:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(beat.process.pid, signal.SIGKILL)

    def _follow(self) -> None:
        """Leave after another rank has printed the verdict. The first rank of another host prints it there, too."""
        with self._ending:
            done = json.loads(self._store.get("done"))
            if self._rank in done["raised"]:
                self._print_own()
            own = self._other_hosts.own
            if tuple(done["host"]) != own and self._store.add(f"told/{own}", 1) == 1:
                say_for_host(done["text"] + "\n")
            self._kill_stopped(done["ranks"])
            self._store.add("followed", 1)
            self._leave_last()

    def _leave_last(self) -> None:
        """Leave; who may end the store by that first waits until the others have read the verdict."""
        if self._launcher is not None:
            self._leave_together()
        if self._rank == 0 and self._holder.is_rank_0:
            with contextlib.suppress(RuntimeError):
                for _ in range(20):
                    if not self._still_there() or self._store.add("followed", 0) >= self._ranks - 1:
                        break
                    time.sleep(0.1)
        leave()

    def _leave_together(self) -> None:
        """Leave when the ranks of all hosts have read the verdict, or after some seconds.

        The store may end with the first launcher that ends. And a launcher with restarts must see that its own ranks
        have failed before it hears that another host starts again: otherwise the two count their restarts differently,
        and the new ranks do not find each other.
        """
        with contextlib.suppress(RuntimeError):
            self._store.add("followed together", 1)
            self._look(range(self._ranks))
            take_neighbours(self._others)
            there = [
                other
                for rank, other in self._others.items()
                if other.beat is not None
                and other.beat.state != ENDED
                and other.process not in (DEAD, STOPPED)
                and (rank == self._rank or self._clock - other.came < GRACE)
            ]
            for _ in range(30):
                if self._store.add("followed together", 0) >= len(there):
                    break
                time.sleep(0.1)
        if self._alarm.is_terminated:  # the launcher of this host knows already
            time.sleep(INTERVAL)
        leave()

    def _let_others_notice(self) -> None:
        """Wait until the others have noticed that rank 0 ends normally, because its end may end the store."""
        for _ in range(20):
            if all(self._store.check([f"noticed/{rank}"]) for rank in self._still_there()):
                return
            time.sleep(0.1)

    def _still_there(self) -> dict[int, Beat]:
        """Return the newest beats of the other ranks that have begun and not ended."""
        self._look(range(1, self._ranks))
        beats = {rank: other.beat for rank, other in self._others.items() if rank != 0 and other.beat is not None}
        return {
            rank: beat
            for rank, beat in beats.items()
            if beat.state != ENDED and beat.process.state() not in (DEAD, STOPPED)
        }

    def _rank_0_ended(self) -> bool:
        first = self._others[0].beat
        return self._holder.is_rank_0 and self._rank != 0 and first is not None and first.state == ENDED

    def _alone(self) -> None:
        """Go on without the store, which ended with rank 0, as long as this rank needs no other."""
        while self._failure is None:
            if self._pause():
                return
        self._store_is_gone("ended")

    def _store_is_gone(self, how: str = LOST) -> None:
        """Leave without a common verdict. The lowest rank that is left on the host prints the message.

        A rank that failed by itself says so: the store ended because of it.
        """
        if not self._leaving.acquire(blocking=False):
            threading.Event().wait()  # another thread ends this process
        if self._failure is not None and self._failure[0] == FAILED:
            _, place, line = self._failure
            say_for_host(failed(self._rank, place, line, self._names().named(self._rank)).text + "\n")
            leave()
        place = where() if self._failure is None else self._failure[1]
        gone = {rank for rank, other in self._others.items() if other.process == DEAD or other.state(0.0).is_in(ENDED)}
        gone |= {0} if self._holder.is_rank_0 else set()
        here = self._rank - int(os.environ.get("LOCAL_RANK", self._rank))  # the first rank of this host
        first = self._others[0].beat
        if gone >= set(range(here, self._rank)):
            say_for_host(
                lost_store(
                    how,
                    self._rank,
                    place,
                    holder=self._holder,
                    names=self._names(),
                    first=first,
                    several=self._launcher is not None,
                )
            )
            holder = self._holder.process(first)
            if holder is not None and holder.state() == STOPPED:
                os.kill(holder.pid, signal.SIGKILL)
            elif self._holder.is_elsewhere and self._launcher is not None:
                self._launcher.end_if_stuck()
        leave()

    def _print_own(self) -> None:
        """Print the traceback of this rank, once."""
        text, self._unprinted = self._unprinted, ""
        say(text, prefix="" if is_launched() and self._rank != 0 else f"[rank {self._rank}] ")
