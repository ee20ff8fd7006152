"""Messages between simulated ranks: by tag, in any order; sizes are checked, and memory is used again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pipelined_programs import CPU

from autopar.errors import SimulationError
from autopar.runtime.running.messages import Message, Pool, SimulatedMessages
from autopar.runtime.simulation.in_flight import InFlight
from autopar.runtime.simulation.simulate import run_together


def bytes_of(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.uint8)


def exchanged(sent: list[Message], received: list[Message]) -> dict[object, dict[int, torch.Tensor]]:
    """What rank 1 receives, by task, of what rank 0 sends."""
    in_flight = InFlight()
    found: dict[object, dict[int, torch.Tensor]] = {}

    def sender() -> Any:
        messages = SimulatedMessages(0, in_flight)
        messages.start(sent)
        for message in sent:
            yield from messages.wait(message.task)

    def receiver() -> Any:
        messages = SimulatedMessages(1, in_flight)
        messages.start(received)
        for message in received:
            found[message.task] = yield from messages.wait(message.task)
        found["none"] = yield from messages.wait("a task without messages")

    run_together({1: receiver(), 0: sender()})
    return found


def test_tags_match() -> None:
    """Not the order in which messages are sent and received."""
    sent = [Message("a", True, 1, bytes_of(1, 2), 7, "a"), Message("b", True, 1, bytes_of(3), 8, "b")]
    received = [Message("b", False, 0, bytes_of(0), 8, "b"), Message("a", False, 0, bytes_of(0, 0), 7, "a")]
    found = exchanged(sent, received)
    assert found["a"][0].tolist() == [1, 2] and found["b"][0].tolist() == [3] and found["none"] == {}


def test_other_sizes() -> None:
    with pytest.raises(RuntimeError, match=r"^rank 1 receives 1 bytes in FR03 of stage 1, and rank 0 sends 2$"):
        exchanged(
            [Message("a", True, 1, bytes_of(1, 2), 7, "")], [Message("a", False, 0, bytes_of(0), 7, "FR03 of stage 1")]
        )


def test_a_message_that_nobody_sends() -> None:
    with pytest.raises(SimulationError, match=r"rank 1 waits in FR03 of stage 1 for ranks 0\n    rank 0 has ended"):
        exchanged([], [Message("a", False, 0, bytes_of(0), 7, "FR03 of stage 1")])


def test_what_is_released_is_overwritten() -> None:
    """So a reader that comes too late has no right numbers."""
    memory = torch.zeros(8, dtype=torch.uint8)
    SimulatedMessages(0, {}).release(memory)
    assert memory.view(torch.float64).isnan().all()


def test_a_pool_allocates_what_is_used_at_once() -> None:
    pool = Pool(CPU)
    for _ in range(5):
        one, other, larger = pool.buffer(16), pool.buffer(16), pool.buffer(32)
        assert one.data_ptr() != other.data_ptr() and len(larger) == 32
        for buffer in (one, other, larger):
            pool.release(buffer)
    assert pool.made == 3
