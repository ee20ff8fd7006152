"""Import all of autopar in processes whose torch lacks some ops, and print what its tables have then.

``python removed_ops.py 0 1 2`` prints a row of JSON for each seed. Seed 0 removes nothing. Each process is a fork of
one that has imported torch.
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import random
import sys

import torch
import torch._decomp  # these look up ops when they are imported, and are no part of the question
import torch._dynamo
import torch._prims
import torch._refs
import torch.distributed.tensor
import torch.export
import torch.testing._internal.distributed.fake_pg

SHARE = 0.3  # of the ops that are removed


def _remove(names: set[str]) -> None:
    """Let ``torch.ops`` answer as a torch without these ops does."""
    find_packet, find_overload = torch._C._jit_get_operation, torch._C._get_operation_overload

    def printed(name: str, overload: str) -> str:
        return f"{name}.{overload}" if overload not in ("", "default") else name

    def packet(name: str) -> tuple[object, object]:
        op, overloads = find_packet(name)
        left = [overload for overload in overloads or () if printed(name, overload) not in names]
        return (op, left) if left else (None, None)

    torch._C._jit_get_operation = packet
    torch._C._get_operation_overload = lambda name, overload: (
        None if printed(name, overload) in names else find_overload(name, overload)
    )
    for space in (torch.ops.aten, torch.ops.prims):
        for kept in [name for name, value in vars(space).items() if isinstance(value, torch._ops.OpOverloadPacket)]:
            delattr(space, kept)


def _tables(removed: set[str]) -> dict[str, list[str]]:
    """Import every module, and return the ops of its tables by name."""
    _remove(removed)
    import autopar

    for module in pkgutil.walk_packages(autopar.__path__, "autopar."):
        if "__main__" not in module.name and ".examples" not in module.name:
            importlib.import_module(module.name)
    from autopar.capture.decompose.expansions import EXPANSIONS
    from autopar.capture.decompose.table import DECOMPOSITIONS
    from autopar.rules.registry import RULES
    from autopar.torch_private import LACKING

    tables = {"RULES": RULES, "DECOMPOSITIONS": DECOMPOSITIONS, "EXPANSIONS": EXPANSIONS}
    return {name: sorted(op.name() for op in table) for name, table in tables.items()} | {"LACKING": sorted(LACKING)}


def _main(seeds: list[int]) -> None:
    ops = sorted(name for name in torch._C._dispatch_get_all_op_names() if name.split("::")[0] in ("aten", "prims"))
    for seed in seeds:
        removed = set(random.Random(seed).sample(ops, int(SHARE * len(ops)))) if seed else set()
        if not (child := os.fork()):
            try:
                print(json.dumps({"removed": sorted(removed), **_tables(removed)}), flush=True)
            finally:
                os._exit(sys.exc_info()[0] is not None)
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
            sys.exit(f"seed {seed} fails")


if __name__ == "__main__":
    _main([int(seed) for seed in sys.argv[1:]])
