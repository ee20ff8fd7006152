"""Ten steps of a Llama with its sequence split, dp2 tp2 on gloo, some hundreds of times under glibc's checks of the
heap.

Each launch is four new processes that repeat one variant for some time. A launch fails where a process ends by a
signal, or where none makes progress. The checks are those of ``MALLOC_CHECK_=3`` and ``MALLOC_PERTURB_``;
``--unchecked`` leaves the heap as it is.

========== =====================================================================================================
tested     the test: capture, ten steps, each parameter gathered by DTensor after each
warm       the same without the capture
ours       forward and backward alone: the collectives of autopar, none of DTensor
copied     as warm, and no all-reduce is done in place
gathers    DTensor alone: each parameter gathered, its gradient clipped, an optimizer's step
flight     ``--flight`` of torch's functional gathers, of 16 to 128 bytes, under way at once: the coalesced gather of gloo
single     the same with the gather that autopar uses
========== =====================================================================================================
"""  # noqa: E501

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

PRELOAD = "libc_malloc_debug.so.0"
RANKS = 4
HEAP = ("malloc", "free", "corrupted", "double free", "realloc", "munmap")  # with which glibc's messages begin
REPEATED = "repeated"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument(
        "--groups", type=int, nargs="+", default=[0, 270], help="process groups made before, each with three threads"
    )
    parser.add_argument("--launches", type=int, default=3)
    parser.add_argument(
        "--seconds",
        type=float,
        default=120.0,
        help="of a launch, from its first repeat on, after which it has ended well",
    )
    parser.add_argument("--flight", type=int, default=30)
    parser.add_argument(
        "--limit", type=float, default=120.0, help="seconds without progress until a launch counts as hanging"
    )
    parser.add_argument("--unchecked", action="store_true")


def run(options: argparse.Namespace) -> str:
    """A process under the checks imports everything once, and forks the ranks of each launch: imports take longer than
    the repeats."""
    checks = {} if options.unchecked else {"LD_PRELOAD": PRELOAD, "MALLOC_CHECK_": "3", "MALLOC_PERTURB_": "165"}
    environment = {**os.environ, **checks, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, __file__, json.dumps(vars(options))]
    return subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout


def launches(options: argparse.Namespace) -> None:
    """Print a row for each variant and number of groups."""
    print(f"{'variant':<10}{'groups':>8}{'launches':>10}{'repeats':>9}  ends")
    for variant in options.variants:
        for groups in options.groups:
            ends: Counter[str] = Counter()
            done = 0
            for _ in range(options.launches):
                end, repeats = launch(variant, groups, options)
                ends[end] += 1
                done += repeats
            row = f"{variant:<10}{groups:>8}{options.launches:>10}{done:>9}  " + ", ".join(
                f"{n} {end}" for end, n in ends.most_common()
            )
            print(row, flush=True)
            print(row, file=sys.stderr, flush=True)


def launch(variant: str, groups: int, options: argparse.Namespace) -> tuple[str, int]:
    """How the processes ended, and how often the last of them has repeated the variant."""
    fork = multiprocessing.get_context("fork")
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="autopar-heap-") as folder:
        paths = [Path(folder, f"rank{rank}") for rank in range(RANKS)]
        started = []
        for rank, path in enumerate(paths):
            path.touch()
            process = fork.Process(
                target=on_rank, args=(rank, path, variant, port, groups, options.flight), daemon=True
            )
            process.start()
            started.append(process)
        hangs = _watch(started, paths, options)
        codes = [process.exitcode for process in started]
        for process in started:
            process.kill()
        for process in started:
            process.join()
        texts = [path.read_text(errors="replace") for path in paths]
    repeats = min(text.count(REPEATED) for text in texts)
    failed = sorted(code for code in codes if code)  # signals first
    if not failed:
        return "hung" if hangs else "well", repeats
    print("\n".join(text[-1500:] for text in texts), file=sys.stderr)
    said = next((line for text in texts for line in text.splitlines() if line.startswith(HEAP)), "")
    return (f"signal {-failed[0]}" if failed[0] < 0 else f"status {failed[0]}") + (
        f" ({said})" if said else ""
    ), repeats


def _watch(started: list[Any], paths: list[Path], options: argparse.Namespace) -> bool:
    """Until a process ends, or the time is over; whether they hang."""
    moved = time.monotonic()
    begun, size = None, 0
    while all(process.exitcode is None for process in started):
        time.sleep(0.2)
        now, printed = time.monotonic(), sum(path.stat().st_size for path in paths)
        if printed != size:
            size, moved = printed, now
        if begun is None and all(REPEATED in path.read_text(errors="replace") for path in paths):
            begun = now
        if now - moved > options.limit:
            return True
        if begun is not None and now - begun > options.seconds:
            return False
    time.sleep(2.0)  # the others say what they saw
    return False


# -- in a process ------------------------------------------------------------------------------------------------------


def tested(flight: int) -> None:
    import loops

    while True:
        loops.loop_alike("llama sequence", {"dp": 2, "tp": 2})
        print(REPEATED)


def warm(flight: int) -> None:
    import loops

    loop, batches = _loop()
    for k in itertools.count():
        for step in range(10):
            loop.step(batches(10 * k + step), promoted=False)
            for parameter in loop.model.parameters():
                loops.whole(parameter)
        print(REPEATED)


def copied(flight: int) -> None:
    from autopar.runtime.lowering import communication

    communication.start_all_reduce_in_place = communication.start_all_reduce
    warm(flight)


def ours(flight: int) -> None:
    loop, batches = _loop()
    for k in itertools.count():
        for step in range(10):
            loop.model(**batches(10 * k + step)).loss.backward()
            loop.optimizer.zero_grad()
        print(REPEATED)


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
        print(REPEATED)


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
        print(REPEATED)


def _loop():
    import loops
    import torch

    import autopar
    from autopar import Mesh

    torch.manual_seed(0)
    make, batches, plan = loops.MODELS["llama sequence"]
    return loops.Loop(autopar.parallelize(make(), Mesh(dp=2, tp=2), plan)), batches


VARIANTS = {one.__name__: one for one in (tested, warm, ours, copied, gathers, flight, single)}


def on_rank(rank: int, path: Path, variant: str, port: int, groups: int, flight: int) -> None:
    from torch import distributed

    with path.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    distributed.init_process_group("gloo", init_method=f"tcp://localhost:{port}", rank=rank, world_size=RANKS)
    kept = [distributed.new_group(list(range(RANKS))) for _ in range(groups)]
    print(f"{len(kept)} more groups", flush=True)
    VARIANTS[variant](flight)


def main() -> None:
    import loops  # noqa: F401
    import torch

    torch.set_num_threads(1)
    launches(argparse.Namespace(**json.loads(sys.argv[1])))


if __name__ == "__main__":
    main()
