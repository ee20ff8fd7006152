"""Run ``autopar profile step``: time each distinct call of a model's training step, print the times, and save them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import distributed

from autopar.api import parallelize
from autopar.cli.files import check_writable
from autopar.cli.models.given import model_of
from autopar.cli.models.options import ModelOptions
from autopar.cli.output import OutputOptions, output_of
from autopar.cli.plan.planning import machine_for
from autopar.cli.stages import check_schedule, schedule_options
from autopar.cli.status import DONE, status_of
from autopar.cli.train.check import mesh_of, one_of, plan_of
from autopar.cli.train.launched import Launched, launched
from autopar.cli.train.optimizers import OPTIMIZERS
from autopar.cli.train.options import AMPS, DEVICES, LIMITS, NONE, option
from autopar.cli.train.refused import Refused
from autopar.ir.mesh import PIPELINE, Mesh
from autopar.runtime.measuring.clock import Effort
from autopar.step.train_step import TrainStep


@dataclass(frozen=True, kw_only=True)
class ProfileOptions(ModelOptions, OutputOptions):
    """The options of ``autopar profile step`` and their defaults."""

    mesh: str = "dp=2,tp=2"
    plan: str | None = None
    machine: str | None = None
    device: str = "cpu"
    optimizer: str = "adamw"
    microbatches: int = 1
    schedule: str | None = None
    chunks: int | None = None
    amp: str = NONE
    recompute: str = NONE
    zero: int = 0
    clip_norm: float | None = None
    seconds: float = Effort.seconds
    interference: bool = False
    save: str | None = None


def run(options: ProfileOptions) -> int:
    """Run with the options and return the exit status. An error is printed as one line, without a traceback."""
    return status_of(partial(_follow, options), options.model)


def _follow(options: ProfileOptions) -> int:
    job = launched()
    mesh = _checked(options, job)
    plan = plan_of(options.plan or ("megatron" if "tp" in mesh.names else "ddp"))
    machine = machine_for(options.machine, plan)
    output = output_of(options, job is None or job.rank == 0)
    step = _captured(options, mesh, plan, job)
    try:
        profile = step.measure(
            machine=machine, effort=Effort(seconds=options.seconds), interference=options.interference
        )
        output.text.print(str(profile), end="", soft_wrap=True)
        if job is not None and job.rank != 0:
            return DONE
        if options.save is None:
            said = "--save FILE writes these times to a file, from which durations are taken"
        else:
            profile.save(options.save)
            said = f"{options.save} has the times of {len(profile.rows)} distinct calls"
        output.notes.print(said, soft_wrap=True)
        output.give(profile.to_json())
        return DONE
    finally:
        if distributed.is_initialized():
            distributed.destroy_process_group()


def _checked(options: ProfileOptions, job: Launched | None) -> Mesh:
    """Check the options; ``Refused`` names the option and the remedy. Returns the mesh."""
    for name, holds, words in LIMITS:
        value = getattr(options, name, None)
        if value is not None and not holds(value):
            raise Refused(f"{option(name)} {value} must be {words}")
    if not options.seconds >= 0:
        raise Refused(f"--seconds {options.seconds} must be 0 or more, for each call")
    one_of("optimizer", options.optimizer, OPTIMIZERS)
    one_of("amp", options.amp, AMPS)
    one_of("device", options.device, DEVICES)
    mesh = mesh_of(options.mesh)
    check_schedule(options, mesh)
    if job is not None and job.size != mesh.size:
        raise Refused(
            f"--mesh {options.mesh} has {mesh.size} ranks, and the job has {job.size} processes; start it with "
            f"torchrun --nproc-per-node {mesh.size}, or give a mesh of {job.size}"
        )
    if job is None and options.interference:
        raise Refused(
            "--interference times ops beside a collective, and one process has none; start several with torchrun "
            f"--nproc-per-node {mesh.size} -m autopar profile step …"
        )
    check_writable("--save", options.save)
    return mesh


def _captured(options: ProfileOptions, mesh: Mesh, plan: Any, job: Launched | None) -> TrainStep:
    """Capture the training step of the model. Nothing of it is computed."""
    device = _device(options, job)
    given = model_of(options)
    model = given.model
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        # alone on the host it stays on meta, and takes no memory
        model = model.to_empty(device=device) if job is not None or device.type != "cpu" else model
    elif device.type != "cpu":
        model = model.to(device)
    parallel = parallelize(model, mesh, plan)
    optimizer = OPTIMIZERS[options.optimizer](parallel.parameters(), 1e-3, 0.0)
    chosen: dict[str, Any] = {"microbatches": options.microbatches, "zero": options.zero}
    chosen |= schedule_options(options) if PIPELINE in mesh.names else {}
    chosen |= {"amp": options.amp} if options.amp != NONE else {}
    chosen |= {"recompute": options.recompute} if options.recompute != NONE else {}
    chosen |= {"clip_norm": options.clip_norm} if options.clip_norm is not None else {}
    step = parallel.train_step(optimizer, **chosen)
    step.capture(given.example)
    return step


def _device(options: ProfileOptions, job: Launched | None) -> torch.device:
    if options.device != "cuda":
        return torch.device("cpu")
    local_rank = 0 if job is None else job.local_rank
    gpus = torch.cuda.device_count()
    if gpus <= local_rank:
        raise Refused(f"--device cuda needs a GPU for each process of this machine, and there are {gpus}; leave it out")
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)
