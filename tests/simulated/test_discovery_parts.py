"""What the search for a rule consists of: small calls, patterns, a process for kernels that crash."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import pytest
import torch
from black_boxes import INDEX, T

from autopar.runtime.discovery import sandbox
from autopar.runtime.discovery.guesses import Factor, pattern_of
from autopar.runtime.discovery.sandbox import CrashError, SandboxError, isolated
from autopar.runtime.discovery.scaled import Scale, scales


def test_small_calls() -> None:
    ways = scales((T(4096, 512, 1), [T(512)], 512, True, 2), {"dim": 3})
    assert ways[0]((T(4096, 512, 1), [T(512)], 512, True, 2), {"dim": 3}) == (
        (T(12, 14, 1), [T(14)], 512, True, 2),
        {"dim": 3},
    )
    assert ways[1]((T(4096, 512), 512), {}) == ((T(12, 14), 14), {})
    related = scales((T(8, 16), T(128), T(9)), {}, related=True)[0]
    assert (related.sizes[8] * related.sizes[16], related.sizes[8] + 1) == (related.sizes[128], related.sizes[9])
    assert scales((T(8, 16),), {})[-1] == Scale({8: 8, 16: 16}, {})
    # an index may be beyond a small piece
    assert all(way.sizes[8] != 8 for way in scales((T(8, 16), T(8, dtype=INDEX)), {}))


def test_results_must_be_as_small() -> None:
    scale = Scale({64: 12, 32: 14}, {})
    assert scale.fits([T(64, 1, 5)], [torch.empty(12, 1, 7)])
    for shape in ((12, 1, 14), (12, 2, 7), (14, 1, 7), (12, 1)):
        assert not scale.fits([T(64, 1, 5)], [torch.empty(shape)])
    assert not scale.fits([T(64), None], [torch.empty(12), torch.empty(12)])


def test_patterns() -> None:
    rows = [Factor(((0, 0), (1, 0)), ((0, 0),)), Factor(((0, 2),))]
    assert pattern_of(rows, [(4, 1, 6), (4, 5), None], [(4, 5)]) == "... 1 b, ... c!, () -> ... c!"
    assert pattern_of([], [(4, 4)], [(4, 4), ()]) == "a! b! -> a! b!, ()"
    assert pattern_of(rows[1:], [(4, 1, 6)], [()], "max") == "a! 1 b -> () by max"


def test_a_sandbox() -> None:
    assert isolated(lambda: {"a": os.getpid()})["a"] != os.getpid()
    assert len(isolated(lambda: "x" * 1_000_000)) == 1_000_000
    with pytest.raises(CrashError, match=r"^running it on pieces ended the process \(SIGSEGV\)$"):
        isolated(lambda: ctypes.string_at(0))
    with pytest.raises(CrashError, match=r"^running it on pieces ended the process$"):
        isolated(lambda: os._exit(1))


def children() -> list[str]:
    """The processes of this one: other tests keep some for later."""
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()


def test_a_sandbox_that_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "SECONDS", 0.2)
    before = children()
    with pytest.raises(SandboxError, match=r"did not end in 0\.2 seconds"):
        isolated(lambda: __import__("time").sleep(60))
    assert children() == before, "nothing is left behind"
