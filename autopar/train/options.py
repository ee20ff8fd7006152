"""What was asked for, as on the command line, and what it means once it is checked."""

from __future__ import annotations

import dataclasses
import difflib
import importlib.util
import json
import math
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from autopar.mesh import Mesh
from autopar.plan import Plan, resolve
from autopar.presets import PRESETS
from autopar.train.launched import Launched
from autopar.train.refused import Refused
from autopar.train.sizes import SIZES, Size
from autopar.train.text import Text, check_length, read

DTYPES: dict[str, tuple[torch.dtype, float]] = {  # dtype, tolerance by default
    "float32": (torch.float32, 1e-4),
    "float64": (torch.float64, 1e-4),  # Llama's norms and its loss are float32 all the same
    "bfloat16": (torch.bfloat16, 1e-2),
}
DEVICES = ("cpu", "cuda")


@dataclass(frozen=True)
class Options:
    """The options of ``autopar train`` and their defaults; ``None`` is decided by ``check``."""

    mesh: str = "dp=2,tp=2"
    plan: str | None = None
    simulate: bool = False
    device: str | None = None
    timeout: float = 60.0
    port: int | None = None
    text: str | None = None
    size: str = "tiny"
    dtype: str = "float32"
    steps: int = 50
    batch: int = 8
    sequence: int = 64
    lr: float | None = None
    seed: int = 0
    tolerance: float | None = None

    def arguments(self) -> list[str]:
        """The same options, as a command line has them."""
        found = []
        for name, value in dataclasses.asdict(self).items():
            if value is True:
                found.append(f"--{name}")
            elif value is not None and value is not False:
                found += [f"--{name}", str(value)]
        return found


PROCESSES_A_CORE = 8  # more are not started: they would only stop the machine

LIMITS: tuple[tuple[str, Callable[[Any], bool], str], ...] = (  # option, what holds, in words
    ("steps", lambda n: n >= 1, "at least 1"),
    ("batch", lambda n: n >= 1, "at least 1"),
    ("sequence", lambda n: n >= 2, "at least 2: a byte and the next one"),
    ("lr", lambda x: math.isfinite(x) and x > 0, "above 0, such as 0.002"),
    ("seed", lambda n: 0 <= n < 2**32, "between 0 and 2**32 - 1"),
    ("timeout", lambda x: math.isfinite(x) and x > 0, "above 0, in seconds"),
    ("tolerance", lambda x: x >= 0, "0 or more, such as 1e-4"),
    ("port", lambda n: 1 <= n <= 65535, "between 1 and 65535"),
)


@dataclass(frozen=True)
class Checked:
    """Options that can be followed, with every default decided.

    Attributes:
        processes: whether each rank is a process; otherwise all are simulated in this one.
        launched: this process, where it is a rank of a job already.
        plan_name, size_name: as they are called in what is printed.
    """

    options: Options
    mesh: Mesh
    plan: Plan
    plan_name: str
    processes: bool
    launched: Launched | None
    device: torch.device
    text: Text
    size: Size
    size_name: str
    dtype: torch.dtype
    lr: float
    tolerance: float


def check(options: Options, launched: Launched | None) -> Checked:
    """Check all that can be checked before anything is built; ``Refused`` names the option and the remedy."""
    for name, holds, words in LIMITS:
        value = getattr(options, name)
        if value is not None and not holds(value):
            raise Refused(f"--{name} {value} must be {words}")
    size = SIZES[_one_of("size", options.size, SIZES)]
    dtype, tolerance = DTYPES[_one_of("dtype", options.dtype, DTYPES)]
    mesh = mesh_of(options.mesh)
    plan_name = options.plan or ("megatron" if "tp" in mesh.names else "ddp")
    plan = plan_of(plan_name)
    if plan_name in PRESETS:
        resolve(plan, mesh, {}, None)  # a preset may need an axis
    text = read(options.text)
    check_length(text, options.sequence)
    if importlib.util.find_spec("transformers") is None:
        raise Refused(
            "the model is Hugging Face's Llama, and transformers is not installed; "
            "pip install 'autopar[llm]', or pip install -e '.[llm]' in a checkout"
        )
    _check_processes(options, mesh, launched)
    processes = launched is not None or (mesh.size > 1 and not options.simulate)
    local = 1 if not processes else mesh.size if launched is None else launched.local_size
    return Checked(
        options, mesh, plan, plan_name, processes, launched, _device(options.device, local, launched), text, size, options.size,
        dtype, options.lr or size.lr, tolerance if options.tolerance is None else options.tolerance,
    )  # fmt: skip


