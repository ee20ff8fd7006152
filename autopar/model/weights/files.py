"""Find the safetensors file of a folder that holds a tensor, and read a part of the tensor.

Only safetensors are read: a pickle can run code of its author, and can only be read as a whole.
"""

from __future__ import annotations

import json
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
ONE, INDEX = "model.safetensors", "model.safetensors.index.json"


class CheckpointFiles:
    """Context: the tensors of a safetensors file, or of a folder of ``save_pretrained``.

    Attributes:
        shapes: name → shape, in the order of the files.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._opened = ExitStack()
        self._slices: dict[str, Any] = {}
        self._files: dict[str, Any] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}

    def __enter__(self) -> CheckpointFiles:
        return self

    def __exit__(self, *raised: Any) -> None:
        self._slices.clear()
        self._files.clear()
        self._opened.close()

    def open(self) -> None:
        """Read the names and shapes of the tensors.

        Raises:
            FileNotFoundError: there are no weights, or a file of the index is missing.
            ValueError: a file is not safetensors.
            ImportError: safetensors is not installed.
        """
        for file, names in _files_of(self.path).items():
            self._open(file, names)

    def _open(self, file: Path, names: list[str] | None) -> None:
        try:
            from safetensors import SafetensorError, safe_open
        except ImportError as error:
            raise ImportError(
                "load_weights reads safetensors, which is not installed; pip install 'autopar[llm]'"
            ) from error
        try:
            opened = self._opened.enter_context(safe_open(file, framework="pt", device="cpu"))
        except SafetensorError as error:
            raise ValueError(f"{file} is no safetensors file, or is cut off ({error}); save it again") from error
        stored_names = opened.keys()
        for name in stored_names if names is None else names:
            if name not in stored_names:
                raise ValueError(
                    f"{self.path / INDEX} says that {name} is in {file.name}, which has no such tensor; save the "
                    f"model again"
                )
            self._slices[name] = opened.get_slice(name)
            self._files[name] = opened
            self.shapes[name] = tuple(self._slices[name].get_shape())

    def read(self, name: str, part: tuple[slice, ...]) -> torch.Tensor:
        """Read a part of a tensor, and nothing else of it."""
        return self._slices[name][part] if part else self._files[name].get_tensor(name)


def _files_of(path: Path) -> dict[Path, list[str] | None]:
    """Return file → the names to read from it; ``None``: all of them.

    Raises:
        FileNotFoundError: there are no weights.
        ValueError: they are not safetensors, or the index is not one.
    """
    if path.is_dir():
        if (path / ONE).is_file():
            return {path / ONE: None}
        if (path / INDEX).is_file():
            return _indexed(path)
        if pickles := sorted(
            file.name for file in path.iterdir() if file.suffix in PICKLES and file.name != "training_args.bin"
        ):
            raise ValueError(
                f"{path} has {', '.join(pickles)}, and no safetensors; a pickle can run code and is not read: save "
                f"the model as safetensors, as save_pretrained does"
            )
        others = sorted(file.name for file in path.glob("*.safetensors"))
        raise FileNotFoundError(
            f"{path} has neither {ONE} nor {INDEX}" + (f"; name the file itself: {', '.join(others)}" if others else "")
        )
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is neither a file nor a folder; load_weights takes what save_pretrained has written"
        )
    if path.suffix in PICKLES:
        raise ValueError(
            f"{path} is a pickle, which can run code and is not read; save the model as safetensors, as "
            f"save_pretrained does"
        )
    return _indexed(path.parent, path) if path.suffix == ".json" else {path: None}


def _indexed(folder: Path, index: Path | None = None) -> dict[Path, list[str] | None]:
    index = index or folder / INDEX
    try:
        entries = json.loads(index.read_text(encoding="utf-8"))["weight_map"].items()
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f'{index} has no "weight_map" of names and files ({error}); save the model again') from error
    names_by_file: dict[Path, list[str] | None] = {}
    for name, file in entries:
        if not isinstance(file, str) or Path(file).name != file or Path(file).suffix != ".safetensors":
            raise ValueError(
                f"{index} says that {name} is in {file!r}, which is no safetensors file beside it; save the model as "
                f"safetensors"
            )
        if not (folder / file).is_file():
            raise FileNotFoundError(
                f"{folder / file} is missing, which {index.name} names; copy all files of the folder"
            )
        names = names_by_file.setdefault(folder / file, [])
        assert names is not None
        names.append(name)
    return names_by_file
