"""Read a DCP folder: its entries by name, and its tensors one by one. No code from the folder runs."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable
from enum import EnumMeta
from pathlib import Path
from typing import Any

import torch
from torch.distributed import checkpoint
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    FileSystemReader,
    HuggingFaceStorageReader,
    Metadata,
    ReadItem,
    StorageReader,
)
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata

from autopar.checkpoint.collective_errors import torch_failures
from autopar.errors import CheckpointError

METADATA = ".metadata"

# the classes that a pickle of DCP's descriptions may name, module → names; torch's dtypes are admitted too
ADMITTED = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties", "ChunkStorageMetadata",
        "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"},
    "pathlib._local": {"Path", "PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"},
}  # fmt: skip

NO_PART = "names {}, which is no part of DCP's descriptions and could run code; it was not read"

ObjectPath = tuple[str | int, ...]


class Source:
    """A DCP folder.

    Attributes:
        paths: name → the keys that lead to the entry in the saved state.
    """

    def __init__(self, folder: Path, allow_pickle: bool) -> None:
        self._folder = folder
        self._metadata = _metadata(folder, allow_pickle)
        self._names: dict[int, str] = {}  # id of a placeholder → its name
        paths = self._metadata.planner_data or {}
        self.paths: dict[str, ObjectPath] = {
            name: tuple(paths.get(name, (name,))) for name in self._metadata.state_dict_metadata
        }

    def nested(self, names: Iterable[str]) -> dict[str, Any]:
        """Return the saved state with these names; a tensor of more than one element is a placeholder on meta."""
        described = self._metadata.state_dict_metadata
        small = [
            name
            for name in names
            if isinstance(about := described[name], BytesStorageMetadata) or about.size.numel() <= 1
        ]
        values = self._read(
            {
                name: None if isinstance(about := described[name], BytesStorageMetadata) else _empty(about, "cpu")
                for name in small
            }
        )
        state: dict[str, Any] = {}
        for name in names:
            if name not in values:
                values[name] = _empty(described[name], "meta")
                self._names[id(values[name])] = name
            _put(state, self.paths[name], values[name])
        self._kept = values  # so that no other object gets the identity of a placeholder
        return _with_lists(state)

    def values(self, tensor: torch.Tensor) -> torch.Tensor:
        """Read the tensor that a placeholder stands for; any other tensor is returned unchanged."""
        if (name := self._names.get(id(tensor))) is None:
            return tensor
        return self._read({name: _empty(self._metadata.state_dict_metadata[name], "cpu")})[name]

    def _read(self, targets: dict[str, Any]) -> dict[str, Any]:
        planner = _Planner()
        with torch_failures(f"{self._folder} could not be read", None):
            checkpoint.load(
                dict(targets), storage_reader=_reader(self._folder, self._metadata), planner=planner, no_dist=True
            )
        return targets | planner.values


def _empty(described: TensorStorageMetadata | BytesStorageMetadata, device: str) -> torch.Tensor:
    assert isinstance(described, TensorStorageMetadata)
    return torch.empty(described.size, dtype=described.properties.dtype, device=device)


class _Planner(DefaultLoadPlanner):
    """Fills tensors; reads every other entry as torch reads weights, and keeps it in ``values``."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False)
        self.values: dict[str, Any] = {}

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        try:
            self.values[name] = torch.load(value, weights_only=True)
        except pickle.UnpicklingError as error:
            raise CheckpointError(f"{name} is no data: {_reason(error)}; leave it out with skip") from None


def _reason(error: Exception) -> str:
    """Return the line of torch's long message that states the cause."""
    lines = [line.strip() for line in str(error).splitlines()]
    return next(
        (line.split(". Please")[0] for line in lines if line.startswith(("WeightsUnpickler error", "Unsupported"))),
        lines[0] if lines else type(error).__name__,
    )


# -- metadata -----------------------------------------------------------------------------------------------------


def _reader(folder: Path, metadata: Metadata) -> StorageReader:
    kind: Any = FileSystemReader if (folder / METADATA).is_file() else HuggingFaceStorageReader

    class ReaderOfKnownMetadata(kind):
        """Returns the metadata that has been read already."""

        def read_metadata(self, *_: Any, **__: Any) -> Metadata:
            return metadata

    return ReaderOfKnownMetadata(str(folder))


