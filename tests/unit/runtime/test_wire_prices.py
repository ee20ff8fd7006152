"""What the operations of a process group are charged with on an emulated wire."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autopar.costs.prices import price
from autopar.runtime.wire.prices import CHARGES, bytes_of, charged, machine_of

A, B = 1e-3, 1e6  # latency, bandwidth
WIRE = machine_of(A, B)


def floats(*counts: int) -> Any:
    return [torch.empty(count) for count in counts]


@pytest.mark.parametrize(("name", "arguments", "form", "size"), [
    ("allreduce", [floats(10)], "all_reduce", 40),
    ("allreduce_coalesced", [floats(10, 6)], "all_reduce", 64),
    ("allgather", [[floats(5, 5, 5, 5)], floats(5)], "all_gather", 80),
    ("all_gather_single", [*floats(20), *floats(5)], "all_gather", 80),
    ("all_gather_single_coalesced", [floats(20, 8), floats(5, 2)], "all_gather", 112),
    ("reduce_scatter", [floats(5), [floats(5, 5, 5, 5)]], "reduce_scatter", 80),
    ("reduce_scatter_single", [*floats(5), *floats(20)], "reduce_scatter", 80),
    ("all_to_all_single", [*floats(20), *floats(20), [], []], "all_to_all", 80),
    ("all_to_all_single", [*floats(20), *floats(20), [5] * 4, [5] * 4], "all_to_all", 80),
    ("alltoall", [floats(5, 5, 5, 5), floats(5, 5, 5, 5)], "all_to_all", 80),
    ("broadcast", [floats(10)], "redistribute", 40),
    ("reduce", [floats(10)], "redistribute", 40),
    ("gather", [[], floats(5)], "redistribute", 60),
    ("scatter", [floats(5), []], "redistribute", 60),
    ("barrier", [], "all_reduce", 0),
])  # fmt: skip
def test_seconds_are_those_of_plans(name: str, arguments: list[Any], form: str, size: int) -> None:
    assert charged(name, arguments, 4, WIRE) == (size, price(form, size, 4, WIRE))


def test_a_message_takes_its_latency_and_its_bytes() -> None:
    for name in ("send", "recv", "recv_anysource"):
        assert charged(name, [floats(250)], 2, WIRE) == (1000, pytest.approx(A + 1000 / B))


def test_a_ring_by_hand() -> None:
    """Large: 2 (p - 1) a + 2 (p - 1) / p · n b; the doubling forms have fewer rounds. Small: 2 rounds."""
    assert charged("allreduce", [floats(1_000_000)], 4, WIRE)[1] == pytest.approx(4 * A + 1.5 * 4e6 / B)
    assert charged("barrier", [], 4, WIRE)[1] == pytest.approx(2 * A)


def test_pieces_that_differ_are_an_exchange() -> None:
    """The rank that sends or receives most, and its partners."""
    out, pieces = torch.empty(7, 2), torch.empty(9, 2)
    size, seconds = charged("all_to_all_single", [out, pieces, [3, 4, 0, 0], [9, 0, 0, 0]], 4, WIRE)
    assert size == 72
    assert seconds == price("redistribute", 72, 2, WIRE)
    size, seconds = charged("alltoall", [floats(1, 2, 3, 4), floats(1, 1, 1, 1)], 4, WIRE)
    assert (size, seconds) == (40, price("redistribute", 40, 4, WIRE))
    assert charged("all_to_all_single", [out[:0], pieces[:0], [0] * 4, [0] * 4], 4, WIRE)[0] == 0


def test_one_rank_pays_nothing() -> None:
    arguments = {"barrier": [], "all_to_all_single": [*floats(4), *floats(4), [], []]}
    for name in set(CHARGES) - {"send", "recv", "recv_anysource", "reduce_scatter"}:
        given = arguments.get(name, [floats(4), floats(4)])
        assert charged(name, given, 1, WIRE)[1] == 0.0


def test_a_wire_without_latency_and_limit_is_free() -> None:
    assert charged("allreduce", [floats(1000)], 4, machine_of(0.0, float("inf")))[1] == 0.0


def test_dtypes_and_nested_lists_are_counted() -> None:
    assert bytes_of([[torch.empty(3, dtype=torch.bool)], torch.empty(2, dtype=torch.complex128)]) == 35
