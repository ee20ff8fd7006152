"""What tensors hold by positions alone: compared with the tensors themselves, on every element."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

from autopar.capture.positions.follow import PositionsOf
from autopar.capture.positions.holds import Affine, Positional, hides_later_keys

Q, K = 5, 5


def found_in(function: Callable[..., torch.Tensor], *args: torch.Tensor, mode: str = "fake") -> Positional | None:
    """What the result of a function holds by positions."""
    graph = make_fx(function, tracing_mode=mode)(*args).graph
    (result,) = graph.find_nodes(op="output")[0].all_input_nodes
    return PositionsOf().at(result)


def elements(found: Positional, like: torch.Tensor) -> torch.Tensor:
    """Write down each element: a slow oracle."""

    def number(affine: Affine, place: tuple[int, ...]) -> Any:
        return affine.constant + sum(slope * at for slope, at in zip(affine.slopes, place, strict=True))

    out = torch.empty(like.shape, dtype=torch.float64)
    for place in itertools.product(*map(range, like.shape)):
        holds = all(number(condition, place) >= 0 for condition in found.conditions)
        out[place] = float(number(found.then, place) if holds else found.other)
    return out


def queries(offset: int = 0) -> torch.Tensor:
    return torch.arange(offset, Q + offset).view(1, 1, Q, 1)


def keys(count: int = K) -> torch.Tensor:
    return torch.arange(count)[None, None, None, :]


def of_transformers() -> torch.Tensor:
    """The mask of a batch without padding, with the look for packed sequences."""
    position = torch.arange(Q).unsqueeze(0).expand(2, -1)
    packed = (torch.diff(position, prepend=position[:, :1] - 1, dim=-1) != 1).cumsum(-1)
    batch, q, k = torch.arange(2).view(2, 1, 1, 1), queries(), keys()
    later = position[batch, k] <= position[batch, q]
    return (torch.ones((), dtype=torch.bool) & later & (packed[batch, q] == packed[batch, k])).expand(2, -1, Q, K)


def lowest() -> float:
    return torch.finfo(torch.float32).min


MASKS: dict[str, tuple[Callable[[], torch.Tensor], bool | None]] = {
    "as transformers makes it": (of_transformers, True),
    "keys up to the query": (lambda: keys() <= queries(), True),
    "queries from the key on": (lambda: queries() >= keys(), True),
    "not later": (lambda: ~(keys() > queries()), True),
    "before the next": (lambda: keys() < queries() + 1, True),
    "tril": (lambda: torch.tril(torch.ones(Q, K, dtype=torch.bool)), True),
    "tril of numbers": (lambda: torch.tril(torch.ones(Q, K)).bool(), True),
    "triu of infinities": (lambda: torch.triu(torch.full((Q, K), -math.inf), diagonal=1), True),
    "of nn.Transformer": (lambda: torch.nn.Transformer.generate_square_subsequent_mask(Q), True),
    "where": (lambda: torch.where(keys() <= queries(), 0.0, lowest()), True),
    "masked_fill": (lambda: torch.zeros(Q, K).masked_fill(keys()[0, 0] > queries()[0, 0], -math.inf), True),
    "times the lowest": (lambda: (1.0 - (keys() <= queries()).float()) * lowest(), True),
    "more keys": (lambda: keys(7) <= queries(), True),
    "a window over all": (lambda: (keys() <= queries()) & (keys() > queries() - Q), True),
    "nothing hidden": (lambda: keys() <= queries(offset=K), False),
    "ones": (lambda: torch.ones(Q, K, dtype=torch.bool), False),
    "zeros to add": (lambda: torch.zeros(2, 1, Q, K), False),
    "a window": (lambda: (keys() <= queries()) & (keys() > queries() - 2), None),
    "without itself": (lambda: keys() < queries(), None),
    "one more": (lambda: keys() <= queries() + 1, None),
    "earlier": (lambda: keys() >= queries(), None),
    "all hidden": (lambda: torch.zeros(Q, K, dtype=torch.bool), None),
    "numbers to add": (lambda: torch.where(keys() <= queries(), 0.0, -1.0), None),
    "of a long window": (lambda: keys() * 2 <= queries(), None),
    "a bias": (lambda: torch.ones(Q, K), None),
}


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_is_causal(name: str) -> None:
    """And where it is known, it holds what the tensor holds; where it is causal, it is the kernel's mask."""
    make, expected = MASKS[name]
    found, mask = found_in(make), make()
    assert found is not None and torch.equal(elements(found, mask), mask.double())
    assert hides_later_keys(found, mask.dtype) is expected
    if expected:
        hidden = ~mask if mask.dtype is torch.bool else mask <= lowest()
        assert torch.equal(hidden, torch.ones(mask.shape, dtype=torch.bool).triu(1))


