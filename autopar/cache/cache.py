"""Look a capture up by everything that decides it, and keep it if it is new: in a folder, for other processes.

The key has what is known before a capture. Beside it, an entry has the guards of the capture: the functions that ran
and the values that they read. An entry is used if they are the same here, as in one process.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

import numpy
import sympy
import torch

from autopar.cache.codec import Check, Codec, Make, Planned, Texts, made_digest, opened, texts_of
from autopar.cache.described import described_options
from autopar.cache.folder import Folder, NotCached, Unusable, failures_as_refused
from autopar.cache.shared import planned_by_first
from autopar.gc_pause import gc_paused
from autopar.ir.program import text_digest
from autopar.report.passes import PassReport
from autopar.rules.registry import REGISTERED
from autopar.runtime.processes.agreement import Agreement

# -- surroundings ------------------------------------------------------------------------------------------------------
#
# Describe what surrounds a capture: autopar's own sources, versions, torch's global settings, registered rules.


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


# -- cache -------------------------------------------------------------------------------------------------------------


T = TypeVar("T")
VARIANTS = 8  # entries of one key that are compared
REPORT = "cache"
LONG = 400  # letters; a fact with more is known by its digest


@dataclass(eq=False)
class Cache:
    """The captures of one model that other processes have made, or may use.

    Attributes:
        folder: where they are kept.
        lines: what came of each look into it, as the reports say.
    """

    folder: Folder
    lines: list[str] = field(default_factory=list)

    @property
    def hits(self) -> int:
        """How often something was found."""
        return sum(line.startswith("hit") for line in self.lines)

    def through(self, make: Make[T], codec: Codec[T], ranks: Agreement | None = None) -> tuple[T, PassReport, str]:
        """Return what an entry has, or what is made; the report that says which; and the digest of its text.

        Args:
            make: makes it.
            codec: how it is kept.
            ranks: those that have the same call; the first one plans, and the others read.
        """
        making = 0.0  # seconds, which the passes report

        def timed(ranks: Agreement | None, check: Check | None) -> T:
            nonlocal making
            start = time.perf_counter()
            try:
                return make(ranks, check)
            finally:
                making += time.perf_counter() - start

        start = time.perf_counter()
        planned = (
            self.planned(timed, codec)
            if ranks is None
            else planned_by_first(partial(self.planned, timed, codec), timed, codec, ranks)
        )
        self.lines.append(planned.line)
        report = PassReport(REPORT, (time.perf_counter() - start - making) * 1e3, notes=(planned.line,))
        return planned.made, report, "" if planned.texts is None else made_digest(planned.texts)

    def planned(self, make: Make[T], codec: Codec[T], check: Check | None = None) -> Planned[T]:
        """Return what this process finds or makes.

        Args:
            check: is called once a call is captured; what it raises ends the search for a plan.
        """
        try:
            with failures_as_refused():
                key = Key.of(codec)
        except NotCached as refused:
            if check is not None:
                raise
            return Planned(make(None, None), f"not used: {refused}", None)
        found, why = self.found(key, codec)
        if found is not None:
            return Planned(found[0], f"hit: {key.text[:12]} in {self.folder.path}", found[1])
        made = make(None, check)
        try:
            with failures_as_refused():
                texts = texts_of(codec, made)
        except NotCached as refused:
            return Planned(made, f"miss: {why}; not kept: {refused}", None)
        failed = self.folder.write(key.text, key.facts, texts)
        kept = f"not kept: {failed}" if failed else f"kept as {key.text[:12]} in {self.folder.path}"
        return Planned(made, f"miss: {why}; {kept}", texts)

    @gc_paused()
    def found(self, key: Key, codec: Codec[T]) -> tuple[tuple[T, Texts] | None, str]:
        """Return what an entry has, with its texts; or why there is none."""
        if why := self.folder.why_untrusted():
            return None, why
        reasons = []
        for path in self.folder.variants(key.text)[:VARIANTS]:
            try:
                entry = self.folder.read(path)
                found = opened(entry.texts, codec)
            except Unusable as error:
                reasons.append(str(error))
                self.folder.remove(path)
                continue
            if not isinstance(found, str):
                return (found, entry.texts), ""
            reasons.append(found)
        return None, reasons[0] if reasons else self._nearest(key)

    def _nearest(self, key: Key) -> str:
        """Say which facts differ from those of the entry that is most like it, of those used last."""
        nearest: list[str] | None = None
        for path in self.folder.entries()[:VARIANTS]:
            try:
                about = self.folder.read(path, touch=False).about
            except Unusable:
                continue
            if about.get("kind") == key.facts["kind"]:
                different = [name for name, value in key.facts.items() if about.get(name) != value]
                if nearest is None or len(different) < len(nearest):
                    nearest = different
        return "nothing was kept before" if nearest is None else f"other {', '.join(nearest)} than in what is kept"


def on_all_ranks(cache: Cache | None, ranks: Agreement | None) -> tuple[Cache | None, str]:
    """Return the cache if all ranks have one, else ``None``, and why. All ranks call it.

    A rank that only looks into a cache would wait for ranks that do not.
    """
    if ranks is None:
        return cache, ""
    has = ranks.gathered(cache is not None)
    if all(has) or not any(has):
        return cache, ""
    return None, f"off on rank {has.index(False)}, and so on all ranks"


@dataclass(frozen=True)
class Key:
    """Everything that decides a capture and is known before it.

    Attributes:
        text: the digest.
        facts: name → what it is; long ones as digests.
    """

    text: str
    facts: Mapping[str, Any]

    @staticmethod
    def of(codec: Codec[Any]) -> Key:
        """Return the key of what a codec makes. ``NotCached`` if something that decides it has no text."""
        facts = {"kind": codec.kind, **_short({**surroundings(), **codec.facts()}.items())}
        return Key(text_digest(json.dumps(facts, sort_keys=True)), facts)


def _short(facts: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    short = {}
    for name, fact in facts:
        text = json.dumps(fact, sort_keys=True)
        short[name] = json.loads(text) if len(text) <= LONG else f"digest {text_digest(text)}"
    return short
