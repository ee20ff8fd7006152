"""A pipelined step from the cache is the step that was compiled: stages, messages, sums of tied parameters, numbers."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from pipelined_steps import MESHES, MODELS, adamw, plan_of

import autopar
from autopar import Mesh
from autopar.cache.folder import Folder

ROWS = 8
STEPS: dict[str, tuple[str, str, str, dict[str, Any]]] = {  # case → model, mesh, policy, more options
    "tied parameters": ("shared", "pp2 tp2", "1f1b", {"clip_norm": 0.5}),
    "a split backward": ("skip", "pp4", "zb-h1", {}),
    "two stages a rank": ("streams", "pp2 dp2", "interleaved-1f1b", {"zero": 1, "ema": 0.9}),
    "gathers apart": ("layers", "pp2 dp2", "looped-bfs", {"zero": 3}),
    "statistics": ("normed", "pp2 dp2", "gpipe", {"recompute": "blocks"}),
    "low precision": ("layers", "pp2 tp2", "dualpipe-v", {"amp": "bf16-O1"}),
}


def step_of(name: str, cache: Any, **more: Any) -> tuple[torch.nn.Module, autopar.TrainStep, list[Any]]:
    """A pipelined step, and its batches."""
    model_name, mesh, policy, options = STEPS[name]
    make, batches, _ = MODELS[model_name]
    torch.manual_seed(0)
    model = make(8).float() if "amp" in options else make(8)
    sizes = MESHES[mesh]
    parallel = autopar.parallelize(model, Mesh(sizes), plan_of(model_name, sizes), cache=cache)
    step = parallel.train_step(adamw(model), microbatches=4, schedule=policy, **{**options, **more})
    made = [batches(ROWS)(k) for k in range(3)]
    if "amp" in options:
        made = [{n: x.float() if x.is_floating_point() else x for n, x in batch.items()} for batch in made]
    return model, step, made


def said(step: Any) -> list[str]:
    return [report.notes[0].partition(" ")[0] for report in step.reports if report.name.endswith("cache")]


@pytest.mark.parametrize("name", STEPS)
def test_a_pipelined_step_from_the_cache_is_the_step(tmp_path: Path, name: str) -> None:
    found, rows = [], list[Any]()
    for cache in (False, tmp_path, tmp_path):
        model, step, batches = step_of(name, cache)
        losses = [step.simulate(**batch) for batch in batches]
        found.append(said(step))
        texts = [step.program.text(comments=True), str(step.communication)]
        texts += [str(step.local(rank)) for rank in range(4)]
        states = [p.detach().clone() for p in (*model.parameters(), *model.buffers())]
        rows.append((losses, states, texts))
    assert found == [[], ["miss:", "miss:"], ["hit:", "hit:"]]
    for other in rows[1:]:
        for first, second in zip(rows[0], other, strict=True):
            assert all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
                       for a, b in zip(first, second, strict=True))  # fmt: skip


def test_another_cut_is_a_miss(tmp_path: Path) -> None:
    for options, expected in (({}, "miss:"), ({}, "hit:"), ({"chunks": 4}, "miss:"), ({"chunks": 4}, "hit:")):
        _, step, batches = step_of("two stages a rank", tmp_path, **options)
        step.simulate(**batches[0])
        assert said(step) == [expected] * 2


def test_a_malformed_entry_of_stages_is_a_miss(tmp_path: Path) -> None:
    _, step, batches = step_of("tied parameters", tmp_path)
    step.simulate(**copy.deepcopy(batches[0]))
    folder = Folder(tmp_path)
    for entry in folder.entries():
        read = folder.read(entry)
        if read.about["kind"] == "stages":
            folder.remove(entry)
            folder.write(entry.parent.name, read.about, {**read.texts, "made.json": '{"stages": []}'})
    _, step, batches = step_of("tied parameters", tmp_path)
    step.simulate(**batches[0])
    assert said(step)[0] == "miss:" and "malformed" in "".join(row.notes[0] for row in step.reports if row.notes)


@pytest.mark.parametrize("name", ["tied parameters", "statistics", "two stages a rank"])
def test_a_call_on_stages_from_the_cache_is_the_call(tmp_path: Path, name: str) -> None:
    """An evaluation between two steps."""
    rows = list[Any]()
    for cache in (False, tmp_path, tmp_path):
        _, step, (batch, other, _) = step_of(name, cache)
        step.simulate(**batch)
        with torch.no_grad():
            out = step.parallel.simulate(**other)
        used = step.parallel.compiler.cache
        words = [] if used is None else [line.partition(" ")[0] for line in used.lines]
        rows.append((words[2:], out if isinstance(out, torch.Tensor) else out[0]))
    assert [words for words, _ in rows] == [[], ["miss:"], ["hit:"]]
    assert torch.equal(rows[0][1], rows[1][1]) and torch.equal(rows[0][1], rows[2][1])
