"""Run the edits of reshard with metadata kept by Inductor's ``FakeTensorUpdater``, to compare from outside.

The same number of nodes at the same places of the same graph, and the same uses replaced. What is inserted is
``aten.clone``, because transfers are the identity on global values; what is kept up to date is ``meta["val"]``, a fake
tensor a node. It knows no Layouts and gives no names, and it runs ops that were changed; autopar's commit knows no
strides and runs none. The edits are decided beforehand, and their time (FX's own) counts, as that of the updates does.
"""

from __future__ import annotations

import time

import torch
from torch import fx
from torch._inductor.fx_utils import FakeTensorUpdater  # tried on 2.13
from torch._inductor.virtualized import V  # tried on 2.13
from torch._subclasses.fake_tensor import FakeTensorMode  # tried on 2.13
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from autopar.gc_pause import gc_paused
from autopar.ir.nodes import operands, record_of
from autopar.ir.program import Program
from autopar.passes.reshard import disagreements

CLONE = torch.ops.aten.clone.default
UPDATES = {"once": "batched", "a reshard": "per-reshard", "an operation": "sync"}


def edited(placed: Program, how: str) -> tuple[float, int]:
    """Seconds of the edits and of the updates, one for each of ``how``; how many updates there were."""
    program = placed.copy()
    mode = FakeTensorMode()
    root = torch.nn.Module()
    for name, constant in program.constants.items():
        root.register_buffer(name, constant.tensor)
    module = fx.GraphModule(root, program.graph)
    with mode:
        given = [
            torch.empty(record_of(node).type.shape, dtype=record_of(node).type.dtype) for node in program.placeholders
        ]
    FakeTensorProp(module, mode).propagate_dont_convert_inputs(*given)
    moves = list(disagreements(program))
    count = 0
    with V.set_fake_mode(mode), gc_paused():
        updater = FakeTensorUpdater(module)
        start = time.process_time()
        for user, index, value, steps, before, _ in moves:
            moved = value
            for _ in steps:
                with program.graph.inserting_before(before):
                    moved = program.graph.call_function(CLONE, (moved,))
                if how == "an operation":
                    updater.incremental_update()
                    count += 1
            _replace(user, index, value, moved)
            if how != "once":
                updater.incremental_update()
                count += 1
        if how == "once":
            updater.incremental_update()
            count += 1
        seconds = time.process_time() - start
    assert all("val" in node.meta for node in program.nodes if node.op == "call_function")
    return seconds, count


def _replace(user: fx.Node, index: int, old: fx.Node, new: fx.Node) -> None:
    if operands(user).count(old) == 1:
        user.replace_input_with(old, new)  # FX's fastest
        return
    position = -1

    def swap(operand: fx.Node) -> fx.Node:
        nonlocal position
        position += 1
        return new if position == index else operand

    user.args, user.kwargs = fx.map_arg(user.args, swap), fx.map_arg(user.kwargs, swap)


def compare(placed: Program, layers: int) -> str:
    """A line for each way to update."""
    lines = [f"the same edits, {layers} layers, metadata kept by Inductor's FakeTensorUpdater (see fake_updates.py):"]
    for how, mode in UPDATES.items():
        seconds, count = min(edited(placed, how) for _ in range(3 if how == "once" else 1))
        lines.append(f"  an update {how:14}{count:6} updates {seconds * 1e3:12.1f} ms    (beside {mode})")
    return "\n".join(lines) + "\n"
