"""Generate tokens on a mesh: the loop of transformers around two captured programs and a cache in pieces."""

from autopar.model.generation.generation import Generation
from autopar.model.generation.model import GeneratingModel

__all__ = ["GeneratingModel", "Generation"]
