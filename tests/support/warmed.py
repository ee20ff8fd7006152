"""Import and run what most ranks need once, before they are forked: they begin with warm caches."""

from __future__ import annotations

import gc

import torch
import torch.distributed.checkpoint
from forks import MAY_CAPTURE_BEFORE
from loops import loop_alike
from steps import steps_alike

torch.set_num_threads(1)
if MAY_CAPTURE_BEFORE:
    loop_alike("llama", {"dp": 1}, layers=1, count=1)
    steps_alike("mlp", {"dp": 2, "tp": 2}, {"zero": 1, "microbatches": 2}, layers=1, count=1)
gc.collect()
gc.freeze()  # no rank looks through all modules again and again
