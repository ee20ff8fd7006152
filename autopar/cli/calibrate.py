"""Run ``autopar calibrate``: measure this machine, print the figures, and write a machine file."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from autopar.cli.files import check_writable
from autopar.cli.output import OutputOptions, output_of
from autopar.cli.status import DONE, status_of
from autopar.cli.train.launched import Launched, launched
from autopar.cli.train.refused import Refused
from autopar.costs.calibrate import calibrated
from autopar.costs.measurements import SIZES, in_group, in_processes
from autopar.report.progress import doing

RANKS = 2  # by default
DEVICES = ("cpu", "cuda")


@dataclass(frozen=True, kw_only=True)
class Calibrating(OutputOptions):
    """The options of ``autopar calibrate`` and their defaults."""

    output: str | None = None
    ranks: int | None = None
    device: str = "cpu"
    rounds: int = 8
    sizes: str = ",".join(map(str, SIZES))
    name: str | None = None


def run(options: Calibrating) -> int:
    """Run with the options and return the exit status. An error is printed as one line, without a traceback."""
    return status_of(partial(_follow, options))


def _follow(options: Calibrating) -> int:
    job = launched()
    output = output_of(options, job is None or job.rank == 0)
    sizes = _sizes(options.sizes)
    ranks = _ranks(options, job)
    if options.rounds < 2:
        raise Refused(f"--rounds {options.rounds} must be at least 2, for the fit")
    check_writable("--output", options.output)
    with doing(f"measure {ranks} ranks"):
        if job is None:
            found = in_processes(ranks, options.rounds, sizes, options.device)
        else:
            found = in_group("env://", job.rank, job.local_rank, ranks, options.rounds, sizes, options.device)
    if job is not None and job.rank != 0:
        return DONE
    name = options.name or (f"cpu, {ranks} processes" if options.device == "cpu" else torch.cuda.get_device_name(0))
    calibration = calibrated(found, name, "autopar calibrate")
    output.text.print(str(calibration), end="", soft_wrap=True)
    if options.output is None:
        said = f"--output FILE writes these figures of {name!r} to a machine file"
    else:
        calibration.machine.save(options.output)
        said = f"{options.output} has the figures of {name!r}: parallelize(…, machine={options.output!r})"
    output.notes.print(said, soft_wrap=True)
    output.give(calibration.machine.description())
    return DONE


def _sizes(text: str) -> list[int]:
    try:
        sizes = [int(word) for word in text.split(",")]
    except ValueError:
        sizes = []
    if len(set(sizes)) < 2 or min(sizes) < 1:
        raise Refused(f"--sizes {text}: write two sizes or more, in bytes: 4,4096,1048576")
    return sorted(set(sizes))


def _ranks(options: Calibrating, job: Launched | None) -> int:
    """Return how many processes measure, after checking the device."""
    if options.device not in DEVICES:
        raise Refused(f"--device {options.device} is unknown; choose from {', '.join(DEVICES)}")
    if job is not None and options.ranks not in (None, job.size):
        raise Refused(f"--ranks {options.ranks}: the job has {job.size} processes, which all measure; leave it out")
    if job is not None and job.local_size != job.size:
        raise Refused(
            f"the job has {job.size} processes, {job.local_size} of them on this machine; start it on one, with "
            f"torchrun --nproc-per-node {job.local_size}: links between machines are not measured"
        )
    gpus = torch.cuda.device_count()
    default = RANKS if options.device == "cpu" else max(gpus, 1)
    ranks = job.size if job is not None else default if options.ranks is None else options.ranks
    if ranks < 1:
        raise Refused(f"--ranks {ranks} must be at least 1; one process measures ops only")
    if options.device == "cuda" and gpus < ranks:
        raise Refused(
            f"--device cuda needs a GPU for each of {ranks} processes, and there are {gpus}; use fewer --ranks"
        )
    return ranks
