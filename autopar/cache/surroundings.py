"""Describe what surrounds a capture: autopar's own sources, versions, torch's global settings, registered rules."""

from __future__ import annotations

import hashlib
import os
import platform
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy
import sympy
import torch

from autopar.cache.described import described_options
from autopar.cache.refused import NotCached
from autopar.rules.registry import REGISTERED

FORMAT = 1  # of entries
VARIABLES = ("TORCH_", "TORCHINDUCTOR_", "PYTORCH_", "ATEN_", "CUBLAS_")  # what begins so, decides
IGNORED = ("TORCHINDUCTOR_CACHE_DIR", "TORCH_HOME", "TORCH_NCCL_")  # where files are, and how processes talk


@cache
def sources_digest() -> str:
    """Return the digest of autopar's own files: of their names and contents. 40 ms, once in a process."""
    digest = hashlib.blake2b(digest_size=16)
    root = Path(__file__).parents[1]
    for folder, folders, files in os.walk(root, followlinks=True):  # ``passes`` is a link in a checkout
        folders[:] = sorted(name for name in folders if name != "__pycache__")
        for name in sorted(files):
            if name.endswith((".py", ".json", ".toml")):
                path = Path(folder, name)
                digest.update(f"{path.relative_to(root)}\n".encode())
                digest.update(path.read_bytes())
    return digest.hexdigest()


def surroundings() -> dict[str, Any]:
    """Return what a capture and a plan depend on besides the model, the call and the options. As JSON.

    Raises:
        NotCached: a rule of the user's is a function.
    """
    return {
        "format": FORMAT,
        "autopar": sources_digest(),
        "versions": {
            "python": sys.version, "torch": torch.__version__, "git of torch": str(torch.version.git_version),
            "numpy": numpy.__version__, "sympy": sympy.__version__, "machine": platform.machine(),
        },
        "settings": _settings(),
        "environment": {
            name: value for name, value in sorted(os.environ.items())
            if name.startswith(VARIABLES) and not name.startswith(IGNORED)
        },
        "rules": [[name, *described_options([rule.pattern, rule.linear, rule.sizes, rule.work])]
                  for name, rule in _registered()],
    }  # fmt: skip


def _registered() -> list[Any]:
    for name, rule in REGISTERED.items():
        if any(callable(part) for part in (rule.pattern, rule.linear, rule.work, *rule.sizes.values())):
            raise NotCached(f"the rule of {name}, which you have registered, is a function")
    return sorted(REGISTERED.items())


def _settings() -> dict[str, Any]:
    """Return torch's global settings that decide which ops a model runs, or what they compute."""
    return {
        "default dtype": str(torch.get_default_dtype()),
        "default device": str(torch.get_default_device()),
        "deterministic": torch.get_deterministic_debug_mode(),
        "fill uninitialized": torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
        "matmul precision": torch.get_float32_matmul_precision(),
        "attention": [torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.mem_efficient_sdp_enabled(),
                      torch.backends.cuda.math_sdp_enabled(), torch.backends.cuda.cudnn_sdp_enabled()],
        "inference": torch.is_inference_mode_enabled(),
        "anomaly": torch.is_anomaly_enabled(),
        "autocast": [[device, torch.is_autocast_enabled(device), str(torch.get_autocast_dtype(device))]
                     for device in ("cpu", "cuda")],
        "autocast cache": torch.is_autocast_cache_enabled(),
        "mkldnn": torch.backends.mkldnn.enabled,
        "cudnn": [torch.backends.cudnn.enabled, torch.backends.cudnn.deterministic, torch.backends.cudnn.allow_tf32],
        "optimized python": sys.flags.optimize,
    }  # fmt: skip
