"""What a step starts early: the gradients of the last micro-batch in its backward, the parameters of a block before it
is computed."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import steps
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from overlapped_steps import code, made, named, places, random_pieces, text
from processes import ranks
from transformers_models import llama
from whole_programs import WholeProgram

from autopar import Mesh
from autopar.ir.nodes import record_of
from autopar.ir.program import Program
from autopar.scheduling.programs import today as buckets
from autopar.step.compiling.merged_programs import merge_programs

SMALL = 256  # bytes; tests have small parameters


# -- the last micro-batch and the update are one program ---------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    [
        "mlp",
        "resnet",
        pytest.param("gpt2", marks=pytest.mark.sweep("the blocks of mlp are gathered too")),
        pytest.param("llama", marks=pytest.mark.sweep("gpt2 shows blocks of attention too")),
    ],
)
@settings(deadline=None, max_examples=2, phases=[Phase.explicit, Phase.generate])  # a failing case needs no shrinking
@given(sizes=st.sampled_from([{"dp": 2}, {"dp": 4}, {"dp": 2, "tp": 2}]), zero=st.integers(0, 3),
       clip_norm=st.sampled_from([None, 0.5]), amp=st.sampled_from([None, "bf16-O2", "fp16-O2"]))  # fmt: skip
def test_joined_is_one_behind_the_other(
    name: str, sizes: dict[str, int], zero: int, clip_norm: float | None, amp: str | None
) -> None:
    """Bit for bit, on all ranks: what is returned, parameters, states, buffers."""
    make, batches, plan = steps.MODELS[name]
    model = make().float() if amp else make()
    step = made(model, Mesh(sizes), plan if "tp" in sizes else "ddp", zero=zero, clip_norm=clip_norm, amp=amp)
    step.capture(
        **{key: value.float() if amp and value.is_floating_point() else value for key, value in batches(0).items()}
    )
    micro, update = step._current().pair
    first, second, both = (
        WholeProgram(micro.program, micro.local),
        WholeProgram(update.program, update.local),
        WholeProgram(*update.last),
    )
    assert all(str(program) == str(merge_programs(micro.program, update.program)) for program in (update.last[0],))
    given = {rank: named(both, own) for rank, own in random_pieces(both, {}).items()}
    copied = {
        rank: {**own, **{key.removesuffix(".copy"): value for key, value in own.items() if key.endswith(".copy")}}
        for rank, own in given.items()
    }
    made_first = {rank: (out, named(first, new)) for rank, (out, new) in first(random_pieces(first, copied)).items()}
    made_second = second(random_pieces(second, {rank: own | made_first[rank][1] for rank, own in given.items()}))
    made_both = both(random_pieces(both, given))
    for rank, (returned, states) in made_both.items():
        apart = {**made_first[rank][1], **named(second, made_second[rank][1])}
        assert len(returned) == len(made_second[rank][0])
        assert all(torch.equal(a, b) for a, b in zip(returned, made_second[rank][0], strict=True))
        assert states.keys() and all(torch.equal(value, apart[key]) for key, value in named(both, states).items())


def test_joined_verifies_and_parses() -> None:
    step = made(steps.Pair(), Mesh(dp=2), zero=1, microbatches=2)
    step.capture(torch.randn(8, 8), torch.randn(8, 8))
    program = step._current().update.last[0]
    program.verify()
    assert [p for p in ("forward", "backward", "update") if f"\n{p}:\n" in str(program)] == [
        "forward",
        "backward",
        "update",
    ]
    assert str(Program.parse(str(program))) == str(program)
    assert {record_of(node).role for node in program.placeholders if node.name.endswith("_grad")} == {"buffer"}


@pytest.mark.long
@pytest.mark.parametrize(("zero", "kind"), [(0, "start_bucket"), (1, "start_scatter_bucket")])
def test_gradients_are_reduced_in_the_backward(monkeypatch: pytest.MonkeyPatch, zero: int, kind: str) -> None:
    """Several buckets, of which all but the last begin before the last matrix product, and are waited for in the
    update."""
    for name in ("FIRST", "OTHERS"):
        monkeypatch.setattr(buckets, name, SMALL * 8)
    lines = code(made(llama(layers=2), Mesh(dp=2), zero=zero), **text())
    begun, products, waited = (
        places(lines, kind),
        places(lines, r"aten\.mm\."),
        places(lines, "finish_(scatter_)?bucket"),
    )
    assert len(begun) >= 4 and sum(place < products[-1] for place in begun) >= len(begun) - 2
    assert len(waited) == len(begun) and min(waited) > max(begun)
    assert len(places(lines, "in_place_update")) == 1


# -- parameters that are gathered where they are used ------------------------------------------------------------------


@pytest.mark.long
def test_parameters_are_gathered_a_block_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gather of each block, forward and backward, but of the last: the backward begins with it. Each begins before
    the one ahead of it is waited for, and the one behind that is not begun yet."""
    monkeypatch.setattr(buckets, "FIRST", SMALL)
    lines = code(made(llama(layers=3), Mesh(dp=2), zero=3), **text())
    begun, waited = places(lines, "start_gather_bucket"), places(lines, "finish_gather_bucket")
    blocks = [
        sorted(set(re.findall(r"layers_(\d)", lines[place].partition("[")[2].partition("]")[0]))) for place in begun
    ]
    assert [block for block in blocks if block] == [["0"], ["1"], ["2"], ["2"], ["1"], ["0"]], blocks
    starts = [place for place in places(lines, "start_gather_bucket|start_all_gather")]
    finishes = [place for place in places(lines, "finish_gather_bucket|finish_all_gather")]
    assert len(starts) == len(finishes)
    for k, place in enumerate(finishes):
        assert sum(start < place for start in starts) == min(k + 2, len(starts))
    assert len(waited) == len(begun)


