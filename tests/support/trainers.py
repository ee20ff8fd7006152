"""The Trainer of transformers on ranks, and the folders that models on a mesh write."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from checkpoints import told
from examples_run import as_launched
from torch import distributed, nn
from transformers_models import VOCABULARY, llama
from weights import MODELS

import autopar
from autopar import Mesh

MESH = Mesh(dp=2, tp=2)


def rows(count: int) -> list[dict[str, torch.Tensor]]:
    """Texts with different numbers of labels."""
    generator, made = torch.Generator().manual_seed(1), []
    for k in range(count):
        ids = torch.randint(1, VOCABULARY, (6,), generator=generator)
        made.append({"input_ids": ids, "labels": torch.where(torch.arange(6) < k % 4, -100, ids)})
    return made


def plain() -> nn.Module:
    torch.manual_seed(0)
    return llama(kv=2, keys_to_ignore_at_inference=["past_key_values"])


def lora() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(plain(), LoraConfig(r=2, target_modules=["q_proj", "o_proj"], init_lora_weights=False))


def trainer(model: nn.Module, folder: str, **options: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    given = {"save_strategy": "no", "num_train_epochs": 1, "learning_rate": 0.1, "optim": "sgd"} | options
    arguments = TrainingArguments(
        folder, per_device_train_batch_size=4, per_device_eval_batch_size=4, logging_steps=1, report_to=[],
        use_cpu=True, disable_tqdm=True, **given,
    )  # fmt: skip
    return Trainer(
        model, arguments, train_dataset=rows(10), eval_dataset=rows(7),
        compute_metrics=lambda made: {"count": len(made.predictions)},
    )  # fmt: skip


def best(model: nn.Module, folder: str) -> dict[str, Any]:
    """Losses, evaluations after each epoch, and the loss of the best checkpoint, which is loaded at the end."""
    made = trainer(
        model, folder, num_train_epochs=2, save_strategy="epoch", eval_strategy="epoch", save_only_model=True,
        load_best_model_at_end=True, gradient_accumulation_steps=2,
    )  # fmt: skip
    made.train()
    history = made.state.log_history
    found = {
        key: [row[key] for row in history if key in row] for key in ("loss", "grad_norm", "eval_loss", "eval_count")
    }
    predicted = made.predict(rows(7))
    return found | {"best": Path(made.state.best_model_checkpoint).name, "logits": torch.tensor(predicted.predictions)}


def low_precision(model: nn.Module, folder: str) -> dict[str, Any]:
    made = trainer(model.float(), folder, bf16=True)
    made.train()
    return {"loss": [row["loss"] for row in made.state.log_history if "loss" in row]}


def adafactor(model: nn.Module, folder: str) -> dict[str, Any]:
    made = trainer(model, folder, optim="adafactor", learning_rate=1e-2, num_train_epochs=2)
    made.train()
    return {"loss": [row["loss"] for row in made.state.log_history if "loss" in row]}


TRAININGS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, str], dict[str, Any]]]] = {
    "best": (plain, best),
    "adapters": (lora, best),
    "adafactor": (plain, adafactor),
    "low precision": (lambda: plain().float(), low_precision),
}


def trained(name: str, folder: str, on_mesh: bool) -> dict[str, Any]:
    """The numbers of a training, on this rank of a mesh or in a process that is alone."""
    make, train = TRAININGS[name]
    with contextlib.redirect_stdout(io.StringIO()) as said:
        if not on_mesh:
            return train(make(), folder)
        with as_launched():
            found = train(autopar.parallelize(make(), MESH, "megatron", outputs="global"), folder)
    return found | {"said": len(said.getvalue())}


def counted(folder: str) -> list[int]:
    """The processes that Accelerate counts: as they are, with a model on a mesh, and for the next arguments."""
    from accelerate import PartialState
    from transformers import TrainingArguments

    numbers = []
    with as_launched():
        arguments = TrainingArguments(folder, use_cpu=True, report_to=[])
        numbers.append(arguments.world_size)
        made = trainer(autopar.parallelize(plain(), MESH, "megatron"), folder)
        numbers += [made.args.world_size, made.args.process_index, made.accelerator.num_processes]
        TrainingArguments(folder, use_cpu=True, report_to=[])
        numbers.append(PartialState().num_processes)
    return numbers


def _told(call: Callable[[], Any]) -> str:
    return ": ".join(told(call))


def refusals(folder: str) -> dict[str, str]:
    with as_launched():
        local = autopar.parallelize(plain(), MESH, "megatron", inputs="local")
        parallel = autopar.parallelize(plain(), MESH, "megatron")
        fails = OSError("the disk is full") if distributed.get_rank() == 0 else None
        with mock.patch.object(type(parallel.module), "save_pretrained", side_effect=fails):
            full = _told(lambda: parallel.save_pretrained(folder))
        return {
            "local": _told(lambda: trainer(local, folder)),
            "checkpoints": _told(lambda: trainer(parallel, folder, save_strategy="epoch")),
            "full": full,
        }


def saved(name: str, mesh: Mesh, folder: str) -> None:
    make, plan = MODELS[name]
    torch.manual_seed(0)
    autopar.parallelize(make(), mesh, plan).save_pretrained(folder)
