"""Real processes for tests: gloo ranks that are started once and run what they are given."""

from __future__ import annotations

import atexit
import functools
import gc
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as multiprocessing
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh

from autopar import Mesh
from autopar.runtime.processes.groups import process_groups
from autopar.scheduling import longest_tail

LIMIT = 120  # seconds for one function
PRELOADED = [  # before ranks are forked
    "calls_of_models",
    "calls_of_optimizers",
    "calls_of_states",
    "calls_of_steps",
    "calls_refused",
    "zoo_architectures",
    "weights",
    "warmed",
]
TRIES = 8  # of orders on a rank; how good orders are is seen in one process
THREADS = 300  # of a rank, above which it has made so many process groups that their idle loops slow down all tests


class Ranks:
    """``count`` processes of one gloo world. ``run`` calls a function of a test module on all of them.

    ``prepare`` is called in each before there are process groups, and may choose another backend as the default.
    """

    def __init__(self, count: int, prepare: Callable[[], Any] | None = None) -> None:
        self.key = count, prepare
        store = tempfile.mktemp(prefix="autopar-test-")
        self.pipes, self.processes = [], []
        for rank in range(count):
            ours, theirs = multiprocessing.Pipe()
            self.pipes.append(ours)
            self.processes.append(forked(_serve, rank, count, store, theirs, prepare))

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """What ``function(*args)`` returns on each rank. What it raises on one is raised here, with its traceback."""
        for pipe in self.pipes:
            pipe.send((function, args))
        answers: list[Any] = []
        for rank, pipe in enumerate(self.pipes):
            if not pipe.poll(LIMIT):
                answers.append(("failed", f"rank {rank} has not answered"))
                continue
            try:
                answers.append(pipe.recv())
            except EOFError:
                self.processes[rank].join(1)
                answers.append(("failed", f"rank {rank} has ended, with the exit code {self.processes[rank].exitcode}"))
        if failed := [f"rank {rank}:\n{value}" for rank, (how, value) in enumerate(answers) if how == "failed"]:
            self.end()  # they may stand in different collectives
            raise AssertionError("\n".join(failed))
        if max(_threads(process.pid) for process in self.processes) > THREADS:
            self.end()  # the next test starts others
        return [value for _, value in answers]

    def end(self) -> None:
        WORLDS.pop(self.key, None)
        for process in self.processes:
            process.kill()


@functools.cache
def _start_forkserver() -> None:
    """It imports before it has our ``sys.path``, passes over what it does not find, and so is given it here."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    forkserver.set_forkserver_preload(PRELOADED)
    forkserver.ensure_running()
    if before is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = before


def forked(function: Callable[..., Any], *args: Any) -> BaseProcess:
    """A process of its own, which begins with all that ranks have imported and cached."""
    _start_forkserver()
    process = multiprocessing.get_context("forkserver").Process(target=function, args=args, daemon=True)
    process.start()
    return process


def _threads(pid: int | None) -> int:
    tasks = Path(f"/proc/{pid}/task")
    return len(list(tasks.iterdir())) if tasks.is_dir() else 0


WORLDS: dict[tuple[int, Callable[[], Any] | None], Ranks] = {}


@functools.cache
def device_mesh(mesh: Mesh) -> DeviceMesh:
    """On a rank: torch's mesh of all ranks, with the process groups that all meshes share."""
    return process_groups().device_mesh(mesh, "cpu", [])


def ranks(count: int, prepare: Callable[[], Any] | None = None) -> Ranks:
    """The processes of a world of this size; they are started when they are first needed."""
    if (count, prepare) not in WORLDS:
        WORLDS[count, prepare] = Ranks(count, prepare)
    return WORLDS[count, prepare]


@atexit.register
def _end() -> None:
    for world in list(WORLDS.values()):
        world.end()


def _serve(rank: int, count: int, store: str, pipe: Any, prepare: Callable[[], Any] | None) -> None:
    torch.set_num_threads(1)
    longest_tail.MOST = TRIES
    if prepare is not None:
        prepare()
    backend = "gloo" if prepare is None else None
    distributed.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=count)
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        try:
            torch.manual_seed(0)
            gc.collect()  # else models of tests before this one would close their groups in the middle of it
            pipe.send(("done", function(*args)))
        except BaseException:
            pipe.send(("failed", traceback.format_exc()))
