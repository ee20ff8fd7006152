"""Hold what benchmarks share: the profilers' tables, and the counts of functions called.

The profilers are cProfile and line_profiler on given functions.
"""

from __future__ import annotations

import argparse
import cProfile
import io
import pstats
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any


def positive(text: str) -> int:
    """A number of layers, of times: for ``argparse``."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not at least 1")
    return number


def calls_of(function: Callable[[], Any], rows: int = 25) -> tuple[Any, pstats.Stats, str]:
    """What ``function`` returns, the statistics of its calls, and their table: ncalls, tottime, cumtime."""
    profile = cProfile.Profile()
    result = profile.runcall(function)
    out = io.StringIO()
    stats = pstats.Stats(profile, stream=out).strip_dirs().sort_stats("tottime")
    stats.print_stats(rows)
    return result, stats, out.getvalue()


def lines_of(function: Callable[[], Any], inside: Iterable[Callable[..., Any]]) -> tuple[Any, str]:
    """What ``function`` returns, and the times of the lines of the functions ``inside`` it."""
    try:
        from line_profiler import LineProfiler
    except ImportError:
        raise SystemExit("--tool lines needs line_profiler: pip install -e '.[profile]'") from None
    lines = LineProfiler()
    for one in inside:
        lines.add_function(one)
    result = lines.runcall(function)
    out = io.StringIO()
    lines.print_stats(out, stripzeros=True)
    return result, out.getvalue().replace(f"{Path(__file__).parent.parent}/", "")
