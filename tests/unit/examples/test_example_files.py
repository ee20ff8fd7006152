"""How the runnable examples are written down, and that their comparison fails where numbers differ."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from examples_run import EXAMPLES

from autopar.examples.on_ranks import compare

FOLDER = Path(__file__).parents[3] / "autopar" / "examples"


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_short_and_says_how_it_is_started(name: str) -> None:
    text = (FOLDER / f"{name}.py").read_text()
    assert len(text.splitlines()) < 120
    said = ast.get_docstring(ast.parse(text)) or ""
    assert f"python -m autopar.examples.{name}\n" in said
    assert f"torchrun --nproc-per-node 4 -m autopar.examples.{name}\n" in said


def test_the_page_has_a_row_for_each_runnable_file() -> None:
    runnable = [path.stem for path in FOLDER.glob("*.py") if "__main__" in path.read_text() and path.stem != "on_ranks"]
    assert sorted(runnable) == sorted(EXAMPLES)
    page = (FOLDER / "README.md").read_text()
    rows = [line.split("|")[1].strip() for line in page.splitlines() if line.startswith("| [`")]
    assert rows == [f"[`{name}`]({name}.py)" for name in EXAMPLES]


def test_the_comparison_ends_the_process_where_numbers_differ(capsys: pytest.CaptureFixture[str]) -> None:
    compare("loss", [1.0, 2.0], [1.0, 2.000001])
    with pytest.raises(SystemExit) as ended:
        compare("loss", [1.0, 2.0], [1.0, 2.1], ["first", "second"])
    assert ended.value.code == "loss of second differ: 2.0 on the mesh, 2.1 on one device"
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "  first             1.000000    1.000000",
        "  second            2.000000    2.100000",
    ]