def _metadata(folder: Path, allow_pickle: bool) -> Metadata:
    if not folder.is_dir():
        raise FileNotFoundError(
            f"there is no folder {folder}; name the one that torch.distributed.checkpoint.save has written"
        )
    path = folder / METADATA
    if not path.is_file():
        if not any(folder.glob("*.safetensors")):
            raise CheckpointError(
                f"{folder} has no {METADATA} and no safetensors, so it is no DCP folder; name the one that "
                f"torch.distributed.checkpoint.save has written"
            )
        try:
            return HuggingFaceStorageReader(str(folder)).read_metadata()
        except Exception as error:
            raise CheckpointError(f"{folder} could not be read: {error}") from error
    if not allow_pickle:
        raise CheckpointError(
            f"{path} is a pickle, and a pickle can run code when it is read; if you trust who wrote it, pass "
            f"allow_pickle=True, or --allow-pickle: then it is read by an unpickler that makes DCP's own descriptions "
            f"and nothing else"
        )
    try:
        with open(path, "rb") as file:
            metadata = _Descriptions(file).load()
    except CheckpointError as error:
        raise CheckpointError(f"{path} {error}") from None
    except Exception as error:  # whatever bytes make an unpickler raise
        raise CheckpointError(
            f"{path} is no description of a DCP folder: {error}; name the folder that "
            f"torch.distributed.checkpoint.save has written"
        ) from error
    _check(path, metadata)
    return metadata


class _Descriptions(pickle.Unpickler):
    """Unpickles only DCP's descriptions."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        admitted = name in ADMITTED.get(module, ()) or (
            module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        )
        if not admitted:
            raise CheckpointError(NO_PART.format(f"{module}.{name}"))
        return super().find_class(module, name)


def _member(owner: object, name: str) -> Any:
    """Return a member of an enumeration. The first releases of Python 3.11 pickle one as ``getattr(its class, name)``,
    and of all that a pickle may name only DCP's memory formats are an enumeration."""
    if not isinstance(owner, EnumMeta):
        raise CheckpointError(NO_PART.format("builtins.getattr"))
    return owner[name]


def _check(path: Path, metadata: Any) -> None:
    """Refuse metadata whose classes are DCP's but whose contents DCP would not write."""
    try:
        described, stored, paths = metadata.state_dict_metadata, metadata.storage_data, metadata.planner_data or {}
        sound = (
            isinstance(metadata, Metadata)
            and all(isinstance(name, str) for name in described)
            and all(
                isinstance(entry, BytesStorageMetadata)
                or (all(size >= 0 for size in entry.size) and isinstance(entry.properties.dtype, torch.dtype))
                for entry in described.values()
            )
            and all(
                isinstance(keys, tuple) and keys and all(isinstance(key, (str, int)) for key in keys)
                for keys in paths.values()
            )
        )
        files = {entry.relative_path for entry in stored.values()}
    except (AttributeError, TypeError) as error:
        raise CheckpointError(f"{path} is no description of a DCP folder: {error}") from error
    if not sound:
        raise CheckpointError(f"{path} is no description of a DCP folder")
    for name in files:
        if not isinstance(name, str) or Path(name).name != name:
            raise CheckpointError(f"{path} names the file {name!r}, which is not in the folder; it was not read")


# -- nesting ------------------------------------------------------------------------------------------------------


def _put(state: dict[Any, Any], path: ObjectPath, value: Any) -> None:
    for key in path[:-1]:
        state = state.setdefault(key, {})
        if not isinstance(state, dict):
            raise CheckpointError(f"{'.'.join(map(str, path))} is inside of an entry that is no dict")
    state[path[-1]] = value


def _with_lists(state: Any) -> Any:
    """Turn dicts whose keys are whole numbers into lists."""
    if type(state) is not dict:
        return state
    if state and all(type(key) is int for key in state):
        return [_with_lists(state[key]) for key in sorted(state)]
    return {key: _with_lists(value) for key, value in state.items()}
