"""Join the outputs of micro-batches, beside the loss, into the outputs of the batch.

| how | for which outputs |
| --- | --- |
| `cat` | a value with a part for each row: the parts are concatenated along the dim of the rows |
| `mean` | a number that is a mean over the batch, as the loss is (``terms``) |
| `sum` | a number that is a sum over the batch |
| `same` | a value that does not depend on the batch |
| `stack` | all others, as where the forward mixes rows: a new first dim has an entry for each micro-batch, and the report says so |

Which of them applies follows from the forward (``batch_independence``). It cannot be detected if a micro-batch has one
row.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import fx

from autopar.capture import Captured
from autopar.errors import CaptureError
from autopar.ir.layout import DistAttr, layout_of
from autopar.ir.nodes import operands, record_of, tensor_type
from autopar.ir.program import Program
from autopar.ir.record import TensorType
from autopar.model.inputs import LocalTensors
from autopar.runtime.dtensors import is_dtensor
from autopar.step.batches.batch_independence import BatchIndependence
from autopar.step.batches.more_rows import MoreRows
from autopar.step.batches.terms import Terms, search
from autopar.step.compiling.loss import as_loss

Way = Literal["cat", "mean", "sum", "same", "stack"]  # to join an output of all micro-batches
WAYS: tuple[Way, ...] = get_args(Way)


@dataclass(frozen=True)
class Output:
    """One tensor that the model returns.

    Attributes:
        name: its place in the structure that the model returns, as ``logits``.
        how: one of ``WAYS``.
        dim: the dim along which ``cat`` joins.
        known: whether the way follows from the forward or is an option of the step.
    """

    name: str
    how: str
    dim: int = 0
    known: bool = True


def loss_of(captured: Captured) -> int:
    """Return the position of the loss: the first returned number that has a gradient.

    ``CaptureError`` if there is none.
    """
    if captured.loss is not None:
        return captured.loss
    output = captured.program.output
    returned = [
        node
        for node, result in zip(operands(output), record_of(output).results, strict=True)
        if result.kind == "return"
    ]
    for k in captured.differentiable:
        if tensor_type(returned[k]).shape == ():
            return k
    shapes = ", ".join(str(list(tensor_type(node).shape)) for node in returned)
    if any(tensor_type(node).shape == () for node in returned):
        raise CaptureError(
            "the loss has no gradient: no parameter that it depends on requires one\n  let some parameter require a "
            "gradient: requires_grad_(True)"
        )
    raise CaptureError(
        f"a training step needs a loss, and the model returns none: one number that has a gradient "
        f"({f'it returns {shapes}' if shapes else 'it returns no tensor'})\n"
        f"  let forward compute the loss from its arguments, and return it; with labels, as models of Hugging Face do"
    )


def names_of(captured: Captured) -> list[str]:
    """Return the names of the tensors that a model returns, by their places in its structure: ``logits``, ``0``."""
    return ["_".join(path) for k, path in enumerate(captured.spec.paths()) if k not in captured.leaves]


def outputs_of(program: Program, loss: int, terms: Terms, required: Mapping[str, str], names: Sequence[str],
               microbatches: int, cut: Collection[str], device: torch.device,
               more_rows: MoreRows | None = None) -> tuple[Output, ...]:  # fmt: skip
    """Return how each tensor that a traced program returns is joined, except its loss.

    Args:
        loss: the position of the loss among the returned tensors; ``terms``: its terms.
        required: name → how, where the user requires a way.

    Raises:
        ValueError: there is no output of that name.
    """
    rows = [
        node
        for node, result in zip(operands(program.output), record_of(program.output).results, strict=True)
        if result.kind == "return"
    ]
    others = [(name, node) for k, (name, node) in enumerate(zip(names, rows, strict=True)) if k != loss]
    if unknown := [name for name in required if name not in dict(others)]:
        known = ", ".join(name for name, _ in others) or "nothing"
        raise ValueError(
            f"returns= names {unknown[0]!r}, and the model has no such output; beside its loss it returns {known}: "
            f"name one of these"
        )
    if microbatches == 1 or not others:
        return tuple(Output(name, required.get(name, "same")) for name, _ in others)
    independence = BatchIndependence(program, [node for _, node in others], cut, device)
    outputs = [_output_of(program, node, name, independence, terms, cut, device, more_rows) for name, node in others]
    return tuple(
        replace(output, how=required[output.name], known=True) if output.name in required else output
        for output in outputs
    )


def _output_of(
    program: Program,
    node: fx.Node,
    name: str,
    independence: BatchIndependence,
    loss: Terms,
    cut: Collection[str],
    device: torch.device,
    more_rows: MoreRows | None,
) -> Output:
    unknown = Output(name, "stack", known=False)
    if node not in independence.varying:
        return Output(name, "same")
    if independence.count == 1:
        return unknown
    if tensor_type(node).shape:
        dims = independence.row_dims(node)
        return (
            Output(name, "cat", dims[0][0])
            if len(dims) == 1 and dims[0][1] == 0 and not independence.mixing_nodes([node])
            else unknown
        )
    terms = search(program, node, independence, more_rows)
    if terms.mixings:
        return unknown
    divided = {division for division in terms.divisions if record_of(division).phase == "forward"}
    if terms.others or terms.sums or terms.numbers or not divided <= loss.divisions.keys():
        return unknown
    return Output(name, "sum" if terms.adds else "mean")


def about_outputs(outputs: Sequence[Output], microbatches: int) -> list[str]:
    """Notes for the report on the outputs whose way does not follow from the forward."""
    return [
        f"the output {output.name} is stacked, with an entry for each of {microbatches} micro-batches: how it is "
        f"joined does not follow from the forward; "
        f'say it, as in returns={{"{output.name}": "cat"}}, or "mean", "sum"'
        for output in outputs
        if not output.known
    ]


def returned_like_the_model(captured: Captured, loss: torch.Tensor, outputs: Sequence[torch.Tensor]) -> Any:
    """Return the model's own output structure, with the loss of the batch and its other outputs."""
    tensors = list(outputs)
    tensors.insert(loss_of(captured), as_loss(loss))
    return captured.with_tensors(tensors)


