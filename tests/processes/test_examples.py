"""The runnable examples: on four ranks, with the numbers of a single device, and as the commands that they name."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from examples_run import EXAMPLES, printed
from processes import ranks

PRINTED = {  # example → what it prints besides the numbers of both
    "plain_loop": "test accuracy",
    "trainer": "saved: config.json generation_config.json model.safetensors training_args.bin\n",
    "peft_lora": (
        "lora_B of q_proj: [32, 4], on each rank [16, 4]\n"
        "the 12 frozen weights are as before, and with the adapters PEFT has the same outputs\n"
    ),
    "lightning_style": "validation",
    "finetune": "transformers has loaded config.json generation_config.json model.safetensors\n",
    "generate": "cache: keys and values of 2 layers, f32[4/dp 2/tp 16 8], 4,096 bytes on a rank; captures: 2\n",
    "moe": (
        "4 experts, of which each rank holds 2 and computes their places: relu : f32[2 4 3 16] = relu(view_7)\n"
        "2 all-to-alls forward\n"
    ),
    "custom_op": "weighted_norm : f32[8/dp 3] +tp = examples::weighted_norm(mm, down)\n",
    "own_pass": (
        "relu once: 1 relu removed in 1 commit; bytes by axis: {'tp': 128, 'dp': 1024}\n"
        "-  relu_1 : f32[8/dp 32/tp] = relu(relu)\n"
    ),
    "elastic_loop": "the last start went on after step 4 of 12\n",
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_has_the_numbers_of_a_single_device(name: str) -> None:
    """It ends with an error, which is an error here, unless they agree; the first rank alone prints."""
    first, *others = ranks(4).run(printed, name)
    assert PRINTED[name] in first and " the mesh  one device\n" in first, first
    assert others == [""] * 3


COMMAND = [sys.executable, "-m"]
TORCHRUN = [*COMMAND, "torch.distributed.run", "--nproc-per-node", "4", "-m"]


@pytest.mark.parametrize(
    ("start", "name"),
    [
        (COMMAND, "plain_loop"),
        *(
            pytest.param(start, name, marks=pytest.mark.sweep("the example runs on ranks, and another one so"))
            for start, names in ((COMMAND, EXAMPLES[1:]), (TORCHRUN, EXAMPLES))
            for name in names
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else ("command" if value is COMMAND else "torchrun"),
)
def test_an_example_is_a_command(start: list[str], name: str) -> None:
    threads = {"OMP_NUM_THREADS": "1"}  # torchrun says so otherwise
    ended = subprocess.run(
        [*start, f"autopar.examples.{name}"], capture_output=True, text=True, timeout=240, env=os.environ | threads
    )
    assert ended.returncode == 0, ended.stderr
    assert PRINTED[name] in ended.stdout
    # a capture of more than 2 s says so, on a machine that is busy
    assert not [line for line in ended.stderr.splitlines() if not line.startswith("autopar: the loop has waited ")]
