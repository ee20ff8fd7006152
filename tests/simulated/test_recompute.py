"""Recomputation: the same numbers bit by bit, nothing kept that need not be, copies where they are first read."""

from __future__ import annotations

import copy
import functools
import re
from pathlib import Path
from typing import Any

import loops
import pytest
import torch
from conv_net import Net
from equality import check_equal
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from models import COLUMN_ROW, Block, Residual
from recomputing import Dropping, Normed, recomputing, results, same
from shared_captures import shared_captures  # noqa: F401
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers_models import gpt2, llama

import autopar
from autopar import Mesh
from autopar.capture import capture
from autopar.ir.layout import DistAttr
from autopar.ir.nodes import is_getitem, operands, record_of
from autopar.ir.program import Program
from autopar.passes import Recompute, run_passes
from autopar.plan.recompute import regions
from autopar.plan.recompute.regions import blocks, module_paths

GOLDEN = Path(__file__).parents[1] / "golden" / "recompute"


def rows() -> dict[str, torch.Tensor]:
    return {"x": torch.randn(8, 8)}


@functools.cache
def one_llama() -> nn.Module:
    return llama(kv=2, layers=1).float()


# how it is made, its batch, its plan, what is computed again
MODELS: dict[str, tuple[Any, Any, Any, tuple[str, ...]]] = {
    "dropout": (Dropping, rows, COLUMN_ROW, ("blocks", "*.act", "min-cut")),
    "states": (Normed, rows, "megatron", ("blocks", "*")),
    "llama": (one_llama, lambda: loops.text(0), "megatron", ("blocks", "*.mlp")),
    "llama sequence": (one_llama, lambda: loops.text(0), "megatron+sp", ("blocks", "min-cut")),
    "gpt2": (lambda: gpt2(layers=1).float(), lambda: loops.text(0), "megatron", ("blocks",)),
}
MESHES = [Mesh(dp=2), Mesh(tp=2), Mesh(dp=2, tp=2)]


