"""Show the progress of a long operation on a terminal, from the second second on.

It is a bar with what is done, and with the current module where there is one.
"""

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

AFTER = 1.0  # seconds before the bar is shown
What = str | Callable[[], str]

Timer = threading.Timer  # tests replace it by a clock of their own


class _Bar:
    """The bar of the running operation. It shows the text of the innermost ``doing`` block."""

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
        if self._thread != threading.get_ident():  # the bar shows the operation of one thread
            yield
            return
        self._what.append(what)
        try:
            yield
        finally:
            self._what.pop()

    def text(self) -> str:
        """Return the text. The drawing thread calls this, so that the operation itself pays nothing for it."""
        innermost = self._what[-1:]
        return "" if not innermost else innermost[0] if isinstance(innermost[0], str) else innermost[0]()

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
    """Show ``what`` in a bar on stderr while this block runs, once the outermost such block has taken a second.

    The bar appears only on a terminal, on the first rank of a job, and is erased at the end. If ``what`` is a function,
    another thread calls it whenever the bar is drawn.
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
    """Return whether stderr is a terminal, and this is the first process of its job."""
    if sys.stderr is None or not sys.stderr.isatty() or os.environ.get("RANK", "0") != "0":
        return False
    return not (distributed.is_available() and distributed.is_initialized()) or distributed.get_rank() == 0


def _drawn(text: Callable[[], str]) -> Progress:
    """Return a bar without an end, since the total is unknown."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, ProgressColumn, Task, TimeElapsedColumn
    from rich.text import Text

    class Doing(ProgressColumn):
        def render(self, task: Task) -> Text:
            return Text(text(), no_wrap=True, overflow="ellipsis")

    # what the program prints meanwhile is put above the bar, if both are on the same terminal
    console = Console(file=sys.stderr, force_jupyter=False)
    progress = Progress(
        TimeElapsedColumn(),
        BarColumn(20),
        Doing(),
        console=console,
        transient=True,
        redirect_stdout=sys.stdout.isatty(),
    )
    progress.add_task("", total=None)
    return progress
