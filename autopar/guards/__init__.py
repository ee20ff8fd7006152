"""Guards: the Python values that forward read when it was captured, and whether they are still what they were."""

from autopar.guards.attributes import AttributesOfModule
from autopar.guards.look import Guards
from autopar.guards.original import Original
from autopar.guards.places import Change
from autopar.guards.reads import Reads
from autopar.guards.variants import Call, Variants

__all__ = ["AttributesOfModule", "Call", "Change", "Guards", "Original", "Reads", "Variants"]
