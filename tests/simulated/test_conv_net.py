"""Convolutional nets: batch norm over a split batch, pooling, groups, residuals; several steps, then eval."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conv_net import Net, Residual
from equality import TOLERANCE, check_equal, loss_of, relative
from shared_captures import shared_captures  # noqa: F401
from torch import nn

import autopar
from autopar import CaptureError, Mesh
from autopar.capture import capture
from autopar.capture.decompose import batch_norm
from autopar.ir.nodes import record_of

d = torch.float64


def check_steps(model: nn.Module, mesh: Mesh, plan: Any, *shape: int, steps: int = 2, ends: bool = True) -> None:
    """Steps of descent, then one of eval where it ``ends`` so: outputs, every gradient, every buffer after each."""
    eager, parallel = copy.deepcopy(model), autopar.parallelize(model, mesh, plan)
    torch.manual_seed(0)
    for step in range(steps + ends):
        x = torch.randn(shape, dtype=d)
        if step == steps:
            model.eval(), eager.eval()
        given = []
        for run in (eager, parallel.simulate):
            own = x.clone().requires_grad_()
            out = run(own)
            loss_of(out).backward()
            given.append((out, own.grad))
        assert all(relative(b, a) <= TOLERANCE for a, b in zip(*given, strict=True)), step
        for (name, ours), theirs in zip(model.named_parameters(), eager.parameters(), strict=True):
            assert (
                ours.grad is not None and theirs.grad is not None and relative(ours.grad, theirs.grad) <= TOLERANCE
            ), (step, name)
        for (name, ours), theirs in zip(model.named_buffers(), eager.buffers(), strict=True):
            assert relative(ours, theirs) <= TOLERANCE, (step, name)
        with torch.no_grad():
            for parameter in [*model.parameters(), *eager.parameters()]:
                parameter -= 1e-3 * parameter.grad / parameter.grad.abs().max()
                parameter.grad = None


COLUMN = {"*.conv.weight": ("tp", None)}
PAIR = {
    **COLUMN,
    "*.norm.weight": ("tp",),
    "*.norm.bias": ("tp",),
    "*.norm.running_*": ("tp",),
    "*.row.weight": (None, "tp"),
}
PLANS: dict[str, tuple[Mesh, Any]] = {
    "2": (Mesh(dp=2), None),
    "4": (Mesh(dp=4), None),
    "column-row": (Mesh(dp=2, tp=2), PAIR),
    "row": (Mesh(tp=2), {"*.conv.weight": (None, "tp"), "*.row.weight": (None, "tp")}),
    "2x2x2": (Mesh(dp=2, cp=2, tp=2), {**COLUMN, "x": (("dp", "cp"), None)}),
}


@functools.cache
def net() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A net, and the values that it begins with."""
    torch.manual_seed(0)
    model = Net().double()
    return model, copy.deepcopy(model.state_dict())


@pytest.mark.usefixtures("shared_captures")
@pytest.mark.parametrize(("mesh", "plan"), PLANS.values(), ids=PLANS)
def test_a_small_resnet_learns_as_on_one_device(mesh: Mesh, plan: Any) -> None:
    """A batch of 7, which comes apart unevenly."""
    model, begin = net()
    model.load_state_dict(begin)
    model.train().zero_grad()
    check_steps(model, mesh, plan, 7, 3, 8, 8, steps=3, ends=plan is None or plan is PAIR)


def test_a_column_row_pair_of_convolutions_has_one_reduction_each_way() -> None:
    """The channels between stay split, through batch norm too, which then speaks over the batch's axis only."""
    program = check_equal(Residual(4, 4).double(), Mesh(dp=2, tp=2), PAIR, (torch.randn(4, 4, 4, 4, dtype=d),)).program
    forward = [n for n in program.nodes if str(n.name).endswith("_tp") and record_of(n).phase == "forward"]
    assert [record_of(n).module for n in forward] == ["row"], "the sum over the channels in between"


