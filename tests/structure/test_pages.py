"""Run the code of every page, compare what it prints with the page, and check that links lead somewhere.

``pytest --update-goldens`` rewrites what the pages print.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import autopar
from autopar.optimizers.definition import DEFINITIONS
from autopar.pipeline import POLICIES
from autopar.rules import RULES

ROOT = Path(autopar.__file__).parents[1]
PAGES = [name for name in subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, check=True, capture_output=True,
                                         text=True).stdout.split()
         if Path(name).name in ("README.md", "CONTRIBUTING.md") and not name.startswith("autopar/passes")]  # fmt: skip
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")


@dataclass(frozen=True)
class Code:
    """A block of Python, the line of the page on which it begins, and where the page has what it prints: (begin, end),
    if it does."""

    text: str
    line: int
    printed: tuple[int, int] | None


def blocks(page: str) -> Iterator[Code]:
    """The blocks of Python in a page. The plain block that follows one with nothing between is what it prints."""
    found = list(BLOCK.finditer(page))
    for block, follower in zip(found, [*found[1:], None], strict=True):
        if block[1] == "python":
            shown = follower is not None and follower[1] == "" and not page[block.end() : follower.start()].strip()
            yield Code(
                block[2],
                page.count("\n", 0, block.start(2)),
                follower.span(2) if follower is not None and shown else None,
            )


def lines(text: str) -> list[str]:
    """The lines of a text, without the spaces at their ends, where rich pads tables."""
    return [line.rstrip() for line in text.strip("\n").splitlines()]


def run(
    page: str, name: str, capsys: pytest.CaptureFixture[str], *, update: bool = False
) -> tuple[dict[str, Any], str]:
    """Run all blocks of a page in one scope. Return the scope, and the page, with ``update`` as the code prints it
    now."""
    scope: dict[str, Any] = {}
    renewed, end = [], 0
    for code in blocks(page):
        exec(compile("\n" * code.line + code.text, name, "exec"), scope)
        printed = lines(capsys.readouterr().out)
        if code.printed is not None:
            begin, after = code.printed
            assert update or printed == lines(page[begin:after]), f"{name}:{code.line}"
            renewed += [page[end:begin], *(f"{line}\n" for line in printed)]
            end = after
    return scope, "".join([*renewed, page[end:]])


@pytest.fixture(autouse=True)
def tables_restored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Pages register rules, optimizers and policies, and write files."""
    monkeypatch.chdir(tmp_path)
    tables: tuple[Any, ...] = (RULES, DEFINITIONS, POLICIES)
    saved = [dict(table) for table in tables]
    yield
    for table, before in zip(tables, saved, strict=True):
        table.clear()
        table.update(before)


@pytest.mark.parametrize("name", PAGES)
def test_the_code_of_a_page_prints_what_the_page_says(
    name: str, capsys: pytest.CaptureFixture[str], update_goldens: bool
) -> None:
    scope, renewed = run((ROOT / name).read_text(), name, capsys, update=update_goldens)
    if update_goldens:
        (ROOT / name).write_text(renewed)
    if name == "README.md":
        assert all(p.grad is not None and p.grad.shape == p.shape for p in scope["model"].parameters())


@pytest.mark.parametrize("name", PAGES)
def test_the_links_of_a_page_lead_somewhere(name: str) -> None:
    text = BLOCK.sub("", (ROOT / name).read_text())
    for link in LINK.findall(text):
        path = link.partition("#")[0]
        if path and "://" not in path:
            assert (ROOT / name).parent.joinpath(path).exists(), f"{name} links to {link}"


@pytest.mark.parametrize("name", [*PAGES, "CHANGELOG.md"])
def test_no_page_has_both_sides_of_a_merge(name: str) -> None:
    assert not re.search(r"^(<{7}|>{7}) ", (ROOT / name).read_text(), re.MULTILINE)


def test_a_page_that_is_wrong_fails(capsys: pytest.CaptureFixture[str]) -> None:
    page = "```python\nprint(1 + 1)\n```\n\n```\n3\n```\n"
    with pytest.raises(AssertionError, match=r"wrong\.md:1"):
        run(page, "wrong.md", capsys)


def test_every_package_has_a_page() -> None:
    packages = [
        path.name for path in (ROOT / "autopar").iterdir() if (path / "__init__.py").exists() and path.name != "passes"
    ]
    assert {"passes/README.md", *(f"autopar/{package}/README.md" for package in packages)} <= set(PAGES)
