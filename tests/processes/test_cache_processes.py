"""On processes one rank plans, and the others read; they have the numbers of a single device."""

from __future__ import annotations

from pathlib import Path

import calls_of_cache as calls
import pytest
from processes import ranks

from autopar.cache.folder import Folder


@pytest.mark.parametrize("plan", [calls.PLAN, "search"], ids=["given", "searched"])
def test_one_rank_plans_and_the_others_read(tmp_path: Path, plan: object) -> None:
    first = ranks(4).run(calls.trained, str(tmp_path), plan)
    assert [traces for _, traces in first] == [1, 0, 0, 0]
    assert [note.partition(" ")[0] for note in first[0][0]] == ["miss:", "miss:"]
    assert all(note.startswith("read from rank 0; there: miss: ") for notes, _ in first[1:] for note in notes)
    second = ranks(4).run(calls.trained, str(tmp_path), plan)
    assert [traces for _, traces in second] == [0, 0, 0, 0]
    assert [note.partition(" ")[0] for note in second[0][0]] == ["hit:", "hit:"]
    assert len(Folder(tmp_path).entries()) == 2


def test_one_rank_chooses_open_options(tmp_path: Path) -> None:
    """The others neither capture nor compare."""
    options = {"microbatches": "search", "zero": "search"}
    for word in ("miss:", "hit:"):
        found = ranks(4).run(calls.trained, str(tmp_path), "search", False, False, options)
        assert (found[0][1] > 1) == (word == "miss:") and [traces for _, traces in found[1:]] == [0, 0, 0]
        assert [note.partition(" ")[0] for note in found[0][0]] == [word, word]
        assert all(note.startswith(f"read from rank 0; there: {word} ") for notes, _ in found[1:] for note in notes)


def test_one_rank_chooses_the_mesh(tmp_path: Path) -> None:
    for word in ("miss:", "hit:"):
        found = ranks(4).run(calls.on_best_mesh, str(tmp_path))
        assert (found[0][1] > 1) == (word == "miss:") and [traces for _, traces in found[1:]] == [0, 0, 0]
        assert [note.partition(" ")[0] for note in found[0][0]] == [word, word]
        assert all(note.startswith(f"read from rank 0; there: {word} ") for notes, _ in found[1:] for note in notes)
    found = ranks(4).run(calls.on_best_mesh, str(tmp_path), 2)
    assert [notes for notes, _ in found] == [["off on rank 2, and so on all ranks"]] * 4


def test_hosts_without_a_shared_folder_read_what_rank_0_sends(tmp_path: Path) -> None:
    for expected in (1, 0):
        found = ranks(4).run(calls.trained, str(tmp_path), calls.PLAN, False, True)
        assert [traces for _, traces in found] == [expected, 0, 0, 0]
    assert [len(Folder(tmp_path / str(rank)).entries()) for rank in range(4)] == [2, 0, 0, 0]


def test_values_that_differ_between_ranks_are_captured_by_each(tmp_path: Path) -> None:
    """Each rank reads another number, which does not change the program: it is legal, and stays so."""
    found = ranks(4).run(calls.trained, str(tmp_path), calls.PLAN, True)
    assert [traces for _, traces in found] == [2, 1, 1, 1]
    note = found[0][0][0]
    assert "on rank 1 own is 2, and was another value, so each rank captures by itself" in note, note


def test_what_cannot_be_kept_is_captured_by_each(tmp_path: Path) -> None:
    found = ranks(4).run(calls.unkept, str(tmp_path))
    assert [traces for _, traces in found] == [2, 1, 1, 1]
    assert found[1][0][0] == "not used: this test refuses it; each rank captures by itself"


def test_a_call_and_the_backward_of_one_output(tmp_path: Path) -> None:
    first, second = (ranks(4).run(calls.called, str(tmp_path)) for _ in range(2))
    assert [traces for _, traces in first] == [1, 0, 0, 0]
    assert [traces for _, traces in second] == [0, 0, 0, 0]
    assert second[3][0][0].startswith("read from rank 0; there: hit: ")


def test_an_error_of_the_planning_rank_is_raised_on_all(tmp_path: Path) -> None:
    found = ranks(4).run(calls.failed, str(tmp_path))
    assert all("broken on rank 0" in each for each in found), found
    assert len(set(found)) == 1


def test_another_model_on_one_rank_is_refused(tmp_path: Path) -> None:
    found = ranks(4).run(calls.other_model, str(tmp_path))
    assert all("forward reads values that differ between the ranks" in each and "beta" in each for each in found), found


def test_planning_may_take_longer_than_the_time_out(tmp_path: Path) -> None:
    found = ranks(4).run(calls.slow, str(tmp_path), 5.0)
    assert found[0][0].startswith("miss: ")


def test_without_a_folder_each_rank_captures_as_before() -> None:
    found = ranks(4).run(calls.trained, "", calls.PLAN)
    assert [(notes, traces) for notes, traces in found] == [([], 1)] * 4


def test_off_on_one_rank_is_off_on_all(tmp_path: Path) -> None:
    """Otherwise those with a cache would wait for those without one."""
    assert ranks(4).run(calls.off_on_one, str(tmp_path)) == [["off on rank 2, and so on all ranks"]] * 4
    assert Folder(tmp_path).entries() == []
