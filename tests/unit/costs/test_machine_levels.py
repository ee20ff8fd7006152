"""Further levels of links in machine files, and what is wrong with them."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autopar.costs.machine import Level, Link, Machine, machine, machine_from

pytestmark = pytest.mark.fast

TWO = (Level("rack", 32, Link(3e-5, 3e9)), Level("row", 128, Link(5e-5, 1e9)))


def test_levels_are_written_and_read(tmp_path: Path) -> None:
    one = replace(machine("NVIDIA H100 80GB HBM3"), name="mine", aliases=(), levels=TWO)
    one.save(tmp_path / "machine.json")
    assert Machine.load(tmp_path / "machine.json") == one
    assert json.loads((tmp_path / "machine.json").read_text())["machines"][0]["levels"][0] == {
        "name": "rack", "ranks": 32, "latency": 3e-5, "bandwidth": 3e9,
    }  # fmt: skip
    assert one.borders == (("host", 8), ("rack", 32), ("row", 128))
    assert hash(one) != hash(replace(one, levels=TWO[:1]))


def test_a_file_without_levels_stays_as_it_was() -> None:
    assert "levels" not in machine("cpu").description()["machines"][0] and machine("cpu").levels == ()


RACK = {"name": "rack", "ranks": 16, "latency": 1e-5, "bandwidth": 1e9}


@pytest.mark.parametrize(
    ("levels", "text"),
    [
        ([RACK | {"ranks": 12}],
         "machines[0].levels[0].ranks: a rack of 12 ranks does not consist of several hosts of 8; give a multiple of "
         "8"),
        ([RACK | {"ranks": 8}],
         "machines[0].levels[0].ranks: a rack of 8 ranks does not consist of several hosts of 8"),
        ([RACK, RACK | {"name": "row", "ranks": 24}],
         "machines[0].levels[1].ranks: a row of 24 ranks does not consist of several racks of 16; give a multiple of "
         "16"),
        ([RACK, RACK | {"ranks": 32}],
         "machines[0].levels[1].name: 'rack' is no name of a further level; levels have different names of one word, "
         "as rack, and the innermost is host"),
        ([RACK | {"name": "host"}], "machines[0].levels[0].name: 'host' is no name of a further level"),
        ([RACK | {"name": "two words"}], "machines[0].levels[0].name: 'two words' is no name of a further level"),
        ([RACK | {"ranks": 1}], "machines[0].levels[0].ranks: "),
        ([{"name": "rack", "ranks": 16, "latency": 1e-5}], "machines[0].levels[0].bandwidth: missing"),
        ([RACK | {"speed": 1}], "machines[0].levels[0].speed: there is no such field"),
        ({}, "machines[0].levels: "),
    ],
)  # fmt: skip
def test_wrong_levels_are_refused(tmp_path: Path, levels: Any, text: str) -> None:
    description = replace(machine("NVIDIA H100 80GB HBM3"), aliases=()).description()
    description["machines"][0]["levels"] = levels
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(description))
    with pytest.raises(ValueError, match="^" + re.escape(f"{path}: {text}")):
        Machine.load(path)


def test_a_machine_in_code_is_checked_too() -> None:
    with pytest.raises(ValueError, match=re.escape("a rack of 12 ranks does not consist of several hosts of 8")):
        machine_from(replace(machine("generic"), levels=(Level("rack", 12, Link(1e-5, 1e9)),)))
