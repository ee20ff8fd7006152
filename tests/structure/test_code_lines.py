"""Hold the code lines of each package within a budget, so that growth is a decision that a diff shows.

Code lines are those of imports, signatures and statements, as ``ruff format`` lays them out; docstrings, comments and
blank lines do not count. A package that grows beyond its budget needs another number here, and a reason; one that has
become much smaller gives its lines back.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILES = [path for path in sorted((ROOT / "autopar").glob("**/*.py")) if "passes" not in path.relative_to(ROOT).parts]
FILES += sorted((ROOT / "passes").glob("*.py"))
# package → the most code lines that it may have; ``autopar`` has the modules that are in no package
MOST_CODE_LINES = {
    "step": 9_050, "runtime": 9_350, "capture": 8_300, "search": 6_850, "ir": 4_350, "cli": 3_850, "model": 3_550,
    "scheduling": 3_600, "pipeline": 3_350, "plan": 2_450, "costs": 2_050, "cache": 1_900, "rules": 1_850,
    "transitions": 1_700, "checkpoint": 1_650, "passes": 1_450, "verify": 1_300, "optimizers": 1_100, "report": 800,
    "autopar": 950, "torch_private": 850, "examples": 800, "page": 550, "data": 550, "elastic": 500,
    "timetable": 300,
}  # fmt: skip
STEP_AND_BELOW = ("step", "runtime", "model", "pipeline")
MOST_OF_STEP_AND_BELOW = 25_150
SLACK = 0.1  # a budget that is larger than the package by more is too large

NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER,
}  # fmt: skip


def code_lines(source: str) -> int:
    """Return the number of lines that have code."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and ast.get_docstring(
            node, clean=False
        ):
            first = node.body[0]
            lines.difference_update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return len(lines)


def lines_of_packages() -> Counter[str]:
    """Return the code lines of each package."""
    found: Counter[str] = Counter()
    for path in FILES:
        first, *rest = path.relative_to(ROOT).parts
        package = rest[0] if first == "autopar" and len(rest) > 1 else first
        found[package] += code_lines(path.read_text())
    return found


def test_no_package_has_more_code_lines_than_its_budget() -> None:
    found = lines_of_packages()
    too_long = {name: lines for name, lines in found.items() if lines > MOST_CODE_LINES[name]}
    assert not too_long, "shorten these packages, or raise their budgets and say why"
    assert sum(found[name] for name in STEP_AND_BELOW) <= MOST_OF_STEP_AND_BELOW


def test_no_budget_is_much_larger_than_its_package() -> None:
    found = lines_of_packages()
    assert not {name: most for name, most in MOST_CODE_LINES.items() if most > max(found[name] * (1 + SLACK), 600)}


def test_code_lines_are_those_with_code() -> None:
    value = '"""Say."""\n\n# why\nx = (\n    1,  # one\n)\n\n\n'
    function = 'def f():\n    """Say\n    more."""\n    return """a\n\nb"""\n'
    assert (code_lines(value), code_lines(value + function)) == (3, 3 + 1 + 3)
