"""Make a model of Hugging Face from its architecture: a class, a model type, a config.json or a named configuration.

Nothing is downloaded, and no weights are loaded.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib.util
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from autopar.cli.models.inputs import parts_of
from autopar.cli.models.raised import raised
from autopar.cli.train.refused import Refused

PREFIX = "hf:"
CONFIG = "config.json"
HEADS = (  # what a model type is planned as: the first of these tables of transformers that has it
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING", "MODEL_FOR_MASKED_LM_MAPPING", "MODEL_FOR_CAUSAL_LM_MAPPING",
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING", "MODEL_MAPPING",
)  # fmt: skip


@cache
def configurations() -> Mapping[str, Mapping[str, Any]]:
    """Return the named configurations: name → the class and what its configuration has."""
    found: Mapping[str, Mapping[str, Any]] = json.loads(Path(__file__).with_name("configurations.json").read_text())
    return found


def is_hugging_face(name: str) -> bool:
    """Return whether a name is that of an architecture: there may be a function of the user's of that name."""
    path = Path(name)
    if name in configurations() or name.startswith(PREFIX) or path.suffix == ".json" or path.is_dir():
        return True
    if ":" in name or not name.isidentifier() or importlib.util.find_spec("transformers") is None:
        return False
    import transformers

    return _is_model(getattr(transformers, name, None)) or name in transformers.CONFIG_MAPPING


def require_transformers(name: str) -> None:
    """Raise ``Refused`` if transformers is not installed."""
    if importlib.util.find_spec("transformers") is None:
        raise Refused(
            f"the model {name} is Hugging Face's, and transformers is not installed; pip install 'autopar[llm]', or "
            f"name a function of your own, as in model.py:make"
        )


def hugging_face_model(name: str, settings: Sequence[str], device: torch.device | str) -> torch.nn.Module:
    """Return a model with random weights, or without values on meta.

    Args:
        name: a named configuration, a class as ``LlamaForCausalLM``, a model type as ``llama`` or ``hf:llama``, or the
            path of a config.json or of a folder with one.
        settings: what its configuration should have: ``hidden_size=256,num_hidden_layers=4``.

    Raises:
        Refused: there is no such architecture, file or setting, or transformers refuses the sizes.
    """
    require_transformers(name)
    architecture, content = _described(name)
    model_class = _class_of(name, architecture, content)
    config = _config_of(name, model_class, content, _settings(settings))
    try:
        with _default_dtype(getattr(config, "dtype", None)), torch.device(device):
            model: torch.nn.Module = model_class(config)
    except Exception as error:
        raise Refused(
            f"{model_class.__name__} of {name} cannot be made of these sizes: {raised(error)}; change them with --set"
        ) from None
    return model


def _described(name: str) -> tuple[str | None, dict[str, Any]]:
    """Return the class that a name stands for, if it says one, and what its configuration has."""
    if name in configurations():
        row = configurations()[name]
        return row["architecture"], dict(row["config"])
    path = Path(name)
    if path.suffix != ".json" and not path.is_dir():
        return None, {}
    file = path / CONFIG if path.is_dir() else path
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise Refused(f"{file}: {error.strerror}; name a folder with a {CONFIG}, or the file itself") from None
    except (ValueError, RecursionError) as error:
        raise Refused(f"{file} is not JSON: {error}; write it with config.save_pretrained") from None
    if not isinstance(content, dict) or not isinstance(content.get("model_type"), str):
        raise Refused(
            f"{file} has no model_type, as {CONFIG} of Hugging Face has; write it with config.save_pretrained"
        )
    architectures = content.get("architectures") or [None]
    return architectures[0], content


def _class_of(name: str, architecture: str | None, content: Mapping[str, Any]) -> Any:
    """Return the class of the model."""
    import transformers

    kind = content.get("model_type") if architecture is None else architecture
    kind = kind or name.removeprefix(PREFIX)
    found = getattr(transformers, kind, None)
    if _is_model(found):
        return found
    kind = content.get("model_type") or kind
    if kind in transformers.CONFIG_MAPPING:
        config_class = transformers.CONFIG_MAPPING[kind]
        for head in HEADS:
            if config_class in (table := getattr(transformers, head)):
                found = table[config_class]
                return found[0] if isinstance(found, tuple) else found
    near = difflib.get_close_matches(kind, [*transformers.CONFIG_MAPPING, *configurations()], n=3)
    hint = f"did you mean {' or '.join(near)}?" if near else "use its class, or a function of your own: model.py:make"
    raise Refused(
        f"{name}: transformers {transformers.__version__} has no architecture {kind}, and code of a folder is not run; "
        f"{hint}"
    )


def _config_of(name: str, model_class: Any, content: dict[str, Any], settings: Mapping[str, Any]) -> Any:
    """Return the configuration with the user's settings; no cache of keys and values is planned for."""
    config_class = model_class.config_class
    known = config_class()
    for key in settings:
        owner = known
        *path, last = key.split(".")
        for part in path:
            owner = getattr(owner, part, None)
        if not hasattr(owner, last):
            names = [*(owner.to_dict() if owner is not None else known.to_dict()), *config_class.attribute_map]
            near = ", ".join(difflib.get_close_matches(last, names, n=3)) or ", ".join(sorted(names)[:8]) + ", …"
            raise Refused(f"--set {key}: the configuration of {model_class.__name__} has no {key}; near it: {near}")
    content = {key: value for key, value in content.items() if key not in ("model_type", "architectures")}
    for key, value in settings.items():
        inner = content
        *path, last = key.split(".")
        for part in path:
            inner[part] = dict(inner.get(part) or {})
            inner = inner[part]
        inner[last] = value
    if hasattr(known, "use_cache"):
        content["use_cache"] = False
    try:
        config = config_class(**content)
    except Exception as error:
        raise Refused(f"the configuration of {name} is refused: {raised(error)}; change it with --set") from None
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 0  # with which labels are shifted, to be the decoder's ids
    return config


def _settings(texts: Sequence[str]) -> dict[str, Any]:
    """Read ``hidden_size=256,num_hidden_layers=4``: numbers, ``true``, ``null`` and lists as in JSON, else words."""
    found: dict[str, Any] = {}
    for part in (part for text in texts for part in parts_of(text)):
        key, separator, value = part.partition("=")
        if not separator or not key:
            raise Refused(f"--set {part}: write it as in --set hidden_size=256,num_hidden_layers=4")
        try:
            found[key.strip()] = json.loads(value)
        except ValueError:
            found[key.strip()] = {"True": True, "False": False, "None": None}.get(value.strip(), value.strip())
    return found


def _is_model(found: Any) -> bool:
    """Return whether this is a class of transformers that is made from a configuration of its own."""
    import transformers

    return (
        isinstance(found, type)
        and issubclass(found, transformers.PreTrainedModel)
        and getattr(found, "config_class", None) is not None
    )


@contextlib.contextmanager
def _default_dtype(dtype: Any) -> Iterator[None]:
    """Make parameters in the dtype of a configuration, as ``from_pretrained`` does."""
    before = torch.get_default_dtype()
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype, None)
    if isinstance(dtype, torch.dtype):
        torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
