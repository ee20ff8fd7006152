"""The table of passes: it has every pass, in an order in which each takes what the one before gives."""

from __future__ import annotations

import inspect
import itertools
from dataclasses import fields
from pathlib import Path

import autopar.passes
from autopar import Mesh
from autopar.passes import PIPELINE, Amp, Recompute, pipeline

FILES = {path.stem for path in Path(autopar.passes.__file__).parent.glob("*.py")} - {"__init__", "manager"}
FULL = {"amp": "bf16-O1", "recompute": "blocks", "widen": True}


def test_the_table_has_every_pass() -> None:
    assert {row.make.__module__.rpartition(".")[2] for row in PIPELINE} == FILES
    assert len(PIPELINE) == len(FILES)


def test_each_pass_takes_what_the_one_before_gives() -> None:
    for row, following in itertools.pairwise(PIPELINE):
        assert row.make.gives == following.make.takes, following.name


def test_rows_read_options_that_there_are() -> None:
    options = set(inspect.signature(pipeline).parameters)
    for row in PIPELINE:
        assert set(row.reads) <= {field.name for field in fields(row.make)}, row.name
        assert {*row.reads.values(), *[row.when] * bool(row.when)} <= options, row.name


def test_a_pass_with_a_condition_runs_when_it_is_asked_for() -> None:
    always = [row.name for row in PIPELINE if not row.when]
    assert [step.name for step in pipeline()] == always
    assert [step.name for step in pipeline(**FULL)] == [row.name for row in PIPELINE]
    assert [step.name for step in pipeline(**FULL, last=Amp)] == ["amp"]
    assert pipeline(last=Amp) == []


def test_a_pass_gets_its_options() -> None:
    mesh = Mesh(dp=2)
    (recompute,) = (step for step in pipeline(mesh, {}, recompute=["h.*"]) if isinstance(step, Recompute))
    assert recompute == Recompute(["h.*"], mesh, {})
