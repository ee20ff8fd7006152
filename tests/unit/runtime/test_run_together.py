"""Simulated ranks that wait for each other's messages go on when these are there; those that wait forever are named."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

from autopar.errors import SimulationError
from autopar.runtime.simulation.in_flight import Until
from autopar.runtime.simulation.simulate import run_together

Run = Generator[Any, Any, None]


def test_ranks_go_on_when_they_can() -> None:
    """In any order; one that is ready at once does not wait for the others."""
    done: list[str] = []

    def sender() -> Run:
        yield Until(lambda: True, "nothing", ())
        done.append("sent")

    def receiver() -> Run:
        yield Until(lambda: "sent" in done, "a message", (0,))
        done.append("received")

    run_together({1: receiver(), 0: sender()})
    assert done == ["sent", "received"]


def test_a_deadlock_names_ranks_and_words() -> None:
    def waits(words: str, *ranks: int) -> Run:
        yield Until(lambda: False, words, ranks)

    def ends() -> Run:
        return
        yield

    with pytest.raises(SimulationError) as caught:
        run_together({0: waits("FR03 of stage 1", 1), 1: waits("the numbers of all stages", 0, 2), 2: ends()})
    assert str(caught.value) == (
        "the ranks wait for each other forever:\n"
        "    rank 0 waits in FR03 of stage 1 for ranks 1\n"
        "    rank 1 waits in the numbers of all stages for ranks 0, 2\n"
        "    rank 2 has ended"
    )


def test_what_a_rank_raises_is_raised() -> None:
    def fails() -> Run:
        yield Until(lambda: True, "nothing", ())
        raise RuntimeError("of this rank")

    with pytest.raises(RuntimeError, match="of this rank"):
        run_together({0: fails()})
