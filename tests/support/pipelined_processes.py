"""Pipelined steps on each of four processes, beside the loop of a single device and all ranks in one process."""

from __future__ import annotations

import copy
from typing import Any

import loops
import pytest
import torch
from equality import relative
from pipelined_steps import MESHES, differences, is_here, made, pipelined_alike
from searched import FAST
from steps import run
from torch import distributed

from autopar import Mesh
from autopar.pipeline import POLICIES
from autopar.runtime.dtensors import is_dtensor

Case = tuple[str, str, str, int]  # model, mesh, policy, micro-batches


def steps_alike(cases: list[Case], **options: Any) -> None:
    """Each case, in one launch."""
    for name, mesh, policy, microbatches in cases:
        layers = max(4, MESHES[mesh]["pp"] * POLICIES[policy].default)
        step = pipelined_alike(name, MESHES[mesh], policy, microbatches, count=3, layers=layers,
                               rows=8 if name == "normed" else 2, called=True, clip_norm=0.5, **options)  # fmt: skip
        step.parallel.close()


def as_simulated(cases: list[Case], **options: Any) -> list[tuple[list[torch.Tensor], dict[str, torch.Tensor]]]:
    """For each case what the steps return on this rank, and the parameters that it has, whole."""
    found = []
    for name, mesh, policy, microbatches in cases:
        step, _, batches = made(name, MESHES[mesh], policy, microbatches, **options)
        alone = step.parallel.job is None
        torch.manual_seed(1)
        losses = [run(step, batches(k), called=not alone) for k in range(3)]
        own = {name: loops.whole(p).detach() for name, p in step.parallel.named_parameters() if is_here(p)}
        found.append((losses, {name: tensor.clone() for name, tensor in own.items()}))
        if not alone:
            step.parallel.close()
    return found


def homes() -> None:
    """A parameter is a DTensor on the ranks of its stage, and stays the same object; other ranks have an empty piece
    of it, with its name, and its state."""
    step, alone, batches = made("layers", MESHES["pp2 tp2"], "1f1b", 3)
    before = {name: id(p) for name, p in step.parallel.named_parameters()}
    run(step, batches(0)), alone(**batches(0))
    assert before == {name: id(p) for name, p in step.parallel.named_parameters()}
    stage = Mesh(MESHES["pp2 tp2"]).coordinates(distributed.get_rank())["pp"]
    homes = step._current().micro.homes
    assert set(homes.values()) == {0, 1}
    for name, parameter in step.parallel.named_parameters():
        assert is_dtensor(parameter)
        own = parameter.to_local().numel()
        assert bool(own) == (homes[name] == stage), (name, own)
        mesh = set(parameter.device_mesh.mesh.flatten().tolist())
        assert mesh == ({0, 1} if homes[name] == 0 else {2, 3})
    assert max(differences(step, alone).values()) <= 1e-9
    step.parallel.close()


def rows_of_each_rank() -> None:
    """Each rank brings its own rows, also of unlike sizes; ranks that differ along ``pp`` bring the same ones."""
    step, alone, batches = made("shared", MESHES["pp2 dp2"], "1f1b", 2, rows=4, inputs="local", clip_norm=0.5)
    mesh = step.parallel.mesh
    dp = mesh.coordinates(distributed.get_rank())["dp"]
    for k, first in enumerate((4, 4, 3, 0)):
        own = {name: (rows[:first], rows[first:])[dp] for name, rows in batches(k).items()}
        assert relative(step(own), alone(**batches(k))[0]) <= 1e-12, first
        with torch.no_grad():
            assert relative(step.parallel(**own), alone.model(**batches(k))) <= 1e-12, first
    assert max(differences(step, alone).values()) <= 1e-9
    own = {name: rows.chunk(2)[dp] for name, rows in batches(0 if distributed.get_rank() < 3 else 1).items()}
    with pytest.raises(RuntimeError, match=r"^ranks 1 and 3 bring different values of x, .* the piece at dp=1"):
        step(own)
    step.parallel.close()


def open_options() -> None:
    """All ranks choose the same micro-batches and stages of ZeRO, and plans that one of them has searched."""
    step = pipelined_alike("layers", MESHES["pp2 dp2"], "1f1b", "search", count=2, layers=2, plan="search", called=True,
                           zero="search", machine=FAST, time_limit=600.0)  # fmt: skip
    plans = [stage.to_json() for stage in step.solution.stages]
    texts = step._calls.agreement.ranks.gathered((str(step.choice), plans))
    assert all(text == texts[0] for text in texts) and len(step.choice.candidates) == 2
    step.parallel.close()


def state_dicts() -> None:
    """A step goes on from those of an earlier time."""
    step, alone, batches = made("shared", MESHES["pp2 tp2"], "1f1b", 3)
    for k in range(2):
        run(step, batches(k)), alone(**batches(k))
    model = {name: t.detach().clone() for name, t in step.parallel.state_dict().items()}
    state = copy.deepcopy(step.optimizer.state_dict())
    for k in range(2, 4):
        run(step, batches(k))
    step.parallel.load_state_dict(model)
    step.optimizer.load_state_dict(state)
    for k in range(2, 4):
        assert relative(run(step, batches(k)), alone(**batches(k))[0]) <= 1e-9
    assert max(differences(step, alone).values()) <= 1e-9
    step.parallel.close()


def frozen_first_stages() -> None:
    """Ranks that train nothing have the numbers of steps, also those of the averages, and the norm."""

    def freeze(model: torch.nn.Module) -> None:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not name.startswith("layers."))

    for clip_norm in (None, 0.5):
        step = pipelined_alike("layers", MESHES["pp4"], "1f1b", 3, count=2, prepare=freeze, called=True,
                               clip_norm=clip_norm, ema=0.9)  # fmt: skip
        assert int(step.averages.count) == 2
        assert {float(state["step"]) for state in step.optimizer.state.values()} == {2.0}
        step.parallel.close()


def other_batches() -> None:
    """Ranks that bring other values are told so, and none hangs; then the step goes on."""
    step, alone, batches = made("layers", MESHES["pp4"], "1f1b", 3)
    run(step, batches(0)), alone(**batches(0))
    with pytest.raises(RuntimeError, match="bring different values of x"):
        run(step, batches(distributed.get_rank()))
    step.parallel.close()
