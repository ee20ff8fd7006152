"""When a rank fails, is lost or is waited for too long: all processes end, with one message that names it."""

from __future__ import annotations

import gc
import json
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import comparisons_on_ranks
import failing_ranks
import pytest
from failing_jobs import Ended, ended
from processes import LIMIT, forked, ranks
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, start_processes

from autopar.runtime import current_op
from autopar.runtime.current_op import CurrentOp
from autopar.runtime.processes.watch.beat import (
    ALIVE,
    CUT,
    DEAD,
    ENDED,
    FAILED,
    RUNNING,
    STOPPED,
    UNKNOWN,
    Beat,
    FollowedRank,
    Process,
    RankState,
    broke_off,
    process_of,
)  # fmt: skip
from autopar.runtime.processes.watch.verdict import GRACE, SILENCE, judge

RANKS = 3
TIMEOUT = 2.0
FIRST, MIDDLE, LAST = (
    "in all_reduce(mm_1, tp)   model.py:41  self.act(self.up(x))   in module layers.0.mlp",
    "in mm(x, t)   model.py:42  self.down(x)   in module layers.0.mlp",
    "in all_reduce(mm_2, dp)   model.py:43  x + y   in module layers.0",
)
RELU = "in y : f32[4] = relu(z)   unknown line   in module the root"
CHUNK = "in x_dp_0 : f32[4096] = all_reduce(x, dp)   unknown line   in module the root"
HOLDS = "which holds the store of the job,"

# case → the exit status of each rank, minus the signal that ended it; and the message, without its remedy
CASES: dict[str, tuple[list[int], str | None]] = {
    "no failure": ([0, 0, 0], None),
    "slow outside": ([0, 0, 0], None),
    "unstopped": ([0, 0, 0], None),
    "exception": ([1, 1, 1], f"rank 2 failed {MIDDLE}: ValueError: a bad value"),
    "exception of rank 0": ([1, 1, 1], f"rank 0 failed {MIDDLE}: ValueError: a bad value"),
    "exception outside": (
        [1, 1, 1],
        'rank 2 failed at failing_ranks.py:LINE  raise ValueError("outside"): ValueError: outside',
    ),
    "exception everywhere": ([1, 1, 1], f"rank LINE failed {MIDDLE}: ValueError: a bad value"),
    "interrupt": ([1, 1, 1], f"rank 2 was interrupted {MIDDLE}"),
    "kill": ([1, 1, -9], f"rank 2 was lost (killed or crashed); it was last seen {MIDDLE}"),
    "kill, a zombie": ([1, 1, -9], f"rank 2 was lost (killed or crashed); it was last seen {MIDDLE}"),
    "stop": ([1, 1, -9], f"rank 2 was stopped (SIGSTOP); it was last seen {MIDDLE}; ranks 0 1 wait {LAST}"),
    "sleep outside": (
        [1, 1, 1],
        f"no progress for 2 s: rank 2 is outside of a step, at failing_ranks.py:LINE  time.sleep(100); ranks 0 1 wait "
        f"{FIRST}",
    ),
    "loop outside": (
        [1, 1, 1],
        f"no progress for 2 s: rank 2 is outside of a step, at failing_ranks.py:LINE  time.sleep(0.3); ranks 0 1 wait "
        f"{FIRST}",
    ),
    "stuck in an op": ([1, 1, 1], f"no progress for 2 s: rank 2 is {MIDDLE}; ranks 0 1 wait {LAST}"),
    "most are stuck in chunks": ([1, 1, 1], f"no progress for 2 s: ranks 1 2 are {RELU}; rank 0 waits {CHUNK}"),
    "early end": ([1, 1, 0], f"rank 2 ended; ranks 0 1 wait {FIRST}"),
    "kill of rank 0": (
        [-9, 1, 1],
        f"rank 0, {HOLDS} was lost (killed or crashed); it was last seen {MIDDLE}; rank 1 was {LAST}",
    ),
    "stop of rank 0": (
        [-9, 1, 1],
        f"rank 0, {HOLDS} was stopped (SIGSTOP); it was last seen {MIDDLE}; rank 1 was {LAST}",
    ),
    "stop, rank 2 leaves; of rank 0": (
        [-9, 1, 1],
        f"rank 0, {HOLDS} was stopped (SIGSTOP); it was last seen {MIDDLE}; rank 1 was {LAST}",
    ),
    "early end of rank 0": ([0, 1, 1], f"rank 0, {HOLDS} ended; rank 1 was {FIRST}"),
    "rank 0 leaves first": ([0, 0, 0], None),
    "exception in chunks": ([1, 1, 1], f"rank 2 failed {RELU}: ValueError: a bad value"),
    "exception in a bucket": ([1, 1, 1], f"rank 2 failed {RELU}: ValueError: a bad value"),
    "kill in chunks": ([1, 1, -9], f"rank 2 was lost (killed or crashed); it was last seen {RELU}"),
    "kill in a bucket": ([1, 1, -9], f"rank 2 was lost (killed or crashed); it was last seen {RELU}"),
    "stop in chunks": ([1, 1, -9], f"rank 2 was stopped (SIGSTOP); it was last seen {RELU}; ranks 0 1 wait {CHUNK}"),
    "kill in chunks of rank 0": (
        [-9, 1, 1],
        f"rank 0, {HOLDS} was lost (killed or crashed); it was last seen {RELU}; rank 1 was {CHUNK}",
    ),
}


