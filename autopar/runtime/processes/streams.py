"""Make the process groups of the streams that programs name, beyond those that a job makes for its mesh."""

from __future__ import annotations

from collections.abc import Iterable

from autopar.ir import transfers
from autopar.ir.program import Program
from autopar.ir.streams import Groups, Stream, group_key
from autopar.ir.subaxes import is_sub_axis
from autopar.runtime.processes.agreement import Agreement
from autopar.runtime.processes.groups import Key, process_groups
from autopar.runtime.processes.job import Job
from autopar.verify.channels.programs import creation_order


def groups_for(job: Job, programs: Iterable[Program], agreement: Agreement | None = None) -> Groups:
    """Return the names of the job's groups, after those that the programs need have been made.

    All ranks call it alike, before the programs are lowered. Groups end with the job.

    Args:
        programs: the local programs of all ranks; those of this rank do if all ranks share their streams and stages.
        agreement: compares what the ranks make; without it, ranks that differ wait for each other.

    Raises:
        RuntimeError: other ranks make other groups, or another call.
    """
    needy = [program for program in programs if _has_further_groups(program)]  # others have the mesh's groups
    missing = [stream for stream in creation_order(needy) if stream not in job.known]
    if missing:
        if agreement is not None:
            agreement.agree(f"make the process groups {', '.join(map(_name, missing))}")
        taken = list[Key]()
        made = process_groups().take_streams(missing, taken)
        job.groups |= {group_key(*stream): group.group_name for stream, group in made.items()}
        job.known |= set(missing)
        job.taken += tuple(taken)
    return job.groups


def _has_further_groups(program: Program) -> bool:
    """Return whether a program has groups beyond those along the axes of its mesh."""
    if program.streams or program.stages:
        return True
    axes = (transfers.arguments(node.target, node.args, node.kwargs).get("axis")
            for node in program.nodes if node.target in transfers.BY_FUNCTION)  # fmt: skip
    return any(is_sub_axis(name) for axis in axes if axis is not None for name in transfers.axes_of(axis))


def _name(stream: Stream) -> str:
    ranks, name = stream
    return f"{name or 'the default one'} of ranks {' '.join(map(str, ranks))}"
