"""Give each rank its rows of a dataset, in one order on all meshes."""

from autopar.data.loader import ShardedLoader
from autopar.data.sharded import sharded

__all__ = ["ShardedLoader", "sharded"]
