"""Say why no plan fits into the memory of a rank, and what would help."""

from __future__ import annotations

from autopar.errors import MemoryLimitError, at_line
from autopar.ir.mesh import Mesh
from autopar.search.certificate import bytes_text
from autopar.search.memory.usage import Usage
from autopar.search.problem.ending import Ending

HELPS = {  # option of a training step → the kinds of memory that it takes less of
    "zero": ("parameters", "gradients", "optimizer state"),
    "recompute": ("activations", "transfers"),
    "microbatches": ("activations", "transfers", "inputs"),
    "offload": ("optimizer state",),
}


def too_little_memory(
    usage: Usage, limit: float, reserve: float, mesh: Mesh, ending: Ending | None
) -> MemoryLimitError:
    """Return the error for the smallest plan that was found.

    Args:
        usage: of that plan.
        limit: bytes of a rank.
        reserve: how many of them the plan had to leave free.
    """
    free = f", of which {bytes_text(reserve)} are for what is not counted here" if reserve else ""
    lines = [
        f"no plan was found that fits into {bytes_text(limit)} a rank{free}: the smallest one found takes "
        f"{bytes_text(usage.bytes)} in the {usage.phase}, {bytes_text(usage.bytes + reserve - limit)} too many"
    ]
    if usage.source or usage.module:
        lines.append(at_line(usage.source, usage.module))
    lines.append("    " + ", ".join(f"{kind} {bytes_text(bytes)}" for kind, bytes in usage.kinds.items()))
    error = MemoryLimitError("\n".join([*lines, f"  {_remedy(usage, mesh, ending)}"]))
    error.bytes = usage.bytes
    return error


def _remedy(usage: Usage, mesh: Mesh, ending: Ending | None) -> str:
    most = next(iter(usage.kinds), "")
    ranks = f"a mesh of more than {mesh.size} ranks, or a larger memory="
    if ending is None:
        return (
            f"most are {most}; use {ranks}; the step of parallel.train_step can recompute activations, and cut batches"
        )
    helping = [option for option in ending.remedies if most in HELPS[option.partition("=")[0]]]
    return f"most are {most}; use {', '.join([*helping, ranks])}"