def test_the_backward_begins_with_the_last_block() -> None:
    """Whose parameters it still has; those of the others it gathers again."""
    make, batches, _ = steps.MODELS["mlp"]
    step = made(make(), Mesh(dp=2), zero=3)
    text = str(step.capture(**batches(0)).micro)
    forward, _, backward = text.partition("\nbackward:\n")
    gathered = [
        {re.search(r"blocks_(\d)", line)[1] for line in part.splitlines() if "all_gather(inner_blocks" in line}
        for part in (forward, backward)
    ]
    assert gathered == [{"0", "1"}, {"0"}]


@pytest.mark.long
def test_small_blocks_share_a_gather() -> None:
    lines = code(made(llama(layers=2), Mesh(dp=2), zero=3), **text())
    assert len(places(lines, "start_gather_bucket")) == 2, "one forward, one backward"


@pytest.mark.long
def test_what_waits_for_a_sum_is_one_bucket_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients that each micro-batch scatters: in buckets, added to their sums when the next one has begun."""
    for name in ("FIRST", "OTHERS"):
        monkeypatch.setattr(buckets, name, SMALL * 8)
    step = made(llama(layers=2), Mesh(dp=2), zero=2, microbatches=2)
    lines = code(step, **text())
    assert len(places(lines, "start_scatter_bucket")) >= 3
    begun, waited = (
        places(lines, "start_(reduce_scatter|scatter_bucket)"),
        places(lines, "finish_(reduce_scatter|scatter_bucket)"),
    )
    assert len(waited) == len(begun)
    for k, place in enumerate(waited[:-1]):
        assert sum(start < place for start in begun) == k + 2
    assert max(waited) < min(places(lines, "in_place_update"))


# -- on processes ------------------------------------------------------------------------------------------------------


def in_small_buckets(name: str, sizes: dict[str, int], options: dict[str, Any]) -> None:
    before = buckets.FIRST, buckets.OTHERS
    buckets.FIRST, buckets.OTHERS = SMALL, SMALL * 16
    try:
        steps.steps_alike(name, sizes, options, count=3)
    finally:
        buckets.FIRST, buckets.OTHERS = before


@pytest.mark.processes
@pytest.mark.parametrize(("name", "sizes", "options"), [
    ("mlp", {"dp": 2}, {"zero": 3, "microbatches": 2, "clip_norm": 0.5}),
    ("mlp", {"dp": 2, "tp": 2}, {"zero": 2, "microbatches": 2}),
    ("mlp", {"dp": 4}, {"zero": 0}),
    *(
        pytest.param(*case, marks=pytest.mark.sweep("each model, mesh and stage of ZeRO occurs in another case"))
        for case in [
            ("llama", {"dp": 2}, {"zero": 3, "microbatches": 2, "clip_norm": 0.5}),
            ("llama", {"dp": 2, "tp": 2}, {"zero": 3, "microbatches": 2, "clip_norm": 0.5}),
            ("gpt2", {"dp": 4}, {"zero": 2, "microbatches": 2}),
            ("llama", {"dp": 4}, {"zero": 0}),
            ("llama sequence", {"dp": 2, "tp": 2}, {"zero": 2, "microbatches": 2}),
            ("mlp", {"dp": 4}, {"zero": 3}),
        ]
    ),
], ids=str)  # fmt: skip
def test_many_buckets(name: str, sizes: dict[str, int], options: dict[str, Any]) -> None:
    """So small that a model of a test has many."""
    ranks(math.prod(sizes.values())).run(in_small_buckets, name, sizes, options)