def table() -> torch.Tensor:
    """3 · i + j at (i, j)."""
    return torch.arange(4)[:, None] * 3 + torch.arange(3)


KNOWN: list[Callable[[], torch.Tensor]] = [
    lambda: table()[-1].clone(), lambda: table()[:, -2].clone(), lambda: table()[-3:].clone(),
    lambda: table()[1::2].clone(), lambda: table().t().clone(), lambda: 5 - table(),
    lambda: table().sub(table(), alpha=1),
    lambda: torch.full((2, 3), 4).cumsum(1), lambda: torch.cat([table()[:1] - 3, table()]),
    lambda: table()[torch.arange(2)[:, None], torch.arange(3)], lambda: table()[:, torch.arange(2)],
    lambda: torch.arange(20)[table()], lambda: torch.where(table() >= 0, 1, 2),
    lambda: table().unsqueeze(1).expand(4, 2, 3),
    lambda: torch.full((2,), 2.75).long(), lambda: torch.full((2,), -math.inf) == -math.inf,
    lambda: torch.ones(2, dtype=torch.bool) + torch.ones(2, dtype=torch.bool), lambda: torch.arange(3).t().clone(),
    lambda: torch.rsub(table(), 2), lambda: torch.full((2,), 3) != 3, lambda: table()[-9:9].clone(),
    lambda: torch.logical_not(torch.zeros(2, dtype=torch.bool)),
    lambda: torch.full((2,), True) & torch.ones(2, dtype=torch.bool),
    lambda: (table() <= 4).float() * 2.0, lambda: torch.where(table() > 5, 1.0, -1.0).masked_fill(table() > 99, 3.0),
]  # fmt: skip


@pytest.mark.parametrize("make", KNOWN)
def test_what_is_known(make: Callable[[], torch.Tensor]) -> None:
    found, tensor = found_in(make), make()
    assert found is not None and torch.equal(elements(found, tensor), tensor.double())


def index_below_zero() -> torch.Tensor:
    return torch.arange(Q)[torch.arange(Q) - 2]


def written() -> torch.Tensor:
    mask = keys()[0, 0] <= queries()[0, 0]
    mask[0, 1] = True
    return mask.clone()


def wraps_around() -> torch.Tensor:
    return torch.arange(5, dtype=torch.uint8) - 1


def by_truths() -> torch.Tensor:
    return torch.arange(Q)[torch.ones(Q, dtype=torch.bool)].clone()


def begins_anew() -> torch.Tensor:
    return torch.cat([torch.arange(3), torch.arange(3)])


def another_first() -> torch.Tensor:
    return torch.cat([torch.arange(1) + 5, torch.arange(3)])


def written_by_parts() -> torch.Tensor:
    mask = torch.ones(4, 4, dtype=torch.bool)
    first, _ = mask.chunk(2)
    first.fill_(False)
    return mask.clone()


ROUNDED: list[Callable[[], torch.Tensor]] = [
    lambda: torch.full((2,), 0.1).double() == 0.1, lambda: (torch.full((2,), 0.29) * 100).long(),
    lambda: torch.ones(2, dtype=torch.bfloat16) + 0.001 != 1, lambda: torch.full((2,), 1e-50).bool(),
    lambda: torch.full((2,), 257.0).bfloat16() == 256, lambda: torch.full((2,), 65536, dtype=torch.int32) * 65536 > 0,
    lambda: torch.full((2,), 2**32).int().bool(), lambda: torch.full((2,), 2**62) * 2 > 0,
    lambda: torch.arange(3, dtype=torch.int32) * 65536 * 65536,
    lambda: torch.ones(2, dtype=torch.long).masked_fill(table()[0, :2] >= 0, 2.5),
    lambda: torch.where(torch.ones(300, dtype=torch.bool), torch.arange(300), torch.zeros(300, dtype=torch.bfloat16)),
    lambda: torch.cat([torch.arange(300), torch.zeros(1, dtype=torch.bfloat16)]),
]  # fmt: skip
UNKNOWN = [
    index_below_zero, written, written_by_parts, wraps_around, by_truths, begins_anew, another_first,
    lambda: ~torch.full((3,), 6), lambda: torch.full((3,), 6) & 3,
    lambda: torch.logical_and(torch.full((3,), 6), torch.ones(3)),
    lambda: torch.ones(2).view(torch.int32).clone(), lambda: torch.cat([torch.zeros(0), torch.ones(2, 2)]),
    lambda: torch.full((2,), math.inf).sub(1).long(), lambda: torch.ones(3).cumsum(0),
    lambda: torch.rsub(table(), 2, alpha=2),
    lambda: table().add(1, alpha=2), lambda: torch.logical_not(torch.arange(3)), lambda: torch.ones(3).cumsum(0).long(),
]  # fmt: skip


@pytest.mark.parametrize("make", [*UNKNOWN, *ROUNDED])
def test_what_is_not_known(make: Callable[[], torch.Tensor]) -> None:
    assert found_in(make) is None


