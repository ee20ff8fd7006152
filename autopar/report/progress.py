"""Show what a long operation is doing: a bar with the name of the module or the pass, on a terminal, from its third second on."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from torch import distributed

if TYPE_CHECKING:
    from rich.progress import Progress

AFTER = 2.0  # seconds that an operation takes in silence
What = str | Callable[[], str]

Timer = threading.Timer  # tests put a clock of their own here


class _Bar:
    """The bar of the operation that is running; those inside it say what is shown, the innermost first."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._what: list[What] = []
        self._lock = threading.Lock()
        self._progress: Progress | None = None
        self._ended = False
        self._timer = Timer(AFTER, self._show)
        self._timer.daemon = True
        self._timer.start()

    @contextlib.contextmanager
    def doing(self, what: What) -> Iterator[None]:
        if self._thread != threading.get_ident():  # it shows one operation
            yield
            return
        self._what.append(what)
        try:
            yield
        finally:
            self._what.pop()

    def text(self) -> str:
        """Read by the thread that draws, so that the operation itself pays nothing for it."""
        what = self._what[-1:]
        return "" if not what else what[0] if isinstance(what[0], str) else what[0]()

    def end(self) -> None:
        self._timer.cancel()
        with self._lock:
            self._ended = True
            if self._progress is not None:
                self._progress.stop()

    def _show(self) -> None:
        with self._lock:
            if not self._ended:
                self._progress = _drawn(self.text)
                self._progress.start()


_bar: _Bar | None = None


@contextlib.contextmanager
def doing(what: What) -> Iterator[None]:
    """While this runs, a bar on stderr says ``what``, if the outermost of such operations has taken two seconds.

    It is there on a terminal alone, on the first rank of a job, and leaves no trace. A function is asked for the text whenever the
    bar is drawn, by another thread.
    """
    global _bar
    if _bar is not None:
        with _bar.doing(what):
            yield
    elif not _is_seen():
        yield
    else:
        bar = _bar = _Bar()
        try:
            with bar.doing(what):
                yield
        finally:
            _bar = None
            bar.end()


def _is_seen() -> bool:
    """Whether somebody looks at stderr, and this is the first process of its job."""
    if sys.stderr is None or not sys.stderr.isatty() or os.environ.get("RANK", "0") != "0":
        return False
    return not (distributed.is_available() and distributed.is_initialized()) or distributed.get_rank() == 0


def _drawn(text: Callable[[], str]) -> Progress:
    """A bar without an end, since nobody knows how much is to come."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, ProgressColumn, Task, TimeElapsedColumn
    from rich.text import Text

    class Doing(ProgressColumn):
        def render(self, task: Task) -> Text:
            return Text(text(), no_wrap=True, overflow="ellipsis")

    # what the program prints meanwhile is put above the bar, where it is for the same terminal
    console = Console(file=sys.stderr, force_jupyter=False)
    progress = Progress(TimeElapsedColumn(), BarColumn(20), Doing(), console=console, transient=True, redirect_stdout=sys.stdout.isatty())
    progress.add_task("", total=None)
    return progress
