"""Every dtype in every transfer on real processes: what the simulator does, and what one device does, or a refusal when
it is planned."""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import exchanges
import pytest
import torch
from exchange_cases import case
from processes import ranks
from strategies import kinds
from transition_runs import addends, read, wide

from autopar.errors import TransitionError
from autopar.ir.program import Program
from autopar.ir.record import DTYPES, TensorType
from autopar.ir.transfers import KINDS
from autopar.transitions import transitions

ON = "tp=4"
TARGETS = ["[5 4]", "[5/tp 4]", "[5 4/tp]"]  # an all-reduce; reduce-scatters of uneven pieces and even ones
MOVES = [
    ("[5/tp 4]", "[5 4]"),
    ("[5 4/tp]", "[5 4]"),
    ("[5/tp 4]", "[5 4/tp]"),
    ("[5 4]", "[5 4/tp]"),
    ("[(3 5/tp) 4]", "[15 4/tp]"),
]
REDUCED = [(name, kind) for name, dtype in DTYPES.items() for kind in kinds(dtype)]
REFUSED = [(name, kind) for name, dtype in DTYPES.items() for kind in KINDS if kind not in kinds(dtype)]
SINGLE = {  # what one device makes of the addends
    "sum": functools.partial(functools.reduce, torch.add), "prod": functools.partial(functools.reduce, torch.mul),
    "max": functools.partial(functools.reduce, torch.maximum),
    "min": functools.partial(functools.reduce, torch.minimum),
}  # fmt: skip


def type_of(dtype: torch.dtype, text: str, pending: str = "") -> TensorType:
    return replace(read(f"f32{text}{pending}", ON), dtype=dtype)


def values(dtype: torch.dtype, kind: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Addends of four ranks, exact in every dtype; among floats that are compared, some that are not numbers, or are
    infinite."""
    numbers = torch.arange(4 * math.prod(shape)).reshape(4, *shape) % 3
    if dtype is torch.bool:
        # none, one, several and all of them
        numbers = torch.arange(4).reshape(4, 1, 1) < torch.arange(math.prod(shape)).reshape(shape) % 6
    if dtype.is_complex:
        numbers = numbers + 1j * (numbers.flip(2) - 1)
    numbers = (numbers * 4 if kind == "avg" else numbers).to(dtype)
    if kind in ("max", "min") and dtype.is_floating_point and dtype.itemsize > 1:
        for rank in range(4):
            numbers[rank, rank, 0] = math.nan  # on one rank, a different one in each row
            numbers[rank, 4, rank % 3] = (-1) ** rank * math.inf
        numbers[:, 0, 3] = torch.tensor([-5.5, -2.0, -3.0, -7.0]).to(dtype)
    return numbers


def single_device(kind: str, given: torch.Tensor) -> torch.Tensor:
    addends_ = wide(given)
    return ((SINGLE["sum"](addends_) / len(given)) if kind == "avg" else SINGLE[kind](addends_)).to(given.dtype)


def same(ours: torch.Tensor, wanted: torch.Tensor) -> bool:
    if ours.dtype is torch.bool and bool((ours.view(torch.uint8) > 1).any()):
        return False  # other bytes than 0 and 1
    if (ours.dtype, ours.shape) != (wanted.dtype, wanted.shape):
        return False
    ours, wanted = (x.double() if x.dtype.is_floating_point else x for x in (ours, wanted))
    return (
        torch.equal(ours, wanted)
        if not ours.is_floating_point()
        else torch.allclose(ours, wanted, rtol=0, atol=0, equal_nan=True)
    )


def test_every_cell() -> None:
    """All reductions and moves of all dtypes, in one launch."""
    cells = []
    for name, kind in REDUCED:
        dtype = DTYPES[name]
        given = values(dtype, kind, (5, 4))
        for target in TARGETS:
            cells.append(
                (
                    f"{name} {kind} to {target}",
                    case(type_of(dtype, "[5 4]", f" +{kind}:tp"), type_of(dtype, target), given),
                )
            )
        _, (whole, *_) = cells[-len(TARGETS)][1]
        assert same(whole, single_device(kind, given)), (name, kind, "simulated", whole)
    for name, dtype in DTYPES.items():
        for before, after in MOVES:
            shape = read(f"f32{before}", ON).shape
            cells.append(
                (
                    f"{name} {before} to {after}",
                    case(type_of(dtype, before), type_of(dtype, after), values(dtype, "", shape)),
                )
            )
    found = ranks(4).run(exchanges.run_lowered, [given for _, (given, _) in cells])
    failed = [
        (cell, rank, found[rank][k], wanted[rank])
        for k, (cell, (_, wanted)) in enumerate(cells)
        for rank in range(4)
        if not same(found[rank][k], wanted[rank])
    ]
    assert not failed, failed[:3]


WHY = {
    "avg": "an average of torch.{0} is no torch.{0}; only floating point is averaged",
    "c": "complex numbers have no {1}",
    "u": "torch finds no {1} of torch.{0}; cast the value first",
}


@pytest.mark.parametrize(("name", "kind"), REFUSED, ids=str)
def test_what_no_dtype_has_is_refused_when_it_is_planned(name: str, kind: str) -> None:
    dtype = DTYPES[name]
    why = WHY["avg" if kind == "avg" else name[0]].format(str(dtype).removeprefix("torch."), kind)
    with pytest.raises(TransitionError) as error:
        transitions(type_of(dtype, "[5 4]", f" +{kind}:tp"), type_of(dtype, "[5 4]"))
    assert str(error.value) == f"no transfers lead from {name}[5 4] +{kind}:tp to {name}[5 4]: {why}"
    text = (
        f"program explicit on {ON}\n  x : {name}[5 4] +{kind}:tp = input\nforward:\n  y : {name}[5 4] = "
        f"all_reduce(x, tp, op={kind})\n  return y\n"
    )
    with pytest.raises(Exception, match=why.replace(".", r"\.")):
        Program.parse(text).verify()


def test_a_sum_of_addends_that_wrap_a_byte() -> None:
    """Bools of a byte: as many addends as a byte has values are still true."""
    from autopar.runtime.lowering.reduction import Reduction

    assert Reduction.of("sum", torch.bool, 256) == Reduction("max") and Reduction.of(
        "prod", torch.bool, 256
    ) == Reduction("min")
    assert addends(type_of(torch.bool, "[5 4]", " +tp"), torch.ones(4, 5, 4, dtype=torch.bool))[0].all()