def test_values_of_inputs_are_not_known() -> None:
    assert found_in(lambda x: x.long().cumsum(0), torch.ones(4)) is None
    assert found_in(lambda x: torch.arange(len(x)) <= x, torch.ones(4, dtype=torch.long)) is None


@pytest.mark.parametrize("length", [2, 5, 9])
def test_a_mask_of_any_size(length: int) -> None:
    """With symbols for sizes, the mask is known for all of them."""

    def mask(x: torch.Tensor) -> torch.Tensor:
        position = torch.arange(x.shape[0])
        return (position[None, :] <= position[:, None]).expand(3, -1, -1)

    found = found_in(mask, torch.ones(length + 2), mode="symbolic")
    assert found is not None and hides_later_keys(found, torch.bool) is True
    assert torch.equal(elements(found, mask(torch.ones(length))), mask(torch.ones(length)).double())


def test_other_arguments_are_not_known() -> None:
    assert found_in(lambda: torch.ops.aten.add.Scalar(torch.arange(3), 0, 2)) is None


def test_truths_of_sizes_are_not_known() -> None:
    """A size that differs from 3 in the first call may be 3 in another."""
    of_size: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda x: torch.full((2, 2), x.shape[0] - 3).bool(), lambda x: torch.full((2, 2), x.shape[0] - 3) != 0,
    ]  # fmt: skip
    assert [found_in(function, torch.ones(5), mode="symbolic") for function in of_size] == [None, None]


STEPS: dict[str, Callable[[st.DrawFn, torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]] = {
    "add": lambda draw, x: (lambda k: lambda x: x + k)(draw(st.integers(-3, 3))),
    "subtract": lambda draw, x: (lambda k: lambda x: k - x)(draw(st.integers(-3, 3))),
    "double": lambda draw, x: lambda x: x + x,
    "slice": lambda draw, x: (lambda d, a: lambda x: x.narrow(d, a, x.shape[d] - a))(
        d := draw(st.integers(0, x.dim() - 1)), draw(st.integers(0, x.shape[d] - 1))),
    "every other": lambda draw, x: (lambda d: lambda x: x.transpose(0, d)[::2].transpose(0, d))(
        draw(st.integers(0, x.dim() - 1))),
    "unsqueeze": lambda draw, x: (lambda d: lambda x: x.unsqueeze(d))(draw(st.integers(0, x.dim()))),
    "permute": lambda draw, x: (lambda dims: lambda x: x.permute(dims))(draw(st.permutations(range(x.dim())))),
    "expand": lambda draw, x: lambda x: x.unsqueeze(0).expand(3, *x.shape),
    "with rows": lambda draw, x: lambda x: x + torch.arange(x.shape[-1]),
    "before": lambda draw, x: lambda x: torch.cat([x.narrow(-1, 0, 1) - 1, x], -1),
    "cumsum": lambda draw, x: (lambda d: lambda x: torch.ones_like(x).cumsum(d))(draw(st.integers(0, x.dim() - 1))),
    "select": lambda draw, x: (lambda d: lambda x: x.select(d, -1))(draw(st.integers(0, x.dim() - 1))),
    "look up": lambda draw, x: lambda x: torch.arange(40)[x.abs() * 0 + torch.arange(x.shape[-1])],
}  # fmt: skip
ENDS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "none": lambda x, y: x, "le": lambda x, y: x <= y, "gt": lambda x, y: x > y,
    "eq": lambda x, y: x == x - 1 + y[..., :1],
    "not": lambda x, y: ~(x >= y), "where": lambda x, y: torch.where(x < y, 0.0, -2.0),
    "both": lambda x, y: (x <= y) & (x > y - 2), "to float": lambda x, y: (x <= y).float() * -3.0,
    "tril": lambda x, y: ((x <= y) | (x > y)).tril() if x.dim() > 1 else x,
    "masked": lambda x, y: (x * 0).masked_fill(x > y, 7),
}  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_whatever_is_known_is_so(data: st.DataObject) -> None:
    """Random functions of positions: what is known of the result is the result, on every element."""
    draw = data.draw
    begin = torch.arange(draw(st.integers(1, 5))) * 1
    names = draw(st.lists(st.sampled_from(sorted(STEPS)), max_size=6))
    steps, x = [], begin
    for name in names:
        step = STEPS[name](draw, x)
        x = step(x)
        steps.append(step)
        assume(0 < x.numel() < 300 and x.dim() > 0)
    end = ENDS[draw(st.sampled_from(sorted(ENDS)))]

    def function() -> torch.Tensor:
        x = torch.arange(len(begin))
        for step in steps:
            x = step(x)
        return end(x, torch.arange(x.shape[-1])).clone()

    found = found_in(function)
    if found is not None:
        assert torch.equal(elements(found, function()), function().double())
