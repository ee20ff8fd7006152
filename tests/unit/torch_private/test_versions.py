"""A torch that autopar was not tried on: one warning that names it, and the range that pip may choose from."""

from __future__ import annotations

import importlib
import re
import warnings
from pathlib import Path

import pytest
import torch

from autopar.torch_private import versions

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("version", "how"),
    [("2.16.0", "newer"), ("2.17.0.dev20270101+cu132", "newer"), ("3.0.0", "newer"), ("2.10.1", "older")],
)
def test_another_torch_is_named_once(version: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    words = (
        f"torch {version} is {how} than those that autopar was tried on, 2.11 to 2.15: compare results with a single"
    )
    with pytest.warns(UserWarning, match=re.escape(words)) as warned:
        importlib.reload(versions)
    assert len(warned) == 1


@pytest.mark.parametrize("version", ["2.11.0", "2.12.1+cu130", "2.15.3", torch.__version__])
def test_those_that_were_tried_are_silent(version: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        versions.warn_of(version)


def test_pip_chooses_among_these() -> None:
    first, last = versions.TRIED
    assert f'"torch>={first[0]}.{first[1]},<{last[0]}.{last[1] + 1}"' in (ROOT / "pyproject.toml").read_text()
