"""Any order that keeps what values depend on keeps the numbers: late starts and waits, chunks, messages of several."""

from __future__ import annotations

import random
import warnings

import pytest
import steps
import torch
from calls_of_orders import same
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st
from model_cases import Made, numbers
from overlapped_steps import made, random_pieces
from random_models import random_case
from random_orders import by_chance, decided, in_order, order_of_today, random_order
from random_transfers import random_transfers, results_on_ranks
from whole_programs import WholeProgram

import autopar
from autopar import Mesh
from autopar.errors import AutoparError
from autopar.ir.program import Program
from autopar.runtime.localize import LocalPrograms
from autopar.scheduling.programs.order import OF_CALLS, Execution

SOME = settings(
    max_examples=12, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.explicit, Phase.generate]
)


def print_and_parse(local: LocalPrograms) -> str:
    """The text of all classes of ranks, which parses back."""
    for program in local.every_class:
        text = str(program)
        again = Program.parse(text)
        assert again == program and str(again) == text
        again.verify()
    return "".join(map(str, local.every_class))


@SOME
@given(st.integers(0, 10**6), st.sampled_from([{"dp": 2, "tp": 2}, {"dp": 3, "tp": 2}]))
def test_transfers_in_any_order(seed: int, sizes: dict[str, int]) -> None:
    """Every kind, dtype and dim, even and uneven, with fewer elements than chunks, and none at all."""
    r = random.Random(seed)
    program = random_transfers(r, sizes)
    program.verify()
    expected = results_on_ranks(program, in_order(program, order_of_today(program, OF_CALLS)))
    local = in_order(program, random_order(program, OF_CALLS, r))
    print_and_parse(local)
    for rank, found in results_on_ranks(program, local).items():
        assert all(same(a, b) for a, b in zip(found, expected[rank], strict=True))


def test_orders_have_chunks_and_messages() -> None:
    """Else the others would test nothing. What cannot be cut is whole."""
    text = ""
    for seed in range(6):
        program = random_transfers(random.Random(seed), {"dp": 2, "tp": 2})
        text += print_and_parse(in_order(program, random_order(program, OF_CALLS, random.Random(seed))))
    lines = [line for line in text.splitlines() if " = start " in line]
    assert sum(" from " in line for line in lines) > 50 and sum(" in " in line for line in lines) > 20
    assert text.count("join_chunks(") > 20
    for kind in ("all_reduce", "reduce_scatter", "all_gather"):
        assert any(kind in line and " from " in line for line in lines)
    for kind in ("all_to_all", "redistribute"):
        own = [line for line in lines if f"start {kind}(" in line]
        assert own and not any(" from " in line or " in " in line for line in own)


@pytest.mark.long
@SOME
@given(st.integers(0, 10**6))
def test_random_models_in_any_order(seed: int) -> None:
    """Outputs, gradients and buffers of random models under random plans, bit for bit."""
    case = random_case(random.Random(seed))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        maker = Made(case)
        try:
            numbers(maker, model := maker.model(), model)
        except Exception:
            assume(False)  # it does not run on one device
        found = []
        try:
            for decide in (order_of_today, by_chance(seed)):
                with decided(decide):
                    mesh = Mesh(dict(case.mesh))
                    parallel = autopar.parallelize(maker.model(), mesh, case.plan, **case.options)
                    found.append(numbers(maker, parallel, parallel.simulate))
        except AutoparError:
            assert not found, "it is refused in any order"
            assume(False)
    today, other = found
    assert today.keys() == other.keys()
    assert [what for what, value in today.items() if not same(other[what], value)] == []


CASES = [
    ("mlp", {"dp": 3}, {"zero": 1}),
    ("mlp", {"dp": 2}, {"zero": 3, "microbatches": 3, "clip_norm": 0.5}),
    ("mlp", {"dp": 2, "tp": 2}, {"zero": 2, "microbatches": 2}),
    ("mlp", {"dp": 3}, {"amp": "fp16-O2", "zero": 2, "microbatches": 2}),
    ("llama sequence", {"dp": 2, "tp": 2}, {"zero": 3, "microbatches": 2}),
    *(
        pytest.param(*case, marks=pytest.mark.sweep("each option occurs in another case"))
        for case in [
            ("llama", {"dp": 2}, {"recompute": "blocks", "zero": 3}),
            ("mlp", {"dp": 2}, {"amp": "bf16-O2", "zero": 1}),
            ("mlp", {"dp": 3}, {"ema": 0.9, "zero": 3}),
            ("resnet", {"dp": 2}, {"zero": 1}),
        ]
    ),
]


@pytest.mark.long
@pytest.mark.parametrize(("name", "sizes", "options"), CASES, ids=str)
def test_steps_in_any_order(name: str, sizes: dict[str, int], options: dict[str, object]) -> None:
    """All programs of a step, whose lines stand in no order of phases: what they return, and the next states."""
    make, batches, plan = steps.MODELS[name]
    low = "amp" in options
    step = made(make().float() if low else make(), Mesh(sizes), plan if "tp" in sizes else "ddp", **options)
    step.capture(**(steps.narrow(batches(0)) if low else batches(0)))
    micro, update = step._current().pair
    programs = [(micro.program, micro.local), update.last, *filter(None, (micro.first, micro.copy))]
    execution = Execution(whole=True, written=update.states)
    for program, local in programs:
        run = WholeProgram(program, local)
        pieces = random_pieces(run, {})
        expected = run(copied(pieces))
        for seed in range(3):
            other = in_order(program, random_order(program, execution, random.Random(seed)))
            print_and_parse(other)
            for rank, (returned, states) in WholeProgram(program, other)(copied(pieces)).items():
                assert all(same(a, b) for a, b in zip(returned, expected[rank][0], strict=True))
                assert all(same(value, expected[rank][1][state]) for state, value in states.items())


def copied(pieces: dict[int, dict[str, torch.Tensor]]) -> dict[int, dict[str, torch.Tensor]]:
    return {rank: {name: piece.clone() for name, piece in own.items()} for rank, own in pieces.items()}


LINES = """\
update:
  w : f32[4] = neg(v)
backward:
  x_dp : f32[4] = {}
update:
  u : f32[4] = add.Tensor(w, x_dp)
  return (u,)
"""
SCHEDULED = (
    "program scheduled on dp=2 at dp=0\nstream dp\n  v : f32[4] = input\n  x : f32[4] = input\nupdate:\n"
    "  n : f32[4] = relu(v)\nbackward:\n  x_dp_start : f32[4] = start all_reduce(x, dp) on dp\n"
) + LINES.format("wait(x_dp_start)")
EXPLICIT = "program explicit on dp=2\n  v : f32[4] = input\n  x : f32[4] +dp = input\n" + LINES.format(
    "all_reduce(x, dp)"
)


def test_a_whole_program_runs_line_by_line() -> None:
    """Phases may stand in any order: here the update begins before the backward ends."""
    own = Program.parse(SCHEDULED)
    own.verify()
    programs = {rank: own.at({"dp": rank}) for rank in range(2)}
    values = {rank: {"v": torch.ones(4), "x": torch.full((4,), rank + 1.0)} for rank in range(2)}
    found = WholeProgram(Program.parse(EXPLICIT), programs)(values)
    assert [returned[0].tolist() for returned, _ in found.values()] == [[2.0] * 4] * 2
