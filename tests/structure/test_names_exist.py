"""Check that each name that a file imports from autopar exists, in benchmarks and lazy imports too."""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
from pathlib import Path

import pytest
from source_trees import imports

ROOT = Path(__file__).parents[2]
FOLDERS = ("autopar", "passes", "profiling", "tests")
FILES = sorted(
    path
    for folder in FOLDERS
    for path in (ROOT / folder).glob("**/*.py")
    if ROOT / "autopar/passes" not in path.parents
)


@functools.cache
def exists(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def missing_names(path: Path) -> list[str]:
    """Return the names that ``from autopar… import`` asks for and that do not exist."""
    missing = []
    for node in imports(path):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "autopar":
            if not exists(node.module):
                missing.append(node.module)
                continue
            module = importlib.import_module(node.module)
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                if not hasattr(module, alias.name) and not exists(full):
                    missing.append(full)
    return missing


@pytest.mark.simulated
@pytest.mark.parametrize("folder", FOLDERS)
def test_imported_names_exist(folder: str) -> None:
    missing = {path: missing_names(path) for path in FILES if path.relative_to(ROOT).parts[0] == folder}
    assert not {str(path): names for path, names in missing.items() if names}


def test_a_missing_name_is_found(tmp_path: Path) -> None:
    path = tmp_path / "some.py"
    path.write_text("from autopar.ir import mesh, mush\ndef f():\n    from autopar.nowhere import it")
    assert missing_names(path) == ["autopar.ir.mush", "autopar.nowhere"]
