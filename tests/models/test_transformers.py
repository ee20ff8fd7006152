"""Hugging Face models with random weights: simulated ranks equal eager, in float64 throughout."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from casts import promoted_casts  # noqa: F401
from equality import check_equal
from transformers_models import batch, bert, float64, gpt2, llama

import autopar
from autopar import Mesh
from autopar.ir.program import Program

MODELS = {
    "llama": llama,
    "grouped queries": lambda: llama(kv=2),
    "one key": lambda: llama(kv=1),
    "tied": lambda: llama(tie_word_embeddings=True),
    "uneven": lambda: llama(heads=3, kv=3, head=2, hidden=11),
    "eager attention": lambda: llama(kv=2, attn_implementation="eager"),
    "gpt2": gpt2,
    "gpt2 uneven": lambda: gpt2(heads=3, width=9),
    "bert": bert,
}
CASES = {
    "ddp": [Mesh(dp=2), Mesh(dp=4)],
    "megatron": [Mesh(tp=2), Mesh(tp=4), Mesh(dp=2, tp=2), Mesh(dp=2, cp=2, tp=2)],
    "megatron+sp": [Mesh(tp=4), Mesh(dp=2, tp=2), Mesh(dp=2, cp=2, tp=2)],
}
SEQUENCE = {"input_ids": ("dp", "cp"), "labels": ("dp", "cp")}


def preset_cases() -> Iterator[Any]:
    """Llama with all presets on all meshes; each other model with one of the presets that split it, on one mesh."""
    split = list(CASES)[1:]
    for number, model in enumerate(MODELS):
        for preset, meshes in CASES.items():
            for k, mesh in enumerate(meshes):
                kept = model == "llama" or (k == number % len(meshes) and preset == split[number % 2])
                reason = pytest.mark.sweep("llama runs with this preset on this mesh, and the model in another case")
                yield pytest.param(model, preset, mesh, id=f"{preset} {mesh}-{model}", marks=() if kept else reason)


@float64
@pytest.mark.parametrize(("model", "preset", "mesh"), [*preset_cases()])
def test_presets(model: str, preset: str, mesh: Mesh) -> None:
    check_equal(MODELS[model](), mesh, [preset, SEQUENCE] if "cp" in mesh.names else preset, (), batch())


WITH_SP = pytest.mark.sweep("it runs with megatron+sp, and one layer with each preset")


@float64
@pytest.mark.parametrize(
    "preset", [pytest.param("ddp", marks=WITH_SP), pytest.param("megatron", marks=WITH_SP), "megatron+sp"]
)
def test_two_layers_and_their_cache(preset: str) -> None:
    check_equal(llama(layers=2, kv=2, use_cache=True), Mesh(dp=2, tp=2), preset, (), batch())


@float64
@pytest.mark.parametrize(("preset", "rows"), [
    ("megatron", 1), ("megatron+sp", 3),
    *(
        pytest.param(*case, marks=pytest.mark.sweep("each preset runs, and fewer rows than ranks, and an odd number"))
        for case in [("megatron", 3), ("megatron", 5), ("megatron+sp", 1), ("megatron+sp", 5)]
    ),
])  # fmt: skip
def test_uneven_batches_and_lengths(preset: str, rows: int) -> None:
    check_equal(llama(kv=2), Mesh(dp=2, tp=2), preset, (), batch(rows, 5))


@float64
def test_a_padded_batch() -> None:
    given = batch()
    mask = torch.ones_like(given["input_ids"])
    mask[1, 4:] = 0
    check_equal(llama(), Mesh(dp=2, tp=2), None, (), {**given, "attention_mask": mask})


UNMODIFIED = [(llama, "megatron"), (gpt2, "ddp"), (bert, "megatron+sp")]


@pytest.mark.parametrize(("model", "preset"), [
    *UNMODIFIED,
    *(
        pytest.param(model, preset, marks=pytest.mark.sweep("each model and each preset occurs in another case"))
        for model in (llama, gpt2, bert) for preset in CASES if (model, preset) not in UNMODIFIED
    ),
])  # fmt: skip
def test_unmodified_models(model: Any, preset: str) -> None:
    """Their casts to float32 are left as they are, and round."""
    check_equal(model(), Mesh(dp=2, tp=2), preset, (), batch(), tolerance=1e-6)


MEGATRON = {"all_reduce": (2, 2)}
SEQUENCE_SPLIT = {"all_gather": (2, 4), "reduce_scatter": (2, 2)}
BLOCKS = [  # the transfers over tp of one block, as Megatron's papers count them: transfer → forward, backward
    (llama, "megatron", MEGATRON),
    *(
        pytest.param(model, "megatron", MEGATRON, marks=pytest.mark.sweep("llama has what it has"))
        for model in (lambda **more: llama(kv=2, **more), gpt2, bert)
    ),
    (llama, "megatron+sp", SEQUENCE_SPLIT | {"all_reduce": (0, 2)}),  # the gradients of two norms
    (gpt2, "megatron+sp", SEQUENCE_SPLIT | {"all_reduce": (0, 6)}),  # of two norms with biases, of two biases of rows
    pytest.param(
        bert, "megatron+sp", SEQUENCE_SPLIT | {"all_reduce": (0, 6)}, marks=pytest.mark.sweep("gpt2 has what it has")
    ),
]


@pytest.mark.parametrize(("model", "preset", "block"), BLOCKS)
def test_the_transfers_of_a_block(model: Any, preset: str, block: dict[str, tuple[int, int]]) -> None:
    """In all, for two layers more than for one. Slices and what makes a bias pending move nothing."""
    counts = []
    for layers in (1, 3):
        parallel = autopar.parallelize(model(layers=layers), Mesh(dp=2, tp=2), preset, example=batch())
        found: dict[str, list[int]] = {}
        for row in parallel.transfers:
            if "tp" in row.axis.split("×") and row.transfer not in ("slice", "pend"):
                found.setdefault(row.transfer, [0, 0])[row.phase == "backward"] += row.times
        counts.append(found)
    one, three = counts
    assert {
        transfer: tuple((last - first) / 2 for last, first in zip(three[transfer], one[transfer], strict=True))
        for transfer in three
        if three[transfer] != one[transfer]
    } == block


@pytest.mark.parametrize("preset", ["ddp", "megatron", "megatron+sp"])
def test_the_local_programs_of_all_ranks(preset: str) -> None:
    """Sizes do not divide: ranks fall into classes, and each one's program is one that prints, parses and verifies."""
    mesh = Mesh(dp=2, tp=2)
    parallel = autopar.parallelize(llama(heads=3, kv=3, head=2, hidden=11), mesh, preset, example=batch(3, 5))
    texts = set()
    for rank in range(mesh.size):
        local = parallel.local(rank)
        assert (local.level, local.coordinates) == ("scheduled", mesh.coordinates(rank))
        local.verify()
        assert Program.parse(str(local)) == local
        texts.add(str(local).partition("\n")[2])
    assert len(texts) == (2 if preset == "ddp" else 4)
