"""Generate tokens on a mesh: the loop of transformers around two captured programs and a cache in pieces."""

from autopar.model.generation.generation import Generation

__all__ = ["Generation"]
