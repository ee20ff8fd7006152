"""Steps on stages that are refused because ranks differ, or that fail; on each process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from error_texts import refused
from pipelined_steps import SPLIT, Layers, Noisy, made
from torch import distributed

import autopar
from autopar import Mesh
from autopar.pipeline import build
from autopar.runtime.dtensors import is_dtensor
from autopar.runtime.running import messages

MESH, ODD = Mesh({"pp": 2, "tp": 2}), 2  # the rank that differs
OWN = build("1f1b", 2, 4)
PLAIN: dict[str, Any] = {"schedule": "1f1b", "microbatches": 4}
HALVES = {"stages": ["layers.[01]*", ["layers.[23]*", "head"]]}
# case → options of all ranks, and those of rank 2 alone; what is said of rank 2, and of the others
DIFFERENT: dict[str, tuple[tuple[dict[str, Any], dict[str, Any]], str, str]] = {
    "schedule": (({}, {"schedule": "gpipe"}), "schedule='gpipe'", "schedule='1f1b'"),
    "schedules of one name": (
        ({"schedule": OWN}, {"schedule": replace(build("gpipe", 2, 4), name="1f1b")}),
        "schedule=1f1b on 2 ranks, 4 micro-batches (table ",
        "schedule=1f1b on 2 ranks, 4 micro-batches (table ",
    ),
    "stages": ((HALVES, {"stages": ["layers.0*", ["layers.[1-3]*", "head"]]}), "'layers.0*'", "'layers.[01]*'"),
    "globs on one rank": (({}, HALVES), "stages=('layers.[01]*'", "microbatches=4, schedule='1f1b'"),
    "microbatches": (({}, {"microbatches": 2}), "microbatches=2", "microbatches=4"),
    "chunks": (
        ({"schedule": "interleaved", "chunks": 2}, {"schedule": "interleaved", "chunks": 1}),
        "chunks=1",
        "chunks=2",
    ),
}


def batch(rows: int = 8) -> dict[str, torch.Tensor]:
    return {"x": torch.ones(rows, 8), "y": torch.ones(rows, dtype=torch.int64)}


def step_of(model: torch.nn.Module, options: dict[str, Any], mesh: Mesh = MESH) -> Any:
    parallel = autopar.parallelize(model, mesh, SPLIT)
    return parallel.train_step(torch.optim.SGD(parallel.parameters(), lr=0.1), **{**PLAIN, **options})


def other_options() -> dict[str, tuple[str, bool]]:
    """What each case says, and whether the parameters are what and where they were."""
    answers, steps = {}, []
    for case, ((common, odd), *_) in DIFFERENT.items():
        torch.manual_seed(0)
        model = Layers()
        before = {name: parameter.clone() for name, parameter in model.named_parameters()}
        step = step_of(model, {**common, **(odd if distributed.get_rank() == ODD else {})})
        said = refused(RuntimeError, lambda step=step: step(batch()))
        unchanged = all(
            not is_dtensor(parameter) and torch.equal(parameter, before[name])
            for name, parameter in model.named_parameters()
        )
        answers[case] = said, unchanged and step.captures == 0
        steps.append(step)
    for step in steps:  # the last closes the groups, which all share
        step.parallel.close()
    return answers


def another_batch(sizes: dict[str, int]) -> tuple[str, list[float]]:
    """What is said of a batch of another shape in a later step, and the losses of the steps around it."""
    step = step_of(Noisy(), {} if "pp" in sizes else {"schedule": None}, Mesh(sizes))
    losses = [float(step(batch()))]
    said = refused(RuntimeError, lambda: step(batch(4 if distributed.get_rank() == ODD else 8)))
    losses += [float(step(batch())) for _ in range(2)]
    step.parallel.close()
    return said, losses


def other_values(across: bool) -> tuple[str, bool, list[tuple[float, float]]]:
    """What is said of a batch with other values on one rank, whether all stays, and losses beside one device."""
    step, alone, batches = made("normed", {"pp": 2, "dp": 2}, "1f1b", 2, rows=4, across=across)
    losses = [(float(step(batches(0))), float(alone(**batches(0))[0]))]
    held = [*step.parallel.buffers(), *(p for group in step.optimizer.param_groups for p in group["params"])]
    before = [local(tensor).clone() for tensor in held]
    odd = {**batches(1), "x": batches(1)["x"] + (distributed.get_rank() == ODD)}
    said = refused(RuntimeError, lambda: step(odd))
    stay = all(torch.equal(local(now), was) for now, was in zip(held, before, strict=True))
    losses += [(float(step(batches(k))), float(alone(**batches(k))[0])) for k in (1, 2)]
    step.finish()
    step.parallel.close()
    return said, stay, losses


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if is_dtensor(tensor) else tensor


def caught() -> tuple[str, str, str]:
    """What a caller catches on the rank that fails, and on one whose connection breaks: class, texts, cause."""
    step = step_of(Layers(), {}, Mesh(pp=2, tp=1))
    step(batch())
    fails = distributed.get_rank() == 1

    class Broken:
        under_way = True

        def wait(self) -> None:
            raise RuntimeError("Connection closed by peer [127.0.0.1]:1234")

    def start(*_: object, **__: object) -> Broken:
        if fails:
            raise ValueError("a bad value")
        return Broken()

    with mock.patch.object(messages, "start", start):
        try:
            step(batch())
        except Exception as error:
            said = "\n".join([str(error), *getattr(error, "__notes__", ())])
            return type(error).__name__, said, str(error.__cause__)
    raise AssertionError("it did not fail")
