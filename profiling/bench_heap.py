"""Ten steps of a Llama with its sequence split, dp2 tp2 on gloo, some hundreds of times under glibc's checks of the heap.

Each launch is four fresh processes that repeat one variant for some time. A launch fails where a process ends by a signal, or where
none makes progress. The checks are those of ``MALLOC_CHECK_=3`` and ``MALLOC_PERTURB_``; ``--unchecked`` leaves the heap as it is.

========== =====================================================================================================
tested     the test: capture, ten steps, each parameter gathered by DTensor after each
warm       the same without the capture
ours       forward and backward alone: the collectives of autopar, none of DTensor
copied     as warm, and no all-reduce is done in place
gathers    DTensor alone: each parameter gathered, its gradient clipped, an optimizer's step
flight     ``--flight`` of torch's functional gathers, of 16 to 128 bytes, under way at once: the coalesced gather of gloo
single     the same with the gather that autopar uses
========== =====================================================================================================
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PRELOAD = "libc_malloc_debug.so.0"
RANKS = 4
HEAP = ("malloc", "free", "corrupted", "double free", "realloc", "munmap")  # with which glibc's messages begin
PROFILES_ITSELF = True  # in other processes


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--groups", type=int, nargs="+", default=[0, 270], help="process groups made before, each with three threads")
    parser.add_argument("--launches", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=120.0, help="of a launch, after which it has ended well")
    parser.add_argument("--flight", type=int, default=30)
    parser.add_argument("--limit", type=float, default=120.0, help="seconds without progress until a launch counts as hanging")
    parser.add_argument("--unchecked", action="store_true")


def run(options: argparse.Namespace) -> str:
    lines = [f"{'variant':<10}{'groups':>8}{'launches':>10}{'ten steps':>11}  ends"]
    for groups in options.groups:
        for variant in options.variants:
            ends: Counter[str] = Counter()
            done = 0
            for _ in range(options.launches):
                end, repeats = launch(variant, groups, options)
                ends[end] += 1
                done += repeats
            lines.append(f"{variant:<10}{groups:>8}{options.launches:>10}{done:>11}  " + ", ".join(f"{n} {end}" for end, n in ends.most_common()))
            print(lines[-1], file=sys.stderr, flush=True)
    return "\n".join(lines) + "\n"


def launch(variant: str, groups: int, options: argparse.Namespace) -> tuple[str, int]:
    """How the processes ended, and how often the last of them has repeated the variant."""
    checks = {} if options.unchecked else {"LD_PRELOAD": PRELOAD, "MALLOC_CHECK_": "3", "MALLOC_PERTURB_": "165"}
    environment = {**os.environ, **checks, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    with tempfile.TemporaryDirectory(prefix="autopar-heap-") as folder:
        paths = [Path(folder, f"rank{rank}") for rank in range(RANKS)]
        given = [variant, f"{folder}/store", str(groups), str(options.flight)]
        started = []
        for rank, path in enumerate(paths):
            with path.open("w") as file:
                command = [sys.executable, __file__, str(rank), *given]
                started.append(subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT))
        hangs = _watch(started, paths, options)
        codes = [one.poll() for one in started]
        for one in started:
            one.kill()
            one.wait()
        texts = [path.read_text(errors="replace") for path in paths]
    repeats = min(text.count("repeated\n") for text in texts)
    failed = sorted(code for code in codes if code)  # signals first
    if not failed:
        return "hung" if hangs else "well", repeats
    print("\n".join(text[-1500:] for text in texts), file=sys.stderr)
    said = next((line for text in texts for line in text.splitlines() if line.startswith(HEAP)), "")
    return (f"signal {-failed[0]}" if failed[0] < 0 else f"status {failed[0]}") + (f" ({said})" if said else ""), repeats


def _watch(started: list[subprocess.Popen[bytes]], paths: list[Path], options: argparse.Namespace) -> bool:
    """Until a process ends, or the time is over; whether they hang."""
    begun = moved = time.monotonic()
    size = 0
    while not any(one.poll() is not None for one in started):
        time.sleep(0.2)
        now, printed = time.monotonic(), sum(path.stat().st_size for path in paths)
        if printed != size:
            size, moved = printed, now
        if now - moved > options.limit:
            return True
        if now - begun > options.seconds and size:
            return False
    time.sleep(2.0)  # the others say what they saw
    return False


# -- in a process ------------------------------------------------------------------------------------------------------


def tested(flight: int) -> None:
    import loops

    while True:
        loops.ten_steps("llama sequence", {"dp": 2, "tp": 2})
        print("repeated")


def warm(flight: int) -> None:
    import loops

    loop, batches = _loop()
    for k in itertools.count():
        for step in range(10):
            loop.step(batches(10 * k + step))
            for parameter in loop.model.parameters():
                loops.whole(parameter)
        print("repeated")


def copied(flight: int) -> None:
    from autopar.runtime import lower

    lower.start_all_reduce_in_place = lower.start_all_reduce
    warm(flight)


def ours(flight: int) -> None:
    from casts import PromotedCasts

    loop, batches = _loop()
    for k in itertools.count():
        for step in range(10):
            with PromotedCasts():
                loop.model(**batches(10 * k + step)).loss.backward()
            loop.optimizer.zero_grad()
        print("repeated")


def gathers(flight: int) -> None:
    import loops
    from torch import nn

    loop, batches = _loop()
    loop.model(**batches(0)).loss.backward()
    while True:
        for _ in range(10):
            for parameter in loop.model.parameters():
                parameter.grad = parameter.detach() * 0.01
            nn.utils.clip_grad_norm_(loop.model.parameters(), 0.5)
            loop.optimizer.step()
            for parameter in loop.model.parameters():
                loops.whole(parameter)
        print("repeated")


def flight(flight: int) -> None:
    from autopar.torch_private import FUNCTIONAL

    _in_flight(FUNCTIONAL.all_gather_into_tensor, flight)


def single(flight: int) -> None:
    from autopar.torch_private import start_gather

    _in_flight(start_gather, flight)


def _in_flight(gather: Any, flight: int) -> None:
    import torch

    from autopar.torch_private import FUNCTIONAL

    group = torch.distributed.group.WORLD.group_name
    while True:
        for _ in range(20):
            pieces = [torch.ones(1, 4 + k % 29) for k in range(flight)]
            started = [gather(piece, RANKS, group) for piece in pieces]
            for piece, one in zip(pieces, started, strict=True):
                assert torch.equal(FUNCTIONAL.wait_tensor(one), piece.expand(RANKS, -1))
        print("repeated")


def _loop():
    import loops
    import torch

    import autopar
    from autopar import Mesh

    torch.manual_seed(0)
    make, batches, plan = loops.MODELS["llama sequence"]
    return loops.Loop(autopar.parallelize(make(), Mesh(dp=2, tp=2), plan)), batches


VARIANTS = {one.__name__: one for one in (tested, warm, ours, copied, gathers, flight, single)}


def main() -> None:
    rank, variant, store, groups, flight = sys.argv[1:]
    sys.path.append(str(HERE.parent / "tests"))
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=RANKS)
    kept = [distributed.new_group(list(range(RANKS))) for _ in range(int(groups))]
    print(f"{len(kept)} more groups")
    VARIANTS[variant](int(flight))


if __name__ == "__main__":
    main()
