"""Starting ranks: what they print, how their end is told, and that none is left behind."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from autopar.errors import LaunchError
from autopar.runtime.processes.launch import _failed, launch
from autopar.runtime.processes.watch.beat import DEAD, process_of
from autopar.runtime.processes.watch.verdict import LOST
from autopar.runtime.processes.watch.watch import PREFIX

MIDDLE = "in mm(x, t)   model.py:42  self.down(x)   in module layers.0.mlp"
RANKS = str(Path(__file__).parents[1] / "support" / "failing_ranks.py")
WAIT = (
    "import os, sys, time; rank = int(os.environ['RANK']); print('pid', os.getpid()); time.sleep(0 if rank == 1 "
    "else 60); "
)


def python(program: str, *arguments: str) -> list[str]:
    return [sys.executable, "-c", program, *arguments]


def all_end(printed: str) -> bool:
    """Whether every process that printed its pid is gone."""
    pids = [int(pid) for pid in re.findall(r"pid (\d+)", printed)]
    return bool(pids) and soon(
        lambda: all(process_of(pid).born == "" or process_of(pid).state() == DEAD for pid in pids)
    )


def soon(condition: Callable[[], bool]) -> bool:
    for _ in range(200):
        if condition():
            return True
        time.sleep(0.1)
    return False


def test_lines_of_all_ranks_but_the_first_say_whose_they_are(capfd: pytest.CaptureFixture[str]) -> None:
    program = (
        "import os, sys; print('out', os.environ['RANK'], *sys.argv[1:]); print('err', os.environ['RANK'], "
        "file=sys.stderr)"
    )
    handlers, variables = [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)], dict(os.environ)
    launch(python(program, "a b", "${local_rank}", "$$"), 3)
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == sorted(
        f"{p}out {r} a b ${{local_rank}} $$" for r, p in enumerate(["", "[rank 1] ", "[rank 2] "])
    )
    assert sorted(err.splitlines()) == sorted(f"{p}err {r}" for r, p in enumerate(["", "[rank 1] ", "[rank 2] "])), (
        "and no noise"
    )
    assert [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)] == handlers
    assert dict(os.environ) == variables


def test_ranks_share_the_cores(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    program = "import os; print(os.environ['OMP_NUM_THREADS'], os.environ.get('GIVEN'))"
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(7)), raising=False)
    launch(python(program), 2, environment={"GIVEN": "yes"})
    assert sorted(capfd.readouterr().out.splitlines()) == ["3 yes", "[rank 1] 3 yes"]
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    launch(python(program), 2)
    assert sorted(capfd.readouterr().out.splitlines()) == ["5 None", "[rank 1] 5 None"]


@pytest.mark.parametrize(
    ("end", "status", "message"),
    [
        ("sys.exit(7)", 7, "autopar: rank 1 exited with status 7"),
        ("os.kill(os.getpid(), 11)", 139, "autopar: rank 1 was killed by SIGSEGV"),
        (
            "os.kill(os.getpid(), 9)",
            137,
            "autopar: rank 1 was killed by SIGKILL\n  if memory ran out, the kernel killed it: see dmesg",
        ),
        ("raise ValueError('no')", 1, "autopar: rank 1 exited with status 1"),
    ],
    ids=["status", "crash", "kill", "exception"],
)
def test_a_rank_that_fails_ends_all(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, end: str, status: int, message: str
) -> None:
    with pytest.raises(LaunchError) as error:
        launch(python(WAIT + end), 3)
    assert (str(error.value), error.value.rank, error.value.status) == (message, 1, status)
    out, err = capfd.readouterr()
    assert all_end(out)
    lines = err.splitlines()
    assert all(line.startswith("[rank 1] ") for line in lines)
    assert bool(lines) == ("raise" in end), "nothing but the traceback of the rank"
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_a_port_in_use_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(LaunchError, match=f"port {port} is in use(.|\n)*give another port"):
            launch(python("print('started')"), 2, endpoint=f"localhost:{port}")
    assert capfd.readouterr().out == ""
    launch(python("print('started')"), 1, endpoint=f"localhost:{port}")
    assert capfd.readouterr().out == "started\n"


@pytest.mark.parametrize("endpoint", ["localhost", "localhost:port", ":29500", "localhost:70000", "192.0.2.1:29500"])
def test_an_endpoint_that_is_none(endpoint: str) -> None:
    with pytest.raises(LaunchError, match=r"is not host:port|nothing can listen"):
        launch(python("pass"), 1, endpoint=endpoint)


def test_no_processes() -> None:
    with pytest.raises(LaunchError, match="give 1 or more"):
        launch(python("pass"), 0)


def test_a_failed_step_is_told_last_and_once(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(LaunchError) as error:
        launch([sys.executable, RANKS, "exception"], 2)
    assert str(error.value) == f"autopar: rank 1 failed {MIDDLE}: ValueError: a bad value"
    assert error.value.rank == 1
    out, err = capfd.readouterr()
    assert all_end(out)
    assert "autopar: " not in out + err
    assert [line for line in err.splitlines() if "Traceback" in line] == ["[rank 1] Traceback (most recent call last):"]


def test_a_killed_rank_is_told_with_its_last_place(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(LaunchError) as error:
        launch([sys.executable, RANKS, "kill"], 2)
    assert str(error.value).startswith(f"autopar: rank 1 was killed by SIGKILL; it was last seen {MIDDLE}")
    assert all_end(capfd.readouterr().out)


@pytest.mark.parametrize("first", [0, 1])
def test_the_launcher_knows_how_a_lost_rank_went(first: int) -> None:
    """Whoever is noticed first: the rank that was killed, or one that left because of it."""
    store = dist.HashStore()
    dist.PrefixStore(PREFIX, store).set(
        "done", json.dumps({"text": f"autopar: rank 1 {LOST}; it was last seen {MIDDLE}", "ranks": [1]})
    )
    failures = {rank: ProcessFailure(rank, 100 + rank, exitcode, "/none") for rank, exitcode in ((0, 1), (1, -9))}
    for rank, failure in failures.items():
        failure.timestamp = int(rank != first)
    told = _failed(ChildFailedError("train.py", failures), dist.PrefixStore(PREFIX, store))
    assert (str(told), told.rank, told.status) == (
        f"autopar: rank 1 was killed by SIGKILL; it was last seen {MIDDLE}",
        1,
        137,
    )


@pytest.fixture
def launcher() -> Callable[..., subprocess.Popen[str]]:
    """A launcher in a process of its own, whose ranks have begun."""

    def start(*entrypoint: str) -> subprocess.Popen[str]:
        program = (
            f"from autopar.runtime.processes import launch; launch.PATIENCE = 1; launch.launch({list(entrypoint)!r}, 2)"
        )
        return subprocess.Popen(
            [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    return start


@pytest.mark.parametrize("number", [
    pytest.param(signal.SIGTERM, id="SIGTERM"),
    pytest.param(signal.SIGINT, id="SIGINT", marks=pytest.mark.sweep("SIGTERM goes the same way")),
])  # fmt: skip
def test_a_signal_to_the_launcher_ends_the_ranks(
    launcher: Callable[..., subprocess.Popen[str]], number: signal.Signals
) -> None:
    ignore = (
        "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.signal(signal.SIGINT, signal.SIG_IGN); "
    )
    process = launcher(*python(ignore + "import os, time; print('pid', os.getpid()); time.sleep(60)"))
    assert process.stdout is not None
    printed = process.stdout.readline() + process.stdout.readline()
    process.send_signal(number)
    out, err = process.communicate(timeout=45)  # torch 2.11 gives ranks 30 s
    assert all_end(printed + out)
    assert err.rstrip().endswith(f"LaunchError: autopar: {number.name} came; all ranks have been ended")


def test_ranks_end_when_the_launcher_is_killed(launcher: Callable[..., subprocess.Popen[str]]) -> None:
    process = launcher(sys.executable, RANKS, "stuck in an op")
    assert process.stdout is not None
    printed = process.stdout.readline() + process.stdout.readline()
    process.kill()
    _, err = process.communicate(timeout=60)  # ends with the last process that could write there
    assert all_end(printed)
    assert err.count("autopar: ") == 1
    assert "autopar: the launcher of this job was lost, and the job's store with it; rank 0 was in" in err


def test_the_launcher_of_torch_is_imported_when_it_is_needed() -> None:
    program = (
        "import sys, autopar.runtime.processes.launch; print([m for m in sys.modules if "
        "m.startswith(('torch.distributed.elastic', 'torch.distributed.launcher'))])"
    )
    done = subprocess.run(python(program), capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
