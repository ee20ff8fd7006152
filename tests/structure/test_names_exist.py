"""Check that each name that a file imports from autopar exists, in benchmarks and lazy imports too."""

from __future__ import annotations

import ast
import importlib
import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("autopar", "passes", "profiling", "tests")
FILES = sorted(
    path
    for folder in FOLDERS
    for path in (ROOT / folder).glob("**/*.py")
    if ROOT / "autopar/passes" not in path.parents
)


def missing_names(source: str) -> list[str]:
    """Return the names that ``from autopar… import`` asks for and that do not exist."""
    missing = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "autopar":
            if importlib.util.find_spec(node.module) is None:
                missing.append(node.module)
                continue
            module = importlib.import_module(node.module)
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                if not hasattr(module, alias.name) and importlib.util.find_spec(full) is None:
                    missing.append(full)
    return missing


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imported_names_exist(path: Path) -> None:
    assert missing_names(path.read_text()) == []


def test_a_missing_name_is_found() -> None:
    assert missing_names("from autopar.ir import mesh, mush") == ["autopar.ir.mush"]
    assert missing_names("def f():\n    from autopar.nowhere import it") == ["autopar.nowhere"]
