"""Train on, after a host was lost or has come back, on the mesh that fits the ranks that are there.

    chosen = autopar.elastic.choose("dp=2,tp=2", "tp=2", global_batch=16, micro_batch=4)
    parallel = autopar.parallelize(model, chosen.mesh, "megatron")
    step = parallel.train_step(optimizer, microbatches=chosen.microbatches)
    for batch in autopar.elastic.batches("runs/a", step, loader, steps=1000, every=10):
        loss = step(batch)

torchrun notices the loss, and starts the script again on all ranks that are left.
"""

from __future__ import annotations

from autopar.elastic.batches import Batches, batches
from autopar.elastic.choice import Choice, choose
from autopar.elastic.start import Start

__all__ = ["Batches", "Choice", "Start", "batches", "choose"]
