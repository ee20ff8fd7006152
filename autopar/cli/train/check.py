"""Check the options of ``autopar train``, and fill in the defaults."""

from __future__ import annotations

import difflib
import importlib.util
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from autopar.checkpoint import latest
from autopar.cli.stages import check_schedule, schedule_options
from autopar.cli.train.elastic import allowed_options, elastic_options
from autopar.cli.train.launched import Launched
from autopar.cli.train.optimizers import OPTIMIZERS
from autopar.cli.train.options import AMPS, DEVICES, DTYPES, LIMITS, LOSS_SCALE, NONE, Tolerance, TrainOptions, option
from autopar.cli.train.presets import TRAININGS
from autopar.cli.train.refused import Refused
from autopar.cli.train.sizes import SIZES, Size
from autopar.cli.train.text import Text, check_length, read
from autopar.ir.mesh import PIPELINE, Mesh, mesh_of_stage
from autopar.plan.loss_scaling import LossScaling
from autopar.plan.plan import SEARCH, Plan, resolve
from autopar.plan.precision import POLICIES, PrecisionPolicy
from autopar.plan.presets import PRESETS
from autopar.search.solutions.artifact import from_json
from autopar.search.solutions.solution import Solution

PLANS = (*PRESETS, SEARCH)  # the plans that have names
PROCESSES_A_CORE = 8  # more processes would only stall the machine


@dataclass(frozen=True)
class Checked:
    """Valid options, with every default filled in.

    Attributes:
        processes: whether each rank is a process; otherwise this process simulates all ranks.
        launched: the rank of this process, if it is a rank of a job already.
        plan_name, size_name: their names in the output.
        policy: the policy of mixed precision, or ``None``.
        scaling: the scaling of the loss; ``None`` without fp16.
    """

    options: TrainOptions
    mesh: Mesh
    plan: Plan | Solution
    plan_name: str
    processes: bool
    launched: Launched | None
    device: torch.device
    text: Text
    size: Size
    size_name: str
    dtype: torch.dtype
    policy: PrecisionPolicy | None
    scaling: LossScaling | None
    lr: float
    tolerance: Tolerance

    @property
    def step_options(self) -> dict[str, Any]:
        """The keyword arguments of ``parallel.train_step``."""
        o = self.options
        arguments: dict[str, Any] = {"microbatches": o.microbatches, "zero": o.zero, "clip_norm": o.clip_norm}
        if self.policy is not None:
            arguments["amp"] = self.policy.name
        if self.scaling is not None:
            arguments["loss_scale"] = self.scaling
        if PIPELINE in self.mesh.names:
            arguments |= schedule_options(o)
        return arguments if o.recompute == NONE else arguments | {"recompute": o.recompute}


def check(options: TrainOptions, launched: Launched | None) -> Checked:
    """Check everything that can be checked before anything is built; ``Refused`` names the option and the remedy."""
    if options.preset is not None:
        one_of("preset", options.preset, TRAININGS)
    for name, holds, words in LIMITS:
        value = getattr(options, name)
        if value is not None and not holds(value):
            raise Refused(f"{option(name)} {value} must be {words}")
    size = SIZES[one_of("size", options.size, SIZES)]
    dtype, tolerance = DTYPES[one_of("dtype", options.dtype, DTYPES)]
    amp = AMPS[one_of("amp", options.amp, AMPS)]
    one_of("optimizer", options.optimizer, OPTIMIZERS)
    mesh = mesh_of(options.mesh)
    if options.elastic:
        whole, given = mesh, options
        options = elastic_options(given, whole, launched)
        for allowed in allowed_options(given, whole):  # a mesh that is refused when a host was lost is of no use
            _planned(allowed, mesh_of(allowed.mesh))
        mesh = mesh_of(options.mesh)
    elif options.meshes is not None:
        raise Refused("--meshes are the meshes that --elastic may choose, which is not given; add it, or use --mesh")
    plan, plan_name = _planned(options, mesh)
    text = read(options.text)
    check_length(text, options.sequence)
    if importlib.util.find_spec("transformers") is None:
        raise Refused(
            "the model is Hugging Face's Llama, and transformers is not installed; "
            "pip install 'autopar[llm]', or pip install -e '.[llm]' in a checkout"
        )
    _check_folder(options)
    _check_processes(options, mesh, launched)
    processes = launched is not None or (mesh.size > 1 and not options.simulate)
    local = 1 if not processes else mesh.size if launched is None else launched.local_size
    policy = POLICIES.get(options.amp)
    scaling = (
        LossScaling(options.loss_scale or LOSS_SCALE) if policy is not None and policy.low is torch.float16 else None
    )
    chosen = None if options.tolerance is None else Tolerance(options.tolerance, options.tolerance, growth=1.0)
    return Checked(
        options, mesh, plan, plan_name, processes, launched, _device(options.device, local, launched), text, size,
        options.size, dtype, policy, scaling, options.lr or size.lr, chosen or amp or tolerance,
    )  # fmt: skip


