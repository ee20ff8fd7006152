"""Put an ordinary PyTorch model on a mesh of devices, with the same numbers.

>>> parallel = autopar.parallelize(model, autopar.Mesh(dp=2, tp=2), plan={"*.up.weight": ("tp", None)}, example=(x,))
"""

from autopar import checkpoint
from autopar.api import parallelize
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
from autopar.runtime.discovery import discover as _discover  # noqa: F401  # it registers itself with the rules

__version__ = "0.1.0"

__all__ = [
    "AutoparError", "CaptureError", "CheckpointError", "DistAttr", "EditError", "Layout", "Mesh", "Parallel", "PlanError",
    "Program", "RuleError", "SimulationError", "TextError", "TransitionError", "VerifyError", "checkpoint", "parallelize",
    "register_rule",
]  # fmt: skip
