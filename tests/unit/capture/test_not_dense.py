"""Tensors that are not dense, and operators that take functions: refused with the name or the line, and the remedy."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable

import pytest
import torch
from refusals import Apply, x
from torch import nn
from torch._higher_order_ops.map import map as map_of
from torch._higher_order_ops.scan import scan

import autopar
from autopar import CaptureError, Mesh
from autopar.capture.explained import EXPLAINED
from autopar.ir.dense import REMEDIES

MESH = Mesh(dp=2)
NESTED, SPARSE, QUANTIZED = REMEDIES["nested"], REMEDIES["sparse"], REMEDIES["quantized"]


def nested(layout: torch.layout) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)


TENSORS: dict[str, tuple[Callable[[], torch.Tensor], str]] = {
    "nested": (lambda: nested(torch.strided), NESTED),
    "nested, jagged": (lambda: nested(torch.jagged), NESTED),
    "sparse_coo": (lambda: torch.eye(4).to_sparse(), SPARSE),
    "sparse_csr": (lambda: torch.eye(4).to_sparse_csr(), SPARSE),
    "quantized": (lambda: torch.quantize_per_tensor(torch.eye(4), 0.1, 0, torch.qint8), QUANTIZED),
}


@pytest.fixture(autouse=True)
def torchs_own_warnings() -> object:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of prototypes, and of what is to be removed
        yield


@pytest.mark.parametrize("kind", TENSORS)
def test_arguments_buffers_parameters_and_attributes(kind: str) -> None:
    make, remedy = TENSORS[kind]
    name = kind.partition(",")[0]
    model = Apply(torch.tanh)
    with pytest.raises(
        CaptureError, match=f"^argument x is a {name} tensor, which has no pieces\n  {re.escape(remedy)}$"
    ):
        autopar.parallelize(model, MESH).capture(make())
    model.register_buffer("table", make())
    with pytest.raises(
        CaptureError, match=f"^the buffer table is a {name} tensor, which has no pieces\n  {re.escape(remedy)}$"
    ):
        autopar.parallelize(model, MESH)
    kept = make()
    with pytest.raises(
        CaptureError,
        match=f"a {name.partition('_')[0]} tensor, which has no pieces\n    test_not_dense.py:.*\n  "
        f"{re.escape(remedy)}$",
    ):
        autopar.parallelize(Apply(lambda x: x + kept.clone().sum()), MESH, "ddp", example=(x,))


def test_a_parameter() -> None:
    model = Apply(torch.tanh)
    model.table = nn.Parameter(torch.eye(4).to_sparse())
    with pytest.raises(
        CaptureError, match=f"^the parameter table is a sparse_coo tensor, which has no pieces\n  {re.escape(SPARSE)}$"
    ):
        autopar.parallelize(model, MESH)


MADE: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "nested_tensor": (lambda x: torch.nested.nested_tensor([x[0], x[1, :2]]).to_padded_tensor(0.0), NESTED),
    "as_nested_tensor": (lambda x: torch.nested.as_nested_tensor([x[0], x[1, :2]]).to_padded_tensor(0.0), NESTED),
    "jagged": (
        lambda x: torch.nested.as_nested_tensor([x[0], x[1, :2]], layout=torch.jagged).to_padded_tensor(0.0),
        NESTED,
    ),
    "from_jagged": (
        lambda x: torch.nested.nested_tensor_from_jagged(x, torch.tensor([0, 2, 8])).to_padded_tensor(0.0),
        NESTED,
    ),
    "to_sparse": (lambda x: x.to_sparse().to_dense(), SPARSE),
    "to_sparse_csr": (lambda x: x.to_sparse_csr().to_dense(), SPARSE),
    "quantize": (lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8).dequantize(), QUANTIZED),
    "to_mkldnn": (lambda x: x.to_mkldnn().to_dense(), REMEDIES["mkldnn"]),
}


@pytest.mark.parametrize("function", MADE)
def test_made_in_forward(function: str) -> None:
    make, remedy = MADE[function]
    with pytest.raises(
        CaptureError,
        match=f"which has no pieces\n    test_not_dense.py:.*{function.removeprefix('as_')}.*\n  {re.escape(remedy)}$",
    ):
        autopar.parallelize(Apply(make), MESH, "ddp", example=(x,))


def test_what_rounds_as_a_quantized_tensor_is_captured() -> None:
    model = Apply(lambda x: torch.fake_quantize_per_tensor_affine(x, 0.1, 0, -128, 127))
    assert torch.equal(autopar.parallelize(model, MESH, "ddp", example=(x,)).simulate(x), model(x))


TAKING_FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "cond ": lambda x: torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,)),
    "while_loop": lambda x: torch._higher_order_ops.while_loop(lambda x: x.sum() < 10, lambda x: (x + 1,), (x,))[0],
    "scan ": lambda x: scan(lambda carry, row: (carry + row, carry * row), torch.zeros(8), x)[1],
    "map_impl ": lambda x: map_of(lambda row: row * 2, x),
}


@pytest.mark.simulated
@pytest.mark.parametrize("name", TAKING_FUNCTIONS)
def test_operators_that_take_functions(name: str) -> None:
    _, what, remedy = next(row for row in EXPLAINED if row[0] == f"HigherOrderOperator {name}")
    with pytest.raises(CaptureError) as caught:
        autopar.parallelize(Apply(TAKING_FUNCTIONS[name]), MESH, "ddp", example=(x,))
    first, line, last = str(caught.value).splitlines()
    assert (first, last) == (what, f"  {remedy}")
    assert line.startswith("    test_not_dense.py:") and line.endswith("in module the root")


def test_cond_on_a_python_value_is_captured() -> None:
    model = Apply(lambda x: torch.cond(len(x) > 2, torch.tanh, torch.sin, (x,)))
    assert torch.equal(autopar.parallelize(model, MESH, "ddp", example=(x,)).simulate(x), model(x))
