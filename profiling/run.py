"""Run a benchmark: ``python profiling/run.py NAME [--tool time|cprofile|lines] [--record]``.

Each benchmark is a file ``bench_NAME.py`` with ``arguments(parser)`` and ``run(options) -> str``; ``--record`` writes
what it prints, with machine, versions and command, to ``results/NAME.txt``. The campaigns in ``tests/campaigns`` run
by their names too, in a process of their own: ``python profiling/run.py fuzz --cases 100 --record``.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from headings import heading
from profilers import calls_of, lines_of

os.environ["AUTOPAR_CACHE"] = ""  # benchmarks measure the work itself; that of the cache has a folder of its own
HERE = Path(__file__).parent
CAMPAIGNS = HERE.parent / "tests" / "campaigns"
RECORD: Any = {"nargs": "?", "const": "", "metavar": "FILE", "help": "write profiling/results/FILE.txt, or NAME.txt"}


def under(tool: str, module: Any, options: argparse.Namespace) -> str:
    if tool == "time" or getattr(module, "PROFILES_ITSELF", False):  # in other processes, or a part of what it does
        return module.run(options)
    if tool == "cprofile":
        printed, _, table = calls_of(lambda: module.run(options))
    else:
        printed, table = lines_of(lambda: module.run(options), module.LINES)
    return printed + table


def campaign(name: str, arguments: list[str]) -> str:
    """What a campaign prints; its progress goes to the terminal."""
    command = [sys.executable, str(CAMPAIGNS / "run.py"), name, *arguments]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


def main() -> None:
    names = sorted(path.stem.removeprefix("bench_") for path in HERE.glob("bench_*.py"))
    parser = argparse.ArgumentParser(prog="python profiling/run.py", description="Benchmarks of autopar.")
    choose = parser.add_subparsers(dest="name", required=True, metavar="NAME")
    for name in names:
        module = importlib.import_module(f"bench_{name}")
        one = choose.add_parser(name, help=(module.__doc__ or "").splitlines()[0])
        one.add_argument("--tool", choices=("time", "cprofile", "lines"), default="time")
        one.add_argument("--record", **RECORD)
        module.arguments(one)
    campaigns = {path.stem.rstrip("_"): path for path in sorted(CAMPAIGNS.glob("*.py")) if path.stem != "run"}
    for name, path in campaigns.items():
        title = (ast.get_docstring(ast.parse(path.read_text())) or "").splitlines()[0]
        one = choose.add_parser(name, help=title, add_help=False)  # the campaign prints its own
        one.add_argument("--record", **RECORD)
        one.set_defaults(tool="time")
    options, more = parser.parse_known_args()
    if options.name in campaigns:
        printed = heading() + campaign(options.name, more)
    elif more:
        parser.error(f"unrecognized arguments: {' '.join(more)}")
    else:
        printed = heading() + under(options.tool, importlib.import_module(f"bench_{options.name}"), options)
    print(printed)
    if options.record is not None:
        kind = "" if options.tool == "time" else f"_{options.tool}"
        (HERE / "results").mkdir(exist_ok=True)
        # no paths of this machine
        (HERE / "results" / f"{options.record or options.name}{kind}.txt").write_text(
            printed.replace(f"{HERE.parent}/", "")
        )


if __name__ == "__main__":
    main()
