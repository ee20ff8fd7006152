"""Read the training text as bytes, and cut batches from it."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch

from autopar.cli.train.refused import Refused

STRIDE = 1_000_003  # the number of steps for which each pair of seed and step has its own generator


@dataclass(frozen=True)
class Text:
    """The training text. ``name`` is for the output."""

    name: str
    data: torch.Tensor  # uint8, one dim

    def batch(
        self, seed: int, step: int, rows: int, length: int, device: torch.device | str = "cpu"
    ) -> dict[str, torch.Tensor]:
        """Return the global batch of one step, ``rows`` pieces of the text.

        It is equal on every rank, and does not depend on earlier steps.
        """
        generator = torch.Generator().manual_seed(seed * STRIDE + step)
        starts = torch.randint(len(self.data) - length + 1, (rows, 1), generator=generator)
        ids = self.data[starts + torch.arange(length)].long().to(device)
        return {"input_ids": ids, "labels": ids}


def standard_library() -> Text:
    """Concatenate the sources of Python's standard library, in the order of their names."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return _text("Python's standard library", b"".join(file.read_bytes() for file in files))


def read(file: str | None) -> Text:
    """Read a file, or the standard library if none is named; ``Refused`` if it cannot be read."""
    if file is None:
        return standard_library()
    try:
        return _text(Path(file).name, Path(file).read_bytes())
    except OSError as error:
        raise Refused(f"--text {file}: {error.strerror}; give a file that can be read, or leave it out") from None


def check_length(text: Text, length: int) -> None:
    """Raise ``Refused`` if the text has no piece of ``length`` bytes."""
    count = len(text.data)
    if count < length:
        shorter = f", or --sequence {count}" if count > 1 else ""
        raise Refused(
            f"{text.name} has {count} bytes, but a sequence has {length}; give a longer text with --text{shorter}"
        )


def _text(name: str, data: bytes) -> Text:
    return Text(
        name, torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    )
