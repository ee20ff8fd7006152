"""``autopar train``: every request that is refused, in one line that names the option and the remedy."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from train_command import (
    alone,  # noqa: F401  # a fixture of all tests here
    command,
)

from autopar.cli.train.check import plan_of
from autopar.cli.train.refused import Refused
from autopar.cli.train.text import Text, check_length


def test_plans_of_names_and_files(tmp_path: Path) -> None:
    assert [plan_of(name) for name in ("ddp", "megatron+sp", "search")] == ["ddp", "megatron+sp", "search"]
    file = tmp_path / "plan.json"
    file.write_text('{"*.up.weight": [["dp", "tp"], null]}')
    assert plan_of(str(file)) == [{"*.up.weight": (("dp", "tp"), None)}]
    for text, told in (
        ("{", "is not JSON: .*"),
        ("3", "is not an object of globs; .*"),
        ("[[1]]", "is not an object of globs; .*"),
    ):
        file.write_text(text)
        with pytest.raises(Refused, match=f"--plan {re.escape(str(file))} {told}"):
            plan_of(str(file))


REFUSED = {
    "--mesh dp2": r"--mesh 'dp2' is not a list of different axes with their sizes; write it as in --mesh dp=2,tp=2",
    "--mesh dp=2,dp=2": r"--mesh 'dp=2,dp=2' is not a list of different axes .*",
    "--mesh dp=0": r"--mesh 'dp=0': axis 'dp' has size 0; the size of an axis is an integer ≥ 1; write it as in --mesh "
    r"dp=2,tp=2",
    "--mesh dp=2 --plan "
    "megatron": r"the preset 'megatron' splits over an axis named tp, and the mesh \(dp=2\) has none; .*",
    "--plan "
    "megatorn": r"--plan megatorn is unknown; choose from ddp, fsdp, hsdp, megatron, megatron\+sp, fsdp\+tp, search, "
    r"or a JSON file of globs; did you mean megatron\?",
    "--plan nowhere.json": r"--plan nowhere\.json: No such file or directory; the names are ddp, fsdp, hsdp, megatron, "
    r"megatron\+sp, fsdp\+tp, search",
    "--size huge": r"--size huge is unknown; choose from tiny, small, medium, large",
    "--dtype float16": r"--dtype float16 is unknown; choose from float32, float64, bfloat16; did you mean .*\?",
    "--device tpu": r"--device tpu is unknown; choose from cpu, cuda.*",
    "--device cuda": r"--device cuda needs a GPU for each rank, 4 on this machine, which has 0; use --device cpu",
    "--simulate --device "
    "cuda": r"--device cuda needs a GPU for each rank, 1 on this machine, which has 0; use --device cpu",
    "--text nowhere": r"--text nowhere: No such file or directory; give a file that can be read, or leave it out",
    "--text .": r"--text \.: Is a directory; .*",
    "--sequence "
    "100000000": r"Python's standard library has \d+ bytes, but a sequence has 100000000; give a longer text with "
    r"--text, or --sequence \d+",
    "--sequence 1": r"--sequence 1 must be at least 2: a byte and the next one",
    "--steps 0": r"--steps 0 must be at least 1",
    "--batch 0": r"--batch 0 must be at least 1",
    "--lr 0": r"--lr 0\.0 must be above 0, such as 0\.002",
    "--lr nan": r"--lr nan must be above 0, such as 0\.002",
    "--seed -1": r"--seed -1 must be between 0 and 2\*\*32 - 1",
    "--timeout 0": r"--timeout 0\.0 must be above 0, in seconds",
    "--tolerance -1": r"--tolerance -1\.0 must be 0 or more, such as 1e-4",
    "--preset llama": r"--preset llama is unknown; choose from llama-fp16-o2, llama-bf16-zero3, .*",
    "--preset llama-fp16": r"--preset llama-fp16 is unknown; choose from .*; did you mean llama-fp16-o2\?",
    "--microbatches 3": r"--microbatches 3 do not divide --batch 8 into equal pieces; try --microbatches 2",
    "--amp fp16-o2": r"--amp fp16-o2 is unknown; choose from none, bf16-O1, fp16-O1, bf16-O2, fp16-O2; did you mean "
    r"fp16-O2\?",
    "--amp bf16-O1 --dtype bfloat16": r"--amp bf16-O1 needs float32 weights, but --dtype is bfloat16; use one of both",
    "--zero 4": r"--zero 4 must be 0, 1, 2 or 3",
    "--zero 1 --mesh "
    "tp=2": r"--zero 1 splits over a data axis, and --mesh tp=2 has none; use --zero 0, or a mesh such as dp=2,tp=2",
    "--clip-norm 0": r"--clip-norm 0\.0 must be above 0, such as 1; inf only measures",
    "--loss-scale nan": r"--loss-scale nan must be 1 or more, such as 1024",
    "--loss-scale "
    "5": r"--loss-scale is for fp16, whose small gradients are lost, and --amp is none; leave it out, or use --amp "
    r"fp16-O2",
    "--loss-scale 5 --amp "
    "bf16-O1": r"--loss-scale is for fp16, whose small gradients are lost, and --amp is bf16-O1; leave it out, or use "
    r"--amp fp16-O2",
    "--warmup -1": r"--warmup -1 must be 0 or more steps",
    "--weight-decay -1": r"--weight-decay -1\.0 must be 0 or more, such as 0\.01",
    "--optimizer adamww": r"--optimizer adamww is unknown; choose from adamw, adam, sgd; did you mean adamw\?",
    "--every 0": r"--every 0 must be at least 1",
    "--resume": r"--resume continues from a checkpoint, but no folder is named; add --checkpoint FOLDER",
    "--port 99999": r"--port 99999 must be between 1 and 65535",
}


@pytest.mark.parametrize("arguments", REFUSED)
def test_what_is_refused(arguments: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert command(*arguments.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(f"autopar: {REFUSED[arguments]}\n", err), err


def test_without_transformers(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert command("--simulate") == 2
    told = (
        "autopar: the model is Hugging Face's Llama, and transformers is not installed; "
        "pip install 'autopar[llm]', or pip install -e '.[llm]' in a checkout\n"
    )
    assert capsys.readouterr() == ("", told)


def test_an_empty_text() -> None:
    with pytest.raises(Refused, match=r"x has 0 bytes, but a sequence has 4; give a longer text with --text$"):
        check_length(Text("x", torch.empty(0, dtype=torch.uint8)), 4)
