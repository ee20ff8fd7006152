"""Errors that begin in torch or in the model, and say where in the model."""

from __future__ import annotations

import functools
import logging
import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from presets import preset_of
from refusals import Apply, x
from torch import nn
from torch.nn.functional import one_hot

import autopar
from autopar import CaptureError, Mesh
from autopar.capture import capture
from autopar.capture.explained import EXPLAINED


@torch.library.custom_op("test_explained::shapeless", mutates_args=())
def shapeless(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@torch.library.custom_op("test_explained::doubles", mutates_args=("x",))
def doubles(x: torch.Tensor) -> None:
    x.mul_(2)


def doubled(x: torch.Tensor) -> torch.Tensor:
    x = x.detach().clone()
    doubles(x)
    return x


def written_over(x: torch.Tensor) -> torch.Tensor:
    y = x.exp()
    return y.mul_(2) + y.sin()


def experts(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.grouped_mm(x, torch.zeros(1, 8, 8), offs=torch.tensor([len(x)], dtype=torch.int32))


def selective(x: torch.Tensor) -> torch.Tensor:
    kept = functools.partial(torch.utils.checkpoint.create_selective_checkpoint_contexts, [torch.ops.aten.tanh.default])
    return torch.utils.checkpoint.checkpoint(
        lambda x: torch.tanh(x).mul_(2) * x, x, use_reentrant=False, context_fn=kept
    )


CASES = {
    "cached during selective activation checkpoint has been mutated": selective,
    "use_reentrant": lambda x: torch.utils.checkpoint.checkpoint(torch.tanh, x, use_reentrant=True),
    "modified by an inplace operation": written_over,
    ".numpy() is not supported": lambda x: x * float(x.detach().numpy().sum()),
    "data is not allocated yet": lambda x: x * torch.tensor([x.detach().sum(), 1.0])[0],
    "no fake impl registered": shapeless,
    "output has alias annotations": doubled,
}
if torch.__version__ < "2.14":  # then it takes float32
    CASES["Expected inputs of BF16 type"] = experts


@pytest.mark.parametrize("piece", CASES)
def test_errors_of_torch_in_the_users_words(piece: str) -> None:
    (_, what, remedy), *_ = (row for row in EXPLAINED if row[0] == piece)
    with pytest.raises(CaptureError) as caught:
        autopar.parallelize(Apply(CASES[piece]), Mesh(dp=2), "ddp", example=(torch.randn(4, 8, requires_grad=True),))
    first, line, last = str(caught.value).splitlines()
    assert (first, last) == (what, f"  {remedy}")
    assert re.search(r"(test_explained|refusals)\.py:", line)  # of what is called in the model, or the model


@pytest.mark.parametrize(
    ("function", "remedy"),
    [
        (
            lambda x: x * torch.cov(x).sum(),
            "  write it as a product of the centred rows, which are the rows minus their means, divided by their "
            "length minus the correction",
        ),
        (
            lambda x: torch.nn.functional.ctc_loss(x.log_softmax(1)[:, None], torch.ones(1, 2).long(), (4,), (2,)),
            "  return its inputs from forward, and compute the loss afterwards",
        ),
        (lambda x: x * int(x.sum()), "  keep the choice inside the graph with torch.where, or move it out of forward"),
    ],
)
def test_values_that_are_read(function: Callable[[torch.Tensor], torch.Tensor], remedy: str) -> None:
    with pytest.raises(CaptureError, match="the step depends on the values of its tensors") as caught:
        autopar.parallelize(Apply(function), Mesh(dp=2), "ddp", example=(torch.randn(4, 8),))
    assert str(caught.value).splitlines()[-1] == remedy


@pytest.mark.parametrize("mesh", [Mesh(dp=2), Mesh(tp=2)])
def test_sparse_gradients(mesh: Mesh) -> None:
    model = nn.Embedding(8, 4, sparse=True)
    with pytest.raises(
        CaptureError,
        match=r"makes a sparse tensor, which has no pieces\n.*\n  make it dense: .* sparse=False in an embedding",
    ):
        autopar.parallelize(model, mesh, preset_of(mesh.names), example=(torch.arange(4),))
    with torch.no_grad():
        autopar.parallelize(model, mesh, preset_of(mesh.names), example=(torch.arange(4),))


def test_an_assignment_to_data() -> None:
    """Of a buffer, a parameter or a value: what no op does is in no graph."""

    def assign(x: torch.Tensor) -> torch.Tensor:
        x.data = x.data * 2
        return x

    with pytest.raises(
        CaptureError,
        match=r"forward assigns to \.data, .*\n    test_explained.py:\d+  x.data = x.data \* 2\n  give the value "
        r"another",
    ):
        autopar.parallelize(Apply(assign), Mesh(dp=2), "ddp", example=(x,))
    y = x.clone()
    y.data = torch.zeros(2)
    assert y.shape == (2,) and "data" not in vars(torch.Tensor)


class Copying(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        middle = y.detach().mean(0)
        with torch.no_grad():
            self.layer.bias[:4].copy_(middle[:4])
        return y


def test_a_write_is_told_where_it_is() -> None:
    with pytest.raises(
        CaptureError,
        match=r"writes into the parameter layer.bias, .*\n    test_explained.py:\d+  "
        r"self.layer.bias\[:4\].copy_\(middle\[:4\]\)",
    ):
        autopar.parallelize(Copying(), Mesh(dp=2), "ddp", example=(x,))


def test_a_step_in_a_checkpoint() -> None:
    """It is captured again in the backward, inside of what captures."""
    parallel = autopar.parallelize(nn.Linear(8, 8), Mesh(dp=2))
    y = torch.utils.checkpoint.checkpoint(parallel.simulate, x, use_reentrant=False)
    y.sum().backward()
    torch.testing.assert_close(y, parallel.module(x))
    assert parallel.module.weight.grad is not None


def test_a_capture_under_anomaly_detection() -> None:
    """It looks at the values of gradients, of which a capture has none."""
    parallel = autopar.parallelize(nn.Linear(8, 8), Mesh(dp=2))
    with pytest.warns(UserWarning, match="Anomaly Detection"), torch.autograd.detect_anomaly():
        parallel.simulate(x).sum().backward()
    assert parallel.module.weight.grad is not None


class Imported(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return one_hot(x, 4)


class Named(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.one_hot(x, 4)


@pytest.mark.parametrize("model", [Imported(), Named()], ids=["imported", "named"])
@pytest.mark.parametrize("wrong", [-1, 4])
def test_classes_that_are_none(model: nn.Module, wrong: int) -> None:
    """On fake tensors ``one_hot`` does not look, and would give rows of zeros."""
    right = torch.tensor([0, 3, 1, 2])
    parallel = autopar.parallelize(model, Mesh(dp=2), "ddp", example=(right,))
    assert torch.equal(parallel.simulate(right), one_hot(right, 4))
    with pytest.raises(
        RuntimeError, match="class values are not all between 0 and 3, as one_hot of 4 classes needs them"
    ):
        parallel.simulate(torch.tensor([0, wrong, 1, 2]))
    with pytest.raises(RuntimeError, match="Class values must be"):  # it is torch's own again
        model(torch.tensor([0, wrong, 1, 2]))


@pytest.mark.skipif(sys.version_info < (3, 11), reason="errors take notes from 3.11 on")
def test_an_error_of_the_models_own_says_where_it_comes_from() -> None:
    with pytest.raises(RuntimeError) as caught:
        autopar.parallelize(nn.Sequential(nn.Linear(8, 8), nn.Linear(9, 4)), Mesh(dp=2), "ddp", example=(x,))
    (note,) = caught.value.__notes__
    assert note.startswith("while autopar captured the step, at\n") and note.endswith("in module 1")


class Loss(nn.Module):
    """A linear layer, and a loss of what it makes."""

    def __init__(self, loss: Any) -> None:
        super().__init__()
        self.linear, self.loss = nn.Linear(8, 4), loss

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = self.linear(x)
        return self.loss(z, y)


def straight(z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(z, y)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="errors take notes from 3.11 on")
@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize(
    ("loss", "target", "message", "line", "module"),
    [
        (
            straight,
            torch.randn(6, 3),
            "must match the size of tensor b (3)",
            "return nn.functional.mse_loss(z, y)",
            "the root",
        ),
        (nn.MSELoss(), torch.randn(6, 3), "must match the size of tensor b (3)", "return self.loss(z, y)", "loss"),
        (nn.BCEWithLogitsLoss(), torch.rand(6, 3), "must be the same as input size", "return self.loss(z, y)", "loss"),
        (
            nn.CrossEntropyLoss(),
            torch.zeros(5, dtype=torch.int64),
            "Expected input batch_size (6) to match target batch_size (5)",
            "return self.loss(z, y)",
            "loss",
        ),
    ],
    ids=["function", "mse", "bce", "cross-entropy"],
)
@pytest.mark.parametrize("step", [False, True], ids=["call", "step"])
def test_a_target_of_a_wrong_shape(
    loss: Any, target: torch.Tensor, message: str, line: str, module: str, step: bool
) -> None:
    """torch refuses it before it calls an op: the line is that of the loss, and not of the op before."""
    parallel = autopar.parallelize(Loss(loss), Mesh(dp=2), "ddp")
    with pytest.raises((RuntimeError, ValueError), match=re.escape(message)) as caught:
        if step:
            parallel.train_step(torch.optim.SGD(parallel.parameters(), lr=0.1)).simulate(torch.randn(6, 8), target)
        else:
            parallel.simulate(torch.randn(6, 8), target)
    (note,) = caught.value.__notes__
    first, second = note.splitlines()
    assert first == "while autopar captured the step, at"
    assert second.startswith("    test_explained.py:") and second.endswith(f"  {line}   in module {module}")


def test_an_error_of_the_model_is_not_logged_too(capfd: pytest.CaptureFixture[str]) -> None:
    """torch's fake tensors log the stack of an op that fails; other records of the logger are kept."""

    class Mismatch(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            logging.getLogger("torch._subclasses.fake_tensor").error("kept")
            return x @ torch.ones(5, 5)

    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    logger.addHandler(handler)
    filters = list(logger.filters)
    try:
        with pytest.raises(RuntimeError, match="same reduction dim"):
            capture(Mismatch(), (torch.ones(4, 4),))
    finally:
        logger.removeHandler(handler)
    assert records == ["kept"] and logger.filters == filters
    assert "failed while" not in capfd.readouterr().err
