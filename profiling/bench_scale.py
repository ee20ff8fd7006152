"""Measure ``autopar verify`` by the number of ranks, from 64 to 16,384, with sizes that divide and that do not.

The model has the sizes of Llama-3-8B and few layers, on ``dp=ranks/8 tp=8`` with the preset ``megatron``. Even: a
sequence of 2,048 tokens for each rank along dp. Uneven: one sequence fewer, of 2,047 tokens, and 128,255 words. Each
row is a process of its own with one thread, from its start. ``CPU`` is that of the process; the parts are seconds by
the clock, but ``start`` and ``verify``. ``plan`` is the passes up to ``share``, ``verify`` everything after
``localize``: the programs of each class of ranks, and the channels of all. ``--rank`` runs a step of one rank of the
mesh, without the others, on a smaller Llama.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from tables import printed

PROFILES_ITSELF = True  # in other processes
RANKS = (64, 512, 4096, 16_384)
TP = 8
MOST_SECONDS, MOST_MEGABYTES, NEAR = 15.0, 1500, 0.10
COLUMNS = (
    "sizes",
    "ranks",
    "CPU, s",
    "memory, MB",
    "start",
    "capture",
    "plan",
    "schedule",
    "localize",
    "verify",
    "classes",
)
OF_RANK = ("mesh", "rank", "zero", "CPU, s", "predicted", "measured", "apart", "messages")
SMALL = "hidden_size=1024,intermediate_size=2816,num_hidden_layers=2,vocab_size=4096"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", nargs="+", type=int, default=RANKS)
    parser.add_argument("--layers", type=int, default=2)


def run(options: argparse.Namespace) -> str:
    rows, worst = [], (0.0, 0)
    for ranks in options.ranks:
        for even in (True, False):
            found = measured("verified", ranks, even, options.layers)
            worst = max(worst[0], found["cpu"]), max(worst[1], found["memory"])
            rows.append((
                "even" if even else "uneven", f"{ranks:,}", f"{found['cpu']:.1f}", f"{found['memory']:,}",
                *(f"{found[part]:.2f}" for part in ("start", "capture", "plan", "schedule", "localize", "verify")),
                f"{found['classes']}",
            ))  # fmt: skip
    text = printed(f"autopar verify, {options.layers} layers of Llama-3-8B", COLUMNS, rows)
    for words, most, limit in (("CPU seconds", worst[0], MOST_SECONDS), ("MB", worst[1], MOST_MEGABYTES)):
        text += f"most {words}: {most:,.1f}, aim {limit:g} {'met' if most <= limit else 'missed'}\n"
    return text + "\n" + one_rank(options.ranks)


def one_rank(sizes: list[int]) -> str:
    rows, apart = [], 0.0
    for ranks in sizes:
        for zero in (0, 3):
            found = measured("of_rank", ranks, zero)
            apart = max(apart, abs(found["measured"] / found["predicted"] - 1))
            rows.append((
                f"dp={ranks // TP} tp={TP}", "17", f"{zero}", f"{found['cpu']:.1f}", f"{found['predicted']:,}",
                f"{found['measured']:,}", f"{found['measured'] / found['predicted'] - 1:+.1%}", f"{found['messages']}",
            ))  # fmt: skip
    text = printed(f"autopar verify --rank, a Llama with {SMALL}", OF_RANK, rows)
    return text + f"memory apart from predicted: {apart:.1%}, aim {NEAR:.0%} {'met' if apart <= NEAR else 'missed'}\n"


def measured(what: str, *given: object) -> dict[str, float]:
    """What a function of this file prints in a process of its own."""
    code = f"import bench_scale; bench_scale.{what}(*{given!r})"
    command = [sys.executable, "-c", f"import time, torch; torch.set_num_threads(1); {code}"]
    out = subprocess.run(command, cwd=Path(__file__).parent, stdout=subprocess.PIPE, text=True, check=True).stdout
    found: dict[str, float] = json.loads(out.splitlines()[-1])
    return found


def verified(ranks: int, even: bool, layers: int) -> None:
    """Verify a call with its backward, and print the CPU seconds of each part."""
    import time

    import torch
    from process_state import high_water
    from transformers import LlamaConfig, LlamaForCausalLM

    import autopar
    from autopar.verify.channels.classes import check_classes

    uneven = 0 if even else 1
    start = time.process_time()
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(
            hidden_size=4096, intermediate_size=14336, num_hidden_layers=layers, num_attention_heads=32,
            num_key_value_heads=8, vocab_size=128256 - uneven,
        ))  # fmt: skip
        ids = torch.zeros(ranks // TP - uneven, 2048 - uneven, dtype=torch.int64)
    mesh = autopar.Mesh(dp=ranks // TP, tp=TP)
    parallel = autopar.parallelize(
        model, mesh, "megatron", example={"input_ids": ids, "labels": ids.clone()}, machine="NVIDIA H100 80GB HBM3"
    )
    made = time.process_time()
    parallel.program.verify()
    classes = parallel.rank_classes["call"]
    for one in classes:
        one.program.verify()
    check_classes(classes)
    end = time.process_time()
    passes = {row.name: row.ms / 1e3 for row in parallel.reports}
    later = {name: passes.pop(name) for name in ("schedule", "localize")}
    capture = passes.pop("capture")
    print(json.dumps({
        "cpu": end, "memory": high_water(), "start": start, "capture": capture, "plan": sum(passes.values()), **later,
        "verify": end - made, "classes": len(classes),
    }))  # fmt: skip


def of_rank(ranks: int, zero: int) -> None:
    """Run the command with ``--rank 17``, and print what it has found."""
    import contextlib
    import io
    import time

    from typer.testing import CliRunner

    from autopar.cli.app import app

    mesh = f"dp={ranks // TP},tp={TP}"
    rows = ["--batch", str(ranks // TP), "--sequence", "128", "--machine", "NVIDIA H100 80GB HBM3"]
    given = ["verify", "llama-3-8b", "--set", SMALL, "--mesh", mesh, "--plan", "megatron", *rows]
    with contextlib.redirect_stderr(io.StringIO()):
        result = CliRunner().invoke(app, [*given, "--rank", "17", "--zero", str(zero), "--json"])
    rank = json.loads(result.stdout)["rank"]
    messages = len(rank["communication"])
    print(
        json.dumps(
            {"cpu": time.process_time(), "messages": messages, **{k: rank[k] for k in ("predicted", "measured")}}
        )
    )
