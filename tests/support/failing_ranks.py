"""Ranks that fail on purpose, for the tests of the watch and of the launcher.

Run as a script it serves jobs: each is a line of JSON on stdin, and its answer tells how each rank ended. torch is
imported once, and the ranks are forked. A rank runs at the top of this script, so that its exceptions and its end are
those of any program. Under a launcher the script is a rank, and its argument says how it fails.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from forks import MAY_CAPTURE_BEFORE

from autopar.ir.program import Program
from autopar.runtime import current_op
from autopar.runtime.lowering import source
from autopar.runtime.lowering.lower import lower_function
from autopar.runtime.processes.launch import store_of_job
from autopar.runtime.processes.watch.watch import INTERVAL, Watch
from autopar.scheduling.programs.run_parts import part_of
from autopar.torch_private import kernel_of

# seconds until a job is given up, and jobs at once: ranks that capture by themselves take longer
LIMIT, AT_ONCE = (30, 6) if MAY_CAPTURE_BEFORE else (90, 1)
TIMEOUT = 2.0  # seconds, of a watch

STEP = """\
def forward(x, compute, reduce):
    reduce(x)
    compute()
    reduce(x)
    return x
"""
OPS = {
    2: "all_reduce(mm_1, tp)   model.py:41  self.act(self.up(x))   in module layers.0.mlp",
    3: "mm(x, t)   model.py:42  self.down(x)   in module layers.0.mlp",
    4: "all_reduce(mm_2, dp)   model.py:43  x + y   in module layers.0",
}


# something happens in ``relu``, while chunks or a bucket are under way
UNDER_WAY = {
    "chunks": """
  x_dp_0_start : f32[4096] = start all_reduce(x, dp) on dp from 0 to 4096
  x_dp_1_start : f32[4096] = start all_reduce(x, dp) on dp from 4096 to 8192
  y : f32[4] = relu(z)
  x_dp_0 : f32[4096] = wait(x_dp_0_start)
  x_dp_1 : f32[4096] = wait(x_dp_1_start)
  x_dp : f32[8192] = join_chunks([x_dp_0, x_dp_1], shape=(8192))
  return x_dp, y
""",
    "bucket": """
  x_dp_start : f32[8192] = start all_reduce(x, dp) on dp in dp_0
  z_dp_start : f32[4] = start all_reduce(z, dp) on dp in dp_0
  y : f32[4] = relu(z)
  x_dp : f32[8192] = wait(x_dp_start)
  z_dp : f32[4] = wait(z_dp_start)
  return x_dp, z_dp, y
""",
}
HEAD = """program scheduled on dp={ranks} at dp={rank}
stream dp
  x : f32[8192] = input
  z : f32[4] = input
