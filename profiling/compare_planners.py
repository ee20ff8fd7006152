"""Measure planners that choose layouts by themselves on Llama 3 8B, 32 layers, an 8 × 8 mesh: ours and autoparallel.

Where autoparallel is not installed, its row is the one that was recorded. Each planner runs in a process of its own.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import subprocess
import sys
import time
from dataclasses import asdict, dataclass

LAYERS, MESH = 32, (8, 8)
LIMIT = 60  # seconds that our search may take


@dataclass(frozen=True)
class Planned:
    """What a planner takes.

    Attributes:
        trace: seconds from the model to its graph.
        problem, solve: seconds to build and to solve the problem.
        apply: seconds to apply the answer; ``None`` if it is not measured.
        memory: bytes of the process at its peak.
    """

    name: str
    trace: float
    problem: float
    solve: float
    apply: float | None
    memory: float

    @property
    def seconds(self) -> float:
        """To the answer."""
        return self.trace + self.problem + self.solve


@dataclass(frozen=True)
class Recorded:
    """A row that was recorded on another day, and where."""

    planned: Planned
    machine: str
    versions: str
    command: str


AUTOPARALLEL = Recorded(
    Planned("autoparallel (recorded, not run here)", 13, 50, 46, 39, 4.3e9),
    machine="2 cores, fake process group",
    versions="meta-pytorch/autoparallel, commit not noted",
    command="its Llama 3 8B: dim 4096, 32 layers, vocabulary 128256, sequence 8192",
)


def has_autoparallel() -> bool:
    """Whether the planner of meta-pytorch is installed, and not another package of this name."""
    return importlib.util.find_spec("autoparallel") is not None and (
        importlib.util.find_spec("autoparallel.api") is not None
    )


def our_planner(layers: int = LAYERS) -> Planned:
    """The search, as the benchmark ``search`` measures it."""
    from bench_search import searched_alone

    found = searched_alone(("8B", layers, "x".join(map(str, MESH)), LIMIT))
    return Planned(
        "autopar, search", found["capture"], found["tables"], found["solver"], None, found["peak"] * 1024**2,
    )  # fmt: skip


def autoparallel() -> Planned:
    """Its planner, in a process of its own."""
    done = subprocess.run([sys.executable, __file__], stdout=subprocess.PIPE, text=True, check=True)
    return Planned(**json.loads(done.stdout.strip().splitlines()[-1]))


def _autoparallel() -> Planned:
    """Plan its own Llama on a fake process group, by its API of 2026."""
    import torch
    from autoparallel._testing.models.llama3 import Transformer, TransformerModelArgs  # type: ignore[import-not-found]
    from autoparallel.api import AutoParallel  # type: ignore[import-not-found]
    from process_state import high_water
    from torch import distributed
    from torch.distributed.tensor import Replicate, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=MESH[0] * MESH[1])
    mesh = distributed.device_mesh.init_device_mesh("cpu", MESH, mesh_dim_names=("dp", "tp"))
    arguments = TransformerModelArgs(
        dim=4096, n_layers=LAYERS, n_heads=32, n_kv_heads=8, ffn_dim_multiplier=1.3, multiple_of=1024,
        rope_theta=500000, vocab_size=128256, max_seq_len=8192,
    )  # fmt: skip
    with torch.device("meta"):
        model = Transformer(arguments)
    at = [time.perf_counter()]
    with AutoParallel(model, lambda: torch.randint(0, 128256, (2 * MESH[0], 8192)), mesh) as planner:
        at.append(time.perf_counter())
        planner.add_parameter_memory_constraint(low=None, high=None)
        planner.add_input_constraints([(Shard(0), Replicate())])
        planner.add_output_constraints([(Shard(0), Shard(2))])
        at.append(time.perf_counter())
        placement = planner.optimize_placement()
        at.append(time.perf_counter())
        planner.apply_placement(placement)
        at.append(time.perf_counter())
    trace, problem, solve, apply = (b - a for a, b in itertools.pairwise(at))
    return Planned("autoparallel", trace, problem, solve, apply, high_water() * 1024**2)  # trace builds the problem


if __name__ == "__main__":
    print(json.dumps(asdict(_autoparallel())))
