"""Put an ordinary PyTorch model on a mesh of devices, with the results of a single device.

>>> parallel = autopar.parallelize(model, autopar.Mesh(dp=2, tp=2), plan={"*.up.weight": ("tp", None)}, example=(x,))

Names load when they are first used (PEP 562), so that importing autopar costs little beside torch.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autopar import checkpoint, data, elastic
    from autopar.api import devices, parallelize
    from autopar.capture.constrained import constrain
    from autopar.capture.local_map import local_map
    from autopar.costs.program_price import price
    from autopar.errors import (
        AutoparError,
        CaptureError,
        CheckpointError,
        EditError,
        PlanError,
        RuleError,
        SimulationError,
        TextError,
        TransitionError,
        VerifyError,
    )
    from autopar.ir.layout import DistAttr, Layout
    from autopar.ir.mesh import Mesh
    from autopar.ir.program import Program
    from autopar.parallel import Parallel
    from autopar.rules import register_rule
    from autopar.runtime.processes.one_rank import one_rank
    from autopar.runtime.redistribute_pieces import redistribute
    from autopar.runtime.simulated_program import localize, simulate
    from autopar.runtime.wire.emulate import emulate
    from autopar.step.reports.log import log
    from autopar.torch_compile import compile_backend

__version__ = "0.2.0"

__all__ = [
    "AutoparError", "CaptureError", "CheckpointError", "DistAttr", "EditError", "Layout", "Mesh", "Parallel",
    "PlanError", "Program", "RuleError", "SimulationError", "TextError", "TransitionError", "VerifyError", "checkpoint",
    "compile_backend", "constrain", "data", "devices", "elastic", "emulate", "local_map", "localize", "log",
    "one_rank", "parallelize", "price", "redistribute", "register_rule", "simulate",
]  # fmt: skip

MODULES = {  # name → the module that has it; all others of ``__all__`` are errors
    "parallelize": "api", "devices": "api", "Parallel": "parallel", "Program": "ir.program", "Mesh": "ir.mesh",
    "DistAttr": "ir.layout", "Layout": "ir.layout", "register_rule": "rules",
    "redistribute": "runtime.redistribute_pieces", "localize": "runtime.simulated_program",
    "simulate": "runtime.simulated_program", "price": "costs.program_price",
    "constrain": "capture.constrained", "local_map": "capture.local_map", "emulate": "runtime.wire.emulate",
    "log": "step.reports.log", "compile_backend": "torch_compile", "one_rank": "runtime.processes.one_rank",
}  # fmt: skip
PACKAGES = ("capture", "checkpoint", "cli", "costs", "data", "elastic", "errors", "ir", "model", "optimizers", "passes",
         "pipeline", "plan", "report", "rules", "runtime", "scheduling", "search", "step", "transitions",
         "verify")  # fmt: skip


class _Passes:
    """Finds ``autopar.passes`` in a checkout without symbolic links.

    There (git on Windows, a zip file), the link ``autopar/passes`` to ``../passes`` is a small text file or is missing.
    """

    here = os.path.join(os.path.dirname(os.path.abspath(__file__)), "passes")
    there = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "passes")

    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "autopar.passes":
            return None
        import importlib.util

        file = os.path.join(cls.there, "__init__.py")
        if not os.path.isfile(file):
            raise ModuleNotFoundError(
                f"autopar.passes is missing: neither {cls.here} nor {cls.there} is a folder; copy the folder passes of "
                f"the checkout there, or install autopar with pip",
                name=name,
            )
        return importlib.util.spec_from_file_location(name, file, submodule_search_locations=[cls.there])


if not os.path.isdir(_Passes.here):
    sys.meta_path.insert(0, _Passes)


def __getattr__(name: str) -> Any:
    value: Any
    if name in PACKAGES:
        value = importlib.import_module(f"autopar.{name}")
    elif name in __all__:
        if name in ("Program", "price", "register_rule"):  # what checks programs and discovers rules registers itself
            importlib.import_module("autopar.api")
        value = getattr(importlib.import_module(f"autopar.{MODULES.get(name, 'errors')}"), name)
    else:
        raise AttributeError(f"module 'autopar' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *PACKAGES})
