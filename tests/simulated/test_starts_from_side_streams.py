"""Steps in random orders, as on CUDA: no races, the same numbers, and a collective waits for what it sends alone."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from cuda_streams import Cuda, fake_cuda
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from overlapped_steps import made, text
from random_orders import by_chance, decided
from steps import Pair
from transformers_models import llama
from whole_programs import WholeProgram

from autopar import Mesh
from autopar.ir.nodes import is_getitem, operands, record_of
from autopar.ir.program import Program
from autopar.optimizers import IN_PLACE
from autopar.runtime.lowering.lower import Lowered, lower_function
from autopar.scheduling.programs.donated import Donated
from autopar.scheduling.programs.run_parts import part_of

SOME = settings(
    max_examples=12, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.explicit, Phase.generate]
)
X, Y = torch.randn(12, 8), torch.randn(12, 8)
PAIRS: list[tuple[dict[str, int], dict[str, Any]]] = [
    ({"dp": 2}, {"zero": 1}),
    ({"dp": 2}, {"zero": 3}),
    ({"dp": 3}, {"zero": 2, "microbatches": 2}),
    ({"dp": 2}, {"zero": 1, "amp": "bf16"}),
]


class EachGroup(dict[Any, str]):
    def __missing__(self, key: Any) -> str:
        return f"group of {key}"


def last_part(step: Any) -> tuple[Program, Donated]:
    """The last micro-batch and the update of rank 0, with what they overwrite."""
    update = step._current().update
    last, locals = update.last
    found = WholeProgram(last, locals)
    written = [of for name, of in found.named.items() if name in update.states or name in found.sums]
    return locals[0], Donated.of(locals[0], written, [found.named[name] for name in found.sums])


def run(program: Program, donated: Donated, device: str) -> tuple[Cuda, Lowered, list[torch.Tensor]]:
    types = {node.name: record_of(node).type for node in program.nodes if node.op in ("placeholder", "get_attr")}
    with fake_cuda() as cuda:
        lowered = lower_function(part_of(program, "whole"), program, EachGroup(), torch.device(device), donated)
        found = lowered.run([value_of(types[name]) for name in lowered.takes])
    return cuda, lowered, found


def value_of(type: Any) -> torch.Tensor:
    torch.manual_seed(len(type.shape))
    return (torch.rand if type.dtype.is_floating_point else torch.ones)(type.shape).to(type.dtype)


def come_too_late(program: Program, donated: Donated, lowered: Lowered, cuda: Cuda) -> list[str]:
    """The starts that come after computations behind what they send, and behind what their group sends before.

    It reads the program and the order of the generated lines, and not where events are.
    """
    lines = lowered.graph.python_code("self").src.splitlines()
    place = {line.strip().split(" ")[0]: k for k, line in enumerate(lines)}
    computed = Counter(place[line] if line else -1 for stream, _, line in cuda.kernels if stream == "compute")
    own: dict[Any, list[int]] = {}
    for name, node in lowered.origins.items():
        own.setdefault(node, []).append(place[name])
    messages: dict[str, list[Any]] = {}
    for node in program.nodes:
        if record_of(node).started and record_of(node).message:
            messages.setdefault(record_of(node).message, []).append(node)
    updates = [k for node in own for k in own[node] if node.target in IN_PLACE]

    def there(value: Any, start: int) -> int:
        """The line behind which a value is there."""
        if value in donated.sums and value not in own:  # the first gradient is the sum
            return there(operands(value)[1], start)
        if value in own and value.target not in IN_PLACE:
            return max(own[value])
        if is_getitem(value) or value.target in IN_PLACE:
            return max(k for k in updates if k < start)
        return -1

    late, until, copies = [], dict[str, int](), dict[str, set[int]]()  # the last two by group
    for name, begin in cuda.begins.items():
        node, start = lowered.origins[name], place[name]
        members = messages.get(record_of(node).message, [node])
        behind = max(there(operands(member)[0], start) for member in members)
        group = next(group for group in cuda.groups if f"{group!r}" in lines[start])
        until[group] = behind = max(behind, until.get(group, -1))
        made = copies.setdefault(group, set())
        values = {operands(member)[0] for member in members}  # the copies of all chunks of a value are made together
        made |= {k for value in values for user in value.users for k in own.get(user, []) if record_of(user).started}
        made |= {k for member in members for k in own.get(member, [])} | {start}
        allowed = sum(count for k, count in computed.items() if k <= behind or k in made)
        if begin > allowed:
            late.append(f"{name} comes after {begin} kernels, and its operands after {allowed}")
    return late


def check(step: Any) -> int:
    """Return how many starts are aside."""
    program, donated = last_part(step)
    cuda, lowered, found = run(program, donated, "cuda")
    _, _, expected = run(program, donated, "cpu")
    assert not cuda.races, cuda.races[:5]
    assert not (late := come_too_late(program, donated, lowered, cuda)), late[:5]
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(found, expected, strict=True))
    return sum(line.startswith("start on side") for line in cuda.log)


@SOME
@given(st.integers(0, 10**6), st.sampled_from(PAIRS))
def test_random_orders(seed: int, case: tuple[Mapping[str, int], Mapping[str, Any]]) -> None:
    sizes, options = case
    with decided(by_chance(seed)):
        step = made(Pair(), Mesh(sizes), "ddp", **options)
        step.capture(X, Y)
    assert check(step) > 0


@pytest.mark.long
@pytest.mark.parametrize("seed", [None, 1, 2])
def test_llama(seed: int | None) -> None:
    """In the order of ``today``, and by chance."""
    with contextlib.nullcontext() if seed is None else decided(by_chance(seed)):
        step = made(llama(kv=2, layers=1).float(), Mesh(dp=2, tp=2))
        step.capture(text())
    assert check(step) > 0
