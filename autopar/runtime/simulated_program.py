"""Run an explicit program by itself: make the programs of all ranks, and simulate them on full tensors.

This is the public way for programs that come from text, from a user's own pass, or from a copy of ``parallel.program``.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from autopar.errors import class_of, shown
from autopar.ir.dense import require_dense
from autopar.ir.nodes import name_of, record_of
from autopar.ir.program import Program
from autopar.ir.record import TensorType
from autopar.ir.text.printer import print_type
from autopar.runtime.localize import LocalPrograms
from autopar.runtime.simulated_step import SimulatedStep
from autopar.verify.levels import verify


def localize(program: Program) -> Mapping[int, Program]:
    """Make the program of each rank, in the shapes of its pieces, from an explicit program.

    >>> print(autopar.localize(program)[3])

    The program is verified, and so are those of the ranks. Ranks whose pieces have equal sizes share a graph. Edits of
    ``program`` that come later change nothing here.

    Returns:
        rank → its program. They are made when the first is asked for.

    Raises:
        ValueError: the program is not explicit, or there is no such rank.
        VerifyError: the program breaks a promise of its level.
        ChannelError: ranks would meet in different collectives, or wait forever; when the first is asked for.
    """
    return LocalPrograms(_explicit(program, "localize").copy(), lambda made: verify(made, "localize"))


def simulate(program: Program, inputs: Mapping[str, torch.Tensor] | Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Run an explicit program on all of its ranks, in this process, on full tensors.

    >>> (y,) = autopar.simulate(program, {**dict(model.named_parameters()), "x": x})

    Gradients: where the program has a backward, the results have autograd graphs. ``backward()`` runs the program's own
    backward and gives full-size gradients to the inputs that the program has a gradient for. The program takes the
    tangents itself; they are no inputs. A result without a gradient counts as one whose gradient is zero.

    State: an input that the program replaces (``x : … = state(next)``: a buffer of batch norm, an accumulated gradient,
    a parameter in an update) gets its next value in place, in the tensor that was given.

    Args:
        program: explicit; it is verified, and not changed.
        inputs: the full tensors of all placeholders that are not tangents: by name, as the program prints it or as the
            model calls it (``up_weight`` or ``"up.weight"``), or in the order of the program. One that is a partial sum
            is given as the sum. A ``seed`` of random ops is drawn from torch's generator where it is not given.

    Returns:
        The full tensors of the line ``return``, in its order.

    Raises:
        ValueError: the program is not explicit, a tensor is missing or unknown, or has another shape or dtype than the
            program says.
        TypeError: an input is no plain tensor.
        VerifyError: the program breaks a promise of its level.
        ChannelError, SimulationError: ranks meet in different collectives, wait forever, or disagree about a value.
    """
    # it has one backward, for the gradients of all results together
    step = SimulatedStep(program, localize(program), lambda positions: step)
    tensors = _in_order(program, inputs)
    return tuple(step(tensors))


def _explicit(program: Program, function: str) -> Program:
    if not isinstance(program, Program):
        raise TypeError(
            f"{function} takes a Program, such as parallel.program or Program.parse(text), not {type(program).__name__}"
        )
    if program.level != "explicit":
        remedy = {
            "traced": "run the passes first: run_passes(program, pipeline(mesh, layouts)), both from autopar.passes",
            "placed": "run the rest of the passes first: run_passes(program, [Reshard()]), both from autopar.passes",
        }.get(program.level, "take the explicit program that it was made from")
        raise ValueError(f"{function} takes an explicit program, this one is {program.level}; {remedy}")
    program.verify()
    return program


def _in_order(program: Program, inputs: Any) -> list[torch.Tensor]:
    """The tensors of all placeholders that are not tangents, in the order of the program."""
    nodes = [node for node in program.placeholders if record_of(node).role != "tangent"]
    if isinstance(inputs, Mapping):
        given = _by_placeholder({node.name: name_of(node) for node in nodes}, inputs)
    elif isinstance(inputs, Sequence) and not isinstance(inputs, str):
        drawn = [node for node in nodes if record_of(node).role == "seed"] if len(inputs) < len(nodes) else []
        nodes_given = [node for node in nodes if node not in drawn]
        if len(inputs) != len(nodes_given):
            raise ValueError(
                f"simulate got {len(inputs)} tensor{'s' * (len(inputs) != 1)}, but the program takes {len(nodes)}: "
                f"{', '.join(node.name for node in nodes)}; give one for each, in this order or by name"
            )
        given = {node.name: tensor for node, tensor in zip(nodes_given, inputs, strict=True)}
    else:
        quoted = "one tensor" if isinstance(inputs, torch.Tensor) else f"inputs={shown(inputs)}"
        raise TypeError(
            f"simulate takes tensors by name or in order, not {quoted}; give a dict or a list, as in [x, w]"
        )
    for node in nodes:
        type = record_of(node).type
        assert isinstance(type, TensorType)
        if node.name not in given and record_of(node).role == "seed" and not type.shape:
            given[node.name] = torch.randint(2**63 - 1, (), dtype=torch.int64)
    if missing := [name_of(node) for node in nodes if node.name not in given]:
        raise ValueError(
            f"simulate got no tensor for {', '.join(missing)}; give one for each placeholder of the program that is "
            f"not a tangent"
        )
    for node in nodes:
        _check(name_of(node), given[node.name], record_of(node).type)
    return [given[node.name] for node in nodes]


def _by_placeholder(names: Mapping[str, str], inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors by placeholder. ``names``: placeholder → what the model calls it."""
    of = {**{theirs: ours for ours, theirs in names.items()}, **{name: name for name in names}}
    given: dict[str, Any] = {}
    for name, tensor in inputs.items():
        if name not in of:
            near = difflib.get_close_matches(str(name), list(of), n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; it takes {', '.join(names.values())}"
            raise ValueError(f"the program has no placeholder {shown(name)}{hint}")
        if of[name] in given:
            raise ValueError(f"{shown(name)} is given twice, also as {of[name]!r}; give it once")
        given[of[name]] = tensor
    return given


def _check(name: str, tensor: Any, type: Any) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} is {class_of(tensor)}; simulate takes full tensors")
    if hasattr(tensor, "placements"):
        raise TypeError(f"{name} is a DTensor; simulate takes full tensors: give {name}.full_tensor()")
    require_dense([(name, tensor)])
    if tensor.is_meta:
        raise ValueError(f"{name} is on the meta device and has no values; give a tensor with values")
    if (tuple(tensor.shape), tensor.dtype) != (type.shape, type.dtype):
        raise ValueError(
            f"{name} is {print_type(type)} in the program, but got {list(tensor.shape)}, {tensor.dtype}; give the full "
            f"tensor, in the program's dtype"
        )
