"""Run an example on a rank, as in a process that a launcher has started, and return what it prints."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
from unittest import mock

from torch import distributed

EXAMPLES = (
    "plain_loop", "trainer", "peft_lora", "lightning_style", "finetune", "generate", "moe", "custom_op", "own_pass",
    "elastic_loop",
)  # fmt: skip


def as_launched() -> mock._patch_dict:
    """The variables that torchrun gives to this rank."""
    rank = str(distributed.get_rank())
    given = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": str(distributed.get_world_size())}
    return mock.patch.dict(os.environ, given | {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"})


def printed(name: str) -> str:
    out = io.StringIO()
    with as_launched(), contextlib.redirect_stdout(out):
        importlib.import_module(f"autopar.examples.{name}").main()
    return out.getvalue()
