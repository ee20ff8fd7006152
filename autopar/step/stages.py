"""Say which stage of ZeRO each parameter of a step has, from the layouts that it has."""

from __future__ import annotations

from autopar.ir import transfers
from autopar.ir.nodes import name_of, record_of
from autopar.ir.program import Program
from autopar.step.compiling.compiled_step import MicroBatch

COLLECTIVES = {function for function, transfer in transfers.BY_FUNCTION.items() if transfer.collective}


def stages_of(micro: MicroBatch) -> dict[str, int]:
    """Return trained parameter → its stage; ``StepChoice`` says what each is."""
    gathered, homes = _gathered(micro.program), {
        name_of(node): record_of(node).type for node in micro.program.placeholders
    }  # fmt: skip
    found = {}
    for name, state in micro.states.items():
        home, total = homes[name].attr, micro.gradients[name].attr  # type: ignore[union-attr]
        if name in gathered:
            found[name] = 3
        else:
            found[name] = 0 if state == home else 1 + (total == state)
    return found


def _gathered(program: Program) -> set[str]:
    """Return the parameters that are moved to other ranks before an op reads them."""
    found = set()
    for node in program.placeholders:
        if record_of(node).role != "param":
            continue
        reached = [node]
        for value in reached:
            moved = [user for user in value.users if user.target in transfers.BY_FUNCTION]
            if any(user.target in COLLECTIVES for user in moved):
                found.add(name_of(node))
                break
            reached += moved
    return found
