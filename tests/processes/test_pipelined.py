"""Pipelined steps on gloo processes: the numbers of a single device, and those of simulated ranks."""

from __future__ import annotations

import functools
from pathlib import Path

import bytes_in_text
import pipelined_outputs
import pipelined_processes
import pipelined_profiles
import pipelined_timelines
import pytest
import staged_gradients
from equality import relative
from processes import ranks

from autopar.pipeline import POLICIES

GRID = ("pp2 tp2", "pp4", "pp2 dp2")
# a model on each mesh; four ranks run all of a list in one launch
CASES = [("streams", "pp2 tp2", "interleaved-1f1b", 3), ("skip", "pp4", "zb-h1", 3), ("normed", "pp2 dp2", "1f1b", 3)]
TRANSFORMERS = [("llama", "pp2 tp2", "zb-v", 3), ("llama tied", "pp4", "1f1b", 3), ("gpt2", "pp2 dp2", "zb-h1", 3),
                ("bert", "pp2 tp2", "1f1b", 1)]  # fmt: skip
MORE = [(name, mesh, policy, 5) for name in ("skip", "shared", "streams") for mesh in GRID for policy in POLICIES]


@pytest.mark.parametrize("cases", [
    CASES,
    pytest.param(TRANSFORMERS, marks=pytest.mark.sweep("simulated ranks run transformers, and these run their loop")),
    *(
        pytest.param(MORE[at : at + 12], marks=pytest.mark.sweep("one mesh for each policy and model"))
        for at in range(0, len(MORE), 12)
    ),
], ids=lambda cases: f"{cases[0][0]} {cases[0][1]}, …")  # fmt: skip
def test_steps(cases: list[tuple[str, str, str, int]]) -> None:
    ranks(4).run(pipelined_processes.steps_alike, cases)


@pytest.mark.parametrize("zero", [pytest.param(1, marks=pytest.mark.sweep("it is simulated, and 3 runs here")), 3])
def test_zero(zero: int) -> None:
    run = functools.partial(pipelined_processes.steps_alike, zero=zero)
    ranks(4).run(run, [("shared", "pp2 dp2", "zb-v", 3)])


def test_across() -> None:
    """What crosses the end of a step is under way on real groups."""
    cases = [("shared", "pp2 dp2", "zb-v", 3)]
    ranks(4).run(functools.partial(pipelined_processes.steps_alike, across=True), cases)


def test_the_numbers_of_simulated_ranks() -> None:
    """Also of what is drawn. A kernel adds up the elements of a tensor in an order that its address decides."""
    cases = [("noisy", "pp4", "1f1b", 3), ("shared", "pp2 tp2", "zb-h1", 3)]
    simulated = pipelined_processes.as_simulated(cases)
    for found in ranks(4).run(pipelined_processes.as_simulated, cases):
        for (losses, own), (wanted, whole) in zip(found, simulated, strict=True):
            assert all(relative(a, b) <= 1e-14 for a, b in zip(losses, wanted, strict=True)) and own
            assert all(relative(tensor, whole[name]) <= 1e-14 for name, tensor in own.items())


@pytest.mark.parametrize("call", [
    "homes", "open_options", "state_dicts", "frozen_first_stages", "other_batches", "rows_of_each_rank",
])  # fmt: skip
def test_calls(call: str) -> None:
    ranks(4).run(getattr(pipelined_processes, call))


def test_recorded(tmp_path: Path) -> None:
    """A step beside its simulation: its numbers, its events, and one clock."""
    cases = [("layers", "pp2 tp2", "1f1b"), ("shared", "pp4", "zb-v")]
    ranks(4).run(pipelined_timelines.recorded, cases, str(tmp_path))


@pytest.mark.parametrize(("name", "mesh", "policy"), [("layers", "pp2 tp2", "1f1b"), ("shared", "pp2 tp2", "zb-v")])
def test_measured(name: str, mesh: str, policy: str) -> None:
    """All ranks get one profile, in which collectives of each stage, and messages between them, are measured."""
    found = ranks(4).run(pipelined_profiles.profiled, name, mesh, policy)
    (profile, times), *others = found
    assert all(other == (profile, times) for other in others)
    assert not [row.call for row in profile.rows.values() if row.why] and profile.ranks == 4
    messages = {call: row for call, row in profile.rows.items() if call.startswith("messages")}
    assert messages and all(row.seconds > 0 for row in messages.values())
    assert {row.seconds for row in messages.values()} >= {seconds for seconds in times.transfer if seconds}
    assert any(row.group == "all_reduce over tp" and 0 < row.startup <= row.seconds for row in profile.rows.values())


def test_bytes_in_the_text_are_the_bytes_that_are_sent() -> None:
    """Rank by rank: of the slots, and of the programs of all stages around them."""
    ranks(4).run(bytes_in_text.as_sent, [("layers", "pp2 tp2", "1f1b"), ("shared", "pp4", "zb-v")])
    ranks(4).run(functools.partial(bytes_in_text.as_sent, returns="outputs"), [("normed", "pp2 dp2", "1f1b")])


def test_gradients_of_calls() -> None:
    ranks(4).run(staged_gradients.on_processes)


def test_outputs() -> None:
    ranks(4).run(pipelined_outputs.on_processes)
