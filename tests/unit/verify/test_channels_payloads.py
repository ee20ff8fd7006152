"""Members of a collective that disagree about what goes on the wire are refused: one thing changed on one rank, each in
turn."""

from __future__ import annotations

import functools
from typing import Any

import models
import pytest
import torch
from channel_programs import GOLDEN, local_programs
from payload_mutations import MUTATIONS, alone, communicating

import autopar
from autopar.errors import ChannelError
from autopar.ir.program import Program
from autopar.runtime.localize import LocalPrograms
from autopar.verify.channels import Collective, Receive, Send, check
from autopar.verify.channels.programs import check_programs


@functools.cache
def texts(name: str) -> list[dict[int, str]]:
    """The local programs of a case, as text: each test breaks its own."""
    if name.startswith("golden"):
        return [{rank: str(p) for rank, p in local_programs(name.split()[1]).items()}]
    if name == "stages":
        from channel_programs import EXCHANGES

        return [{rank: str(p) for rank, p in LocalPrograms(Program.parse(EXCHANGES), Program.verify).items()}]
    if name == "step":
        return [{rank: str(programs[rank]) for rank in range(4)} for programs in steps_programs()]
    model, x = (
        (models.Block(), torch.randn(7, 8)) if name == "uneven" else (models.Residual(7, 9), torch.randn(5, 3, 7))
    )
    parallel = autopar.parallelize(
        model, autopar.Mesh(dp=3, tp=2) if name == "uneven" else autopar.Mesh(dp=2, tp=2), "megatron", example=(x,)
    )
    return [{rank: str(parallel.local(rank)) for rank in parallel.mesh.ranks}]


class Loss(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(5, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).square().mean()


def steps_programs() -> list[Any]:
    parallel = autopar.parallelize(Loss(), autopar.Mesh(dp=4), "ddp")
    step = parallel.train_step(torch.optim.AdamW(parallel.parameters()), zero=1, clip_norm=1.0)
    step.capture(torch.randn(8, 5))
    micro, update = step._current().pair
    return [micro.local, update.local, update.last[1]]


CASES = [f"golden {path.stem}" for path in sorted(GOLDEN.glob("*.txt"))] + ["uneven", "residual", "stages", "step"]


@pytest.mark.parametrize("case", CASES)
def test_one_thing_changed_on_one_rank_is_refused(case: str) -> None:
    """Of each kind of collective the first, on the first rank and on the last."""
    for program in texts(case):
        whole = {rank: Program.parse(text) for rank, text in program.items()}
        check_programs(whole)
        for rank in (min(whole), max(whole)):
            first = {(node.target, node.kwargs.get("parts") is None): node.name for node in communicating(whole[rank])}
            for name in first.values():
                for kind, mutate in MUTATIONS.items():
                    broken = Program.parse(program[rank])
                    node = broken.node(name)
                    if alone(broken, node) or not mutate(node):
                        continue
                    with pytest.raises(ChannelError):
                        check_programs({**whole, rank: broken})
                        pytest.fail(f"{kind} of {name} on rank {rank} is accepted")


TEXT = (
    "program local on dp=2 at dp={}\n  x : {}[{} 8] = input\nforward:\n  y : {}[{} 8] = all_reduce(x, dp{})\n  "
    "return y\n"
)
OTHERS = {
    "shape": (("f32", 4, "f32", 4, ""), "shape", "[8 8]", "[4 8]"),
    "dtype": (("bf16", 8, "bf16", 8, ""), "dtype", "f32", "bf16"),
    "reduction": (("f32", 8, "f32", 8, ", op='max'"), "reduction", "sum", "max"),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_the_error_names_ranks_lines_values_and_remedy(kind: str) -> None:
    other, what, left, right = OTHERS[kind]
    programs = {0: Program.parse(TEXT.format(0, "f32", 8, "f32", 8, "")), 1: Program.parse(TEXT.format(1, *other))}
    with pytest.raises(ChannelError) as caught:
        check_programs(programs)
    lines = [
        next(line.strip() for line in str(programs[rank]).splitlines() if line.startswith("  y")) for rank in (0, 1)
    ]
    assert str(caught.value) == (
        f"collective 1 of ranks 0 1 has another {what} on rank 1 than on rank 0:\n"
        f"  rank 0: y = all_reduce of ranks 0 1\n      {lines[0]}\n  rank 1: y = all_reduce of ranks 0 1\n      "
        f"{lines[1]}\n"
        f"the {what} is {left} on rank 0 and {right} on rank 1; give both ranks the same {what}"
    )


def test_a_piece_is_as_long_as_all_members_say() -> None:
    text = (
        "program local on dp=2 at dp={}\n  x : f32[{}] = input\nforward:\n  y : f32[5] = all_gather(x, 0, dp, "
        "sizes=[3, 2])\n  return y\n"
    )
    check_programs({rank: Program.parse(text.format(rank, 3 - rank)) for rank in (0, 1)})
    with pytest.raises(ChannelError) as caught:
        check_programs({rank: Program.parse(text.format(rank, 3)) for rank in (0, 1)})
    assert str(caught.value) == (
        "the piece of rank 1 is 3 long, but the collective says that it is 2 long:\n"
        "  rank 1: y : f32[5] = all_gather(x, 0, dp, sizes=[3, 2])\nlist the actual size of each member's piece"
    )


def test_payloads_are_compared_where_both_are_given() -> None:
    check({0: [Collective("a", "all_reduce", (0, 1), (("dtype", "f32"),))], 1: [Collective("a", "all_reduce", (0, 1))]})
    tasks = {0: [Send("x", 1, 4, (("dtype", "f32"),))], 1: [Receive("x", 0, 4, (("dtype", "i32"),))]}
    with pytest.raises(
        ChannelError, match=r"^message 1 from rank 0 to rank 1 has another dtype on rank 1 than on rank 0:\n"
    ):
        check(tasks)
