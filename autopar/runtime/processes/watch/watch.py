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
from types import TracebackType
from typing import Any

import torch.distributed as dist

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
from autopar.runtime.processes.watch.ending import leave, say
from autopar.runtime.processes.watch.followed_rank import FollowedRank, RankState
from autopar.runtime.processes.watch.holder import Holder, is_launched
from autopar.runtime.processes.watch.verdict import GRACE, LOST, SILENCE, Verdict, failed, judge
from autopar.runtime.processes.watch.wording import at, last_seen

INTERVAL = 0.5  # seconds between beats
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
        self._holder = Holder(store)
        copied: Any = store  # the stubs know neither its clone, nor that a value may be bytes
        self._store: Any = dist.PrefixStore(PREFIX, copied.clone())
        self._rank, self._ranks, self._timeout = rank, ranks, timeout
        self._process = process_of(os.getpid())
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
        if self._holder.is_rank_0 and self._rank != 0:
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
        with contextlib.suppress(RuntimeError):  # the store is gone
            if self._failure is None:
                self._failure = (TERMINATED, where(), "")
            for _ in range(20):
                self._round()
                if not any(self._can_judge(rank) for rank in range(min(self._rank, WITNESSES))):
                    break  # else a lower rank prints the verdict
                time.sleep(0.1)
        end_by_sigterm()

    def _guard(self) -> None:
        """Notice that rank 0 is stopped: its store stops with it, and the other thread waits for the store forever."""
        rounds, waited = -1, 0.0
        while not self._over.wait(INTERVAL) and not self._rank_0_ended():
            waited = waited + INTERVAL if rounds == self._rounds else 0.0
            rounds, first = self._rounds, self._others[0].beat
            needed = where().inside or self._failure is not None  # a failed rank waits for the lock of its beat
            if waited >= min(self._timeout, SILENCE) and first is not None and needed:
                state = first.process.state()
                if state in (STOPPED, UNKNOWN):
                    self._store_is_gone("was stopped (SIGSTOP)" if state == STOPPED else "gives no sign of life")

    def _round(self) -> None:
        self._post()
        if self._store.check(["done"]):
            self._follow()
        witness = self._rank < WITNESSES
        others = range(self._ranks) if witness else range(self._rank)
        for rank in others:
            self._look(rank)
            if not witness and self._can_judge(rank):
                return
        if any(self._can_judge(rank) for rank in range(self._rank)):
            return
        if not witness:
            for rank in range(self._rank, self._ranks):
                self._look(rank)
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
            self._store.set(f"beat/{self._rank}", Beat(self._sequence, state, place, self._process, error).dump())

    def _look(self, rank: int) -> None:
        other = self._others[rank]
        if other.beat is not None:  # first the process, then the beat: a rank posts that it ended before it dies
            other.process = other.beat.process.state()
        elif not self._store.check([f"beat/{rank}"]):  # ``get`` would wait for a missing key
            return
        other.take(Beat.load(self._store.get(f"beat/{rank}")), self._clock)
        if rank != self._rank and other.beat is not None:
            self._alarm.look_at(other.beat.process)

    def _can_judge(self, rank: int) -> bool:
        other = self._others[rank]
        return (
            other.beat is not None
            and other.beat.state in (ALIVE, CUT)
            and other.process not in (DEAD, STOPPED)
            and self._clock - other.came < GRACE
        )

    def _states(self) -> dict[int, RankState]:
        return {rank: other.state(self._clock) for rank, other in self._others.items()}

    # -- the end ---------------------------------------------------------------------------------------------------

    def _raised(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Replace ``sys.excepthook``: report an exception that reached the top, and leave."""
        if os.getpid() != self._process.pid or self._thread is None or not self._thread.is_alive():
            self._usual_hook(kind, error, trace)
            return
        line = f"{kind.__name__}: {error}".strip().partition("\n")[0]  # without its notes
        self._unprinted = "" if kind is KeyboardInterrupt else "".join(traceback.format_exception(kind, error, trace))
        if not broke_off(error):
            self._print_own()
        self._failure = (CUT if broke_off(error) else FAILED, where_raised(error), line)
        try:
            self._post()
            if self._failure[0] == FAILED:
                self._report(failed(self._rank, self._failure[1], line))
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
                say(verdict.text + "\n")
            self._store.set("done", json.dumps({"text": verdict.text, "ranks": verdict.ranks, "raised": raised}))
            for rank in verdict.ranks:
                beat = self._others[rank].beat
                if rank != self._rank and beat is not None and beat.process.state() == STOPPED:
                    os.kill(beat.process.pid, signal.SIGKILL)  # it cannot leave by itself
            self._leave_last()

    def _follow(self) -> None:
        """Leave after another rank has printed the verdict."""
        with self._ending:
            if self._rank in json.loads(self._store.get("done"))["raised"]:
                self._print_own()
            self._store.add("followed", 1)
            self._leave_last()

    def _leave_last(self) -> None:
        """Leave; rank 0 first waits until the others have read the verdict, because its end may end the store."""
        if self._rank == 0 and self._holder.is_rank_0:
            with contextlib.suppress(RuntimeError):
                for _ in range(20):
                    if not self._still_there() or self._store.add("followed", 0) >= self._ranks - 1:
                        break
                    time.sleep(0.1)
        leave()

    def _let_others_notice(self) -> None:
        """Wait until the others have noticed that rank 0 ends normally, because its end may end the store."""
        for _ in range(20):
            if all(self._store.check([f"noticed/{rank}"]) for rank in self._still_there()):
                return
            time.sleep(0.1)

    def _still_there(self) -> dict[int, Beat]:
        """Return the newest beats of the other ranks that have begun and not ended."""
        for rank in range(1, self._ranks):
            self._look(rank)
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
        if self._failure[0] == FAILED:
            say(failed(self._rank, *self._failure[1:]).text + "\n")
            leave()
        self._store_is_gone("ended")

    def _store_is_gone(self, how: str = LOST) -> None:
        """Leave without a common verdict. The lowest rank that is left on the host prints the message."""
        place = where() if self._failure is None else self._failure[1]
        gone = {rank for rank, other in self._others.items() if other.process == DEAD or other.state(0.0).is_in(ENDED)}
        gone |= {0} if self._holder.is_rank_0 else set()
        here = self._rank - int(os.environ.get("LOCAL_RANK", self._rank))  # the first rank of this host
        first = self._others[0].beat
        if gone >= set(range(here, self._rank)):
            text = "the launcher of this job was lost, and the job's store with it"
            if self._holder.is_rank_0:
                text = f"rank 0, which holds the store of the job, {how}"
                text += "" if first is None or how == "ended" else f"; {last_seen(first)}"
            say(f"autopar: {text}; rank {self._rank} was {at(place)}\n")
            if self._holder.is_rank_0 and first is not None and first.process.state() == STOPPED:
                os.kill(first.process.pid, signal.SIGKILL)
        leave()

    def _print_own(self) -> None:
        """Print the traceback of this rank, once."""
        text, self._unprinted = self._unprinted, ""
        say(text, prefix="" if is_launched() and self._rank != 0 else f"[rank {self._rank}] ")
