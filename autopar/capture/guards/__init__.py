"""Guard a capture: record the Python values that forward read, and check that they are still the same."""

from autopar.capture.guards.attributes import AttributesOfModule
from autopar.capture.guards.original import Original
from autopar.capture.guards.places import GuardedChange
from autopar.capture.guards.reads import Reads
from autopar.capture.guards.unrepeated import FIRST_VALUES, FirstValues
from autopar.capture.guards.variants import GuardedCall, Guards, Variants

__all__ = [
    "FIRST_VALUES",
    "AttributesOfModule",
    "FirstValues",
    "GuardedCall",
    "GuardedChange",
    "Guards",
    "Original",
    "Reads",
    "Variants",
]
