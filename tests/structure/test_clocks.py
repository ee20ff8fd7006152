"""Nothing reads the wall clock: hosts of a job have different ones. What is compared is measured on one host."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import autopar

ROOT = Path(autopar.__file__).parent
FORBIDDEN = {
    ("time", "time"), ("time", "time_ns"), ("datetime", "now"), ("datetime", "utcnow"), ("datetime", "today"),
    ("date", "today"),
}  # fmt: skip
ALLOWED = {  # file → why it may
    "cache/folder.py": "the oldest entries are removed first",
    "cli/cache.py": "a person reads how old an entry is",
}
TIMES_OF_FILES = {"st_mtime", "st_ctime", "st_atime", "getmtime", "getctime"}


def reads(tree: ast.AST) -> Iterator[int]:
    """The lines that read the wall clock, or the time of a file, which the host that wrote it has set."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            owner = node.value.id if isinstance(node.value, ast.Name) else getattr(node.value, "attr", "")
            if (owner, node.attr) in FORBIDDEN or node.attr in TIMES_OF_FILES:
                yield node.lineno
        elif isinstance(node, ast.ImportFrom) and node.module == "time":
            yield from (node.lineno for name in node.names if ("time", name.name) in FORBIDDEN)


def test_no_module_reads_the_wall_clock() -> None:
    files = [*ROOT.rglob("*.py"), *(ROOT.parent / "passes").glob("*.py")]
    files = [path for path in files if str(path.relative_to(ROOT.parent)).removeprefix("autopar/") not in ALLOWED]
    found = [f"{path.name}:{line}" for path in files for line in reads(ast.parse(path.read_text()))]
    assert found == []


def test_a_read_of_the_clock_is_found() -> None:
    text = "a = time.time()\nb = datetime.datetime.now()\nc = path.stat().st_mtime\nd = time.monotonic()\n"
    assert sorted(reads(ast.parse(text))) == [1, 2, 3]
    assert [*reads(ast.parse("from time import time"))] == [1]
