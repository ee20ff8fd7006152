"""Return the model that a command is about, and the arguments of a call, from its options."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Any

import torch

from autopar.cli.models.call import call_of, with_labels
from autopar.cli.models.exported import exported_model
from autopar.cli.models.files import called, function_of, names_in
from autopar.cli.models.hugging_face import configurations, hugging_face_model, is_hugging_face, require_transformers
from autopar.cli.models.inputs import inputs_of
from autopar.cli.models.options import ModelOptions
from autopar.cli.models.own import ARGUMENTS, own_model, takes
from autopar.cli.train.model import llama
from autopar.cli.train.refused import Refused
from autopar.cli.train.sizes import SIZES
from autopar.errors import class_of
from autopar.report.progress import doing


@dataclass(frozen=True)
class Given:
    """What a command is about.

    Attributes:
        model: the model, on meta where it can be.
        example: the arguments of one call, as ``parallelize`` takes them.
        notes: what was decided for the user, in sentences.
    """

    model: torch.nn.Module
    example: Any
    notes: tuple[str, ...] = ()


def model_of(options: ModelOptions, *, values: bool = False) -> Given:
    """Return the model and the arguments that options name.

    Args:
        values: whether the tensors have values, so that the model can run; else they are on meta where that is
            possible, and take no memory.

    Raises:
        Refused: there is no such model, file or function; a function returns something else; or arguments are missing.
    """
    _check(options)
    if values:
        torch.manual_seed(0)
    with doing(f"make {options.model}"):
        given = _given(options, values)
    example, notes = with_labels(given.model, given.example)
    return Given(given.model, example, (*given.notes, *notes))


def _check(options: ModelOptions) -> None:
    for name in ("batch", "sequence"):
        if getattr(options, name) < 1:
            raise Refused(f"--{name} {getattr(options, name)} must be at least 1")
    if options.example is not None and options.inputs is not None:
        raise Refused("--example and --inputs both give the arguments of a call; leave one of them out")


def _given(options: ModelOptions, values: bool) -> Given:
    name, device = options.model, torch.device("cpu" if values else "meta")
    if name in SIZES:
        require_transformers(name)
        _refuse_settings(options, f"choose one of {', '.join(SIZES)}, or LlamaForCausalLM with --set")
        with device:
            model: torch.nn.Module = llama(SIZES[name], options.sequence, 0, torch.float32, device)
        return Given(model, _arguments(options, model, device))
    if is_hugging_face(name):
        model = hugging_face_model(name, options.set, device)
        heads = () if name == type(model).__name__ else (f"{name} is planned as a {type(model).__name__}",)
        return Given(model, _arguments(options, model, device), heads)
    if name.endswith(".py"):
        found = [f"{name}:{each}" for each in names_in(name)]
        raise Refused(
            f"{name} names no function or class; write one of {', '.join(found)}"
            if found
            else f"{name} names no function; write FILE.py:FUNCTION, as in model.py:make"
        )
    if name.endswith(".pt2"):
        _refuse_settings(options, "export another model")
        return _exported(options)
    if ":" not in name:
        near = difflib.get_close_matches(name, [*SIZES, *configurations()], n=1)
        raise Refused(
            f"the model {name} is unknown; choose from {', '.join((*SIZES, *configurations()))}, an architecture of "
            f"Hugging Face, as LlamaForCausalLM, a file of torch.export, as model.pt2, or name a function that makes "
            f"one, as in model.py:make" + (f"; did you mean {near[0]}?" if near else "")
        )
    _refuse_settings(options, "change what the function makes")
    model, example, notes = own_model(name, options.example, values)
    if options.inputs is not None:
        example = inputs_of(options.inputs, _device_of(model, device))
    if example is None:
        first = f"{next(iter(takes(model)), 'x')}={_dtype_of_first(model)}"
        raise Refused(
            f"{name} returns a model alone, and its forward takes {', '.join(takes(model)) or 'nothing'}; give the "
            f"arguments of a call, as --inputs {first}[8,64] or --example "
            f"{name.rpartition(':')[0]}:FUNCTION"
        )
    return Given(model, example, notes)


def _dtype_of_first(model: torch.nn.Module) -> str:
    """Return the dtype that the first argument of forward seems to have: integers where the model looks them up."""
    return "i64" if any(isinstance(m, torch.nn.Embedding) for m in model.modules()) else "f32"


def _exported(options: ModelOptions) -> Given:
    """Return what ``torch.export.save`` has written, with the arguments of its export unless others are given."""
    model, saved = exported_model(options.model)
    if options.inputs is not None or options.example is not None:
        return Given(model, _arguments(options, model, _device_of(model, torch.device("cpu"))))
    if saved is None:
        raise Refused(f"{options.model} was saved without the arguments of a call; give them as --inputs x=f32[8,64]")
    return Given(model, saved)


def _arguments(options: ModelOptions, model: torch.nn.Module, device: torch.device) -> Any:
    """Return the arguments of a call of a model that is not the user's own."""
    if options.inputs is not None:
        return inputs_of(options.inputs, device)
    if options.example is None:
        return call_of(model, options.batch, options.sequence, device)
    with device:
        example = called(options.example, function_of(options.example, ARGUMENTS))
    if not isinstance(example, (tuple, dict)):
        raise Refused(f"--example {options.example} returns {class_of(example)}; {ARGUMENTS}")
    return example


def _device_of(model: torch.nn.Module, otherwise: torch.device) -> torch.device:
    return next((tensor.device for tensor in (*model.parameters(), *model.buffers())), otherwise)


def _refuse_settings(options: ModelOptions, remedy: str) -> None:
    if options.set:
        raise Refused(f"--set {options.set[0]} is for an architecture of Hugging Face, not {options.model}; {remedy}")
