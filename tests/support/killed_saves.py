"""Ranks that are killed while they save a checkpoint, for the tests that nothing half-written is ever taken for whole.

Run as a script it serves jobs: a line of JSON each on stdin, and its answer on stdout. torch is imported once, and the
ranks are forked. A job saves step 1 in peace; then a rank is killed while they save step 2. The places are those where
Python tells an audit hook that it is about to touch a file of the folder, or sizes of a file.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import signal
import sys
import time
from typing import Any

import torch
import torch._dynamo  # takes 2 s, of each rank that distributes a tensor, unless it is there before the forks
from checkpoints import whole
from torch import distributed
from torch.distributed import checkpoint as _loaded_before_the_forks  # noqa: F401

from autopar import checkpoint
from autopar.checkpoint import reading as _reading  # noqa: F401
from autopar.checkpoint import writing as _writing  # noqa: F401
from autopar.errors import CheckpointError

LIMIT = 20  # seconds until a job is given up: the ranks that are left must not wait for the dead
AT_ONCE = 3  # jobs
SAVED, REFUSED = 0, 3  # exit statuses of ranks


def state(step: int, rank: int, ranks: int) -> dict[str, Any]:
    """That of a step, and a tensor of several stretches, of which each rank has a piece."""
    found = whole(step)
    large = torch.full((6, 500), float(step))
    if ranks > 1:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor

        large = distribute_tensor(large, init_device_mesh("cpu", (ranks,)), [Shard(0)])
    return found | {"large": large}


def arm(job: dict[str, Any]) -> list[int]:
    """Be killed while saving; returns the count of places passed."""
    passed = [0]
    if "size" in job:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_FSIZE, (job["size"], resource.RLIM_INFINITY))

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event.startswith(("os.", "open", "shutil.")) and args and str(args[0]).startswith(job["folder"]):
            if passed[0] == job.get("place"):
                os.killpg(0, signal.SIGKILL) if job["victim"] is None else os.kill(os.getpid(), signal.SIGKILL)
            passed[0] += 1

    sys.addaudithook(hook)
    return passed


def run(job: dict[str, Any], rank: int) -> int:
    """A rank of a job; its exit status."""
    ranks, folder = job["ranks"], job["folder"]
    if ranks > 1:
        distributed.init_process_group("gloo", init_method=f"file://{folder}-store", rank=rank, world_size=ranks)
    first, second = state(1, rank, ranks), state(2, rank, ranks)
    checkpoint.save(folder, first, keep=job["keep"])
    passed = arm(job) if job["victim"] in (rank, None) else [0]
    try:
        checkpoint.save(folder, second, keep=job["keep"])
    except CheckpointError:
        return REFUSED
    if "count" in job:
        os.write(job["count"], f"{passed[0]} ".encode())
    return SAVED


def serve(job: dict[str, Any]) -> dict[str, Any]:
    """Fork the ranks of a job, and wait for them."""
    os.setpgid(0, 0)
    reading, writing = os.pipe()
    pids = {}
    for rank in range(job["ranks"]):
        if (pid := os.fork()) == 0:
            os.setpgid(0, 0) if rank == 0 else os.setpgid(0, next(iter(pids)))  # so that the parent outlives them
            os._exit(run(job | {"count": writing}, rank))
        pids[pid] = rank
        os.setpgid(pid, next(iter(pids)))
    os.close(writing)
    codes: dict[int, int] = {}
    begin = time.monotonic()
    while len(codes) < len(pids) and time.monotonic() - begin < LIMIT:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            codes[pids[pid]] = os.waitstatus_to_exitcode(status)
        else:
            time.sleep(0.005)
    for pid, rank in pids.items():
        if rank not in codes:
            os.kill(pid, signal.SIGKILL)
    places = os.read(reading, 100).decode().split()
    return {"codes": [codes.get(rank) for rank in range(len(pids))], "places": [int(count) for count in places]}


if __name__ == "__main__":
    torch.set_num_threads(1)
    gc.freeze()
    running = 0
    for line in sys.stdin:
        if running == AT_ONCE:
            os.wait()
            running -= 1
        running += 1
        if os.fork() == 0:
            job = json.loads(line)
            os.write(1, (json.dumps(job | serve(job)) + "\n").encode())
            os._exit(0)
    while running:
        os.wait()
        running -= 1
