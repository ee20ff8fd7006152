"""How real models are cut: what crosses, what is computed on all stages, and what W has."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from pipelined_steps import MESHES, made, vectors
from steps import run

from autopar.ir import transfers
from autopar.ir.nodes import record_of, tensor_type
from autopar.step.pipelined.placing.programs import PipelinedMicro, Stage


def cut(name: str, mesh: str = "pp2 tp2", policy: str = "1f1b", layers: int = 4, **options: Any) -> PipelinedMicro:
    step, _, batches = made(name, MESHES[mesh], policy, 2, layers=layers, **options)
    run(step, batches(0))
    return step._current().micro


def products(stage: Stage) -> Counter[str]:
    """How many products each phase has."""
    ops = [node for node in stage.program.nodes if node.op == "call_function"]
    return Counter(record_of(node).phase for node in ops if "mm" in str(node.target))


@pytest.mark.long
def test_llama() -> None:
    """One value crosses, and its gradient comes back: masks, rotary tables and labels are made on both stages. Of the
    products of the backward, W has one for each weight: 14 of 28 on the first stage, 15 of 30 behind, with the head."""
    micro = cut("llama", policy="zb-h1")
    first, last = micro.stages
    assert (len(first.cut.up), len(last.cut.up), len(first.cut.down), len(last.cut.down)) == (1, 0, 0, 1)
    assert "copy" not in micro.around and {micro.homes["model.embed_tokens.weight"], micro.homes["lm_head.weight"]} == {
        0,
        1,
    }
    assert [record_of(n).name for n in first.cut.program.placeholders if record_of(n).role == "input"] == [""]
    apart = [products(stage) for stage in micro.stages]
    assert [(of["backward"], of["weight_gradients"]) for of in apart] == [(14, 14), (15, 15)]
    for stage in micro.stages:
        states = [n for n in stage.program.nodes if n.name.endswith("_grad_sum") and "weight" in n.name]
        products_of = [n for n in states if any("mm" in str(v.target) for v in n.all_input_nodes)]
        assert {record_of(node).phase for node in products_of} == {"weight_gradients"}


def test_where_layers_are() -> None:
    """Layers stay whole; stages have about as many. The last also has the head."""
    micro = cut("layers", "pp4", layers=8)
    found = [
        sorted({name.split(".")[1] for name in stage.parameters if name.startswith("layers")}) for stage in micro.stages
    ]
    assert (
        [name for names in found for name in names] == [str(k) for k in range(8)]
        and max(map(len, found)) <= 3
        and all(found)
    )
    assert "head.weight" in micro.stages[-1].parameters


def test_by_globs() -> None:
    """As given, however unequal; also in the middle of a layer."""
    stages = [["layers.0.0"], ["layers.0.1", "layers.1", "layers.2", "layers.3", "head"]]
    first, last = cut("layers", "pp2 dp2", stages=stages).stages
    assert first.parameters == ["layers.0.0.weight", "layers.0.0.bias"] and len(last.parameters) == 8


def test_a_skip_is_one_message() -> None:
    """What enters the first layer goes through all stages, beside what each makes."""
    stages = ["layers.0", "layers.1", "layers.2", ["layers.3", "head"]]
    micro = cut("skip", "pp4", stages=stages)
    assert [len(stage.cut.up) for stage in micro.stages] == [1, 2, 2, 0]
    assert [len(stage.cut.down) for stage in micro.stages] == [0, 1, 2, 2]


def test_a_tied_parameter() -> None:
    """Its home is the first stage that reads it; no value of its shape crosses."""
    micro = cut("shared", "pp4")
    assert micro.homes["layers.0.0.weight"] == 0
    received = [node for node in micro.around["copy"][0].nodes if node.target is transfers.recv]
    assert received and {tensor_type(node).shape for node in received} == {(8, 8)}
    shapes = [value.ends.shape for boundary in range(3) for value in
              (*micro.forward_values(boundary), *micro.backward_values(boundary))]  # fmt: skip
    assert (8, 8) not in shapes and shapes


def test_programs_do_not_grow_with_micro_batches() -> None:
    few, many = (made("layers", MESHES["pp4"], "1f1b", count)[0] for count in (2, 32))
    sizes = []
    for step, rows in ((few, 4), (many, 64)):
        run(step, vectors(rows)(0))
        sizes.append({name: len(list(program.nodes)) for name, program in step.program.programs.items()})
    assert sizes[0] == sizes[1]
