"""Errors in simulated steps on stages name the rank, the slot, the op and the user's line."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from failing_steps import MICROBATCHES, Logarithms, batch_of, step_of
from pipelined_steps import Layers
from torch import nn

import autopar
from autopar import Mesh
from autopar.errors import AnomalyError, ScheduleError, SimulationError
from autopar.pipeline import PipelineSchedule, build
from autopar.pipeline.task import Slot
from autopar.runtime.running.messages import Message, SimulatedMessages

TP, DP = {"pp": 2, "tp": 2}, {"pp": 2, "dp": 2}


def test_an_op_that_fails_is_told_with_its_slot() -> None:
    step, batch = step_of("looked", DP, "1f1b"), batch_of("looked")
    before = {name: parameter.clone() for name, parameter in step.parallel.named_parameters()}
    batch["x"][7] = 9
    with pytest.raises(IndexError, match="index out of range") as caught:
        step.simulate(**batch)
    assert re.search(
        r"on rank 1, in FW03 of stage 0 \(micro-batch 3\): embedding : f32\[1 8\] = embedding\(embed_weight, x\)   "
        r"failing_steps\.py:\d+  return .*   in module embed",
        "\n".join(caught.value.__notes__),
    )
    for name, parameter in step.parallel.named_parameters():
        assert torch.equal(parameter, before[name]), "nothing has changed"
    step.simulate(**batch_of("looked"))  # and steps go on


def test_a_message_that_is_not_sent_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    step, start = step_of("layers", TP, "1f1b"), SimulatedMessages.start

    def drop(own: SimulatedMessages, messages: list[Message]) -> None:
        dropped = [m for m in messages if own._rank == 1 and m.words == "FS02 of stage 0 to stage 1"]
        start(own, [message for message in messages if message not in dropped])
        for message in dropped:
            own._open[message.task].append(message)

    monkeypatch.setattr(SimulatedMessages, "start", drop)
    with pytest.raises(SimulationError) as caught:
        step.simulate(**batch_of("layers"))
    first, *lines = str(caught.value).splitlines()
    assert first == "the ranks wait for each other forever:"
    assert "    rank 3 waits in FR02 of stage 1 from stage 0 for ranks 1" in lines
    assert "    rank 1 waits in BR02 of stage 0 from stage 1 for ranks 3" in lines
    assert len(lines) == 4


def test_a_message_that_is_not_received_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    step, start = step_of("layers", TP, "1f1b"), SimulatedMessages.start

    def twice(own: SimulatedMessages, messages: list[Message]) -> None:
        start(own, [*messages, *(m for m in messages if m.is_send and m.words == "BS03 of stage 1 to stage 0")])

    monkeypatch.setattr(SimulatedMessages, "start", twice)
    with pytest.raises(SimulationError, match=r"^rank [01] never receives what rank [23] has sent to it$"):
        step.simulate(**batch_of("layers"))


def test_a_schedule_that_would_wait_forever_does_not_reach_the_loop() -> None:
    """Both ranks receive before they send."""
    right = build("1f1b", 2, MICROBATCHES).with_messages()
    rows = list(right.slots)
    k = next(k for k, row in enumerate(rows) if row[0].compute and row[0].compute[0].of == "B")
    rows[k], rows[k - 1] = (rows[k - 1][0], rows[k][1]), (rows[k][0], rows[k - 1][1])  # a backward before its gradient
    wrong = PipelineSchedule(tuple(rows), right.batches, right.rank_of)
    with pytest.raises(ScheduleError):
        step_of("layers", TP, wrong)
    lonely = [
        tuple(Slot(tuple(t for t in slot.tasks if str(t) != "FS02"), slot.free) for slot in row) for row in right.slots
    ]
    with pytest.raises(ScheduleError, match=r"F[SR]02"):
        step_of("layers", TP, PipelineSchedule(tuple(lonely), right.batches, right.rank_of))


# -- NaN ---------------------------------------------------------------------------------------------------------------


class Rooted(Layers):
    """Roots, of negative numbers where a row is marked, which a mask removes from the result."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[:-1]:
            x = layer(x)
        x = torch.where(x > 0, torch.sqrt(x), x)
        return nn.functional.cross_entropy(self.head(self.layers[-1](x)), y)


def looking(
    make: Callable[[], nn.Module], sizes: dict[str, int], schedule: str = "1f1b", *, looks: bool = True, **options: Any
) -> Any:
    torch.manual_seed(0)
    parallel = autopar.parallelize(make(), Mesh(sizes), "ddp" if "dp" in sizes else {})
    return parallel.train_step(
        torch.optim.SGD(parallel.parameters(), lr=0.1), microbatches=MICROBATCHES, schedule=schedule,
        stages=[["layers.[01]*"], ["layers.[23]*", "head"]], detect_anomaly=looks, **options,
    )  # fmt: skip


def test_the_slot_of_a_nan_is_told() -> None:
    step = looking(Logarithms, {"pp": 2, "dp": 2})
    step.simulate(**batch_of("logarithms"))
    batch = batch_of("logarithms")
    batch["x"][5, 0] = -5.0  # the second row of micro-batch 2
    with pytest.raises(AnomalyError) as caught:
        step.simulate(**batch)
    assert re.match(
        r"log makes a NaN on rank [13], in FW02 of stage [01] \(micro-batch 2\)\n    log : f32\[1 8\] = log\(.*\)\n    "
        r"failing_steps\.py:\d+  .*torch\.log\(x \+ marked\).*\n  8 of 8 elements of log are NaN; ",
        str(caught.value),
    ), caught.value


def test_a_nan_of_a_forward_is_told_in_its_backward() -> None:
    """Although forwards of other micro-batches, without a NaN, have run in between."""
    step = looking(Rooted, {"pp": 2}, "gpipe")
    with pytest.raises(AnomalyError, match=r"^sqrt makes a NaN on rank 1, in FW00 of stage 1 \(micro-batch 0\)\n"):
        step.simulate(**batch_of("layers"))


@pytest.mark.parametrize(
    ("of", "said"),
    [
        ("layers.3.0.weight", "the parameter layers.3.0.weight comes in with NaN: 1 of 64 elements"),
        ("x", "the input x of micro-batch 2 of 4 comes in with NaN: 1 of 16 elements"),
    ],
)
def test_a_nan_that_comes_in_is_told(of: str, said: str) -> None:
    step, batch = looking(Layers, {"pp": 2}), batch_of("layers")
    (batch["x"] if of == "x" else step.parallel.get_parameter(of).data)[3, 0] = torch.nan
    with pytest.raises(AnomalyError) as caught:
        step.simulate(**batch)
    assert str(caught.value).startswith(said)


def test_a_step_that_looks_computes_the_same_although_gradients_overflow() -> None:
    """The scale makes inf and NaN in gradients, which cross stages; that is no anomaly, and the step is skipped."""
    losses = []
    for looks in (True, False):
        step = looking(Layers, {"pp": 2}, looks=looks, amp="fp16-O2", loss_scale=2.0**40, clip_norm=1.0)
        losses.append([step.simulate(**batch_of("layers", k)) for k in range(2)])
        assert bool(step.skipped)
    assert losses[0] == losses[1]
