"""Read the tensors of a call from the command line: ``input_ids=i64[8,2048]``."""

from __future__ import annotations

import difflib
import re

import torch

from autopar.cli.train.refused import Refused
from autopar.ir.record import DTYPES

PART = re.compile(r"(?P<name>[^=\s]+)=(?P<dtype>\w+)\[(?P<sizes>[\d,\s]*)\]")
WRITTEN = "write it as in --inputs input_ids=i64[8,2048],mask=bool[8,2048]"


def parts_of(text: str) -> list[str]:
    """Split a text at its commas, but for those within brackets."""
    return [part.strip() for part in re.split(r",(?![^\[\]]*\])", text) if part.strip()]


def inputs_of(text: str, device: torch.device | str) -> dict[str, torch.Tensor]:
    """Return the tensors that ``--inputs`` describes, by the names of forward's arguments.

    On meta they have no values. Elsewhere floats are drawn, and integers are 0 or 1, which any table of embeddings has.

    Raises:
        Refused: the text is not written like this, names an unknown dtype, or an argument twice.
    """
    found: dict[str, torch.Tensor] = {}
    for part in parts_of(text):
        match = PART.fullmatch(part)
        if match is None:
            raise Refused(f"--inputs {text}: {part} is no tensor; {WRITTEN}")
        name, dtype = match["name"], match["dtype"]
        if name in found:
            raise Refused(f"--inputs {text} has {name} twice; {WRITTEN}")
        if dtype not in DTYPES:
            near = difflib.get_close_matches(dtype, DTYPES, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise Refused(f"--inputs {part}: there is no dtype {dtype}; there are {', '.join(DTYPES)}{hint}")
        sizes = [int(size) for size in match["sizes"].split(",") if size.strip()]
        found[name] = drawn(sizes, DTYPES[dtype], device)
    if not found:
        raise Refused(f"--inputs {text!r} has no tensor; {WRITTEN}")
    return found


def drawn(sizes: list[int], dtype: torch.dtype, device: torch.device | str, below: int = 2) -> torch.Tensor:
    """Return a tensor with random values: floats, or integers from 0 to ``below - 1``; on meta it has none."""
    if torch.device(device).type == "meta":
        return torch.empty(sizes, dtype=dtype, device="meta")
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(sizes, device=device).to(dtype)
    return torch.randint(0, below, sizes, device=device).to(dtype)
