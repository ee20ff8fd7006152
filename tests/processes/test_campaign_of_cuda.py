"""How the campaign on CUDA judges its cases, tried with ranks that only pretend; its cases run by hand and on GPUs."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

CAMPAIGNS = Path(__file__).parents[1] / "campaigns"
RANK = """
import json, os, sys, time
case, rank, file = sys.argv[1], int(os.environ.get("RANK", 0)), sys.argv[3]
row = {"apart": 1e-7}
if case == "tp" and rank == 1:
    print("it ends here", flush=True)
    os._exit(3)
if case == "cp":
    time.sleep(60)
if case == "step":
    row["error"] = "AssertionError: apart from eager by 1.0e-01, more than 2e-05"
if case == "dp":
    row["collectives"] = {"0": ["all_reduce Float", "all_gather Float" if rank else "all_reduce Float"]}
with open(file + ".part", "w") as made:
    json.dump(row, made)
os.rename(file + ".part", file)
sys.stdin.read()
"""


@pytest.fixture
def campaign() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("campaign_of_cuda", CAMPAIGNS / "cuda_.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look there
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_no_campaign_hides_a_package() -> None:
    """Their folder comes first on the path of what they start: torch imports ``cuda.bindings``, where it is."""
    assert not {"cuda", "numpy", "torch"} & {path.stem for path in CAMPAIGNS.iterdir()}


def options(module: ModuleType, *words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    module.arguments(parser)
    return parser.parse_args(words)


def test_verdicts(campaign: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row is written when its case has ended, and no process is left."""
    (tmp_path / "cuda_case_run.py").write_text(RANK)
    monkeypatch.setattr(campaign, "SUPPORT", tmp_path)
    monkeypatch.setattr(campaign, "PATIENCE", 0.1)
    rows, logs = str(tmp_path / "rows"), str(tmp_path / "logs")
    words = ["--cpu", "--rows", rows, "--logs", logs, "--jobs", "9", "--limit", "3"]
    printed = campaign.run(options(campaign, *words, "--names", "loop", "step", "dp", "tp", "cp"))
    found = {line.split()[0]: line for line in printed.splitlines() if line}
    assert " equal " in found["loop"] and " WRONG " in found["step"] and " ORDER " in found["dp"]
    assert " failed " in found["tp"] and " time-out " in found["cp"]
    assert "tp: rank 1 ended: it ends here" in printed
    assert "rank 0 sends all_reduce Float, rank 1 all_gather Float" in printed
    assert "5 of" in printed and "it ends here" in (tmp_path / "logs").read_text()
    assert campaign.run(options(campaign, "--cpu", "--table", "--rows", rows)) == printed


def test_parts_have_each_case_once(campaign: ModuleType) -> None:
    parts = [campaign.chosen(options(campaign, "--part", f"{k}/3")) for k in (1, 2, 3)]
    assert sorted(name for part in parts for name in part) == sorted(campaign.CASES)
    with pytest.raises(SystemExit, match="--part 4/3 is not K/N"):
        campaign.chosen(options(campaign, "--part", "4/3"))


def test_without_a_gpu_it_says_so(campaign: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="torch sees no GPU here; --stand-in PATH"):
        campaign.run(options(campaign))


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([{"0": ["a"]}, {"0": ["a"]}, {"1": ["b"]}], ""),
        ([{"0": ["a", "b"]}, {"0": ["a"]}], "group 0, collective 1: rank 0 sends b, rank 1 nothing"),
        ([{"0 messages": ["send 0->1 Float"]}, {"0 messages": ["recv 1<-0 Float"]}], ""),
        ([{"0 messages": ["send 0->1 Float"]}, {"0 messages": ["recv 1<-0 Half"]}], "0->1: 1 sent, 1 received"),
        ([{"0 messages": ["send 0->1 Float"]}, {}], "0->1: 1 sent, 0 received"),
    ],
)
def test_orders_of_ranks_are_compared(campaign: ModuleType, ranks: list[dict[str, list[str]]], words: str) -> None:
    found = campaign.unequal(ranks)
    assert words in found and bool(words) == bool(found)