def mesh_of(text: str) -> Mesh:
    """``dp=2,tp=2`` as a mesh."""
    sizes: dict[str, int] = {}
    for part in text.split(","):
        axis, _, count = part.strip().partition("=")
        if not axis.isidentifier() or not count.isdecimal() or axis in sizes:
            raise Refused(f"--mesh {text!r} is not a list of different axes with their sizes; write it as in --mesh dp=2,tp=2")
        sizes[axis] = int(count)
    try:
        return Mesh(sizes)
    except ValueError as error:
        raise Refused(f"--mesh {text!r}: {error}; write it as in --mesh dp=2,tp=2") from None


def plan_of(name: str) -> Plan:
    """A preset's name as it is, or a JSON file: an object of globs, or a list of such and of presets' names."""
    if name in PRESETS:
        return name
    file = Path(name)
    if file.suffix != ".json" and not file.is_file():
        _one_of("plan", name, PRESETS, ", or a JSON file of globs")
    try:
        plan = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise Refused(f"--plan {name}: {error.strerror}; the presets are {', '.join(PRESETS)}") from None
    except ValueError as error:
        raise Refused(f'--plan {name} is not JSON: {error}; write it as in {{"*.up_proj.weight": ["tp", null]}}') from None
    parts = plan if isinstance(plan, list) else [plan]
    if not all(isinstance(part, (dict, str)) for part in parts):
        raise Refused(f'--plan {name} is not an object of globs; write it as in {{"*.up_proj.weight": ["tp", null]}}')
    return [part if isinstance(part, str) else {glob: _tuples(spec) for glob, spec in part.items()} for part in parts]


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _one_of(option: str, value: str, names: Iterable[str], more: str = "") -> str:
    names = list(names)
    if value in names:
        return value
    near = difflib.get_close_matches(value, names, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise Refused(f"--{option} {value} is unknown; choose from {', '.join(names)}{more}{hint}")


def _check_processes(options: Options, mesh: Mesh, launched: Launched | None) -> None:
    if launched is None:
        cores = os.cpu_count() or 1
        if not options.simulate and mesh.size > max(16, PROCESSES_A_CORE * cores):
            raise Refused(
                f"--mesh {options.mesh} needs {mesh.size} processes, and this machine has {cores} cores; "
                f"--simulate runs all ranks in one process, and torchrun starts them on several machines"
            )
        return
    if options.simulate:
        raise Refused("--simulate runs all ranks in this one process, but RANK and WORLD_SIZE are set; start it without torchrun")
    if launched.size != mesh.size:
        raise Refused(
            f"the job has {launched.size} {'process' if launched.size == 1 else 'processes'}, but the mesh {mesh} has {mesh.size} ranks; "
            f"start it with torchrun --nproc-per-node {mesh.size}, or choose --mesh dp={launched.size}"
        )


def _device(name: str | None, local: int, launched: Launched | None) -> torch.device:
    """The device of this process. CUDA needs a GPU for each of the machine's ranks, and is chosen where they are there."""
    if name is not None:
        _one_of("device", name, DEVICES)
    gpus = torch.cuda.device_count()
    if name == "cuda" and gpus < local:
        raise Refused(f"--device cuda needs a GPU for each rank, {local} on this machine, which has {gpus}; use --device cpu")
    if name == "cpu" or gpus < local:
        return torch.device("cpu")
    return torch.device("cuda", launched.local_rank if launched else 0)