def join_whole(output: Output, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Join an output of all micro-batches into that of the batch. ``parts``: in the order of the micro-batches."""
    if output.how == "stack":
        return torch.stack(list(parts))
    if output.how == "same" or len(parts) == 1:
        return parts[-1]
    if output.how == "cat":
        return torch.cat(list(parts), output.dim)
    total = torch.stack(list(parts)).sum(0)
    return total if output.how == "sum" else total / len(parts)


def join_pieces(
    output: Output, pieces: Sequence[torch.Tensor], type: TensorType, tensors: LocalTensors, brought: int
) -> torch.Tensor:
    """Join this rank's pieces of an output of all micro-batches. All ranks call it.

    The result is as ``outputs=`` of ``parallelize`` requires.

    Args:
        pieces: in the order of the micro-batches.
        type: the type of the output of one micro-batch.
        brought: the number of pieces that the ranks bring with ``inputs="local"``, whose batch is these pieces in the
            order of the ranks; 0 where all ranks have the same batch.
    """
    assert type.layout is not None
    attr, shape, count, joins = type.attr, list(type.shape), len(pieces), output.how == "cat" and len(pieces) > 1
    splits = any(axes for _, axes in attr.dims[output.dim]) if joins else False
    if splits and not brought:
        parts = [tensors.returned(piece, type) for piece in pieces]  # rows of one rank are not neighbours
        return _split_as(
            parts[0], torch.cat([part.full_tensor() if is_dtensor(part) else part for part in parts], output.dim)
        )
    if joins:
        shape[output.dim] *= count
        (rows, axes), *parts_behind = attr.dims[output.dim]
        if parts_behind:
            assert rows is not None  # the parts of a merged dim have sizes
            attr = replace(
                attr,
                dims=(*attr.dims[: output.dim], ((rows * count, axes), *parts_behind), *attr.dims[output.dim + 1 :]),
            )
    if joins and brought and not splits:  # each micro-batch has some rows of each rank
        cut = [piece.chunk(brought, output.dim) for piece in pieces]
        pieces = [rows for of_a_rank in zip(*cut, strict=True) for rows in of_a_rank]
    if output.how == "stack":
        attr, shape = DistAttr(((DistAttr.replicated(1).dims[0]), *attr.dims)), [count, *shape]
    return tensors.returned(
        join_whole(output, pieces), replace(type, shape=tuple(shape), layout=layout_of(type.layout.mesh, attr))
    )


def _split_as(part: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return a value that is the same on all ranks, as a DTensor with the placements of another."""
    if not is_dtensor(part):
        return value
    from torch.distributed.tensor import DTensor, Replicate

    whole = DTensor.from_local(value, part.device_mesh, [Replicate()] * part.device_mesh.ndim, run_check=False)
    return whole.redistribute(placements=part.placements)
