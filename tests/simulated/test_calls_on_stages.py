"""Gradients of calls of a model whose parameters are on the stages of a pipeline, all ranks simulated."""

from __future__ import annotations

import pytest
import torch
from staged_gradients import alike, batch_of, made


@pytest.mark.long
@pytest.mark.parametrize(("name", "mesh", "policy", "layers"), [
    ("shared", "pp2 tp2", "1f1b", 4), ("counted", "pp2 dp2", "1f1b", 4), ("shared", "pp4", "zb-v", 8),
])  # fmt: skip
def test_gradients(name: str, mesh: str, policy: str, layers: int) -> None:
    """From the loss; from other outputs, of which the last one alone leads through all stages; twice."""
    parallel, alone = made(name, mesh, policy, layers)
    alike(parallel, alone, 1, ("loss",))
    alike(parallel, alone, 2, ("layer 1",))
    assert next(reversed(dict(parallel.named_parameters()).values())).grad is None
    alike(parallel, alone, 3, ("layer 1", "scores"), times=2)


@pytest.mark.long
def test_what_runs() -> None:
    parallel, _ = made("shared", "pp2 tp2")
    found = parallel.simulate(**batch_of(parallel, 0))
    assert str(parallel.timetable).splitlines() == [
        "timetable of a call, 2 stages",
        "ranks 0 1, stage 0", "  copy hands copies", "  FW00@0", "  FS00@0>1", "  share takes outputs",
        "  BR00@0<1 BW00@0", "  home takes sums hands sums", "  gradients takes outputs",
        "ranks 2 3, stage 1", "  copy hands copies", "  FR00@1<0 FW00@1", "  share takes outputs",
        "  BW00@1", "  BS00@1>0", "  home takes sums hands sums", "  gradients takes outputs",
    ]  # fmt: skip
    rows = {(row.transfer, row.phase): row.bytes for row in parallel.transfers}
    assert rows["recv", "forward"] > 0 and rows["recv", "backward"] > 0 and rows["recv", "update"] > 0
    sent = [line for line in parallel.transfers.lines if line.transfer == "recv" and line.bytes]
    assert {line.after.rpartition("@")[2] for line in sent} >= {"s0", "s1"}
    assert "recv" in str(parallel.transfers)
    found["loss"].backward()
    with pytest.raises(RuntimeError, match="second time"):
        found["loss"].backward()
    found = parallel.simulate(**batch_of(parallel, 0))
    with pytest.raises(RuntimeError, match="create_graph=True is refused"):
        found["loss"].backward(create_graph=True)
    parallel.eval()
    with pytest.raises(RuntimeError, match="the model has changed since the call whose backward runs from its outputs"):
        found["scores"].sum().backward()
    with torch.no_grad():
        parallel.simulate(**batch_of(parallel, 0))
    assert "BW00" not in str(parallel.timetable)


@pytest.mark.long
def test_before_a_step_has_cut_the_model_each_stage_has_all_of_it() -> None:
    parallel, alone = made("shared", "pp2 tp2")
    parallel.leave_stages()
    alike(parallel, alone, 1, ("loss",))
