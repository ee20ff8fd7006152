"""Name a model's tensors as a person does who does not know of wrappers, adapters and parametrizations."""

from autopar.capture.naming.names import Names, Part, names_of

__all__ = ["Names", "Part", "names_of"]
