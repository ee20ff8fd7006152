"""The messages between stages are lines of the program: the bytes in the text are those that are sent, rank by rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import steps
import torch
from bytes_in_text import in_text
from pipelined_steps import MESHES, made
from torch import nn

import autopar
from autopar import Mesh
from autopar.ir.program import Program
from autopar.pipeline import POLICIES, Task
from autopar.runtime.running.messages import Message, SimulatedMessages
from autopar.runtime.simulation.in_flight import Channel, InFlight

CASES = [("layers", "pp2 tp2"), ("skip", "pp4"), ("shared", "pp2 dp2")]


@pytest.mark.parametrize("policy", POLICIES)
def test_bytes_in_the_text_are_the_bytes_that_are_sent(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, mesh = CASES[list(POLICIES).index(policy) % len(CASES)]
    microbatches = 4
    counted: dict[tuple[int, bool], Counter[Any]] = {}
    number = Counter[Any]()
    start = SimulatedMessages.start

    def count(self: SimulatedMessages, messages: Sequence[Message]) -> None:
        for message in messages:
            if isinstance(message.task, Task):
                phase = {"F": "forward", "B": "backward"}[message.task.of]
                counted.setdefault((self._rank, message.is_send), Counter())[message.other, phase] += len(
                    message.memory
                )
                number[self._rank, message.other, message.task] += 1
        start(self, messages)

    monkeypatch.setattr(SimulatedMessages, "start", count)
    step, _, batches = made(name, MESHES[mesh], policy, microbatches, layers=8)
    steps.run(step, batches(0))
    assert counted and set(number.values()) == {1}, "one message for a pair, a slot and a direction"
    for rank in step._calls.mesh.ranks:
        for is_send, one in zip((True, False), in_text(step.local(rank)["micro"], rank), strict=True):
            wanted = Counter({key: bytes * microbatches for key, bytes in one.items()})
            assert counted.get((rank, is_send), Counter()) == wanted, (rank, is_send)


@pytest.mark.parametrize("name", ["shared", "normed"])
def test_bytes_of_the_programs_of_all_stages(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of a tied weight, its sum on the way home, outputs and written buffers: their lines are what is sent."""
    counted: dict[str, Counter[tuple[int, int]]] = {}
    send = InFlight.send

    def count(own: InFlight, channel: Channel, message: torch.Tensor, name: str = "") -> None:
        if name:  # else it is a message of a slot
            counted.setdefault(name, Counter())[channel[:2]] += message.nbytes
        send(own, channel, message, name)

    monkeypatch.setattr(InFlight, "send", count)
    step, _, batches = made(name, MESHES["pp2 dp2"], "1f1b", 4, layers=8, returns="outputs")
    steps.run(step, batches(0))
    wanted: Counter[tuple[int, int]] = Counter()
    for rank in step._calls.mesh.ranks:
        for key, program in step.local(rank).programs.items():
            sent, _ = in_text(program, rank, 1) if key != "micro" else (Counter(), None)
            for (other, _), bytes in sent.items():
                wanted[rank, other] += bytes
    assert sum(counted.values(), Counter()) == wanted and wanted


class Scaled(nn.Module):
    """A layer of a product."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
        return self.layer(x * by)


class Skipped(nn.Module):
    """The last layer reads what the first one makes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8), Scaled()])

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        first = torch.tanh(self.layers[0](x))
        second = torch.relu(self.layers[1](first))
        return nn.functional.mse_loss(self.layers[2](second, first), y)


FORWARD = """\
  tanh_s1 : f32[4 8] @s0 = send(tanh, s1)
  tanh_s1_s1 : f32[4 8] @s1 = recv(tanh_s1, s1, splits=((), ()))
  tanh_s1_s1_s2 : f32[4 8] @s1 = send(tanh_s1_s1, s2)
  tanh_s1_s1_s2_s2 : f32[4 8] @s2 = recv(tanh_s1_s1_s2, s2, splits=((), ()))
  relu_s2 : f32[4 8] @s1 = send(relu, s2)
  relu_s2_s2 : f32[4 8] @s2 = recv(relu_s2, s2, splits=((), ()))"""


def test_a_value_that_is_read_further_on_goes_through_the_stage_between() -> None:
    """As lines: it is received there, and sent on as it came."""
    parallel = autopar.parallelize(Skipped(), Mesh(pp=3), {})
    optimizer = torch.optim.SGD(parallel.parameters(), 0.1)
    step = parallel.train_step(optimizer, microbatches=2, schedule="1f1b", stages=["layers.0", "layers.1", "layers.2"])
    step.capture(x=torch.randn(8, 8), y=torch.randn(8, 8))
    program = step.program.programs["micro"]
    forward = str(program).partition("\nbackward:")[0].splitlines()
    assert "\n".join(line for line in forward if " = send(" in line or " = recv(" in line) == FORWARD
    assert str(Program.parse(str(program))) == str(program)
    program.verify()
    for rank in range(3):
        local = step.local(rank)["micro"]
        local.verify()
        assert str(Program.parse(str(local))) == str(local)