@pytest.fixture(scope="module")
def ends(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    """How the ranks of each selected case ended, and what they printed."""
    selected = [
        item.callspec.params["case"]
        for item in request.session.items
        if getattr(item, "originalname", "") == "test_ranks"
    ]
    jobs = [
        {
            "case": case,
            "ranks": RANKS,
            "timeout": TIMEOUT,
            "reap": "zombie" not in case,
            "rank 0 has the store": "rank 0" in case,
        }
        for case in selected
    ]
    return ended("failing_ranks.py", jobs, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("case", CASES)
def test_ranks(ends: dict[str, Ended], case: str) -> None:
    codes, output = ends[case]
    expected, message = CASES[case]
    assert codes == expected, output
    messages = [line for line in output.splitlines() if line.startswith("autopar: ")]
    if message is None:
        assert output == ""
        return
    assert len(messages) == 1, output
    before, _, after = message.partition("LINE")
    assert messages[0].startswith(f"autopar: {before}")
    assert messages[0].endswith(after)
    if case == "exception everywhere":
        return
    tracebacks = {line.partition("] ")[0] + "]" for line in output.splitlines() if "Traceback" in line}
    assert tracebacks == ({f"[rank {0 if 'rank 0' in case else 2}]"} if "exception" in case else set()), output


@pytest.mark.parametrize("start", ["a process", "torch's spawn"])
@pytest.mark.parametrize("case", ["exception", "kill"])
def test_children_of_multiprocessing(case: str, start: str, tmp_path: Path) -> None:
    """They print their traceback themselves, and ask no ``sys.excepthook``: a connection that broke is none."""
    if start == "a process":
        children = [forked(failing_ranks.child, rank, 2, case, str(tmp_path)) for rank in range(2)]
        for one in children:
            one.join(LIMIT)
    else:
        with pytest.raises((ProcessRaisedException, ProcessExitedException)):
            start_processes(failing_ranks.child, (2, case, str(tmp_path)), 2, start_method="forkserver")
    output = (tmp_path / "output.txt").read_text()
    (message,) = (line for line in output.splitlines() if line.startswith("autopar: "))
    _, told = CASES[case]
    # the other rank waits, or its connection has already broken
    assert told is not None and message.partition("; rank 0 waits in ")[0] == "autopar: " + told.replace(
        "rank 2", "rank 1"
    )
    tracebacks = [line for line in output.splitlines() if "Traceback" in line]
    assert tracebacks == ["[rank 1] Traceback (most recent call last):"] * (case == "exception"), output


def test_a_comparison_of_calls_waits_for_the_other_ranks() -> None:
    places = ranks(3).run(comparisons_on_ranks.place_of_a_comparison)
    assert [place.peers for place in places] == [(1, 2), (0, 2), (0, 1)]
    assert {place.collective for place in places} == {"the comparison of the ranks' calls"}
    assert all(
        place.text.startswith("the comparison of the ranks' calls   comparisons_on_ranks.py:") for place in places
    )


# -- where ---------------------------------------------------------------------------------------------------------


def _step(source: str, **names: Any) -> Callable[[], None]:
    scope = dict(names)
    exec(compile(source, "<step>", "exec"), scope)
    return scope["step"]


def test_an_op_is_found_on_the_stack_of_another_thread() -> None:
    inside, go_on = threading.Event(), threading.Event()

    def block() -> None:
        inside.set()
        go_on.wait(10)

    step = _step("def step():\n  a = 1\n  del a\n  block()\n  b = 2\n", block=block)
    current_op.register(step.__code__, {2: "first", 5: "last"})
    twin = _step("def step():\n  a = 1\n  del a\n  block()\n  b = 2\n", block=block)
    current_op.register(twin.__code__, {2: "another"})  # an equal code object, but not the same
    thread = threading.Thread(target=step)
    thread.start()
    assert inside.wait(10)
    place = current_op.where()
    assert (place.inside, place.text) == (True, "first"), "a line without a text belongs to the op above"
    current_op.tick()
    assert current_op.where().ticks == place.ticks + 1
    current_op.register(step.__code__, {4: "again"})
    assert current_op.where().text == "again"
    current_op.register(step.__code__, {4: "the call"}, is_call=True)
    assert current_op.where().text.startswith("the call   test_watch.py:"), "with the line of the main thread"
    go_on.set()
    thread.join()
    outside = current_op.where()
    assert not outside.inside
    assert outside.text.startswith("test_watch.py:")
    assert outside.text.endswith("outside = current_op.where()")


def test_the_op_of_an_exception_is_found_in_its_traceback() -> None:
    step = _step("def step():\n  a = 1\n  int('x')\n")
    current_op.register(step.__code__, {2: "first", 3: "second"})
    try:
        step()
    except ValueError as error:
        place = current_op.where_raised(error)
        assert (place.inside, place.text) == (True, "second")
    try:
        json.loads("{")
    except ValueError as error:
        place = current_op.where_raised(error)
        assert not place.inside
        assert place.text.endswith('json.loads("{")')


def test_code_that_is_registered_may_go() -> None:
    step = _step("def step(): pass\n")
    current_op.register(step.__code__, {1: "only"})
    code = weakref.ref(step.__code__)
    del step
    gc.collect()
    assert code() is None


# -- the verdict ---------------------------------------------------------------------------------------------------

PROCESS = Process("elsewhere", 1, "")
MM, REDUCE, USERS = (
    CurrentOp(3, True, "mm(x, t)"),
    CurrentOp(3, True, "all_reduce(mm, tp)"),
    CurrentOp(3, False, "train.py:7  load()"),
)


def seen(
    place: CurrentOp,
    state: str = ALIVE,
    process: str = RUNNING,
    silent: float = 0.1,
    still: float = 0.1,
    settled: float = 50.0,
) -> RankState:
    return RankState(
        Beat(1, state, place, PROCESS, "RuntimeError: no" if state in (FAILED, CUT) else ""),
        process,
        silent,
        still,
        settled,
    )


NEW = RankState(None, UNKNOWN, 500.0, 500.0, 500.0)
VERDICTS: dict[str, tuple[list[RankState], tuple[int, ...] | None]] = {
    "all outside, forever": ([seen(USERS, still=5000.0)] * 3, None),
    "a rank alone may take long": ([seen(MM, still=5000.0)], None),
    "one waits": ([seen(REDUCE, still=59.0), seen(USERS, still=900.0)], None),
    "one has waited": ([seen(REDUCE, still=61.0), seen(USERS, still=900.0)], (1,)),
    "one makes progress": ([seen(REDUCE, still=100.0), seen(USERS, still=900.0), seen(MM, still=3.0)], None),
    "one has not begun": ([seen(REDUCE, still=61.0), NEW], (1,)),
    "one has ended": ([seen(REDUCE, still=61.0), seen(USERS, ENDED, DEAD, silent=900.0)], (1,)),
    "one ended, none waits": ([seen(USERS, still=61.0), seen(USERS, ENDED, DEAD, silent=900.0)], None),
    "all in the same op": ([seen(REDUCE, still=61.0)] * 2, (0, 1)),
    "most are in one op": ([seen(REDUCE, still=61.0), seen(MM, still=61.0), seen(REDUCE, still=61.0)], (1,)),
    "silent on another host": (
        [seen(REDUCE, still=SILENCE + 1), seen(MM, process=UNKNOWN, silent=SILENCE + 1, still=30.0)],
        (1,),
    ),
    "silent, no one waits": (
        [seen(USERS, still=SILENCE + 1), seen(USERS, process=UNKNOWN, silent=SILENCE + 1, still=30.0)],
        None,
    ),
    "silent, but it runs here": (
        [seen(REDUCE, still=SILENCE + 1), seen(MM, process=RUNNING, silent=SILENCE + 1, still=30.0)],
        None,
    ),
    "stopped for a moment": ([seen(REDUCE, still=5.0), seen(MM, process=STOPPED, silent=5.0, still=5.0)], None),
    "dead": ([seen(USERS), seen(USERS, process=DEAD)], (1,)),
    "failed, the others are cut": (
        [seen(REDUCE, CUT, settled=9.0), seen(MM, FAILED), seen(REDUCE, CUT, settled=9.0)],
        (1,),
    ),
    "dead, the others are cut": ([seen(REDUCE, CUT, settled=0.1), seen(MM, process=DEAD)], (1,)),
    "cut, the cause may come": ([seen(REDUCE, CUT, settled=GRACE / 2), seen(MM)], None),
    "cut, and no other cause": ([seen(REDUCE, CUT, settled=GRACE + 1), seen(MM)], (0,)),
    "cut, the other is silent": (
        [seen(REDUCE, CUT, settled=GRACE + 1), seen(MM, process=UNKNOWN, silent=GRACE + 1)],
        (1,),
    ),
    "cut, the other ended": ([seen(REDUCE, CUT, settled=2.0), seen(USERS, ENDED, DEAD)], (1,)),
    "cut, one ended, one may be lost": (
        [seen(REDUCE, CUT, settled=2.0), seen(USERS, ENDED), seen(MM, process=UNKNOWN, silent=2.0)],
        None,
    ),
}


@pytest.mark.parametrize("case", VERDICTS)
def test_verdict(case: str) -> None:
    states, blamed = VERDICTS[case]
    verdict = judge(dict(enumerate(states)), timeout=60.0)
    assert (None if verdict is None else verdict.ranks) == blamed, verdict


@pytest.mark.parametrize(
    ("first", "said"),
    [
        (
            REDUCE,
            "autopar: rank 1 ended; rank 0 waits in all_reduce(mm, tp)\n  all ranks must take the same number of "
            "steps: see how the data is split",
        ),
        (
            USERS,
            "autopar: no progress for 60 s: rank 0 is outside of a step, at train.py:7  load(); rank 1 has ended; "
            "rank 2 waits in mm(x, t)",
        ),
    ],
    ids=["all wait", "one is outside"],
)
def test_a_rank_that_ended_is_named_however_long_its_connections_last(first: CurrentOp, said: str) -> None:
    others = {2: seen(MM, still=61.0)} if first is USERS else {}
    verdict = judge({0: seen(first, still=61.0), 1: seen(USERS, ENDED, RUNNING, silent=61.0), **others}, timeout=60.0)
    assert verdict is not None
    assert verdict.text.startswith(said)


def test_a_loop_of_the_users_is_no_progress() -> None:
    rank = FollowedRank()
    for now, place in enumerate(
        [
            USERS,
            CurrentOp(3, False, "train.py:8  more()"),
            CurrentOp(3, True, "mm"),
            CurrentOp(3, True, "t"),
            CurrentOp(4, True, "t"),
        ]
    ):
        rank.take(Beat(now, ALIVE, place, PROCESS), float(now))
        assert rank.state(float(now)).still == (1.0 if now == 1 else 0.0)
    assert rank.state(6.0).silent == 2.0
    rank.take(Beat(4, ALIVE, CurrentOp(4, True, "t"), PROCESS), 7.0)
    assert rank.state(7.0).silent == 3.0, "the same beat once more is not a new one"


def test_beats_are_read_back() -> None:
    beat = Beat(7, FAILED, MM, process_of(1), "ValueError: ü")
    assert Beat.load(beat.dump()) == beat


def test_what_is_a_consequence() -> None:
    cut = RuntimeError(
        "[../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.1.1]:4711"
    )
    assert broke_off(cut)
    assert not broke_off(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not broke_off(ValueError("Connection closed by peer"))
    wrapped = ValueError("a step failed")
    wrapped.__cause__ = cut
    assert broke_off(wrapped)


def test_a_process_is_known_by_its_birth() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    process = process_of(child.pid)
    assert process.state() == RUNNING
    if process.born:  # there is /proc
        assert Process(process.host, process.pid, "0").state() == DEAD, "the pid is another process's now"
        child.send_signal(signal.SIGSTOP)
        _until(lambda: process.state() == STOPPED)
    assert Process("elsewhere", process.pid, process.born).state() == UNKNOWN
    child.kill()
    _until(lambda: process.state() == DEAD or not process.born)  # a zombie
    child.wait()
    assert process.state() == DEAD


def _until(condition: Callable[[], bool]) -> None:
    for _ in range(100):
        if condition():
            return
        time.sleep(0.1)
    raise AssertionError("it never came")
