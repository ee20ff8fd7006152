"""Counts of a loss are summed over the mesh while the forward runs."""

from __future__ import annotations

import re
from typing import Any

import pytest
import steps
import torch
from equality import relative
from overlapped_steps import AnyGroup, code, made, named, places, random_pieces, text
from processes import ranks
from torch import nn
from transformers_models import llama
from whole_programs import WholeProgram

from autopar import Mesh
from autopar.ir import transfers
from autopar.ir.nodes import operands, record_of
from autopar.runtime.lowering.lower import lower_function
from autopar.scheduling.programs.run_parts import part_of
from autopar.step.compiling.hoisted_counts import hoist_counts


class TwoLosses(nn.Module):
    """Two means, of which each has its own count, behind a forward whose inputs are divided by a count of theirs, if
    they are."""

    def __init__(self, divides: bool = True) -> None:
        super().__init__()
        self.divides = divides
        self.one, self.two = nn.Linear(8, 16, dtype=torch.float64), nn.Linear(16, 5, dtype=torch.float64)
        self.weight: torch.Tensor | None = torch.linspace(0.5, 2, 5, dtype=torch.float64)

    def forward(self, x: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = x / mask.sum() if self.divides else x
        scores = self.two(torch.tanh(self.one(x)))
        squares = (scores.square().mean(1) * mask).sum() / mask.sum()
        return squares + nn.functional.cross_entropy(scores, labels, self.weight, ignore_index=1)


def two(seed: int = 0) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {
        "x": torch.randn(8, 8, dtype=torch.float64),
        "mask": torch.tensor([1, 0, 1, 1, 0, 1, 1, 1]),
        "labels": torch.arange(8) % 5,
    }


def first_code(step: Any, **batch: Any) -> list[str]:
    """The lines of the function that the counts and the first micro-batch are, on rank 0."""
    step.capture(**batch)
    _, locals = step._current().micro.first
    return lower_function(part_of(locals[0], "whole"), locals[0], AnyGroup()).graph.python_code("self").src.splitlines()


@pytest.mark.long
@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_count_travels_in_the_second_half_of_the_forward(microbatches: int) -> None:
    """It begins behind some of the forward's products, and is waited for behind others, before those of the
    backward."""
    step = made(llama(layers=2), Mesh(dp=2), microbatches=microbatches)
    lines = (code if microbatches == 1 else first_code)(step, **text())
    begun, waited, products = (
        places(lines, "start_all_reduce"),
        places(lines, r"collectives_wait\("),
        places(lines, r"aten\.mm\."),
    )
    forward = len(products) // 3  # two products of the backward for each of the forward
    before, between = (
        sum(place < begun[0] for place in products),
        sum(begun[0] < place < waited[0] for place in products),
    )
    assert 0.3 * forward < before < 0.7 * forward and between > 0.3 * forward and before + between <= forward


def test_counts_share_a_message() -> None:
    """The two of the losses, where they are of one dtype."""
    model = TwoLosses()
    model.weight = None
    begun = places(lines := code(made(model, Mesh(dp=2)), **two()), "start_bucket")
    assert (
        re.search(r"\[sum_\d, sum_\d\], \(None, None\), 'sum'", lines[begun[0]])
        and begun[0] < places(lines, r"aten\._log_softmax\.")[0]
    )


@pytest.mark.parametrize(
    ("model", "microbatches", "zero"),
    [
        ("llama", 4, 3),
        ("two losses", 1, 3),
        ("two losses", 4, 0),
        pytest.param("gpt2", 1, 0, marks=pytest.mark.sweep("llama counts labels too, and two losses has one step")),
        pytest.param("bert", 2, 1, marks=pytest.mark.sweep("llama counts labels too")),
    ],
)
def test_the_other_order_is_one(model: str, microbatches: int, zero: int) -> None:
    """Each value stands behind its operands; what is no count, nor made of one, keeps its place among the others."""
    make, batches = (lambda: TwoLosses(microbatches == 1), two) if model == "two losses" else steps.MODELS[model][:2]
    step = made(make(), Mesh(dp=2), microbatches=microbatches, zero=zero)
    step.capture(**batches(0))
    micro, update = step._current().pair
    for program in (micro.program, update.program, update.last[0], *([micro.first[0]] if microbatches > 1 else [])):
        nodes = [node for node in program.nodes if node.op in ("call_function", "get_attr")]
        found = hoist_counts(nodes)
        assert len(found) == len(nodes) and set(found) == set(nodes)
        place = {node: k for k, node in enumerate(found)}
        assert all(place[value] < place[node] for node in found for value in operands(node) if value in place)
        moved = [node for node in nodes if record_of(node).role == "" and not _is_of_parameters(node)]
        assert [node for node in found if node not in moved] == [node for node in nodes if node not in moved]
        assert hoist_counts(found) == found


def _is_of_parameters(node: Any) -> bool:
    """Whether a value is made of anything but inputs."""
    open_, seen = [node], set()
    while open_:
        value = open_.pop()
        if value.op == "placeholder" and record_of(value).role not in ("input", "buffer"):
            return True
        if value not in seen:
            seen.add(value)
            open_ += operands(value)
    return False


def test_a_program_without_counts_stays() -> None:
    make, batches, _ = steps.MODELS["mlp"]
    step = made(make(), Mesh(dp=2))
    step.capture(**batches(0))
    nodes = [node for node in step._current().micro.program.nodes if node.op != "placeholder"][:-1]
    assert not any(node.target is transfers.all_reduce for node in nodes[: len(nodes) // 2])
    assert hoist_counts(nodes) == nodes


@pytest.mark.long
@pytest.mark.parametrize(("sizes", "zero"), [
    pytest.param({"dp": 2}, 0, marks=pytest.mark.sweep("the mesh of two axes shows more")), ({"dp": 2, "tp": 2}, 3),
], ids=str)  # fmt: skip
def test_the_first_is_counts_and_then_micro(sizes: dict[str, int], zero: int) -> None:
    """Bit for bit, on all ranks: the counts that it hands on, the sums, buffers."""
    _, batches, plan = steps.MODELS["llama"]
    step = made(llama(kv=2), Mesh(sizes), plan if "tp" in sizes else "ddp", zero=zero, microbatches=2)
    step.capture(**batches(0))
    micro = step._current().micro
    assert micro.count is not None and micro.first is not None
    counting, plain, both = (
        WholeProgram(*micro.count),
        WholeProgram(micro.program, micro.local),
        WholeProgram(*micro.first),
    )
    given = {rank: named(both, own) for rank, own in random_pieces(both, {}).items()}
    counts = counting(random_pieces(counting, given))
    told = {rank: {f".count.{k}": count for k, count in enumerate(returned)} for rank, (returned, _) in counts.items()}
    apart = plain(random_pieces(plain, {rank: own | told[rank] for rank, own in given.items()}))
    for rank, (returned, states) in both(random_pieces(both, given)).items():
        assert returned and all(torch.equal(a, b) for a, b in zip(returned, counts[rank][0], strict=True))
        assert states and all(
            torch.equal(value, named(plain, apart[rank][1])[key]) for key, value in named(both, states).items()
        )


def two_losses_alike(microbatches: int) -> None:
    torch.manual_seed(0)
    single, model = (TwoLosses(divides=microbatches == 1) for _ in range(2))  # else by the count of the micro-batch
    model.load_state_dict(single.state_dict())
    step = made(model, Mesh(dp=2), microbatches=microbatches)
    alone = steps.Single(single, torch.optim.AdamW(single.parameters(), lr=1e-2))
    for k in range(3):
        ours, (theirs, _) = steps.run(step, **two(k)), alone(**two(k))
        assert relative(ours, theirs) < 1e-9, (k, ours, theirs)


@pytest.mark.parametrize("microbatches", [1, 2, 4])
def test_two_losses(microbatches: int) -> None:
    two_losses_alike(microbatches)


@pytest.mark.processes
def test_two_losses_on_processes() -> None:
    ranks(2).run(two_losses_both_ways)


def two_losses_both_ways() -> None:
    two_losses_alike(1)
    two_losses_alike(4)