NORMS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "1d": (lambda: nn.BatchNorm1d(4), (6, 4)),
    "1d with places": (lambda: nn.BatchNorm1d(4), (6, 4, 3)),
    "3d": (lambda: nn.BatchNorm3d(4, momentum=0.4), (6, 4, 2, 1, 3)),
    "no weight": (lambda: nn.BatchNorm2d(4, affine=False), (6, 4, 2, 3)),
    "no running statistics": (lambda: nn.BatchNorm2d(4, track_running_stats=False), (6, 4, 2, 3)),
    "neither": (lambda: nn.BatchNorm2d(4, affine=False, track_running_stats=False), (6, 4, 2, 3)),
    "instance norm": (lambda: nn.InstanceNorm2d(4, affine=True), (6, 4, 2, 3)),
    "instance norm with statistics": (
        lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
        (6, 4, 2, 3),
    ),
    "group norm": (lambda: nn.GroupNorm(2, 4), (6, 4, 2, 3)),
    "group norm without weight": (lambda: nn.GroupNorm(2, 4, affine=False), (6, 4, 3)),
}


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        *((name, Mesh(dp=2, tp=2)) for name in NORMS),
        *((name, Mesh(dp=4)) for name in ("1d", "neither", "instance norm with statistics", "group norm")),
        *(
            pytest.param(name, Mesh(dp=4), marks=pytest.mark.sweep("a rank without a piece is there for each kind"))
            for name in NORMS
            if name not in ("1d", "neither", "instance norm with statistics", "group norm")
        ),
    ],
    ids=str,
)
def test_norms(name: str, mesh: Mesh) -> None:
    """A batch of 6 leaves the last of 4 ranks without a piece; over 2x2 the channels are split too."""
    make, shape = NORMS[name]
    torch.manual_seed(0)
    check_steps(make().double(), mesh, {"input": ("dp", "tp")} if "tp" in mesh.names else None, *shape)


class First(nn.Module):
    """A layer of the batch as it comes."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


IMAGE = (5, 4, 6, 6)
LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "conv1d": (lambda: nn.Conv1d(4, 6, 3, stride=2), (5, 4, 7)),
    "conv3d": (lambda: nn.Conv3d(4, 6, 2), (5, 4, 3, 3, 3)),
    "groups": (lambda: nn.Conv2d(4, 6, 3, groups=2), IMAGE),
    "depthwise": (lambda: nn.Conv2d(4, 8, 3, groups=4, bias=False), IMAGE),
    "dilated": (lambda: nn.Conv2d(4, 6, (3, 2), dilation=2, padding="same"), IMAGE),
    "reflected": (lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"), IMAGE),
    "circular": (lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="circular"), IMAGE),
    "transposed": (lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, output_padding=1), IMAGE),
    "transposed groups": (lambda: nn.ConvTranspose2d(4, 6, 3, groups=2), IMAGE),
    "one image": (lambda: nn.Conv2d(4, 6, 3), IMAGE[1:]),
    "max": (lambda: nn.MaxPool2d(2), IMAGE),
    "max 1d": (lambda: nn.MaxPool1d(2), IMAGE[:3]),
    "max 3d": (lambda: nn.MaxPool3d(2), (5, 4, 4, 4, 2)),
    "average": (lambda: nn.AvgPool2d(3, 2, 1), IMAGE),
    "average 3d": (lambda: nn.AvgPool3d(2), (5, 4, 4, 4, 2)),
    "adaptive average": (lambda: nn.AdaptiveAvgPool2d(4), IMAGE),
    "adaptive average to one": (lambda: nn.AdaptiveAvgPool2d(1), IMAGE),
    "adaptive max": (lambda: nn.AdaptiveMaxPool2d(4), IMAGE),
    "nearest": (lambda: nn.Upsample(scale_factor=2), IMAGE),
    "bilinear": (lambda: nn.Upsample(scale_factor=2, mode="bilinear"), IMAGE),
    "pixels": (lambda: nn.Sequential(nn.PixelShuffle(2), nn.PixelUnshuffle(3)), (5, 8, 3, 3)),
    "channel shuffle": (lambda: nn.ChannelShuffle(2), IMAGE),
    "unfold": (lambda: nn.Sequential(nn.Unfold(2, stride=2), nn.Fold(6, 2, stride=2)), IMAGE),
    "padded": (lambda: nn.Sequential(nn.ZeroPad2d(1), nn.ReplicationPad2d((1, 0, 2, 0))), IMAGE),
    "local response": (lambda: nn.LocalResponseNorm(3), IMAGE),
}
SPLITS: dict[str, dict[str, Any]] = {
    "channels": {"x": ("dp", "tp")},  # of layers that have no weight
    "column": {"layer.weight": ("tp",)},
    "row": {"layer.weight": (None, "tp")},
}
CASES = [
    (name, split)
    for name, (make, _) in LAYERS.items()
    for split in SPLITS
    if hasattr(make(), "weight") != (split == "channels")
]


@pytest.mark.parametrize(("name", "split"), CASES, ids=[f"{name}, {split}" for name, split in CASES])
def test_layers(name: str, split: str) -> None:
    torch.manual_seed(0)
    make, shape = LAYERS[name]
    check_equal(
        First(make()).double(), Mesh(dp=2, tp=2), SPLITS[split], (torch.randn(shape, dtype=d).requires_grad_(),)
    )


@pytest.mark.parametrize(
    "layer",
    [nn.GroupNorm(2, 4), nn.Conv2d(4, 3, 2, groups=1), nn.BatchNorm2d(4)],
    ids=lambda layer: type(layer).__name__,
)
def test_an_input_that_needs_no_gradient(layer: nn.Module) -> None:
    """Those of the weights come without the input's."""
    torch.manual_seed(0)
    check_equal(First(copy.deepcopy(layer)).double(), Mesh(dp=2), None, (torch.randn(IMAGE, dtype=d),))


