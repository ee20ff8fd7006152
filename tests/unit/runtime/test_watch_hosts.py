"""The watch over several hosts: what counts as a lost host, how hosts are named, and launchers that wait forever."""

from __future__ import annotations

import errno
import socket
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from autopar.ir.hosts import Hosts
from autopar.runtime.current_op import CurrentOp
from autopar.runtime.processes.watch import launcher, other_hosts
from autopar.runtime.processes.watch.beat import (
    ALIVE,
    CUT,
    DEAD,
    FAILED,
    RUNNING,
    STOPPED,
    UNKNOWN,
    Beat,
    Process,
    RankState,
)
from autopar.runtime.processes.watch.beat import process_of as process
from autopar.runtime.processes.watch.verdict import LOST_HOST, SILENCE, UNREACHABLE, judge
from autopar.runtime.processes.watch.wording import HostNames

LOADS, REDUCES = CurrentOp(3, False, "train.py:7  load()"), CurrentOp(3, True, "all_reduce(mm, tp)")
ALPHA, BETA = ("0", "alpha"), ("1", "beta")


def seen(
    host: tuple[str, str],
    place: CurrentOp = LOADS,
    state: str = ALIVE,
    process: str = RUNNING,
    silent: float = 0.1,
    unreachable: bool = False,
) -> RankState:
    beat = Beat(1, state, place, Process("a host", 1, ""), "ValueError: no" if state == FAILED else "", host)
    return RankState(beat, process, silent, 0.1, 50.0, unreachable)


HERE = {0: seen(ALPHA), 1: seen(ALPHA, REDUCES)}
SILENT = seen(BETA, REDUCES, process=UNKNOWN, silent=UNREACHABLE + 2)
GONE = replace(SILENT, unreachable=True)


def test_a_host_whose_kernel_does_not_answer_is_lost_wherever_its_ranks_are() -> None:
    behind = replace(GONE, beat=replace(GONE.beat, place=CurrentOp(2, False, "train.py:7  load()")))  # type: ignore[type-var]
    verdict = judge({**HERE, 2: GONE, 3: behind}, timeout=60.0)
    assert verdict is not None
    assert verdict.ranks == (2, 3)
    assert verdict.text == (
        "autopar: host beta (ranks 2 3) has given no sign of life for 12 s: its network or the host is lost; rank 3 "
        f"was last seen at train.py:7  load(); rank 1 waits in all_reduce(mm, tp){LOST_HOST}"
    )


def test_a_host_whose_last_beats_came_one_by_one_is_lost_as_a_whole() -> None:
    verdict = judge({**HERE, 2: GONE, 3: replace(GONE, silent=UNREACHABLE - 1)}, timeout=60.0)
    assert verdict is not None
    assert verdict.text.startswith("autopar: host beta (ranks 2 3) has given no sign of life for 9 s: its network ")


@pytest.mark.parametrize(
    ("state", "why"),
    [
        (SILENT, "the kernel answers: the rank may hold the interpreter"),
        (replace(GONE, silent=UNREACHABLE - 1), "a beat has come in the meantime"),
        (replace(SILENT, process=STOPPED), "a rank may be stopped for a while"),
    ],
)
def test_a_silent_rank_is_not_lost_at_once(state: RankState, why: str) -> None:
    assert judge({**HERE, 2: state, 3: state}, timeout=60.0) is None, why


def test_a_rank_that_stays_stopped_is_lost_also_where_no_rank_is_in_a_step() -> None:
    states = {0: seen(ALPHA), 1: seen(BETA, process=STOPPED, silent=SILENCE + 1)}
    verdict = judge(states, timeout=60.0)
    assert verdict is not None
    assert verdict.text == (
        "autopar: rank 1 on host beta was stopped (SIGSTOP); it was last seen at train.py:7  load()"
    )


@pytest.mark.parametrize(
    ("state", "said"),
    [
        (seen(BETA, REDUCES, process=DEAD), "rank 2 on host beta was lost (killed or crashed); it was last seen in "),
        (seen(BETA, REDUCES, FAILED), "rank 2 on host beta failed in all_reduce(mm, tp): ValueError: no"),
        (replace(seen(BETA, REDUCES, CUT), settled=9.0), "rank 2 on host beta failed in all_reduce(mm, tp): "),
    ],
)
def test_a_rank_is_named_with_its_host(state: RankState, said: str) -> None:
    verdict = judge({**HERE, 2: state, 3: seen(BETA)}, timeout=60.0)
    assert verdict is not None
    assert verdict.text.startswith(f"autopar: {said}")


