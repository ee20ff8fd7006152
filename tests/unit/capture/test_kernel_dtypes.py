"""Capture refuses the dtypes that eager refuses, with eager's words and the model's line."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from autopar.capture import capture
from autopar.capture.kernel_dtypes import SMALLEST, _try

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64)
INDEX = torch.arange(4)

Call = Callable[[Callable[..., torch.Tensor], Callable[..., torch.Tensor]], torch.Tensor]
CALLS: dict[str, Call] = {  # of tensors of one dtype and of another
    "linear": lambda a, b: F.linear(a(4, 4), b(4, 4), b(4)),
    "linear without bias": lambda a, b: F.linear(a(2, 4, 4), b(4, 4)),
    "bias": lambda a, b: F.linear(a(4, 4), a(4, 4), b(4)),
    "matmul": lambda a, b: a(2, 4, 4) @ b(4, 4),
    "bmm": lambda a, b: a(2, 4, 4) @ b(2, 4, 4),
    "mv": lambda a, b: a(4, 4) @ b(4),
    "addmm": lambda a, b: torch.addmm(b(4), a(4, 4), b(4, 4)),
    "einsum": lambda a, b: torch.einsum("ij,jk->ik", a(4, 4), b(4, 4)),
    "conv2d": lambda a, b: F.conv2d(a(1, 2, 8, 8), b(2, 2, 3, 3), b(2)),
    "conv1d": lambda a, b: F.conv1d(a(1, 2, 8), b(2, 2, 3)),
    "layer_norm": lambda a, b: F.layer_norm(a(4, 4), (4,), b(4), b(4)),
    "group_norm": lambda a, b: F.group_norm(a(4, 4), 2, b(4), b(4)),
    "batch_norm": lambda a, b: F.batch_norm(a(4, 4), b(4), b(4), b(4), b(4), training=True),
    "cdist": lambda a, b: torch.cdist(a(4, 4), b(4, 4)),
    "binary_cross_entropy": lambda a, b: F.binary_cross_entropy(b(4, 4), a(4, 4)),
    "binary_cross_entropy_with_logits": lambda a, b: F.binary_cross_entropy_with_logits(b(4, 4), a(4, 4)),
    "cross_entropy": lambda a, b: F.cross_entropy(b(4, 4), a(4)),
    "index_add": lambda a, b: b(4, 4).index_add(0, INDEX, a(4, 4)),
    "index_copy": lambda a, b: b(4, 4).index_copy(0, INDEX, a(4, 4)),
    "index_put": lambda a, b: b(4, 4).index_put((INDEX,), a(4, 4)),
    "gelu": lambda a, b: F.gelu(a(4, 4)),
    "softmax": lambda a, b: F.softmax(a(4, 4), -1),
}


class Called(torch.nn.Module):
    def __init__(self, call: Call, *dtypes: torch.dtype) -> None:
        super().__init__()
        self.call, self.dtypes = call, dtypes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, other = (lambda *shape, d=d: torch.ones(shape, dtype=d) for d in self.dtypes)
        return self.call(one, other)


def _raised(run: Callable[[], object]) -> str | None:
    try:
        run()
    except (RuntimeError, NotImplementedError) as error:
        return str(error).partition("\n")[0]
    return None


@pytest.mark.parametrize("name", CALLS)
def test_capture_refuses_exactly_the_dtypes_that_eager_refuses(name: str) -> None:
    for pair in itertools.product(DTYPES, repeat=2):
        model, x = Called(CALLS[name], *pair), torch.ones(1)
        eager, captured = _raised(partial(model, x)), _raised(partial(capture, model, (x,)))
        assert (eager is None) == (captured is None), f"{pair}: eager: {eager}; capture: {captured}"


@pytest.mark.parametrize("op", SMALLEST)
def test_each_smallest_call_runs_in_a_dtype_that_its_op_takes(op: str) -> None:
    overload = getattr(getattr(torch.ops.aten, op.split(".")[1]), op.split(".")[2])
    classes = op == "aten.nll_loss_forward.default"
    for dtype in (torch.float32, torch.float64):
        _try(overload, tuple(torch.int64 if classes and k == 1 else dtype for k, _ in enumerate(SMALLEST[op])))


def test_the_error_on_meta_is_eagers_and_names_the_line() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4)).to("meta")
    with pytest.raises(RuntimeError, match="mat1 and mat2 must have the same dtype, but got Long and Float") as caught:
        capture(model, (torch.empty(2, 4, dtype=torch.int64, device="meta"),))
    assert any("test_kernel_dtypes.py" in note and "in module 0" in note for note in caught.value.__notes__)