@functools.cache
def made(name: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A model, and the values that it begins with."""
    model = MODELS[name][0]()
    return model, copy.deepcopy(model.state_dict())


@pytest.mark.long
@pytest.mark.usefixtures("shared_captures")
@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        *((name, MESHES[2]) for name in ("dropout", "states", "llama sequence")),
        *(
            pytest.param(name, MESHES[2], marks=pytest.mark.sweep("llama with its sequence split has such blocks"))
            for name in ("llama", "gpt2")
        ),
        *(
            pytest.param("dropout", mesh, marks=pytest.mark.sweep("each axis is there beside the other"))
            for mesh in MESHES[:2]
        ),
    ],
    ids=str,
)
def test_the_same_numbers(name: str, mesh: Mesh) -> None:
    """Loss, gradients and states, as without, bit by bit."""
    _, batch, plan, whats = MODELS[name]
    (model, begin), given = made(name), batch()
    plan = plan if "tp" in mesh.names else "ddp"
    found = {}
    for what in (None, *whats):
        model.load_state_dict(begin)
        with recomputing(what):
            parallel = autopar.parallelize(model, mesh, plan, example=given)
        found[what] = results(parallel, given)
        assert ("_again" in str(parallel.program)) == (what is not None)
    for what in whats:
        assert same(found[what], found[None]), what


def test_the_same_numbers_as_on_a_single_device() -> None:
    """Dropout draws again what a single device has drawn once."""
    model = Dropping().double()
    x = torch.randn(8, 8, dtype=torch.float64)
    eager = copy.deepcopy(model)
    torch.manual_seed(3)
    eager(x).backward()
    with recomputing("blocks"):
        parallel = autopar.parallelize(model, Mesh(dp=2, tp=2), COLUMN_ROW, example=(x,), random="single")
    torch.manual_seed(3)
    parallel.simulate(x).backward()
    for ours, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        assert torch.allclose(ours.grad, theirs.grad, rtol=1e-10, atol=1e-12)


def test_a_convolutional_net() -> None:
    with recomputing("*.norm*"):
        check_equal(Net().double(), Mesh(dp=2), None, (torch.randn(4, 3, 9, 9, dtype=torch.float64),))


class Stack(nn.Module):
    def __init__(self, depth: int, checkpointed: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(depth))
        self.checkpointed = checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + (checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x))
        return x.square().mean()


def test_the_golden_blocks_are_those_of_a_model() -> None:
    """``test_goldens`` runs the pass on the program as text; the capture gives the same program."""
    program = capture(Stack(2), (torch.randn(4, 8),)).program
    before, after = (GOLDEN / "blocks.txt").read_text().split("---\n")
    assert program == Program.parse(before)
    run_passes(program, [Recompute()])
    assert str(program) == after


def test_a_checkpoint_in_the_model_stays() -> None:
    """What it computes again is not computed a third time; and other modules may be."""
    x = torch.randn(4, 8, dtype=torch.float64)
    plain = capture(Stack(2, checkpointed=True), (x.float(),)).program
    text = str(plain)
    (report,) = run_passes(plain, [Recompute("*.down")])
    assert text.count("gelu(") == str(plain).count("gelu(") == 4, report
    with recomputing("*"):
        check_equal(Stack(2, checkpointed=True).double(), Mesh(dp=2), None, (x,))


class Hooked(nn.Module):
    """A region whose output is returned, and one whose outputs only its own backward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Block(), nn.Sequential(nn.Linear(8, 8), nn.Tanh())

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.a(x)
        return torch.exp(y), self.b(x) + 1


def test_what_is_kept() -> None:
    """What is returned is, and what only the region's own backward reads is not, though others read it in the
    forward."""
    program = capture(Hooked(), (torch.randn(4, 8),)).program
    run_passes(program, [Recompute(["*.b", "a"])])
    text = str(program)
    assert "exp_again" not in text and "tanh_again" in text and re.search(r"tanh_backward\(\w+, tanh_again\)", text)
    program = capture(Hooked(), (torch.randn(4, 8),)).program
    run_passes(program, [Recompute("*")])
    assert "exp_again" not in str(program)


def test_states_are_made_once() -> None:
    """What reads a state is not computed again: the state has its next value by then."""
    program = capture(Normed(), (torch.randn(8, 8),)).program
    nexts = [
        value
        for value, result in zip(operands(program.output), record_of(program.output).results, strict=True)
        if result.kind == "state"
    ]
    run_passes(program, [Recompute("*")])
    states = [node for node in program.placeholders if record_of(node).role == "state"]
    assert states and all(record_of(user).phase == "forward" for state in states for user in state.users)
    assert all(f"{value.name}_again" not in str(program) for value in nexts)
    assert re.search(r"mul_7_again : .* = mul.Tensor\(addmm_1_again, cat\)", str(program))  # of views of the state


def test_states_that_are_written_in_place() -> None:
    """On a process, the state has its next value when the backward runs."""
    model, batch = Normed(), rows()
    found = []
    for what in (None, "*"):
        with recomputing(what):
            parallel = autopar.parallelize(copy.deepcopy(model), Mesh(dp=1), "ddp", example=batch)
        found.append([*results(parallel, batch, "call"), *results(parallel, batch, "call")])
    assert same(*found)


def test_copies_lie_as_is_said_of_originals() -> None:
    program, mesh = capture(Stack(2), (torch.randn(4, 8),)).program, Mesh(dp=2, tp=2)
    split = DistAttr.split(None, "tp")
    run_passes(program, [Recompute("blocks", mesh, {"gelu": split})])
    assert (
        record_of(program.node("gelu_again")).type.attr == split
        and record_of(program.node("gelu_1_again")).type.layout is None
    )


def test_copies_say_what_they_are() -> None:
    program = capture(Stack(2), (torch.randn(4, 8),)).program
    (report,) = run_passes(program, [Recompute()])
    one, two = program.node("gelu"), program.node("gelu_again")
    assert record_of(two)._replace(phase="forward") == record_of(one) and record_of(one).module == "layers.0.act"
    assert record_of(two).phase == "backward" and record_of(two).source
    assert report.notes == ("6 ops of the forward run again in the backward, 0 have moved there; 1,536 bytes of "
                            "values are computed again, "
                            "256 are kept (whole values, views counted too)",)  # fmt: skip


@pytest.mark.long
def test_transfers_of_copies_are_their_own() -> None:
    """Share never reads in the backward what a transfer has made of an original that is computed again."""
    with recomputing("blocks"):
        parallel = autopar.parallelize(
            llama(kv=2, layers=2).float(), Mesh(dp=2, tp=2), "megatron", example=loops.text(0)
        )
    program = parallel.program
    again = {node.name.removesuffix("_again") for node in program.nodes if node.name.endswith("_again")}
    moved = [
        node
        for node in program.nodes
        if node.target is autopar.ir.transfers.all_reduce and operands(node)[0].name.endswith("_again")
    ]
    # of the attention's output, in each layer
    assert len(moved) == 2 and all(record_of(node).phase == "backward" for node in moved)
    for node in program.nodes:
        if record_of(node).phase == "backward":
            for value in operands(node):
                made_of = operands(value)[0] if value.target in autopar.ir.transfers.BY_FUNCTION else value
                assert record_of(value).phase == "backward" or made_of.name not in again


def check_structure(program: Program, before: Program, what: Any) -> None:
    """By the definition: what is kept must be, and a copy stands in front of its first reader."""
    region = regions(before, what)
    of = {node.name: region(node) for node in before.nodes}
    made_from = {node.name: node for node in before.nodes}
    order = list(program.nodes)
    assert all(node.users for node in order if node.op == "call_function")  # nothing is made for nobody
    for node in order:
        if node.name.endswith("_again"):
            first = min(order.index(user) for user in node.users)
            assert all(between.name.endswith("_again") for between in order[order.index(node) + 1 : first])
        if record_of(node).phase != "backward" or node.op == "output":
            continue
        mine = of[node.name.removesuffix("_again")]
        for value in operands(node):
            if value.op != "call_function" or record_of(value).phase == "backward" or of[value.name] is None:
                continue
            old = made_from[value.name]
            if any(user.op == "output" for user in old.users):
                continue
            backward = {
                of[user.name.removesuffix("_again")] for user in value.users if record_of(user).phase == "backward"
            }
            forward = {of[user.name] for user in old.users if record_of(user).phase == "forward"}
            assert forward - {of[value.name]} and backward - {of[value.name]}, (
                f"{node.name}, in {mine}, reads {value.name}"
            )
        assert not any(is_getitem(node) and record_of(value).phase != "backward" for value in operands(node))


@pytest.mark.long
@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_random_models_and_regions(data: st.DataObject) -> None:
    torch.manual_seed(data.draw(st.integers(0, 99)))
    dim = 4
    kinds = [lambda: nn.LayerNorm(dim), nn.Tanh, nn.ReLU, lambda: nn.Dropout(0.5), lambda: nn.Softmax(-1),
             lambda: Block(dim, 6), lambda: nn.Linear(dim, dim), lambda: Residual(dim, 6, 2),
             lambda: nn.BatchNorm1d(dim)]  # fmt: skip
    layers = [data.draw(st.sampled_from(kinds))() for _ in range(data.draw(st.integers(1, 5)))]
    layers.insert(data.draw(st.integers(0, len(layers))), layers[0])  # once more: two calls are one region
    model, batch = nn.Sequential(*layers, nn.Linear(dim, 2)), {"input": torch.randn(4, dim)}
    before = capture(model, (), batch).program
    paths = module_paths(before)
    what = data.draw(
        st.one_of(
            st.just("min-cut"), st.lists(st.sampled_from([path or "*" for path in paths]), min_size=1, unique=True)
        )
    )
    after = before.copy()
    run_passes(after, [Recompute(what)])
    check_structure(after, before, what)
    mesh, plan = data.draw(st.sampled_from([(Mesh(dp=2), "ddp"), (Mesh(dp=2, tp=2), {"*weight": ("tp",)})]))
    found = []
    for one in (None, what):
        with recomputing(one):
            found.append(results(autopar.parallelize(copy.deepcopy(model), mesh, plan, example=batch), batch))
    assert same(*found)


def test_blocks() -> None:
    """Numbered modules with modules of their own, the outermost, of all lists."""
    paths = ["", "embed", "encoder", "encoder.block",
             *(f"encoder.block.{k}{rest}" for k in range(2) for rest in ("", ".mlp", ".mlp.0", ".mlp.0.up")),
             "decoder.block.0", "decoder.block.0.mlp", "norms", "norms.0", "norms.1"]  # fmt: skip
    assert blocks(paths) == {"encoder.block.0", "encoder.block.1", "decoder.block.0"}


@pytest.mark.parametrize(
    ("what", "kind", "text"),
    [
        ("*.mpl", ValueError, "recompute's glob '*.mpl' matches no module that the step runs; near it: up"),
        (["*.up", "dwn"], ValueError, "recompute's glob 'dwn' matches no module that the step runs; near it: down"),
        ("blocks", ValueError,
         'recompute="blocks" takes the numbered modules that contain modules, as layers.0 with layers.0.mlp, '
                               "and the step has none; name modules with globs; it has up, act, down"),
        (3, TypeError, 'recompute=3: say "blocks", "min-cut", or a glob over module paths, as in "*.layers.*", or a '
                       'list of globs'),
        ([], TypeError, "recompute=[]: say"),
    ],
    ids=str,
)  # fmt: skip
def test_errors(what: Any, kind: type[Exception], text: str) -> None:
    program = capture(Block(), (torch.randn(4, 8),)).program
    dump = str(program)
    with pytest.raises(kind) as caught:
        run_passes(program, [Recompute(what)])
    assert text in str(caught.value)
    assert str(program) == dump


def test_a_step_without_a_backward() -> None:
    with torch.no_grad():
        program = capture(Stack(2), (torch.randn(4, 8),)).program
    dump = str(program)
    for what in ("blocks", "min-cut"):
        run_passes(program, [Recompute(what)])
        assert str(program) == dump