def _planned(options: TrainOptions, mesh: Mesh) -> tuple[Plan | Solution, str]:
    """Check the options that must fit a mesh, and return its plan and the name of the plan."""
    _check_step(options, mesh)
    check_schedule(options, mesh)
    plan_name = options.plan or ("megatron" if "tp" in mesh.names else "ddp")
    alone = options.plan is None and set(mesh.names) <= {PIPELINE}  # each rank has a stage, and nothing is split
    plan = {} if alone else plan_of(plan_name)
    plan_name = "of one rank a stage" if alone else plan_name
    if isinstance(plan, Solution) and plan.mesh.axes != mesh.axes:
        raise Refused(
            f"--plan {plan_name} is for the mesh ({plan.mesh}), and this one is ({mesh}); use --mesh "
            f"{','.join(f'{axis}={size}' for axis, size in plan.mesh.axes)}, or search a plan for this mesh"
        )
    if not isinstance(plan, Solution) and plan_name in PRESETS:
        resolve(plan, mesh_of_stage(mesh, 0), {}, None)  # a preset may need an axis
    return plan, plan_name


def mesh_of(text: str) -> Mesh:
    """Parse ``dp=2,tp=2`` as a mesh."""
    sizes: dict[str, int] = {}
    for part in text.split(","):
        axis, _, count = part.strip().partition("=")
        if not axis.isidentifier() or not count.isdecimal() or axis in sizes:
            raise Refused(
                f"--mesh {text!r} is not a list of different axes with their sizes; write it as in --mesh dp=2,tp=2"
            )
        sizes[axis] = int(count)
    try:
        return Mesh(sizes)
    except ValueError as error:
        raise Refused(f"--mesh {text!r}: {error}; write it as in --mesh dp=2,tp=2") from None


