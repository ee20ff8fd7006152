"""Benchmarks: ``python profiling/run.py NAME [--tool time|cprofile|lines] [--record]``.

Each benchmark is a file ``bench_NAME.py`` with ``arguments(parser)`` and ``run(options) -> str``; ``--record`` writes
what it prints, with machine, versions and command, to ``results/NAME.txt``.
"""

from __future__ import annotations

import argparse
import cProfile
import importlib
import io
import os
import platform
import pstats
import shlex
import sys
from pathlib import Path

import torch

HERE = Path(__file__).parent


def heading() -> str:
    """What is needed to repeat a measurement."""
    import autopar

    return (
        f"python {' '.join(map(shlex.quote, ['profiling/run.py', *sys.argv[1:]]))}\n"
        f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}; Python {platform.python_version()}, "
        f"torch {torch.__version__}, autopar {autopar.__version__}\n\n"
    )


def under(tool: str, module: object, options: argparse.Namespace) -> str:
    run = module.run  # type: ignore[attr-defined]
    if tool == "time" or getattr(module, "PROFILES_ITSELF", False):  # its work is in other processes
        return run(options)
    if tool == "cprofile":
        profile = cProfile.Profile()
        printed = profile.runcall(run, options)
        out = io.StringIO()
        pstats.Stats(profile, stream=out).strip_dirs().sort_stats("tottime").print_stats(25)
        return printed + out.getvalue()
    try:
        from line_profiler import LineProfiler
    except ImportError:
        raise SystemExit("--tool lines needs line_profiler: pip install -e '.[profile]'") from None
    lines = LineProfiler()
    for function in module.LINES:  # type: ignore[attr-defined]
        lines.add_function(function)
    printed = lines.runcall(run, options)
    out = io.StringIO()
    lines.print_stats(out, stripzeros=True)
    return printed + out.getvalue()


def main() -> None:
    names = sorted(path.stem.removeprefix("bench_") for path in HERE.glob("bench_*.py"))
    parser = argparse.ArgumentParser(prog="python profiling/run.py", description="Benchmarks of autopar.")
    choose = parser.add_subparsers(dest="name", required=True, metavar="NAME")
    for name in names:
        module = importlib.import_module(f"bench_{name}")
        one = choose.add_parser(name, help=(module.__doc__ or "").splitlines()[0])
        one.add_argument("--tool", choices=("time", "cprofile", "lines"), default="time")
        one.add_argument("--record", action="store_true", help="write the result to profiling/results/")
        module.arguments(one)
    options = parser.parse_args()
    printed = heading() + under(options.tool, importlib.import_module(f"bench_{options.name}"), options)
    print(printed)
    if options.record:
        kind = "" if options.tool == "time" else f"_{options.tool}"
        (HERE / "results").mkdir(exist_ok=True)
        (HERE / "results" / f"{options.name}{kind}.txt").write_text(printed)


if __name__ == "__main__":
    main()
