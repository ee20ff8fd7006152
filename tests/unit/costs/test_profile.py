"""Profiles: what is saved is loaded, other programs are refused, and so are files that are none."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from profiled import TEXT, profile, program

from autopar.costs.machine import machine
from autopar.costs.profile import Profile
from autopar.costs.profile_row import ProfileRow
from autopar.costs.profile_table import DEAREST
from autopar.errors import ProfileError

FOUND = profile()
REMEDY = "make one of this step with autopar profile step --save FILE, or step.measure().save(FILE)"


# -- times of a program ------------------------------------------------------------------------------------------------


def test_each_op_and_transfer_has_the_time_of_its_call() -> None:
    found, one = FOUND.durations(program()), program()
    assert set(found) == {node.name for node in one.nodes if node.op == "call_function"}
    assert found["mm_1_tp"] == pytest.approx(254e-6) and found["relu"] == pytest.approx(12e-6)
    assert all(FOUND.seconds(one.node(name)) == seconds for name, seconds in found.items())


def test_sums_by_phase() -> None:
    assert FOUND.by_phase == {"forward": pytest.approx(sum(FOUND.durations(program()).values()))}
    assert FOUND.total == sum(FOUND.by_phase.values())


def test_startups_by_transfer_and_axes() -> None:
    assert FOUND.startup("all_reduce", "tp") == 150e-6
    with pytest.raises(ProfileError) as raised:
        FOUND.startup("all_gather", "dp")
    assert str(raised.value) == (
        "the profile has no all_gather over dp; there are all_reduce over dp, all_reduce over tp"
    )


def differing(text: str) -> str:
    with pytest.raises(ProfileError) as raised:
        FOUND.durations(program(text))
    return str(raised.value)


def test_a_program_on_another_mesh_is_refused() -> None:
    assert differing(TEXT.replace("tp=2", "tp=4")) == (
        f"the profile was made of another program: that is on the mesh (dp=2 tp=2), and this one on (dp=2 tp=4); "
        f"{REMEDY}"
    )


def test_a_program_of_other_sizes_is_refused_with_its_calls() -> None:
    message = differing(TEXT.replace("[8/dp", "[16/dp"))
    assert message.startswith("the profile was made of another program: 4 of 7 distinct calls have no time; " + REMEDY)
    assert message.splitlines()[1:] == [
        "    mm(f32[8 64], f32[64 64] by t of f32[64 64]) -> f32[8 64]",
        "    all_reduce(f32[8 64], tp) -> f32[8 64]",
        "    relu(f32[8 64]) -> f32[8 64]",
        "    and 1 more",
    ]


def test_a_program_of_equal_calls_is_refused_unless_the_user_takes_them() -> None:
    renamed = TEXT.replace("relu", "other").replace("other(", "relu(")
    assert differing(renamed) == (
        f"the profile was made of another program: it has the times of all calls, but the order or the names of values "
        f"differ; {REMEDY}; or take the times of equal calls, with strict=False"
    )
    found = FOUND.durations(program(renamed), strict=False)
    assert found["other"] == FOUND.durations(program())["relu"]


def test_a_call_without_a_time_is_refused_whatever_the_user_takes() -> None:
    other = TEXT.replace("relu(mm_1_tp)", "tanh(mm_1_tp)")
    with pytest.raises(ProfileError) as raised:
        FOUND.durations(program(other), strict=False)
    assert str(raised.value) == (f"the profile has no time of a call; {REMEDY}\n    tanh(f32[4 64]) -> f32[4 64]")


def test_a_program_that_is_not_explicit_is_refused() -> None:
    traced = program("program traced\n  x : f32[8 64] = input\n  relu : f32[8 64] = relu(x)\n  return relu\n")
    with pytest.raises(ValueError, match=r"of explicit programs, and this one is traced; pass the explicit program"):
        FOUND.durations(traced)


# -- files -------------------------------------------------------------------------------------------------------------


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "step.json"
    FOUND.save(path)
    loaded = Profile.load(path)
    assert loaded == FOUND and loaded.source == str(path)
    assert loaded.durations(program()) == FOUND.durations(program())
    lines = path.read_text().splitlines()
    assert sum(line.startswith('  {"call": ') for line in lines) == len(FOUND.rows), "each call has a line"


def test_a_loaded_profile_names_its_file_in_errors(tmp_path: Path) -> None:
    FOUND.save(tmp_path / "step.json")
    with pytest.raises(ProfileError, match=r"^the profile .*step\.json was made of another program"):
        Profile.load(tmp_path / "step.json").durations(program(TEXT.replace("tp=2", "tp=4")))


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"there is no folder .*/no for the profile .*; make it first"):
        FOUND.save(tmp_path / "no" / "step.json")
    with pytest.raises(FileNotFoundError, match=r"there is no profile .*; autopar profile step --save FILE writes one"):
        Profile.load(tmp_path / "step.json")


Change = Callable[[dict[str, Any]], Any]
FOREIGN = "this is no profile of a step; autopar profile step --save FILE writes one"
DAMAGED: list[tuple[str, Change, str]] = [
    ("version", lambda c: c.update(version=2), "version: 2 is not known; this autopar reads version 1"),
    ("foreign", lambda c: c.pop("rows"), FOREIGN),
    ("no version", lambda c: c.pop("version"), FOREIGN),
    ("rows", lambda c: c.update(rows={}), "rows: a list is wanted, not {}"),
    ("mesh", lambda c: c.pop("mesh"), "mesh: missing"),
    ("more", lambda c: c.update(speed=1), "speed: there is no such field; there are version, device, backend"),
    ("seconds", lambda c: c["rows"][2].update(seconds=-1.0), "rows[2].seconds: a number ≥ 0 is wanted, not -1.0"),
    ("text", lambda c: c["rows"][0].update(seconds="fast"), "rows[0].seconds: a number ≥ 0 is wanted, not 'fast'"),
    ("long", lambda c: c["rows"][0].update(seconds=1e9), "rows[0].seconds: 1000000000.0 is out of the range of "
                                                         "durations, 0 to 1e+06"),
    ("kind", lambda c: c["rows"][0].update(kind="copy"), "rows[0].kind: 'copy' is none of op, local, exchange"),
    ("phase", lambda c: c["rows"][0].update(times={"sideways": 1}), "rows[0].times: 'sideways' is none of finish, "
                                                                    "forward, backward, weight_gradients, update"),
    ("times", lambda c: c["rows"][0].update(times={"forward": 1.5}), "rows[0].times.forward: an integer ≥ 0 is wanted"),
    ("startup", lambda c: c["rows"][4].update(startup=1.0), "rows[4].startup: 1 is more than the whole call takes"),
    ("twice", lambda c: c["rows"].append(c["rows"][0]), "rows: t(f32[64 64]) -> f32[64 64] is given twice"),
    ("machine", lambda c: c["machine"]["machines"][0].pop("inside"), "machine: machines[0].inside: missing"),
    ("machines", lambda c: c["machine"]["machines"].clear(), "machine: one machine is wanted, not 0"),
    ("digest", lambda c: c["programs"].update(micro=3), "programs.micro: a string is wanted, not 3"),
    ("factor", lambda c: c.update(interference=-0.1), "interference: a number ≥ 0 is wanted, not -0.1"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "said"), [row[1:] for row in DAMAGED], ids=[row[0] for row in DAMAGED])
def test_a_damaged_file_is_refused(change: Change, said: str, tmp_path: Path) -> None:
    path = tmp_path / "step.json"
    FOUND.save(path)
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(ProfileError) as raised:
        Profile.load(path)
    assert str(raised.value).startswith(f"{path}: {said}")


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "\x00"], ids=["empty", "open", "deep", "binary"])
def test_a_file_that_is_no_json_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "step.json"
    path.write_text(text)
    with pytest.raises(ProfileError, match="the file is not JSON"):
        Profile.load(path)


def test_a_machine_file_is_no_profile(tmp_path: Path) -> None:
    machine("cpu").save(tmp_path / "machine.json")
    with pytest.raises(ProfileError, match="this is no profile of a step"):
        Profile.load(tmp_path / "machine.json")


# -- the table ---------------------------------------------------------------------------------------------------------


def test_the_table_has_the_dearest_calls_first() -> None:
    lines = str(FOUND).splitlines()
    rows = [line for line in lines if "->" in line]
    assert "all_reduce(f32[1 64], dp) -> f32[1 64]" in rows[0]
    assert " ".join(rows[0].split()[-5:-1]) == "1 257.0 5.0 51.40"
    assert lines[-3].startswith("one after the other: 0.")
    assert lines[-2] == "measured on cpu, 4 gloo processes of 1 thread, torch 2.13.0"
    assert lines[-1] == "a product of matrices takes 1.25 times as long beside an all-reduce"


def test_the_table_says_what_was_not_measured() -> None:
    rows = {call: replace(row, why="it was not there") if row.group else row for call, row in FOUND.rows.items()}
    text = str(profile(rows=rows, interference=0.0))
    assert text.endswith("2 distinct calls have their prices: it was not there\n")
    assert [line.split()[-4] for line in text.splitlines() if "all_reduce" in line] == ["–", "–"], "no time of its own"


def test_many_calls_are_one_row_beside_the_dearest() -> None:
    rows = {f"op_{k}": ProfileRow(f"op_{k}", "op", 1e-6 * (100 - k), 1e-6, {"update": 2}) for k in range(60)}
    text = str(profile(rows=rows))
    assert f"{60 - DEAREST} other distinct calls" in text
    assert f"op_{DEAREST - 1} " in text and f"op_{DEAREST} " not in text