def test_split_channels_in_need_no_gathering_for_the_gradient_of_the_bias() -> None:
    """That is a sum of its own: what a rank has of the channels does not matter to it."""
    x = torch.randn(IMAGE, dtype=d, requires_grad=True)
    parallel = check_equal(
        nn.Conv2d(4, 6, 3).double(), Mesh(tp=2), {"weight": (None, "tp"), "input": (None, "tp")}, (x,)
    )
    assert "all_gather" not in str(parallel.program)


def test_running_a_captured_step_changes_no_input() -> None:
    """``native_batch_norm`` would write its running statistics, without saying so."""
    program = capture(nn.BatchNorm2d(4).double(), (torch.randn(6, 4, 2, 3, dtype=d),)).program
    values = {n: torch.rand([*record_of(n).type.shape]).to(record_of(n).type.dtype) for n in program.placeholders}
    kept = [v.clone() for v in values.values()]
    torch.fx.Interpreter(torch.fx.GraphModule({}, program.graph), garbage_collect_values=False).run(*values.values())
    assert all(torch.equal(a, b) for a, b in zip(values.values(), kept, strict=True))
    assert "batch_norm" not in str(program) and str(program).count("= state(") == 3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_statistics_of_halves_are_taken_in_float32(dtype: torch.dtype, training: bool) -> None:
    """Of 4096 numbers around 100, whose sum float16 does not hold, and bfloat16 to two digits."""
    x = (100 + torch.randn(64, 2, 8, 8)).to(dtype)
    weight, bias, mean, var = torch.ones(2), torch.zeros(2), torch.full((2,), 100.0), torch.ones(2)
    gradient = torch.randn(x.shape).to(dtype)
    own = [mean.clone(), var.clone()]
    have = batch_norm.batch_norm(x, weight, bias, *own, training, 0.1, 1e-5)
    wanted = torch.native_batch_norm(x, weight, bias, mean, var, training, 0.1, 1e-5)
    assert have[0].dtype == dtype and have[1].dtype == torch.float32
    for ours, theirs in zip((*have, *own), (*wanted, mean, var), strict=True):
        torch.testing.assert_close(
            ours,
            theirs,
            rtol=2 * torch.finfo(ours.dtype).eps if ours is have[0] else 1e-4,
            atol=2e-3 * (ours is have[0]),
            check_dtype=False,
        )
    rest = (gradient, x, weight, mean, var, wanted[1], wanted[2], training, 1e-5, [True] * 3)
    exact = torch.ops.aten.native_batch_norm_backward(*[v.double() if isinstance(v, torch.Tensor) else v for v in rest])
    for ours, theirs in zip(batch_norm.batch_norm_backward(*rest), exact, strict=True):
        torch.testing.assert_close(
            ours.double(), theirs, rtol=torch.finfo(ours.dtype).eps * (1 if ours.dtype == dtype else 1e4), atol=1e-3
        )


def test_a_cumulative_average_reads_a_buffer_and_is_refused() -> None:
    """With ``momentum=None`` torch divides by how many batches there were, as a number of Python's."""
    with pytest.raises(CaptureError, match=r"depends on the values of its tensors"):
        autopar.parallelize(nn.BatchNorm2d(4, momentum=None), Mesh(dp=2), "ddp", example=(torch.randn(6, 4, 2, 2),))
