"""Measure compile=True beside uncompiled autopar, and beside torch.compile of DistributedDataParallel and DTensor.

The model and its batches are those of ``step``: a Llama with two layers of 256, two sequences of 128 tokens a rank,
AdamW, gloo processes with one thread each. Before anything is timed, each system gives the loss and, after a step, the
parameters of the plain model on the whole batch. The first step has the capture, or what torch.compile traces, and all
compiling, with empty caches of Inductor. Then each pair is timed in turn, in rounds, as in ``step``: ratios are taken
within a round.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as multiprocessing
from bench_step import barrier, check, in_rounds, interval, ratios, spread
from profilers import positive
from step_rivals import RATE, System, alike, batch, dtensor, llama, loop, loops, own_rows
from tables import printed
from torch import distributed, nn

import autopar

PROFILES_ITSELF = True
OURS, COMPILED = "autopar", "autopar, compile=True"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=positive, default=2)
    parser.add_argument("--rounds", type=positive, default=20)
    parser.add_argument("--steps", type=positive, default=3, help="timed, of each system in each round")


@dataclass(frozen=True)
class Family:
    """Ways to train with one kind of parallelism.

    Attributes:
        title: of the kind.
        systems: name → a system.
        pieces: how many pieces the batch of all ranks has.
    """

    title: str
    systems: dict[str, System]
    pieces: int


def families(model: nn.Module) -> list[Callable[[], Family]]:
    return [functools.partial(data_parallel, model), functools.partial(tensor_parallel, model)]


def data_parallel(model: nn.Module) -> Family:
    ranks = distributed.get_world_size()
    own, ddp = own_rows(batch(ranks)), lambda: nn.parallel.DistributedDataParallel(copy.deepcopy(model))
    made = functools.partial(ours, model, own, autopar.Mesh(dp=ranks), "ddp", inputs="local")
    name = "DistributedDataParallel"
    return Family("data parallel", {
        OURS: made(False), COMPILED: made(True),
        name: rival(name, ddp(), own, local=True), f"torch.compile + {name}": compiled(name, ddp(), own, local=True),
    }, ranks)  # fmt: skip


def tensor_parallel(model: nn.Module) -> Family:
    ranks = distributed.get_world_size()
    made = functools.partial(ours, model, batch(), autopar.Mesh(tp=ranks), "megatron")
    return Family("tensor parallel", {
        OURS: made(False), COMPILED: made(True),
        "DTensor": rival("DTensor", dtensor(copy.deepcopy(model), ranks), batch()),
        "torch.compile + DTensor": compiled("DTensor", dtensor(copy.deepcopy(model), ranks), batch()),
    }, 1)  # fmt: skip


def ours(model: nn.Module, given: Any, mesh: autopar.Mesh, plan: str, compile: bool, inputs: Any = "global") -> System:
    parallel = autopar.parallelize(copy.deepcopy(model), mesh, plan, inputs=inputs, compile=compile)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=RATE)
    step = parallel.train_step(optimizer)
    return System(COMPILED if compile else OURS, parallel, optimizer, lambda: step(given))


def rival(name: str, model: nn.Module, given: Any, **facts: Any) -> System:
    optimizer = torch.optim.AdamW(alike(model), lr=RATE, foreach=True)
    return System(
        name, model, optimizer, loop(model, optimizer, given, 1, lambda *_: contextlib.nullcontext()), **facts
    )


def compiled(name: str, model: nn.Module, given: Any, **facts: Any) -> System:
    """The same loop, whose model torch.compile compiles in place: names of parameters stay."""
    model.compile()
    return rival(f"torch.compile + {name}", model, given, **facts)


def work(rank: int, ranks: int, folder: str, options: argparse.Namespace) -> None:
    """What one process does. The first one writes its findings into ``folder``."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/inductor{rank}"
    model = llama()
    begin = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    found: dict[str, Any] = {}
    for make in families(model):
        family = make()
        plain, *_ = loops("plain", lambda: copy.deepcopy(model), batch(family.pieces))
        right, first, notes = plain.numbers(), {}, {}
        for name, system in family.systems.items():
            barrier()
            start = time.perf_counter()
            check(system, begin, right)
            first[name] = time.perf_counter() - start
        regions = family.systems[COMPILED].model.regions
        notes[COMPILED] = str(regions)
        beside = [name for name in family.systems if name != COMPILED]
        times = {
            name: in_rounds({COMPILED: family.systems[COMPILED].step, name: family.systems[name].step},
                            options.rounds, options.steps)
            for name in beside
        }  # fmt: skip
        found[family.title] = {"first": first, "notes": notes, "times": times}
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(found))
    barrier()
    distributed.destroy_process_group()


def run(options: argparse.Namespace) -> str:
    import transformers

    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(work, (options.ranks, folder, options), nprocs=options.ranks)
        found = json.loads(Path(folder, "found.json").read_text())
    text = (
        f"transformers {transformers.__version__}; {options.ranks} ranks, {options.rounds} rounds of {options.steps} "
    )
    text += "steps; float32\n"
    for title, part in found.items():
        own = next(iter(part["times"].values()))[COMPILED]
        rows = [(COMPILED, f"{part['first'][COMPILED]:.1f}", *spread([t * 1e3 for t in own], 1), "", "")]
        for name, pair in part["times"].items():
            apart = ratios(pair[COMPILED], pair[name])
            low, high = interval(apart)
            rows.append((
                name, f"{part['first'][name]:.1f}", *spread([t * 1e3 for t in pair[name]], 1),
                f"{statistics.median(apart):.3f}", f"{low:.3f} - {high:.3f}",
            ))  # fmt: skip
        columns = ("system", "first step s", "ms", "quartiles", "compile=True / it", "95 %")
        text += printed(f"{title}: {part['notes'][COMPILED]} in compile=True", columns, rows)
    return text
