"""What forward decides by the values of tensors: kept in the graph with eager's numbers, or refused by name."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autopar
from autopar import CaptureError, Mesh
from autopar.capture import capture

Function = Callable[..., Any]


class Applied(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function, self.scale = function, nn.Parameter(torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64))

    def forward(self, *args: torch.Tensor) -> Any:
        return self.function(self.scale, *args)


def x(seed: int = 0, rows: int = 6) -> torch.Tensor:
    return torch.randn(rows, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def added(scale: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(x)
    (rows,) = torch.where(x[:, 0] > 0)
    return out.index_add_(0, rows, (x[rows] * scale).tanh())


def put(scale: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    out = x * scale
    out[x[:, 0] > 0] = out[x[:, 0] > 0].softmax(-1) * 2
    return out


def numbers_put(scale: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    out = x * scale
    rows, columns = (x > 0).nonzero(as_tuple=True)
    out[rows, columns] = 7.0
    return out


def column_of_a_table(scale: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    rows = (x[:, 0] > 0).nonzero()[:, 0]
    return torch.zeros_like(x).index_add_(0, rows, x[rows] * scale)


def looked_up(scale: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    order = x[:, 1].argsort()
    (rows,) = torch.where(x[:, 0] > 0)
    return torch.zeros_like(x).index_add_(0, rows, x[order[rows]] * scale)


def last_of_several(scale: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    out = x.clone()
    rows, columns = torch.where(x > 0)
    out[rows] = columns[:, None] * scale
    return out


def mean(scale: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return (x[x[:, 0] > 0] * scale).mean(0)


def total(scale: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return (x[x > 0] ** 2).sum() * scale


def of_classes(scale: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    labels = torch.arange(6) % 3
    kept = x[:, 0] > 0
    return F.cross_entropy((x * scale)[kept], labels[kept])


def filled(scale: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    out = torch.zeros(8, 3, dtype=x.dtype)
    out[torch.tensor([True, False, True, True, False, True, True, True]).logical_and(x[0, 0] == x[0, 0])] = x * scale
    return out


def only_if(scale: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    out = x * scale
    if x[:, 0].sum() > 0:
        out.mul_(3)
    return out


def rows_of_another_condition(scale: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The rows are found before, and count only if something else holds."""
    out = torch.zeros_like(x) * scale
    (rows,) = torch.where(x[:, 0] > 0)
    if x[:, 1].sum() > 0:
        out.index_add_(0, rows, x[rows] * scale)
    return out


