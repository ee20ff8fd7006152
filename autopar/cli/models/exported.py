"""Load a program that torch.export has written, FILE.pt2."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import torch

from autopar.capture.exported import exported_module
from autopar.cli.models.raised import raised
from autopar.cli.train.refused import Refused
from autopar.errors import CaptureError


def exported_model(name: str) -> tuple[torch.nn.Module, Any]:
    """Return the model of a file, and the arguments of its export as args and kwargs; ``None`` if it has none.

    Raises:
        Refused: there is no such file, or it has no exported program.
    """
    if not Path(name).is_file():
        raise Refused(
            f"there is no file {name}; torch.export.save(torch.export.export(model, args), {name!r}) writes one"
        )
    if not zipfile.is_zipfile(name):  # torch would log its own words besides
        raise Refused(f"{name} is no program of torch.export; torch.export.save writes one")
    try:
        program = torch.export.load(name)
        return exported_module(program), program.example_inputs
    except CaptureError as error:
        raise Refused(f"{name}: {error}") from None
    except Exception as error:
        raise Refused(f"{name} is no program of torch.export: {raised(error)}; torch.export.save writes one") from None
