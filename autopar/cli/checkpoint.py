"""Run ``autopar checkpoint``: show a folder of checkpoints, or one checkpoint, and convert from and to DCP."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from autopar.checkpoint.dcp import export_dcp, import_dcp
from autopar.checkpoint.files import verify
from autopar.checkpoint.folder import checkpoints_in, incompleteness_of, latest, no_folder, read_manifest
from autopar.checkpoint.manifest import Manifest
from autopar.checkpoint.values import leaves
from autopar.errors import CheckpointError

DONE, CUT_OFF, REFUSED = 0, 1, 2  # exit statuses
WIDTH = 80  # characters of a printed value


def show(path: str, check: bool) -> int:
    """Print a folder of checkpoints, or one checkpoint; return the exit status."""
    return _printed(lambda: _lines(Path(path), check))


def imported(source: str, folder: str, allow_pickle: bool, skip: Sequence[str]) -> int:
    """Write a checkpoint from a DCP folder, and print its path; return the exit status."""
    return _printed(lambda: _new(import_dcp(source, folder, allow_pickle=allow_pickle, skip=skip)))


def exported(source: str, folder: str, torchtitan: bool) -> int:
    """Write a DCP folder from a checkpoint, and print its path; return the exit status."""
    return _printed(lambda: [f"{export_dcp(source, folder, torchtitan=torchtitan)} is written"])


def _new(path: Path) -> list[str]:
    return [f"{path}   {_summary(read_manifest(path))}"]


def _printed(lines: Callable[[], Iterable[str]]) -> int:
    """Print lines; an error is printed as one line. Return the exit status."""
    try:
        for line in lines():
            print(line)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has closed the pipe, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CUT_OFF
    except (CheckpointError, OSError) as error:
        print(f"autopar: {error}", file=sys.stderr)
        return REFUSED
    return DONE


def _lines(path: Path, check: bool) -> Iterator[str]:
    if not path.is_dir():
        raise CheckpointError(no_folder(path))
    checkpoints = checkpoints_in(path)
    if checkpoints:
        newest = latest(path)
        yield from _columns(
            [
                (checkpoint.name, incompleteness_of(checkpoint) or _summary(read_manifest(checkpoint)))
                for checkpoint in checkpoints
            ]
        )
        if newest is None:
            raise CheckpointError(f"{path} has no complete checkpoint")
        yield ""
    else:
        newest = path
    manifest = read_manifest(newest)
    yield f"{newest.name}   {_summary(manifest)}"
    if check:
        verify(newest, manifest.files)
        yield "all files are unchanged since they were written"
    yield from _columns(
        [
            (name, str(tensor), f"{_bytes(tensor.shape, tensor.dtype.itemsize):,} bytes")
            for name, tensor in manifest.tensors.items()
        ]
    )
    yield from _columns([(name, _short(json.dumps(value))) for name, value in leaves(manifest.tree)])


def _summary(manifest: Manifest) -> str:
    step = "" if (value := _step(manifest)) is None else f"step {value}, "
    size = sum(file.bytes for file in manifest.files)
    count = len(manifest.files)
    return (
        f"{step}{len(manifest.tensors)} tensors, {size:,} bytes in {count} file{'s' * (count != 1)}, by torch "
        f"{manifest.torch}"
    )


def _step(manifest: Manifest) -> int | None:
    """Return the ``step`` of the state, if it has one."""
    step = manifest.tree.get("step") if isinstance(manifest.tree, dict) else None
    return step if isinstance(step, int) else None


def _bytes(shape: tuple[int, ...], width: int) -> int:
    return math.prod(shape) * width


def _short(text: str) -> str:
    return text if len(text) <= WIDTH else f"{text[: WIDTH - 1]}…"


def _columns(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
