"""Edits: the same program, however often is committed."""

from __future__ import annotations

import models
import pytest
import torch
from edit_scripts import draw_script
from edited_program import base, layout
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.capture import capture
from autopar.errors import EditError
from autopar.ir.layout import DistAttr
from autopar.ir.mesh import Mesh
from autopar.ir.nodes import record_of
from autopar.ir.program import Program
from autopar.ir.record import TensorType
from autopar.passes import Place, Reshard, run_passes
from autopar.passes.reshard import MODES


@pytest.mark.parametrize(("sync", "explicit", "commits"), [(False, False, 1), (False, True, 3), (True, False, 3)])
def test_commits_and_visits_of_each_mode(sync: bool, explicit: bool, commits: int) -> None:
    program = base()
    with program.edit(sync=sync) as edit:
        for count in range(3):
            edit.slice(program.node("g_tp"), 0, "dp", before=program.node("mul"))
            if explicit:
                edit.commit()
            assert len(program.graph.nodes) == 14 + (count + 1) * (commits > 1)
    assert program.counts.commits == commits
    assert program.counts.inserted == 3
    assert program.counts.node_visits == (17 if commits == 1 else 15 + 16 + 17)  # each node once a commit


@pytest.mark.simulated
@pytest.mark.parametrize("name", ["block", "residual", "language"])
def test_the_modes_of_reshard_give_the_same_program(name: str) -> None:
    model, args = {
        "block": lambda: (models.Block(), (torch.randn(6, 8),)),
        "residual": lambda: (models.Residual(7, 9), (torch.randn(5, 3, 7),)),
        "language": lambda: (
            models.Language(),
            (torch.zeros(4, 3, dtype=torch.long), torch.zeros(4, 3, dtype=torch.long)),
        ),
    }[name]()
    placed = capture(model, args, {}).program
    split = {}
    for p in placed.placeholders:
        ndim, user = len(record_of(p).type.shape), record_of(p).name
        if record_of(p).role == "input" or user.endswith("up.weight"):
            split[p.name] = DistAttr.split("tp" if user.endswith("up.weight") else "dp", *[None] * (ndim - 1))
    run_passes(placed, [Place(Mesh(dp=2, tp=2), split)])
    made = {}
    for mode in MODES:
        program = placed.copy()
        (report,) = run_passes(program, [Reshard(mode)])
        made[mode] = program.text(comments=True)
        assert (report.commits == 1) == (mode == "batched")
        assert report.inserted > 3
        assert program.counts.node_visits >= report.commits * len(placed.graph.nodes)
    assert made["batched"] == made["per-reshard"] == made["sync"]


def test_a_transfer_may_apply_only_after_what_is_staged_before_it() -> None:
    """What is staged counts, also where a type follows from it."""
    made = []
    for sync in (False, True):
        program = base()
        with program.edit(sync=sync) as edit:
            edit.replace_use(program.node("x_dp_tp"), program.node("x_dp"), program.node("relu"))
            edit.annotate(
                program.node("x"), type=TensorType((8, 4), torch.float32, layout(program, "dp", None, pending=("tp",)))
            )
            edit.all_reduce(program.node("x"), "tp", before=program.node("relu"))
            again = edit.reduce_scatter(program.node("x_dp"), 1, "tp", before=program.node("mul"))
            edit.all_gather(again, 1, "tp", before=program.node("mul"))
        made.append(str(program))
    assert made[0] == made[1]
    assert (
        "  x_dp_tp_1 : f32[8 4/tp] = reduce_scatter(x_dp, 1, tp)\n  x_dp_tp_1_tp : f32[8 4] = all_gather(x_dp_tp_1, "
        "1, tp)\n" in made[0]
    )


@pytest.mark.simulated
@settings(max_examples=40, deadline=None)
@given(st.data())
def test_all_modes_give_the_same_program(data: st.DataObject) -> None:
    script, fine = draw_script(data, data.draw(st.integers(1, 8)))
    if not fine:
        script.calls.pop()
    made: dict[str, str] = {}
    counts: dict[str, tuple[int, int]] = {}
    for mode in ("sync", "explicit", "batched"):
        program = base()
        try:
            with program.edit(sync=mode == "sync") as edit:
                script.play(program, edit, edit.commit if mode == "explicit" else lambda: None)
        except EditError:
            assert not fine  # an erasure that the operation left out would have made possible
            return
        made[mode] = program.text(comments=True)
        counts[mode] = (program.counts.inserted, program.counts.removed)
        assert Program.parse(made[mode]) == program
        assert len({node.name for node in program.nodes}) == len(program.graph.nodes)
        assert program.counts.commits <= 1 or mode != "batched"
        program.graph.lint()
    assert made["sync"] == made["explicit"] == made["batched"]
    assert counts["sync"] == counts["explicit"] == counts["batched"]
