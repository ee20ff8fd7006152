"""A refusal ends a job with one short traceback: the user's frames, and one line of each other rank."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed

import autopar
from autopar.errors import PlanError, VerifyError
from autopar.runtime.processes.watch.traces import one_line, short_traceback
from autopar.runtime.processes.watch.watch import Watch


def refusal() -> Exception:
    with pytest.raises(PlanError) as caught:
        autopar.parallelize(torch.nn.Linear(4, 4), autopar.Mesh(tp=2), {"weight": ("zz", None)})
    return caught.value


def raised(error: Exception, cause: Exception | None = None) -> Exception:
    try:
        raise error from cause
    except Exception as made:
        return made


SAID = "autopar.errors.PlanError: the plan's 'weight': ('zz', None): the mesh (tp=2) has no axis 'zz'; its axes are tp"


def test_a_refusal_has_the_users_frames_alone() -> None:
    text = short_traceback(refusal()).splitlines()
    assert text[0] == "Traceback (most recent call last):" and text[-1] == SAID
    assert [line.split('"')[1] for line in text if line.startswith("  File ")] == [__file__]
    assert "autopar.parallelize(torch.nn.Linear" in text[2]


def test_a_refusal_has_no_causes() -> None:
    text = short_traceback(raised(PlanError("no axis"), ValueError("inside")))
    assert "no axis" in text and "inside" not in text and text.count("Traceback") == 1


def test_an_error_of_the_model_keeps_its_place() -> None:
    """The frames of torch and autopar between the user's are left out, the innermost stays."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(5, 4))
    parallel = autopar.parallelize(model, autopar.Mesh(dp=2), "ddp")
    with pytest.raises(RuntimeError) as caught:
        parallel.simulate(torch.ones(2, 4))
    text = short_traceback(caught.value)
    frames = [line for line in text.splitlines() if line.startswith("  File ")]
    assert __file__ in frames[0] and len(frames) <= 3 and "while autopar captured the step" in text


@pytest.mark.parametrize("error", [VerifyError("a promise"), KeyError("inside")], ids=repr)
def test_a_defect_of_autopar_is_printed_whole(error: Exception) -> None:
    def inner() -> None:
        raise error

    scope: dict[str, Any] = {"inner": inner}
    exec(compile("def outer():\n    inner()", f"{autopar.__path__[0]}/api.py", "exec"), scope)
    with pytest.raises(type(error)) as caught:
        scope["outer"]()
    frames = short_traceback(caught.value).count("  File ")
    assert frames == (3 if isinstance(error, VerifyError) else 2)


@pytest.mark.parametrize("rank", [0, 3])
def test_the_first_rank_of_torchrun_prints_it(
    rank: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    error = refusal()
    sys.excepthook(type(error), error, error.__traceback__)
    said = capfd.readouterr().err
    first = f"rank 3 refuses: {SAID.removeprefix('autopar.errors.')}\n"
    assert said == (first if rank else short_traceback(error))
    other = raised(KeyError("of the user"))
    sys.excepthook(KeyError, other, other.__traceback__)
    assert "KeyError: 'of the user'" in capfd.readouterr().err


def test_another_hook_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def own(*_: object) -> None: ...

    monkeypatch.setattr(sys, "excepthook", own)
    monkeypatch.setenv("RANK", "0")
    refusal()
    assert sys.excepthook is own
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    monkeypatch.delenv("RANK")
    refusal()
    assert sys.excepthook is sys.__excepthook__  # a process that is alone prints as Python does


def test_ranks_of_a_watch_print_the_same_error_once() -> None:
    store = distributed.HashStore()
    errors = [raised(PlanError("no axis")) for _ in range(2)]
    own, same = (Watch._printed(SimpleNamespace(_store=store), error) for error in errors)  # type: ignore[arg-type]
    assert own == short_traceback(errors[0]) and same == f"raises the same: {one_line(errors[1])}\n"
    another = Watch._printed(SimpleNamespace(_store=store), raised(PlanError("no dim")))  # type: ignore[arg-type]
    assert "no dim" in another and "raises the same" not in another
