"""Count the project's packages, files, functions and imports, and time ``import autopar`` beside ``import torch``."""

from __future__ import annotations

import argparse
import ast
import io
import statistics
import subprocess
import sys
from collections import Counter
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
CPU_TIME = "import resource; u = resource.getrusage(resource.RUSAGE_SELF); print(u.ru_utime + u.ru_stime)"
WIDTH = 100


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--times", type=int, default=5, help="processes for each import")


def packages_in_order() -> tuple[str, ...]:
    """Return the order of packages that the structure test holds, read from its text."""
    tree = ast.parse((ROOT / "tests" / "structure" / "test_structure.py").read_text())
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == "PACKAGES":
            return ast.literal_eval(node.value) if node.value else ()
    raise LookupError("the structure test has no PACKAGES")


def package_of(path: Path) -> str:
    """Return the package of a source file: ``autopar/ir/mesh.py`` → ``ir``."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return "passes" if parts[0] == "passes" else parts[1]


def imported_packages(tree: ast.Module) -> list[str]:
    """Return the package of each import of a file, lazy ones and those for types included."""
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            names += [
                f"{node.module}.{alias.name}" if node.module == "autopar" else node.module for alias in node.names
            ]
        elif isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
    return [name.split(".")[1] for name in names if name.startswith("autopar.")]


def import_seconds(module: str, times: int) -> float:
    """Return the CPU seconds of a process that imports ``module`` alone; the fastest of ``times``."""
    command = [sys.executable, "-c", f"import {module}; {CPU_TIME}"]
    return min(float(subprocess.run(command, capture_output=True, text=True, check=True).stdout) for _ in range(times))


def run(options: argparse.Namespace) -> str:
    files, lines, imports = Counter[str](), Counter[str](), Counter[str]()
    lengths: list[tuple[int, str]] = []
    functions: list[tuple[int, str]] = []
    for path in sorted([*(ROOT / "autopar").glob("**/*.py"), *(ROOT / "passes").glob("*.py")]):
        if ROOT / "autopar" / "passes" in path.parents:  # a link
            continue
        text = path.read_text()
        tree, package, name = ast.parse(text), package_of(path), str(path.relative_to(ROOT))
        count = len(text.splitlines())
        files[package] += 1
        lines[package] += count
        imports[package] += sum(other != package for other in imported_packages(tree))
        lengths.append((count, name))
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.end_lineno:
                functions.append((node.end_lineno - node.lineno + 1, f"{name} {node.name}"))
    console = Console(width=WIDTH, record=True, file=io.StringIO())
    table = Table("package", "files", "lines", "imports of packages above")
    for package in packages_in_order():
        if files[package]:
            table.add_row(package, str(files[package]), f"{lines[package]:,}", str(imports[package]))
    table.add_row("all", str(files.total()), f"{lines.total():,}", str(imports.total()))
    console.print(table)
    rows = [
        f"{kind}: median {statistics.median(size for size, _ in sizes):.0f} lines; largest "
        + ", ".join(f"{size} ({name})" for size, name in sorted(sizes, reverse=True)[:3])
        for kind, sizes in (("files", lengths), ("functions", functions))
    ]
    seconds = {module: import_seconds(module, options.times) for module in ("sys", "torch", "autopar", "autopar.api")}
    rows.append(
        "CPU seconds of a process that imports one module: "
        + ", ".join(f"{module} {taken:.2f}" for module, taken in seconds.items())
        + f"; autopar.api beside torch alone {seconds['autopar.api'] - seconds['torch']:+.2f}"
    )
    return console.export_text() + "\n" + "\n".join(rows) + "\n"
