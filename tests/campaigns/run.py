"""Run a campaign, which is a test of thousands of cases: ``python tests/campaigns/run.py NAME [options]``.

Each campaign is a file beside this one, with ``arguments(parser)`` and ``run(options) -> str``; an underscore at the
end of its name is dropped. ``tests/support`` is put on ``PYTHONPATH``, so that the processes that a campaign starts
import from there too. ``python profiling/run.py NAME --record`` runs the same and records what is printed.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from pathlib import Path

HERE = Path(__file__).parent
SUPPORT = str(HERE.parent / "support")


def main() -> None:
    files = {path.stem.rstrip("_"): path.stem for path in sorted(HERE.glob("*.py")) if path.stem != "run"}
    parser = argparse.ArgumentParser(prog="python tests/campaigns/run.py", description="Tests of thousands of cases.")
    choose = parser.add_subparsers(dest="name", required=True, metavar="NAME")
    sys.path.insert(1, SUPPORT)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (SUPPORT, os.environ.get("PYTHONPATH"))))
    for name in files if {"-h", "--help"} & set(sys.argv[1:2]) else sys.argv[1:2]:
        if name in files:
            module = importlib.import_module(files[name])
            module.arguments(choose.add_parser(name, help=(module.__doc__ or "").splitlines()[0]))
    options = parser.parse_args()
    print(importlib.import_module(files[options.name]).run(options), end="")


if __name__ == "__main__":
    main()
