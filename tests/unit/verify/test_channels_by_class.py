"""Channels that are checked by class of ranks accept what the check of all ranks accepts, and nothing else."""

from __future__ import annotations

import random
from typing import Any

import pytest
from channel_programs import EXCHANGES, GOLDEN
from hypothesis import given, settings
from hypothesis import strategies as st
from payload_mutations import MUTATIONS, communicating
from random_transfers import random_transfers

from autopar.errors import ChannelError
from autopar.ir.program import Program
from autopar.runtime.localize import LocalPrograms
from autopar.verify.channels import classes as by_class
from autopar.verify.channels.classes import RankClass, agree, check_classes
from autopar.verify.channels.programs import check_programs

LARGE = """program explicit on dp=2048 tp=8
  x : f32[16383/dp 1001/tp] +dp = input
  w : f32[1001/tp 7] = param
forward:
  y : f32[16383/dp 1001] = all_gather(v, 1, tp)
  return y
"""


def all_ranks(classes: list[RankClass]) -> dict[int, Program]:
    return {rank: one.program.at(one.program.mesh.coordinates(rank)) for one in classes for rank in one.ranks}


def refused(check: Any, given: Any) -> str | None:
    try:
        check(given)
    except ChannelError as error:
        return str(error)
    return None


def classes_of(program: Program) -> list[RankClass]:
    return LocalPrograms(program, Program.verify).classes


@pytest.mark.parametrize("name", [path.stem for path in sorted(GOLDEN.glob("*.txt"))])
def test_right_programs(name: str) -> None:
    classes = classes_of(Program.parse((GOLDEN / f"{name}.txt").read_text().partition("---\n")[0]))
    check_classes(classes)
    assert agree(classes) == (not classes[0].program.stages)


def test_programs_with_stages_go_to_the_check_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(by_class, "check_programs", lambda programs, channels: asked.append(sorted(programs)))
    classes = classes_of(Program.parse(EXCHANGES))
    assert asked == [[0, 1, 2]]
    check_classes(classes)
    assert asked == [[0, 1, 2]] * 2


@settings(max_examples=60, deadline=None)
@given(
    st.randoms(use_true_random=False),
    st.sampled_from([{"dp": 2, "tp": 3}, {"dp": 4, "tp": 2}, {"dp": 2, "tp": 2, "ep": 3}]),
)
def test_broken_programs_are_refused_by_both(choose: random.Random, mesh: dict[str, int]) -> None:
    """One class of ranks, or one rank of a class, has another program."""
    classes = classes_of(random_transfers(choose, mesh, 6))
    assert agree(classes)
    at = choose.randrange(len(classes))
    one = classes[at]
    broken = Program.parse(str(one.program))
    nodes = list(communicating(broken))
    if not nodes:
        return
    changed = MUTATIONS[choose.choice(list(MUTATIONS))](choose.choice(nodes))
    if choose.random() < 0.5 or len(one.ranks) == 1:
        changed_classes = [*classes[:at], RankClass(broken, one.ranks), *classes[at + 1 :]]
    else:
        rank = choose.choice(list(one.ranks))
        left = [other for other in one.ranks if other != rank]
        moved = RankClass(broken.at(broken.mesh.coordinates(rank)), [rank])
        whole = RankClass(one.program.at(broken.mesh.coordinates(left[0])), left)
        changed_classes = [*classes[:at], whole, moved, *classes[at + 1 :]]
    expected = refused(check_programs, all_ranks(changed_classes))
    assert refused(check_classes, changed_classes) == expected
    assert agree(changed_classes) <= (expected is None)
    assert changed or expected is None


def test_a_rank_is_missing_or_twice_or_on_no_mesh() -> None:
    (one,) = classes_of(
        Program.parse(LARGE.replace("2048", "2").replace("16383", "4").replace("1001", "8").replace("(v", "(x"))
    )
    assert agree([one])
    assert not agree([RankClass(one.program, one.ranks[:-1])])
    assert not agree([one, RankClass(one.program, [1])])
    assert not agree([])
    with pytest.raises(ChannelError, match="is not the same on both"):
        check_classes([RankClass(one.program, one.ranks[:-1])])


def test_16384_ranks_are_localized_and_checked_by_class(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes do not divide: 16,383 rows and 1,001 columns. No rank is looked at by itself."""
    made = []
    localize = LocalPrograms._of_class
    monkeypatch.setattr(LocalPrograms, "_of_class", lambda own, at: made.append(dict(at)) or localize(own, at))
    monkeypatch.setattr(by_class, "check_programs", lambda *given: pytest.fail("ranks were checked one by one"))
    programs = LocalPrograms(Program.parse(LARGE.replace("(v", "(x")), Program.verify)
    classes = programs.classes
    # 8 rows and one coordinate with 7; 126 columns, and one coordinate with 119
    assert sorted(len(one.ranks) for one in classes) == [1, 7, 2047, 2047 * 7]
    assert len(made) == 4 and sum(len(one.ranks) for one in classes) == 16_384
    wrong = Program.parse(str(classes[-1].program).replace("sizes=[126, 126", "sizes=[126, 127"))
    assert str(wrong) != str(classes[-1].program)
    assert not agree([*classes[:-1], RankClass(wrong, classes[-1].ranks)])
