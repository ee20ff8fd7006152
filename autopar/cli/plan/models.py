"""Give the model to plan for and the arguments of a call: the small Llama, or the user's own."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from autopar.cli.plan.raised import raised
from autopar.cli.train.model import llama
from autopar.cli.train.refused import Refused
from autopar.cli.train.sizes import SIZES
from autopar.errors import class_of

RETURNS = "it returns a pair, return model, (x,), of a model and the arguments of one call"


def model_of(name: str, batch: int, sequence: int) -> tuple[torch.nn.Module, Any]:
    """Return a model and its ``example``, as ``parallelize`` takes them.

    Args:
        name: a size of the Llama, which is then on the meta device and has labels; or ``FILE.py:FUNCTION`` or
            ``package.module:FUNCTION``, a function of the user's that returns both.
        batch, sequence: of the Llama.

    Raises:
        Refused: there is no such size, file or function, or the function returns something else.
    """
    if name in SIZES:
        if importlib.util.find_spec("transformers") is None:
            raise Refused(
                f"the model {name} is Hugging Face's Llama, and transformers is not installed; pip install "
                f"'autopar[llm]', or name a function of your own, as in model.py:make"
            )
        ids = torch.empty(batch, sequence, dtype=torch.long, device="meta")
        with torch.device("meta"):
            return llama(SIZES[name], sequence, 0, torch.float32, torch.device("meta")), {
                "input_ids": ids,
                "labels": ids,
            }
    where, separator, function = name.rpartition(":")
    if not separator or not where or not function:
        raise Refused(
            f"the model {name} is unknown; choose from {', '.join(SIZES)}, or name a function that makes one, as in "
            f"model.py:make; {RETURNS}"
        )
    module = _module(where)
    make = getattr(module, function, None)
    if not callable(make):
        raise Refused(f"{where} has no function {function}; {RETURNS}")
    try:
        inspect.signature(make).bind()
    except TypeError as error:
        raise Refused(f"{name} is called without arguments, and it has one ({error}); {RETURNS}") from None
    try:
        made = make()
    except Exception as error:
        raise Refused(f"{name} raises {raised(error)}") from None
    if not isinstance(made, tuple) or len(made) != 2 or not isinstance(made[0], torch.nn.Module):
        raise Refused(f"{name} returns {class_of(made)}; {RETURNS}")
    if not isinstance(made[1], (tuple, dict)):
        raise Refused(f"{name} returns a model and {class_of(made[1])}; {RETURNS}")
    return made


def _module(where: str) -> ModuleType:
    """Import a file or a module by its name."""
    if not where.endswith(".py"):
        try:
            return importlib.import_module(where)
        except Exception as error:
            if isinstance(error, ModuleNotFoundError) and f"{where}.".startswith(f"{error.name}."):
                raise Refused(f"there is no module {error.name}; name a file, as in model.py:make") from None
            raise Refused(f"{where} cannot be imported: it raises {raised(error)}") from None
    path = Path(where)
    if not path.is_file():
        raise Refused(f"there is no file {where}")
    sys.path.insert(0, str(path.parent.resolve()))  # as for a script, so that it can import its neighbours
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[path.stem]
        raise Refused(f"{where} cannot be imported: it raises {raised(error)}") from None
    return module
