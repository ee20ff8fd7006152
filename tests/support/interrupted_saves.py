"""Saves that end at a chosen file operation: killed before, within or after it, with the power cut, or with a full
disk."""

from __future__ import annotations

import errno
import functools
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import same, told
from torch import distributed
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from autopar import checkpoint
from autopar.checkpoint import files, pieces

KILLS = ("before", "within", "after")


class KilledError(BaseException):
    """This process does nothing any more."""


@dataclass
class Disk:
    """Performs the operations of ``files`` until it comes to the one at which the save ends.

    Attributes:
        at: its number; ``None``: there is none.
        how: one of ``KILLS``, or ``"full"``: that operation fails, and the process goes on.
        power: whether the machine stays on: otherwise all that was not forced to disk is lost.
        count: how many operations there were.
    """

    at: int | None = None
    how: str = "before"
    power: bool = True
    count: int = 0
    dead: bool = False
    contents: set[Path] = field(default_factory=set)  # files whose bytes were not forced
    # what was made, or renamed from where, and not forced
    names: list[tuple[Path, Path | None]] = field(default_factory=list)

    def perform(self, name: str, operation: Callable[..., Any], *args: Any) -> Any:
        if self.dead:
            raise KilledError
        number, self.count = self.count, self.count + 1
        if number != self.at:
            return self._done(name, operation, *args)
        if self.how == "full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(args[0]))
        if self.how == "within":
            self._half(name, *args)
        elif self.how == "after":
            done = self._done(name, operation, *args)
            if name == "create":
                done.close()
        self.dead = True
        if not self.power:
            self._lose()
        raise KilledError

    def _done(self, name: str, operation: Callable[..., Any], *args: Any) -> Any:
        done = operation(*args)
        if name == "create":
            self.contents.add(args[0])
            self.names.append((args[0], None))
        elif name == "append":
            args[0].flush()  # so that nothing is written behind the last operation
        elif name == "force":
            self.contents.discard(Path(args[0].name))
        elif name == "force_names":
            self.names = [(path, old) for path, old in self.names if path.parent != args[0]]
        elif name == "rename":
            self.names.append((args[1], args[0]))
        return done

    def _half(self, name: str, *args: Any) -> None:
        if name == "append":
            files_append(args[0], bytes(args[1])[: len(args[1]) // 2])
            args[0].flush()
        elif name == "remove":
            next(path for path in args[0].rglob("*") if path.is_file()).unlink()

    def _lose(self) -> None:
        for path, old in reversed(self.names):
            if old is None:
                path.unlink(missing_ok=True)
            elif path.exists():
                path.rename(old)
        for path in filter(Path.exists, self.contents):
            path.write_bytes(b"")


files_append = files.append


@contextmanager
def disk(found: Disk) -> Iterator[None]:
    """Saves use this disk; blocks are small, so that a tensor is several."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "STRETCH", 128)
        for name in files.OPERATIONS:
            patch.setattr(files, name, functools.partial(found.perform, name, getattr(files, name)))
        yield


def state(step: int) -> dict[str, Any]:
    """Other values at each step; on processes with a tensor of which each has a piece."""
    values = torch.arange(64.0).reshape(8, 8) + step
    if not distributed.is_initialized():
        return {"w": values, "step": step}
    mesh = distributed.init_device_mesh("cpu", (distributed.get_world_size(),))
    return {
        "w": distribute_tensor(values, mesh, [Shard(0)]),
        "b": distribute_tensor(values + 1, mesh, [Replicate()]),
        "step": step,
    }


def prepared(folder: Path) -> None:
    """A folder with step 1, and what saves that were ended have left."""
    checkpoint.save(folder, state(1))
    if first():
        for name in (".writing-000007-0a1b2c3d", ".removing-000000"):
            (folder / name).mkdir()
            (folder / name / "rank-00000.safetensors").write_bytes(b"x" * 100)


def step_in(folder: Path) -> int:
    """The step that is loaded, exactly; warnings are errors."""
    target = state(100)
    found = checkpoint.load(folder, target)
    same(found, state(found["step"]))
    return found["step"]


def first() -> bool:
    return not distributed.is_initialized() or distributed.get_rank() == 0


def meet() -> None:
    if distributed.is_initialized():
        distributed.barrier()


def interrupted(source: Path, folder: Path, found: Disk | None) -> tuple[int, str]:
    """Save step 2 over a copy of a prepared folder. ``found``: the disk of this rank, ``None``: an ordinary one.

    Returns:
        The step that is loaded afterwards, and the error.
    """
    if first():
        shutil.copytree(source, folder)
    meet()
    with disk(found or Disk()):
        try:
            how, text = told(lambda: checkpoint.save(folder, state(2), keep=1))
        except KilledError:
            how, text = "KilledError", ""
    meet()
    step = step_in(folder)
    if found is None or found.how != "full":
        path = checkpoint.save(folder, state(3), keep=1)  # the next save goes well, and clears up
        if first():
            left = sorted(one.name for one in folder.iterdir())
            assert left == [path.name, "latest"], left
        assert step_in(folder) == 3
    meet()
    if first():
        shutil.rmtree(folder)
    return step, f"{how}: {text}"


def on_ranks(folder: str) -> dict[str, list[int]]:
    """Each rank in turn is killed at each operation of its own: the steps that are loaded then."""
    root = Path(folder)
    torch.set_num_threads(1)
    prepared(root / "source")
    steps: dict[str, list[int]] = {}
    for victim in range(distributed.get_world_size()):
        mine = distributed.get_rank() == victim
        counting = Disk()
        assert interrupted(root / "source", root / "copy", counting if mine else None)[0] == 2
        count = [counting.count]
        distributed.broadcast_object_list(count, victim)
        for how in KILLS[1:]:  # before an operation is after the last one
            steps[f"{victim} {how}"] = [
                interrupted(root / "source", root / "copy", Disk(at, how) if mine else None)[0]
                for at in range(count[0])
            ]
    return steps