def plan_of(name: str) -> Plan | Solution:
    """Return a plan: the name of a preset, ``"search"``, or the contents of a JSON file.

    The file has an object of globs, or a list of objects and names; or a plan that was searched and saved.
    """
    if name in PLANS:
        return name
    file = Path(name)
    if file.suffix != ".json" and not file.is_file():
        one_of("plan", name, PLANS, ", or a JSON file of globs")
    try:
        plan = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise Refused(f"--plan {name}: {error.strerror}; the names are {', '.join(PLANS)}") from None
    except (ValueError, RecursionError) as error:
        raise Refused(
            f'--plan {name} is not JSON: {error}; write it as in {{"*.up_proj.weight": ["tp", null]}}'
        ) from None
    if isinstance(plan, dict) and "version" in plan:
        return from_json(plan, name)
    parts = plan if isinstance(plan, list) else [plan]
    if not all(isinstance(part, (dict, str)) for part in parts):
        raise Refused(f'--plan {name} is not an object of globs; write it as in {{"*.up_proj.weight": ["tp", null]}}')
    return [part if isinstance(part, str) else {glob: _tuples(spec) for glob, spec in part.items()} for part in parts]


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def one_of(option: str, value: str, names: Iterable[str], more: str = "") -> str:
    """Return the value of an option; ``Refused`` if it is none of these names, with a near one."""
    names = list(names)
    if value in names:
        return value
    near = difflib.get_close_matches(value, names, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise Refused(f"--{option} {value} is unknown; choose from {', '.join(names)}{more}{hint}")


def _check_step(options: TrainOptions, mesh: Mesh) -> None:
    """Check options that must fit each other."""
    if options.batch % options.microbatches:
        near = min(
            (n for n in range(1, options.batch + 1) if options.batch % n == 0),
            key=lambda n: abs(n - options.microbatches),
        )
        raise Refused(
            f"--microbatches {options.microbatches} do not divide --batch {options.batch} into equal pieces; try "
            f"--microbatches {near}"
        )
    if options.amp != NONE and options.dtype != "float32":
        raise Refused(f"--amp {options.amp} needs float32 weights, but --dtype is {options.dtype}; use one of both")
    if options.loss_scale is not None and not options.amp.startswith("fp16"):
        raise Refused(
            f"--loss-scale is for fp16, whose small gradients are lost, and --amp is {options.amp}; leave it out, or "
            f"use --amp fp16-O2"
        )
    if options.zero and not set(mesh.names) - {"tp", "pp", "cp"}:
        raise Refused(
            f"--zero {options.zero} splits over a data axis, and --mesh {options.mesh} has none; use --zero 0, or a "
            f"mesh such as dp=2,tp=2"
        )


def _check_folder(options: TrainOptions) -> None:
    """Refuse to start a new training in a folder with checkpoints of another training."""
    if options.checkpoint is None:
        if options.resume:
            raise Refused("--resume continues from a checkpoint, but no folder is named; add --checkpoint FOLDER")
        return
    if Path(options.checkpoint).is_file():
        raise Refused(f"--checkpoint {options.checkpoint} is a file, and no folder; name a folder")
    newest = latest(options.checkpoint)
    if newest is not None and not options.resume:
        raise Refused(
            f"--checkpoint {options.checkpoint} has {newest.name} of another training; continue it with --resume, or "
            f"name another folder"
        )


def _check_processes(options: TrainOptions, mesh: Mesh, launched: Launched | None) -> None:
    if launched is None:
        cores = os.cpu_count() or 1
        if not options.simulate and mesh.size > max(16, PROCESSES_A_CORE * cores):
            raise Refused(
                f"--mesh {options.mesh} needs {mesh.size} processes, and this machine has {cores} cores; "
                f"--simulate runs all ranks in one process, and torchrun starts them on several machines"
            )
        return
    if options.simulate:
        raise Refused(
            "--simulate runs all ranks in this one process, but RANK and WORLD_SIZE are set; start it without torchrun"
        )
    if launched.size != mesh.size:
        raise Refused(
            f"the job has {launched.size} {'process' if launched.size == 1 else 'processes'}, but the mesh {mesh} has "
            f"{mesh.size} ranks; start it with torchrun --nproc-per-node {mesh.size}, or choose --mesh "
            f"dp={launched.size}"
        )


def _device(name: str | None, local: int, launched: Launched | None) -> torch.device:
    """Return the device of this process. CUDA is the default if there are enough GPUs.

    It needs one for each of the machine's ranks.
    """
    if name is not None:
        one_of("device", name, DEVICES)
    gpus = torch.cuda.device_count()
    if name == "cuda" and gpus < local:
        raise Refused(
            f"--device cuda needs a GPU for each rank, {local} on this machine, which has {gpus}; use --device cpu"
        )
    if name == "cpu" or gpus < local:
        return torch.device("cpu")
    return torch.device("cuda", launched.local_rank if launched else 0)
