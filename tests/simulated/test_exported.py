"""What ``torch.export`` makes of a model has on a mesh the numbers of the model, its names and its guards."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from exported_models import PLAN, batch, exported, gradients, net
from torch import nn

import autopar
from autopar import CaptureError, Mesh
from autopar.capture.blocks import blocks, module_paths

MESH = Mesh(dp=2, tp=2)


def check(parallel: Any, eager: nn.Module, rows: int = 8) -> None:
    """Outputs, gradients by name, and buffers are those of eager."""
    x, mask = batch(rows)
    parallel.zero_grad()
    eager.zero_grad()
    ours, theirs = parallel.simulate(x, mask=mask), eager(x, mask=mask)
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    found, expected = gradients(parallel, ours), gradients(eager, theirs)
    assert list(found) == list(expected) == [name for name, _ in eager.named_parameters()]
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(dict(parallel.named_buffers()), dict(eager.named_buffers()), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("plan", [PLAN, "fsdp+tp", "search"])
def test_numbers_and_statistics_are_those_of_the_model(plan: Any) -> None:
    model = net()
    eager = copy.deepcopy(model)
    x, mask = batch()
    parallel = autopar.parallelize(exported(model), MESH, plan, example=((x,), {"mask": mask}))
    for _ in range(2):
        check(parallel, eager)
    assert sorted(parallel.state_dict()) == sorted(eager.state_dict())


def test_a_program_that_was_loaded(tmp_path: Path) -> None:
    model, file = net(), tmp_path / "net.pt2"
    torch.export.save(exported(model), file)
    check(autopar.parallelize(torch.export.load(file), MESH, PLAN), model)


def test_sizes_are_those_of_the_export() -> None:
    model = net()
    parallel = autopar.parallelize(exported(model, dynamic=True), MESH, PLAN)
    eager = copy.deepcopy(model)
    for rows in (8, 5, 16):
        check(parallel, eager, rows)
    x, mask = batch(17)
    words = r"does not take this call: Guard failed: x.size\(\)\[0\] <= 16\n  call it with sizes in the range of its"
    with pytest.raises(CaptureError, match=words):
        parallel.simulate(x, mask=mask)


def test_static_sizes_take_only_these() -> None:
    parallel = autopar.parallelize(exported(net()), MESH, PLAN)
    x, mask = batch(6)
    for _ in range(2):
        with pytest.raises(CaptureError, match=r"Guard failed: x.size\(\)\[0\] == 8\n.*export it for more of them"):
            parallel.simulate(x, mask=mask)
    check(parallel, net())


def test_arguments_may_be_passed_by_their_names(tmp_path: Path) -> None:
    model, (x, mask) = net(), batch()
    file = tmp_path / "net.pt2"
    torch.export.save(exported(model), file)
    for program in (exported(model), torch.export.load(file)):
        parallel = autopar.parallelize(program, MESH, PLAN)
        torch.testing.assert_close(parallel.simulate(mask=mask, x=x), parallel.simulate(x, mask=mask))


def test_another_call_is_refused() -> None:
    parallel = autopar.parallelize(exported(net()), MESH, PLAN)
    with pytest.raises(CaptureError, match="does not take this call: 'NoneType' object has no attribute 'size'"):
        parallel.simulate(batch()[0], mask=None)


@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated")  # torch's own
def test_gradients_of_a_decomposed_program_are_refused() -> None:
    model = net().eval()
    x, mask = batch()
    decomposed = exported(model).run_decompositions()
    parallel = autopar.parallelize(decomposed, MESH, PLAN)
    words = r"was decomposed \(its dialect is ATEN\), and its gradients would be others than the model's"
    with pytest.raises(CaptureError, match=words):
        parallel.simulate(x, mask=mask)
    with torch.no_grad():
        torch.testing.assert_close(parallel.simulate(x, mask=mask), model(x, mask=mask), rtol=1e-10, atol=1e-12)


def test_the_mode_is_that_of_the_export() -> None:
    parallel = autopar.parallelize(exported(net()), MESH, PLAN)
    for change in (parallel.train, parallel.eval):
        with pytest.raises(
            RuntimeError, match=r"keeps the mode in which it was exported.*\n  leave them out, or export"
        ):
            change()


class Frozen(nn.Module):
    """Its norm stays in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(8, 16), nn.BatchNorm1d(16)

    def train(self, mode: bool = True) -> Frozen:
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.up(x))


def test_a_model_decides_what_train_means() -> None:
    model, (x, _) = Frozen().double().train(), batch()
    parallel = autopar.parallelize(model, MESH, {"*.up.weight": ("tp", None)})
    parallel.eval()
    parallel.train()
    assert parallel.training and not parallel.norm.training
    torch.testing.assert_close(parallel.simulate(x), copy.deepcopy(model)(x), rtol=1e-10, atol=1e-12)


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def test_modules_and_lines_are_known() -> None:
    torch.manual_seed(0)
    model = Layers().double()
    plain = copy.deepcopy(model)
    x = torch.randn(8, 8, dtype=torch.float64)
    program = torch.export.export(model, (x,), dynamic_shapes={"x": {0: torch.export.Dim.AUTO}})
    plan = {"*.0.weight": ("tp", None), "layers.0()": ("dp", None)}
    parallel = autopar.parallelize(program, MESH, plan, example=(x,))
    same = autopar.parallelize(plain, MESH, plan, example=(x,))
    assert str(parallel.program) == str(same.program)
    assert [(line.module, line.source) for line in parallel.transfers.lines] == [
        (line.module, line.source) for line in same.transfers.lines
    ]
    assert blocks(module_paths(parallel.program)) == {"layers.0", "layers.1"}
    step = parallel.train_step(torch.optim.SGD(parallel.parameters(), lr=0.1), microbatches=2, recompute="blocks")
    loss = plain(x)
    loss.backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    torch.testing.assert_close(step.simulate(x), loss.detach(), rtol=1e-10, atol=1e-12)
    for (name, ours), theirs in zip(parallel.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12, msg=name)


def test_a_program_with_a_backward_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    program = exported(net())
    monkeypatch.setattr(type(program.graph_signature), "backward_signature", object())
    with pytest.raises(CaptureError, match="has a backward already, and autopar makes one of its own"):
        autopar.parallelize(program, MESH, PLAN)
