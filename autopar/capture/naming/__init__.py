"""Name a model's tensors as a person does who does not know of wrappers, adapters and parametrizations."""

from autopar.capture.naming.names import Names, names_of
from autopar.capture.naming.parts import Part

__all__ = ["Names", "Part", "names_of"]
