"""The table of passes: it has every pass, in an order in which each takes what the one before gives."""

from __future__ import annotations

import inspect
import itertools
from dataclasses import fields
from pathlib import Path

import pytest

import autopar.passes
from autopar import Mesh
from autopar.costs.machine import machine
from autopar.passes import PIPELINE, Amp, OnStages, Recompute, pipeline

FILES = {path.stem for path in Path(autopar.passes.__file__).parent.glob("*.py")} - {"__init__", "manager"}
FULL = {"amp": "bf16-O1", "recompute": "blocks", "widen": True, "split_backward": True,
        "stages": OnStages(Mesh(pp=1), {}, {}), "levels": machine("generic")}  # fmt: skip


def test_the_table_has_every_pass() -> None:
    assert {row.make.__module__.rpartition(".")[2] for row in PIPELINE} == FILES
    assert len(PIPELINE) == len(FILES)


@pytest.mark.parametrize("search", [False, True])
def test_each_pass_takes_what_the_one_before_gives(search: bool) -> None:
    for step, following in itertools.pairwise(pipeline(**FULL, search=search)):
        assert step.gives == following.takes, following.name


def test_rows_read_options_that_there_are() -> None:
    options = set(inspect.signature(pipeline).parameters)
    for row in PIPELINE:
        assert set(row.reads) <= {field.name for field in fields(row.make)}, row.name
        conditions = {row.when, row.unless} - {""}
        assert {*row.reads.values(), *conditions} <= options, row.name


def test_a_pass_with_a_condition_runs_when_it_is_asked_for() -> None:
    always = [row.name for row in PIPELINE if not row.when]
    assert [step.name for step in pipeline()] == always
    assert [step.name for step in pipeline(**FULL)] == [row.name for row in PIPELINE if row.when != "search"]
    assert [step.name for step in pipeline(**FULL, last=Amp)] == ["amp"]
    assert pipeline(last=Amp) == []


def test_the_search_takes_the_place_of_the_passes_that_follow_the_plan() -> None:
    searched = [step.name for step in pipeline(**FULL, search=True)]
    assert searched == [row.name for row in PIPELINE if not row.unless]
    assert set(searched).isdisjoint({"expand", "place", "follow", "narrow", "lift", "defer"})


def test_a_pass_gets_its_options() -> None:
    mesh = Mesh(dp=2)
    (recompute,) = (step for step in pipeline(mesh, {}, recompute=["h.*"]) if isinstance(step, Recompute))
    assert recompute == Recompute(["h.*"], mesh, {})