def in_turns(scale: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    out = x * scale
    for row in (x[:, 0] > 0).nonzero():
        out[row] *= 2
    return out


def split(scale: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    sizes = torch.stack([(x[:, 0] > 0).sum(), (x[:, 0] <= 0).sum()]).tolist()
    positive, negative = x.split(sizes)
    return torch.cat([positive * scale, negative.tanh()])


@pytest.mark.parametrize("function", [
    added, put, numbers_put, column_of_a_table, looked_up, mean, total, of_classes, filled, only_if,
    rows_of_another_condition, in_turns, split,
])  # fmt: skip
def test_one_capture_has_eagers_numbers(function: Function) -> None:
    """Of batches with other rows, with all, with none."""
    model = Applied(function)
    parallel = autopar.parallelize(model, Mesh(dp=2), "ddp", example=(x(),))
    none, all_rows = -x().abs(), x().abs()
    for given in (x(), x(1), x(2), all_rows, none):
        model.zero_grad()
        expected = model(given)
        (wanted,) = torch.autograd.grad(expected.square().sum(), model.scale, allow_unused=True)
        found = parallel.simulate(given)
        found.square().sum().backward()
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10, equal_nan=True)
        if wanted is not None:
            torch.testing.assert_close(model.scale.grad, wanted, rtol=1e-10, atol=1e-10, equal_nan=True)
    assert parallel.captures == 1


def returned(scale: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return x[x[:, 0] > 0] * scale


def mixed(scale: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return x[x[:, 0] > 0].softmax(0).sum(0) * scale


def two_masks(scale: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return (x[x[:, 0] > 0] + x[x[:, 1] > 0]).sum(0) * scale


def counted(scale: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return scale * (x[x[:, 0] > 0].shape[0] + 1)


def doubled_in_turns(scale: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    y = x * scale
    for _ in (x[:, 0] > 0).nonzero():
        y = y * 2
    return y


def counted_in_turns(scale: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    turns = 0
    for _ in (x[:, 0] > 0).nonzero():
        turns += 1
    return x * scale * turns


def left_early(scale: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    y = x * scale
    for row in (x[:, 0] > 0).nonzero():
        y[row] += 1
        break
    return y


def returned_early(scale: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    y = x * scale
    if y.sum() > 0:
        return y + 1
    return y


def chosen(scale: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    y = x * scale
    if y.sum() > 0:
        y = y + 1
    return y


def two_in_one_test(scale: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    y = x * scale
    if y.sum() > 0 and y[0, 0] > 0:
        y.mul_(2)
    return y


def empty_has_work(scale: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    y = x * scale
    (rows,) = torch.where(y[:, 0] > 0)
    if rows.numel() == 0:
        y.mul_(2)
    return y


def kept_mean(scale: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    (rows,) = torch.where(x[:, 0] > 0)
    taken = x[rows] * scale
    return torch.zeros_like(x).index_add(0, rows, taken - taken.mean(0, keepdim=True))


def written_before_used(scale: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    y = x * scale
    (rows,) = torch.where(x[:, 0] > 0)
    taken = y[rows]
    y.mul_(2)
    return torch.zeros_like(x).index_add_(0, rows, taken)


def number(scale: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return x * scale * int(scale.sum() > 3)


def number_of_inputs(scale: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """It would differ in each batch."""
    return x * scale * x.sum().item()


RETURN = "return the mask and all rows; select them outside of forward"
ALL = "compute with all rows, and choose with torch.where"
REFUSED: dict[Function, tuple[str, str]] = {
    last_of_several: ("forward writes rows that a mask selects, perhaps several at one place", "out.index_add_"),
    returned: ("forward returns rows that a mask selects, and their number is a value", RETURN),
    mixed: ("forward computes softmax of the rows that a mask selects, and it may mix rows", "fill the other rows"),
    kept_mean: ("forward computes the mean of rows that a mask selects, with keepdim or dtype", ALL),
    two_masks: ("forward combines rows that different masks select, with add", "select them by one mask"),
    counted: ("forward computes with the number of rows that a mask selects, which is a value", ALL),
    doubled_in_turns: (
        "forward uses a tensor that is made only for some values of another tensor",
        "add to a tensor that is made before",
    ),
    counted_in_turns: (
        "forward changes the variable turns only for some values of a tensor",
        "compute both, and choose with torch.where",
    ),
    left_early: ("forward loops over positions of a mask, and may leave the loop", "loop over all positions"),
    returned_early: (
        "forward returns or breaks only for some values of a tensor",
        "with torch.where, or move it out of",
    ),
    chosen: ("forward uses a tensor that is made only for some values of another tensor", "choose with torch.where"),
    two_in_one_test: ("forward decides by several values in one test", "write one test inside of the other"),
    empty_has_work: ("forward decides by the number of rows that a mask selects", "only skips work, leave it out"),
    written_before_used: (
        "forward takes rows of a tensor that it writes into before the rows are used",
        "write into a copy, with clone()",
    ),
    number_of_inputs: ("the step depends on the values of its tensors", "x.sum().item()"),
    number: ("the step depends on the values of its tensors", "keep the choice inside the graph with torch.where"),
}


@pytest.mark.parametrize("function", REFUSED)
def test_what_has_no_such_form_is_refused(function: Function) -> None:
    with pytest.raises(CaptureError) as caught:
        capture(Applied(function), (x(),))
    problem, remedy = REFUSED[function]
    text = str(caught.value)
    assert problem in text and remedy in text and "test_values_in_graph.py:" in text


def asserted(scale: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    y = x * scale
    assert y.isnan().sum() == 0 and y.isinf().sum().item() < 1, "no numbers"
    if not torch.all(y < 100):
        raise ValueError("too large")
    return y


def test_checks_that_only_raise_are_left_out_and_told() -> None:
    captured = capture(Applied(asserted), (x(),))
    lines = [note.partition("\n    ")[2] for note in captured.notes if "leaves the check out" in note]
    assert len(lines) == 2 and "assert y.isnan()" in lines[0] and "if not torch.all(y < 100):" in lines[1]


def in_one_line(scale: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    y = x * scale
    if y.isnan().any(): raise ValueError("no numbers")  # fmt: skip  # noqa: E701
    return y


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 does not know which part of a line runs")
def test_a_check_in_one_line() -> None:
    captured = capture(Applied(in_one_line), (x(),))
    (note,) = [note for note in captured.notes if "leaves the check out" in note]
    assert "if y.isnan().any(): raise" in note


def with_mask(scale: torch.Tensor, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    if not mask.any():
        mask = None
    return x * scale if mask is None else (x * scale).masked_fill(mask[:, None], 5.0)


@pytest.mark.parametrize("masked", [True, False])
def test_a_value_of_the_inputs_is_checked_in_each_call(masked: bool) -> None:
    some, none = torch.tensor([False, True] * 3), torch.zeros(6, dtype=torch.bool)
    other = torch.tensor([True] * 6)
    model = Applied(with_mask)
    parallel = autopar.parallelize(model, Mesh(dp=2), "ddp", example=(x(), some if masked else none))
    notes = parallel.reports["capture"].notes
    (note,) = [note for note in notes if "asks for a value of the inputs or buffers" in note]
    assert note.endswith("if not mask.any():")
    for mask in (some, other) if masked else (none,):
        torch.testing.assert_close(parallel.simulate(x(1), mask), model(x(1), mask))
    said = r"captured for another answer to this line\n    test_values_in_graph\.py:\d+  if not "
    with pytest.raises(RuntimeError, match=said) as caught:
        parallel.simulate(x(), none if masked else some)
    assert not getattr(caught.value, "__notes__", ())  # the message is not repeated


def test_a_value_that_a_meta_tensor_lacks_is_refused() -> None:
    with pytest.raises(CaptureError, match="changes the variable mask only for some values of a tensor"):
        capture(Applied(with_mask), (x().to("meta"), torch.zeros(6, dtype=torch.bool, device="meta")))


def ignoring(scale: torch.Tensor, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    labels.masked_fill_(labels == -100, 0)
    return x * scale * labels[:, None]


def test_a_write_that_changes_nothing_is_checked_in_each_call() -> None:
    model, labels = Applied(ignoring), torch.arange(6)
    parallel = autopar.parallelize(model, Mesh(dp=2), "ddp", example=(x(), labels))
    torch.testing.assert_close(parallel.simulate(x(), labels + 3), model(x(), labels + 3))
    with pytest.raises(RuntimeError, match="writes into its argument"):
        parallel.simulate(x(), torch.tensor([0, 1, -100, 3, 4, 5]))
    with pytest.raises(CaptureError, match="writes into its argument"):
        capture(model, (x(), torch.tensor([0, 1, -100, 3, 4, 5])))
