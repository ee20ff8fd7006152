"""Where nodes come from: module path and the user's line, of the backward's nodes too; and reports that quote them."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn
from transformers_models import batch, bert, gpt2, llama

import autopar
from autopar import CaptureError, Mesh
from autopar.capture.provenance import Origin, Recorder
from autopar.ir.nodes import operands, record_of
from autopar.ir.program import Program
from autopar.torch_private import draws_random

MESH = Mesh(dp=2, tp=2)
MODELS = {"llama": lambda: llama(layers=2), "gpt2": gpt2, "bert": bert}


def known(program: Program, phase: str, paths: set[str]) -> float:
    """The share of a phase's call nodes that have a line and a path of the model."""
    records = [
        record_of(node) for node in program.nodes if node.op == "call_function" and record_of(node).phase == phase
    ]
    return sum(bool(r.source) and r.module in paths for r in records) / len(records)


@functools.cache
def captured(name: str) -> tuple[nn.Module, Program]:
    model = MODELS[name]()
    return model, autopar.parallelize(model, MESH, "ddp", example=batch()).program


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
def test_nodes_know_their_module_and_line(name: str) -> None:
    model, program = captured(name)
    paths = {path for path, _ in model.named_modules()}
    assert known(program, "forward", paths) >= 0.95
    assert known(program, "backward", paths) >= 0.95


@pytest.mark.simulated
@pytest.mark.parametrize("name", MODELS)
def test_a_gradient_comes_from_its_parameters_module(name: str) -> None:
    """Not only known, but right: the node that makes a gradient names the module that owns the parameter."""
    model, program = captured(name)
    owners: dict[str, set[str]] = {}  # a tied parameter has several, and its gradient is the sum of theirs
    first = {id(parameter): name for name, parameter in reversed(list(model.named_parameters(remove_duplicate=False)))}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(first[id(parameter)], set()).add(name.rpartition(".")[0])
    names = {node.name: record_of(node).name or node.name for node in program.placeholders}
    gradients = {
        names[result.of]: record_of(value).module
        for value, result in zip(operands(program.output), record_of(program.output).results, strict=True)
        if result.kind == "grad"
    }
    assert len(gradients) == len(owners)
    assert {name: module for name, module in gradients.items() if module not in owners[name]} == {}


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.norm = nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        with torch.no_grad():  # an op without a gradient after one with: it must not take the other's place
            scale = x.abs().max()
        return self.norm(x)[..., 1:] * scale


@pytest.mark.simulated
def test_lines_are_the_users() -> None:
    program = autopar.parallelize(Two(), MESH, {}, example=(torch.randn(4, 4, requires_grad=True),)).program
    lines = {node.name: record_of(node) for node in program.nodes if node.op == "call_function"}
    forward = [r for r in lines.values() if r.phase == "forward"]
    assert all(r.source.startswith("test_provenance.py:") for r in lines.values())
    assert [r.module for r in forward if "layer(x)" in r.source][:1] == ["layers.0"]
    norm = next(r for name, r in lines.items() if "native_layer_norm_backward" in name)
    assert (norm.module, norm.source.partition("  ")[2]) == ("norm", "return self.norm(x)[..., 1:] * scale")
    products = [r for name, r in lines.items() if name.startswith("mm") and r.phase == "backward"]
    assert {r.module for r in products} == {"layers.0", "layers.1"}


@pytest.mark.simulated
def test_the_table_of_transfers() -> None:
    """Layers are one row, and brackets of the user's line stay."""
    parallel = autopar.parallelize(Two(), MESH, {"layers.*.weight": ("tp", None)}, example=(torch.randn(4, 4),))
    rows = parallel.transfers
    gathers = [row for row in rows if row.transfer == "all_gather" and row.phase == "forward"]
    assert {(row.module, row.axis, row.times) for row in gathers} >= {("layers.*", "tp", 2)}
    total: dict[str, int] = {}
    for row in rows:
        total[row.axis] = total.get(row.axis, 0) + row.bytes
    assert {axis: count for axis, count in total.items() if count} == parallel.reports["share"].bytes
    text = str(rows)
    assert "layers.*" in text and "test_provenance.py" in text and "[..., 1:]" in text


ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention.default
REFUSED: dict[str, tuple[Any, str, str, str]] = {
    "attention": (
        ATTENTION,
        "single",
        "_scaled_dot_product_flash_attention.default draws its dropout inside one kernel, whose numbers depend on the "
        "whole operands",
        'leave random="parallel"; or choose torch.nn.attention.sdpa_kernel(SDPBackend.MATH), or set its dropout to 0',
    ),
    "a recurrent layer": (
        torch.ops.aten._cudnn_rnn.default,
        "parallel",
        "_cudnn_rnn.default draws its dropout inside one kernel",
        "set its dropout to 0",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_dropout_inside_a_kernel_that_is_refused(name: str) -> None:
    """Of kernels that run on a GPU only; a trace asks this of each op that draws."""
    op, random, what, remedy = REFUSED[name]
    recorder = Recorder(nn.Linear(2, 2), random)  # type: ignore[arg-type]
    recorder.current = Origin("layers.0", "model.py:41  attend(x)")
    with pytest.raises(CaptureError) as caught:
        recorder._check_random(op, {})
    assert str(caught.value) == f"{what}\n    model.py:41  attend(x)   in module layers.0\n  {remedy}"


def test_dropout_inside_an_attention_kernel_is_drawn() -> None:
    """The kernel draws, and its backward draws nothing: it reads the state that the kernel has left."""
    Recorder(nn.Linear(2, 2), "parallel")._check_random(ATTENTION, {})
    backward = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
    draw = [0.0] * 3 + [0.1]
    assert draws_random(ATTENTION, tuple(draw)) and not draws_random(ATTENTION, (*draw[:3], 0.0))
    assert not draws_random(backward, (*[None] * 10, 0.1))
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention_backward.default
    assert not draws_random(efficient, (*[None] * 9, 0.1))
