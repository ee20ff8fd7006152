"""Say whether a process may run a backward before ranks are forked from it.

With a CUDA build the threads of autograd refuse a backward in the fork of a process that has run one. Ranks then
capture by themselves, which takes longer.
"""

from __future__ import annotations

import torch

MAY_CAPTURE_BEFORE = not torch.backends.cuda.is_built()
