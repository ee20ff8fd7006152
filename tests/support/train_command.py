"""Run ``autopar train`` in this process, without the environment of a job."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from autopar.cli.app import app
from autopar.cli.train import run as running
from autopar.cli.train.sizes import SIZES


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No job around the tests, no terminal that is forced, one thread; typer replaces ``sys.excepthook``."""
    for name in (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "FORCE_COLOR",
        "TTY_COMPATIBLE",
        running.STARTED,
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the tensors are small
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def one_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The smallest model has one layer."""
    monkeypatch.setitem(SIZES, "tiny", replace(SIZES["tiny"], layers=1))


def command(*arguments: str) -> int:
    """The exit status of ``autopar train`` in this process."""
    with pytest.raises(SystemExit) as end:
        app(["train", *arguments])
    return int(end.value.code or 0)
