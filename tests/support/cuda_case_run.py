"""Run one case of the campaign of CUDA in this process, which is one rank of it: ``cuda_case_run.py CASE DEVICE FILE``.

The result is written to the file as JSON: how far the numbers are from eager's (``null``: none is
compared) or what was raised, and the collectives
that torch's flight recorder of NCCL has seen. Then the process waits to be ended, so that no rank misses another one's
store.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from cuda_cases import CASES
from cuda_trainings import ON, check


def prepare(device: str, ranks: int) -> None:
    """``device`` is ``cuda``, ``cpu``, or ``stand-in``: CUDA that computes nothing."""
    ON.name, ON.values = ("cpu" if device == "cpu" else "cuda"), device != "stand-in"
    torch.set_num_threads(1)
    if device == "cpu":
        return
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    if device == "stand-in":
        torch.backends.cudnn.enabled = False  # cuDNN has a runtime of its own
        torch.backends.cuda.enable_cudnn_sdp(False)
        read_zeros()
    else:
        torch.cuda.set_per_process_memory_fraction(0.9 / max(ranks, 8))


def read_zeros() -> None:
    """Numbers that are read from the device are zero, and conditions hold: all ranks read the same, and loops end."""
    tensor: Any = torch.Tensor
    for name, value in {"__float__": 0.0, "__int__": 0, "__bool__": True, "item": 0}.items():
        true = getattr(tensor, name)
        setattr(tensor, name, lambda x, true=true, value=value: value if x.is_cuda else true(x))


def collectives() -> dict[str, list[str]]:
    """What this rank has sent through NCCL: group → its collectives in order, and ``peers`` → its messages."""
    from torch._C._distributed_c10d import _dump_nccl_trace

    entries = pickle.loads(_dump_nccl_trace(True, False, False)).get("entries", [])
    found: dict[str, list[str]] = {}
    for entry in entries:
        name = entry["profiling_name"].removeprefix("nccl:")
        group = f"{entry['process_group'][0]}{' messages' if entry['is_p2p'] else ''}"
        found.setdefault(group, []).append(f"{name} {','.join(entry['input_dtypes'])}")
    return found


def failed(error: BaseException) -> str:
    """What was raised, and the innermost lines of autopar."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/autopar/" in frame.filename]
    places = [f"{frame.filename.rpartition('/autopar/')[2]}:{frame.lineno}" for frame in reversed(frames[-3:])]
    words = " ".join(f"{type(error).__name__}: {error}".split())
    return f"{words[:600]}{' at ' if places else ''}{' < '.join(places)}"


def main(name: str, device: str, file: str) -> None:
    case = CASES[name]
    row: dict[str, Any] = {}
    try:
        prepare(device, case.ranks)
        row["apart"] = case.run()
        ON.wait()
        if row["apart"] is not None:
            check(row["apart"], case.tolerance)
    except BaseException as error:
        traceback.print_exc()
        row["error"] = failed(error)
    if device != "cpu" and dist.is_initialized():
        row["collectives"] = collectives()
    made = Path(f"{file}.part")
    made.write_text(json.dumps(row))
    made.rename(file)
    sys.stdout.flush()
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