forward:"""


def scheduled_step(lines: str, rank: int, ranks: int) -> Callable[..., Any]:
    """A step whose lines are those of a scheduled program."""
    program = Program.parse(HEAD.format(rank=rank, ranks=ranks) + lines)
    relu, computes = torch.ops.aten.relu.default, list[Callable[[], None]]()
    values = {"x": torch.ones(8192), "z": torch.ones(4)}

    def computed(z: torch.Tensor) -> torch.Tensor:
        computes[-1]()
        return relu(z)

    def kernel(op: Any) -> Callable[..., Any]:
        return computed if op is relu else kernel_of(op)

    with mock.patch.object(source, "kernel_of", kernel):  # generated code binds kernels when it is compiled
        lowered = lower_function(
            part_of(program, "whole"),
            program,
            {tuple(range(ranks)): dist.group.WORLD.group_name},  # type: ignore[union-attr]
        )

    def run(x: torch.Tensor, compute: Callable[[], None], reduce: Any) -> None:
        computes.append(compute)
        lowered.run([values[name] for name in lowered.takes])

    return run


def step() -> Callable[..., torch.Tensor]:
    scope: dict[str, Callable[..., torch.Tensor]] = {}
    exec(compile(STEP, "<step>", "exec"), scope)
    current_op.register(scope["forward"].__code__, OPS)
    return scope["forward"]


def train(case: str, watch: Watch, rank: int, ranks: int, timeout: float) -> None:
    """Five steps, and in the third something happens on the last rank, or on rank 0, or on most ranks."""
    lines = next((text for what, text in UNDER_WAY.items() if what in case), "")
    forward: Callable[..., Any] = scheduled_step(lines, rank, ranks) if lines else step()
    x = torch.ones(4)
    culprit = rank == (0 if case.endswith("of rank 0") else ranks - 1) or (rank > 0 and "most" in case)
    watch.start()
    for k in range(5):
        here = k == 2 and (culprit or case == "exception everywhere")
        if case == "slow outside" and k == 2:
            time.sleep(1.5 * timeout)
        if here and case == "sleep outside":
            time.sleep(100)
        if here and case == "loop outside":
            while True:
                time.sleep(0.3)
                time.sleep(0.3)
        if here and case == "exception outside":
            raise ValueError("outside")
        if here and case.startswith("early end"):
            return
        if k == 2 and rank == 2 and "rank 2 leaves" in case:
            threading.Timer(5 * INTERVAL, os._exit, [1]).start()  # between the stop and its discovery
        current_op.tick()
        forward(x, (lambda: in_step(case)) if here else (lambda: None), dist.all_reduce)
    if case == "rank 0 leaves first" and rank != 0:
        time.sleep(6 * INTERVAL)
    if case != "unstopped":
        watch.stop()


def in_step(case: str) -> None:
    if case.startswith("exception"):
        raise ValueError("a bad value\nand a second line")
    if case.startswith("interrupt"):
        raise KeyboardInterrupt
    if case.startswith(("kill", "stop")):
        time.sleep(3 * INTERVAL)  # so that the others know where it was
    if case.startswith("kill"):
        os.kill(os.getpid(), signal.SIGKILL)
    elif case.startswith("stop"):
        os.kill(os.getpid(), signal.SIGSTOP)
    elif "stuck in" in case:
        time.sleep(100)


def rank_of_a_job() -> tuple[dict[str, Any], int]:
    """Serve jobs until stdin ends, some at the same time; returns only in the forked ranks."""
    running = 0
    for line in sys.stdin:
        job = json.loads(line)
        if running == AT_ONCE:
            os.wait()
            running -= 1
        sys.stdout.flush()
        running += 1
        if os.fork() == 0:  # the parent of the ranks
            pids = {}
            for rank in range(job["ranks"]):
                pid = os.fork()
                if pid == 0:
                    return job, rank
                pids[pid] = rank
            os.write(1, (json.dumps({"case": job["case"], **ends(pids, job["reap"])}) + "\n").encode())
            os._exit(0)
    while running:
        os.wait()
        running -= 1
    os._exit(0)


def joined_rank_of_a_job() -> tuple[dict[str, Any], int, dist.Store]:
    """Serve jobs; in a forked rank, print to the job's file, join the job, and return it, the rank and the store."""
    gc.freeze()  # otherwise each rank spends seconds on its end
    job, rank = rank_of_a_job()
    output = os.open(job["output"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(0)
    held = job["rank 0 has the store"]
    shared = store_of_rank_0(Path(job["file"]), rank) if held else dist.FileStore(job["file"])
    join(rank, job["ranks"], shared)
    return job, rank, shared


def ends(pids: dict[int, int], reap: bool) -> dict[str, object]:
    """How each rank ended: its exit status, or minus its signal; None for those that never did."""
    codes: dict[int, int | None] = {}
    begin = time.monotonic()
    while len(codes) < len(pids) and time.monotonic() - begin < LIMIT:
        for pid, rank in pids.items():
            if rank in codes:
                continue
            flags = os.WEXITED | os.WNOHANG | (0 if reap else os.WNOWAIT)  # a zombie stays one
            done = os.waitid(os.P_PID, pid, flags)
            if done is not None:
                codes[rank] = done.si_status if done.si_code == os.CLD_EXITED else -done.si_status
        time.sleep(0.02)
    for pid, rank in pids.items():
        if rank not in codes:
            os.kill(pid, signal.SIGKILL)
        if rank not in codes or not reap:
            os.waitpid(pid, 0)
    return {"codes": [codes.get(rank) for rank in range(len(pids))]}


def join(rank: int, ranks: int, store: dist.Store | None) -> None:
    """The process group; its own time-out is too long for the tests to see it."""
    shared = None if store is None else dist.PrefixStore("gloo", store)
    dist.init_process_group("gloo", store=shared, rank=rank, world_size=ranks, timeout=timedelta(seconds=120))


def store_of_rank_0(file: Path, rank: int) -> dist.Store:
    """A store that ends with rank 0, on a port that the system chooses; the other ranks read its number."""
    if rank == 0:
        store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        written = file.with_suffix(".new")
        written.write_text(str(store.port))
        written.rename(file)
        return store
    while not file.exists():
        time.sleep(0.01)
    return dist.TCPStore("localhost", int(file.read_text()), is_master=False, wait_for_workers=False)


def child(rank: int, ranks: int, case: str, folder: str) -> None:
    """A rank that is a child of multiprocessing: its exceptions reach no ``sys.excepthook``."""
    output = os.open(f"{folder}/output.txt", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    shared = dist.FileStore(f"{folder}/store")
    join(rank, ranks, shared)
    train(case, Watch(shared, rank, ranks, timeout=TIMEOUT), rank, ranks, TIMEOUT)


if __name__ == "__main__" and "RANK" in os.environ:
    rank, ranks, timeout = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), TIMEOUT
    join(rank, ranks, None)
    watch = Watch(store_of_job(), rank, ranks, timeout=timeout)
    watch.start()  # before the test, which may kill the launcher, learns that the ranks are there
    print(f"rank {rank} has the pid {os.getpid()}", flush=True)
    train(sys.argv[1], watch, rank, ranks, timeout)
elif __name__ == "__main__":
    job, rank, shared = joined_rank_of_a_job()
    train(job["case"], Watch(shared, rank, job["ranks"], timeout=job["timeout"]), rank, job["ranks"], job["timeout"])
