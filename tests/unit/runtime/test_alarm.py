"""The alarm of the watch: it wakes up for an end and for SIGTERM, and leaves what others have set."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from autopar.runtime.processes.watch.alarm import Alarm
from autopar.runtime.processes.watch.beat import process_of

LONG = 60.0  # seconds that no wait here lasts, if the alarm works; the test's own limit ends it otherwise


@pytest.fixture
def alarm() -> Iterator[Alarm]:
    alarm = Alarm()
    yield alarm
    alarm.stop()


def sleeper() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])


def test_the_end_of_a_process_wakes_up(alarm: Alarm) -> None:
    child = sleeper()
    process = process_of(child.pid)
    alarm.look_at(process)
    alarm.wait(0.0)
    assert process in alarm._processes and alarm._processes[process] is not None, "it runs"
    child.kill()
    alarm.wait(LONG)
    assert alarm._processes[process] is None, "it is not looked at any more"
    child.wait()
    alarm.look_at(process)
    assert alarm._processes[process] is None, "nor once more"


def test_a_process_that_has_ended_before_is_passed_over(alarm: Alarm) -> None:
    child = sleeper()
    process = process_of(child.pid)
    child.kill()
    child.wait()
    alarm.look_at(process)
    assert alarm._processes == {process: None}


def test_sigterm_wakes_up_and_waits_for_the_watch(alarm: Alarm) -> None:
    alarm.start()
    assert not alarm.is_terminated
    signal.raise_signal(signal.SIGTERM)  # this process goes on
    alarm.wait(LONG)
    assert alarm.is_terminated
    alarm.stop()
    assert not alarm.is_terminated, "the end is nobody's any more"
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert signal.set_wakeup_fd(-1) == -1


def test_a_handler_of_the_users_stays(alarm: Alarm) -> None:
    came: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: came.append(number))
    try:
        handler = signal.getsignal(signal.SIGTERM)
        alarm.start()
        assert signal.getsignal(signal.SIGTERM) is handler
        signal.raise_signal(signal.SIGTERM)
        assert came == [signal.SIGTERM]
        assert not alarm.is_terminated
    finally:
        signal.signal(signal.SIGTERM, before)


def test_stop_ends_a_wait(alarm: Alarm) -> None:
    """Nothing is compared: without the stop, the test would last as long as the wait."""
    alarm.stop()
    alarm.wait(LONG)


ENDED = """
import os, signal, time
from autopar.runtime.processes.watch import alarm
{before}
alarm.PATIENCE = 0.2
alarm.Alarm().start()
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(600)
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    "before", ["", "if os.fork(): os._exit(-os.waitstatus_to_exitcode(os.wait()[1]))"], ids=["process", "fork"]
)
def test_sigterm_ends_a_process_whose_watch_hangs(before: str) -> None:
    done = subprocess.run([sys.executable, "-c", ENDED.format(before=before)], timeout=120, check=False)
    assert done.returncode == (-signal.SIGTERM if not before else signal.SIGTERM)


FORKED = """
import os, signal, time
from autopar.runtime.processes.watch.alarm import Alarm
Alarm().start()
pid = os.fork()
if pid == 0:
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    time.sleep(600)
time.sleep(0.5)
os.kill(pid, signal.SIGTERM)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGTERM
"""


@pytest.mark.processes
def test_a_fork_ends_as_any_process() -> None:
    subprocess.run([sys.executable, "-c", FORKED], timeout=120, check=True)
