"""Check how the tests are kept: in known folders, with names of their own, and without imports of one from another."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

from source_trees import imports

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
FILES = sorted(TESTS.glob("**/*.py"))
FOLDERS = ("golden", "models", "processes", "simulated", "structure")  # beside these, unit/PACKAGE


def imported_by(path: Path) -> set[str]:
    """The first part of the name of each module that a file imports, inside functions too."""
    names: set[str] = set()
    for node in imports(path):
        if isinstance(node, ast.Import):
            names.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.split(".")[0])
    return names


def test_every_test_file_stands_in_a_known_folder() -> None:
    packages = {path.name for path in (ROOT / "autopar").iterdir() if (path / "__init__.py").is_file()}
    known = {TESTS / folder for folder in FOLDERS} | {TESTS / "unit" / package for package in packages}
    strays = [
        str(path.relative_to(TESTS)) for path in FILES if path.name.startswith("test_") and path.parent not in known
    ]
    assert not strays


def test_names_of_test_files_and_support_modules_are_unique() -> None:
    """pytest imports them all by their names alone."""
    names = Counter(path.stem for path in FILES if "campaigns" not in path.parts and path.stem != "conftest")
    assert [name for name, count in names.items() if count > 1] == []


def test_no_module_imports_a_test_module() -> None:
    """What two of them need is in ``tests/support``."""
    files = [*FILES, *(ROOT / "profiling").glob("*.py")]
    found = {
        str(path.relative_to(ROOT)): name for path in files for name in imported_by(path) if name.startswith("test_")
    }
    assert not found


def test_tests_and_profiling_do_not_import_each_other() -> None:
    """What both need is in ``autopar.examples``."""
    benchmarks = sorted((ROOT / "profiling").glob("*.py"))
    of_tests = {path.stem for path in FILES} - {"run"}
    of_profiling = {path.stem for path in benchmarks} - {"run"}
    assert not {(path.name, name) for path in benchmarks for name in imported_by(path) & of_tests}
    assert not {(path.name, name) for path in FILES for name in imported_by(path) & of_profiling}


def test_a_support_module_has_no_tests() -> None:
    for path in (TESTS / "support").glob("*.py"):
        functions = [node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]
        assert not [name for name in functions if name.startswith("test_")], path


def test_a_marker_names_no_tier_below_its_folders() -> None:
    """pytest does not look into the folders above the selected tiers (``conftest.py``)."""
    order = ("fast", "simulated", "long", "processes", "models")
    for path in FILES:
        tier = path.relative_to(TESTS).parts[0]
        if tier in order:
            below = "|".join(order[: order.index(tier)]) or "(?!)"
            assert not re.search(rf"\bmark\.({below})\b", path.read_text()), path


def test_each_sweep_gives_its_reason() -> None:
    """A case that does not run by default says which other test shows the same."""
    for path in FILES:
        assert not re.search(r"mark\.sweep(?!\(\s*\"[^\"]{20,})", path.read_text()), path
