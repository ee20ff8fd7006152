"""Counts in two programs, of one micro-batch and of the totals: the numbers of the one program of all micro-batches."""

from __future__ import annotations

import pytest
import torch
from pipelined_programs import CPU, Values, run_phase

from autopar.ir.nodes import name_of, operands
from autopar.ir.program import Program
from autopar.ir.value_names import batch_input_name, total_name
from autopar.step.batches.counts import count_parts, count_program
from autopar.step.batches.terms import Terms, terms_of
from autopar.verify.levels import verify

# a mean over labels, one over weights of classes, which has a bound, and a plain mean
TEXT = """\
program traced
  z : f32[6] = input
  labels : i64[6] = input
  weight : f32[5] = buffer
forward:
  kept : bool[6] = ne.Scalar(labels, -100)
  kept_1 : f32[6] = _to_copy(kept, dtype=f32)
  masked : f32[6] = mul.Tensor(z, kept_1)
  total : f32[] = sum(masked)
  sum_1 : i64[] = sum(kept)
  div : f32[] = div.Tensor(total, sum_1)
  clamped : i64[6] = clamp(labels, 0, 4)
  own : f32[6] = index_select(weight, 0, clamped)
  own_1 : f32[6] = mul.Tensor(own, kept_1)
  weighted : f32[6] = mul.Tensor(z, own_1)
  total_1 : f32[] = sum(weighted)
  sum_2 : f32[] = sum(own_1)
  clamp_min : f32[] = clamp_min(sum_2, 1.0)
  div_1 : f32[] = div.Tensor(total_1, clamp_min)
  loss : f32[] = add.Tensor(div, div_1)
  return loss
"""
BATCHES = 4


def program_and_terms() -> tuple[Program, Terms]:
    program = Program.parse(TEXT)
    return program, terms_of(program, operands(program.output)[0], ["z", "labels"], CPU)


def returned(program: Program, given: Values) -> list[torch.Tensor]:
    """``given``: by the user's names."""
    values = {node.name: given[name_of(node)] for node in program.placeholders}
    run_phase(program, "forward", values)
    return [values[node.name] for node in operands(program.output)]


def test_the_same_counts() -> None:
    program, terms = program_and_terms()
    assert {node.name for node in terms.counts} == {"clamp_min", "sum_1"}
    whole = count_program(program, terms, BATCHES, CPU)
    sums, counts = count_parts(program, terms, BATCHES, CPU)
    verify(sums), verify(counts)
    labels = [torch.randint(0, 5, (6,)) for _ in range(BATCHES)]
    labels[1][:] = -100  # a micro-batch without any label
    labels[2][::2] = -100
    weight = torch.rand(5)
    of_each = [returned(sums, {"labels": y, "weight": weight}) for y in labels]
    totals = {total_name(k): torch.stack(of_all).sum(0) for k, of_all in enumerate(zip(*of_each, strict=True))}
    found = returned(counts, totals)
    wanted = returned(whole, {**{batch_input_name("labels", k): y for k, y in enumerate(labels)}, "weight": weight})
    assert len(found) == 2
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape == ()
        torch.testing.assert_close(one, other)


def test_their_size_does_not_depend_on_micro_batches() -> None:
    program, terms = program_and_terms()
    few, many = (count_parts(program, terms, count, CPU) for count in (2, 200))
    assert [len(list(part.nodes)) for part in few] == [len(list(part.nodes)) for part in many]


@pytest.mark.parametrize("part", [0, 1])
def test_only_inputs_and_buffers_are_read(part: int) -> None:
    """So they can be computed before the first forward; the second part reads totals alone."""
    program, terms = program_and_terms()
    names = [name_of(node) for node in count_parts(program, terms, BATCHES, CPU)[part].placeholders]
    assert sorted(names) == [["labels", "weight"], [total_name(0), total_name(1)]][part]
