"""Run ``autopar checkpoint``: show a folder of checkpoints, or one checkpoint, and convert from and to DCP."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from autopar.checkpoint.dcp import export_dcp, import_dcp
from autopar.checkpoint.files import verify
from autopar.checkpoint.folder import checkpoints_in, incompleteness_of, latest, no_folder, read_manifest
from autopar.checkpoint.manifest import Manifest
from autopar.checkpoint.values import leaves
from autopar.cli.output import OutputOptions, output_of
from autopar.cli.status import DONE, status_of
from autopar.errors import CheckpointError
from autopar.ir.record import DTYPE_NAMES
from autopar.report.progress import doing

WIDTH = 80  # characters of a printed value


def show(path: str, check: bool, options: OutputOptions) -> int:
    """Print a folder of checkpoints, or one checkpoint; return the exit status."""

    def follow() -> int:
        output = output_of(options)
        for line in _lines(Path(path), check):
            output.text.print(line, soft_wrap=True)
        if options.json:
            output.give(_described(Path(path)))
        return DONE

    return status_of(follow)


def imported(source: str, folder: str, allow_pickle: bool, skip: Sequence[str], options: OutputOptions) -> int:
    """Write a checkpoint from a DCP folder, and print its path; return the exit status."""
    return _written(lambda: import_dcp(source, folder, allow_pickle=allow_pickle, skip=skip), options, _new)


def exported(source: str, folder: str, torchtitan: bool, options: OutputOptions) -> int:
    """Write a DCP folder from a checkpoint, and print its path; return the exit status."""
    return _written(
        lambda: export_dcp(source, folder, torchtitan=torchtitan), options, lambda path: f"{path} is written"
    )


def _written(write: Callable[[], Path], options: OutputOptions, said: Callable[[Path], str]) -> int:
    def follow() -> int:
        output = output_of(options)
        with doing("write a checkpoint"):
            path = write()
        output.text.print(said(path), soft_wrap=True)
        output.give({"written": str(path)})
        return DONE

    return status_of(follow)


def _described(path: Path) -> dict[str, Any]:
    """Return what a checkpoint holds, as JSON; of a folder of several, the newest."""
    newest = latest(path) if checkpoints_in(path) else path
    assert newest is not None  # else the lines have said so
    manifest = read_manifest(newest)
    return {
        "checkpoint": str(newest), "step": _step(manifest), "torch": manifest.torch,
        "bytes": sum(file.bytes for file in manifest.files), "files": len(manifest.files),
        "tensors": {
            name: {"shape": list(tensor.shape), "dtype": DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype))}
            for name, tensor in manifest.tensors.items()
        },
        "values": dict(leaves(manifest.tree)),
    }  # fmt: skip


def _new(path: Path) -> str:
    return f"{path}   {_summary(read_manifest(path))}"


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
