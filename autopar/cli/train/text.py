"""The training text, as bytes, and the batches that are cut from it."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch

from autopar.cli.train.refused import Refused

STRIDE = 1_000_003  # steps of one seed that have a generator of their own


@dataclass(frozen=True)
class Text:
    """What is trained on. ``name`` is for people."""

    name: str
    data: torch.Tensor  # uint8, one dim

    def batch(self, seed: int, step: int, rows: int, length: int, device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
        """The global batch of one step: ``rows`` pieces of the text. Equal on every rank, and whatever ran before."""
        generator = torch.Generator().manual_seed(seed * STRIDE + step)
        starts = torch.randint(len(self.data) - length + 1, (rows, 1), generator=generator)
        ids = self.data[starts + torch.arange(length)].long().to(device)
        return {"input_ids": ids, "labels": ids}


def standard_library() -> Text:
    """The sources of Python's standard library, one after the other in the order of their names."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return _text("Python's standard library", b"".join(file.read_bytes() for file in files))


def read(file: str | None) -> Text:
    """A file, or without one the standard library; ``Refused`` where it cannot be read."""
    if file is None:
        return standard_library()
    try:
        return _text(Path(file).name, Path(file).read_bytes())
    except OSError as error:
        raise Refused(f"--text {file}: {error.strerror}; give a file that can be read, or leave it out") from None


def check_length(text: Text, length: int) -> None:
    """``Refused`` when the text has no piece of ``length`` bytes."""
    count = len(text.data)
    if count < length:
        shorter = f", or --sequence {count}" if count > 1 else ""
        raise Refused(f"{text.name} has {count} bytes, but a sequence has {length}; give a longer text with --text{shorter}")


def _text(name: str, data: bytes) -> Text:
    return Text(name, torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8))