def test_a_host_that_has_a_rank_left_is_not_lost() -> None:
    verdict = judge({**HERE, 2: GONE, 3: seen(BETA)}, timeout=60.0)
    assert verdict is not None
    assert "rank 2 on host beta has given no sign of life" in verdict.text


def test_a_job_on_one_host_names_no_host() -> None:
    names = HostNames({0: seen(ALPHA), 1: seen(ALPHA)})
    assert names.named(1) == "rank 1"
    assert names.whole([0, 1]) == {}
    assert HostNames({}, Hosts(("alpha",), (0, 0))).named(0) == "rank 0"


def test_hosts_that_the_job_has_compared_are_named_without_beats() -> None:
    names = HostNames({}, Hosts(("alpha", "beta"), (0, 0, 1, 1)))
    assert names.with_ranks(names.of(3)) == "host beta (ranks 2 3)"


def test_a_beat_carries_its_host_and_its_neighbours() -> None:
    beat = Beat(1, ALIVE, LOADS, Process("a", 1, ""), "", BETA, "10.0.0.2:1234", {3: DEAD})
    assert Beat.load(beat.dump()) == beat


# -- the kernel of another host ------------------------------------------------------------------------------------


def test_a_listener_that_goes_away_is_no_lost_host() -> None:
    """Its process has ended; what happened is told by beats."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        connection = other_hosts.Connection(f"127.0.0.1:{server.getsockname()[1]}")
        accepted, _ = server.accept()
        assert not connection.is_lost()
        accepted.close()
    assert not any(connection.is_lost() for _ in range(3))
    connection.close()


class Unanswered(socket.socket):
    """Connects, and nobody answers."""

    def connect_ex(self, address: object) -> int:
        return errno.EINPROGRESS


@pytest.mark.parametrize("heard", [None, 1.0, 6.0])
def test_a_connection_that_never_came_about(heard: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link went down before; or a firewall stands between, where beats go on."""
    now = [100.0]
    monkeypatch.setattr(other_hosts.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(other_hosts.socket, "socket", Unanswered)
    connection = other_hosts.Connection("127.0.0.1:1")
    if heard is not None:
        now[0] += heard
        connection.heard()
    now[0] = 100.0 + other_hosts.TRIED - 0.1
    assert not connection.is_lost()
    now[0] += 0.2
    assert [connection.is_lost() for _ in range(2)] == [heard != 6.0] * 2
    connection.close()


def test_a_host_that_refuses_a_connection_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    connection = other_hosts.Connection(f"127.0.0.1:{port}")
    now = other_hosts.time.monotonic() + other_hosts.TRIED + 1
    monkeypatch.setattr(other_hosts.time, "monotonic", lambda: now)
    assert not any(connection.is_lost() for _ in range(3))


def test_nobody_listens_in_a_job_on_one_host(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in other_hosts.NODES:
        monkeypatch.delenv(name, raising=False)
    assert other_hosts.Listener().address == ""


def test_only_the_first_rank_of_a_host_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"GROUP_WORLD_SIZE": "2", "RANK": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert other_hosts.Listener().address == ""
    monkeypatch.setenv("LOCAL_RANK", "0")
    listener = other_hosts.Listener()
    host, _, port = listener.address.rpartition(":")
    socket.create_connection((host, int(port)), 10).close()
    listener.close()


# -- the launcher --------------------------------------------------------------------------------------------------


NAPS = "while not select.select([sys.stdin], [], [], 0.02)[0]: pass"  # until a line comes
SLEEP = "time.sleep(60)"


@pytest.mark.parametrize("rounds", [5, 0])  # 0: the link goes down before the store has answered once
@pytest.mark.parametrize(
    ("script", "is_stuck"),
    [
        (f"{NAPS}\n{SLEEP}", True),
        (f"{NAPS}\nwhile True: time.sleep(0.02)", False),
        (SLEEP, False),  # a shell, or a process that waits for its children
    ],
)
def test_a_launcher_that_does_not_wake_up_any_more_is_ended(
    script: str, is_stuck: bool, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "LOOKS", 0.5)
    begin = "import select, signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True)\n"
    command = [sys.executable, "-c", begin + script]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None and child.stdout is not None
        child.stdout.readline()
        watch = launcher.LauncherWatch(process(child.pid), 60.0)
        for _ in range(rounds):
            time.sleep(0.2)
            assert watch.failure(0.2) == ""
        time.sleep(0.2)
        child.stdin.write(b"\n")
        child.stdin.flush()
        time.sleep(0.5)
        assert watch.end_if_stuck() is is_stuck
        if is_stuck:
            assert child.wait(60) == -9
        assert (child.poll() is None) is not is_stuck
        child.kill()
