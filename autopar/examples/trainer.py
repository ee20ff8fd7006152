"""Train with the Trainer of transformers: it trains, evaluates and saves a model on a mesh as on one device.

    python -m autopar.examples.trainer
    torchrun --nproc-per-node 4 -m autopar.examples.trainer

The Trainer takes what ``parallelize`` returns. Its arguments are those of one device: ``per_device_train_batch_size``
is the batch of the whole mesh, because the mesh stands for one device. Each process loads the whole batch, and keeps
its piece. With ``compute_metrics`` or ``predict``, give ``parallelize(…, outputs="global")``.
"""

import contextlib
import os
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.utils import logging

import autopar
from autopar.examples.on_ranks import compare, is_first, leave_job, on_ranks, shared_folder

MESH = autopar.Mesh(dp=2, tp=2)
SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4
}  # fmt: skip


def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES))


def texts(count: int, seed: int) -> list[dict[str, Any]]:
    """Texts whose labels differ in number, with a column that the model does not take."""
    generator, rows = torch.Generator().manual_seed(seed), []
    for k in range(count):
        ids = torch.randint(64, (16,), generator=generator)
        labels = ids.clone()
        labels[: k % 7] = -100
        rows.append({"input_ids": ids, "labels": labels, "title": f"text {k}"})
    return rows


def train(model: torch.nn.Module, folder: Path) -> list[float]:
    """Return the losses of all steps, the norm of the last gradients, and the loss of the evaluation."""
    arguments = TrainingArguments(
        str(folder), num_train_epochs=2, per_device_train_batch_size=4, gradient_accumulation_steps=2,
        per_device_eval_batch_size=4, learning_rate=1e-2, logging_steps=1, save_strategy="no", report_to=[],
        disable_tqdm=True, use_cpu=not torch.cuda.is_available(),
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=texts(22, 1), eval_dataset=texts(7, 2))
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):  # the Trainer prints each step
        trainer.train()
        evaluated = trainer.evaluate()
    trainer.save_model()
    steps = [row for row in trainer.state.log_history if "loss" in row]
    return [*(row["loss"] for row in steps), steps[-1]["grad_norm"], evaluated["eval_loss"]]


def main() -> None:
    logging.disable_progress_bar()
    logging.set_verbosity_error()  # it would warn that a process of a job trains on one device below
    parallel = autopar.parallelize(model(), MESH, "megatron")
    with shared_folder() as shared:
        folder, other = shared / "mesh", shared / "single"
        ours = train(parallel, folder)
        parallel.close()
        if is_first():
            leave_job()  # else the Trainer of one device would take the job for its own
            single = train(model(), other)
            names = [*(f"step {k}" for k in range(1, len(ours) - 1)), "gradient norm", "evaluation"]
            compare("loss", ours, single, names, tolerance=1e-4)
            saved, expected = (LlamaForCausalLM.from_pretrained(path).state_dict() for path in (folder, other))
            torch.testing.assert_close(saved, expected, rtol=1e-3, atol=1e-3)
            print("saved:", *sorted(path.name for path in folder.iterdir()))


if __name__ == "__main__":
    on_ranks(main)
