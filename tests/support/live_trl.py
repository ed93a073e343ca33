"""A tiny model of a family, trained by TRL's DPOTrainer and by dpo-pack on the same ids in the same steps."""

from __future__ import annotations

import random
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from rich.console import Console
from transformers import AutoModelForCausalLM

from dpo_pack.recipe.load import parse_recipe
from dpo_pack.trainer import train
from support.family_errors import packs
from support.rows import write_rows
from support.run_files import records
from support.tiny_models import tiny_config, tiny_model
from support.tiny_tokenizer import VOCABULARY_SIZE, tiny_tokenizer

NUM_STEPS, PAIRS_PER_STEP = 3, 4
LEARNING_RATE, BETA, EPSILON = 5e-4, 0.1, 1e-6
# Families whose load-balancing loss TRL 1.16 cannot compute: it looks for `num_experts` in their configs.
WITHOUT_BALANCE = {"granitemoe", "granitemoehybrid", "granitemoeshared", "phimoe"}
METRICS = ("loss", "grad_norm", "rewards/chosen", "rewards/rejected", "logps/chosen", "logps/rejected")
Steps = list[dict[str, float]]


def save_models(family: str, directory: Path) -> None:
    """policy/ and reference/, which differ by a hundredth, without what only training mode computes.

    TRL trains in training mode and switches off modules of dropout; dpo-pack trains in evaluation mode.
    """
    keys = tiny_config(family).to_dict()
    noise = {key for key, value in keys.items() if "drop" in key or "jitter" in key if type(value) is float}
    changes: dict[str, Any] = dict.fromkeys(noise, 0.0)
    changes |= {key: VOCABULARY_SIZE for key in keys if key.startswith("vocab_size")}
    model = tiny_model(family, **changes)
    torch.manual_seed(1)
    for name in ("reference", "policy"):
        tiny_tokenizer().save_pretrained(directory / name)
        model.save_pretrained(directory / name)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 + 0.01 * torch.randn_like(parameter))


def pairs() -> list[dict[str, list[int]]]:
    rng = random.Random(0)

    def ids(least: int, most: int) -> list[int]:
        return [rng.randrange(3, VOCABULARY_SIZE) for _ in range(rng.randint(least, most))]

    return [
        {"prompt_ids": ids(3, 15), "chosen_ids": [*ids(1, 9), 2], "rejected_ids": [*ids(1, 9), 2]}
        for _ in range(NUM_STEPS * PAIRS_PER_STEP)
    ]


def trl_steps(family: str, directory: Path) -> Steps:
    """What TRL logs at each step: padded batches, a live reference, fp32, eager attention."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    config = DPOConfig(
        output_dir=str(directory / "trl"),
        beta=BETA,
        per_device_train_batch_size=PAIRS_PER_STEP,
        train_sampling_strategy="sequential",
        num_train_epochs=1,
        learning_rate=LEARNING_RATE,
        adam_epsilon=EPSILON,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=1.0,
        max_length=64,
        router_aux_loss_coef=_router_coefficient(family),
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    policy, reference = (
        AutoModelForCausalLM.from_pretrained(
            directory / name, dtype=torch.float32, attn_implementation="eager"
        )
        for name in ("policy", "reference")
    )
    # It would tokenise text; these are ids.
    with patch.object(DPOTrainer, "_prepare_dataset", lambda self, rows, *_: rows), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = DPOTrainer(
            model=policy,
            ref_model=reference,
            args=config,
            train_dataset=Dataset.from_list(pairs()),
            processing_class=tiny_tokenizer(),
        )
        trainer.train()
    logged = [line for line in trainer.state.log_history if "loss" in line]
    return [{name: line[name] for name in METRICS} for line in logged]


def our_steps(family: str, directory: Path) -> Steps:
    """What dpo-pack logs: packed and with shared prompts where the family can be packed, else padded."""
    write_rows(directory / "pairs.jsonl", pairs())
    recipe = parse_recipe(
        {
            "output_dir": str(directory / "run"),
            "model": {"path": str(directory / "policy")},
            "reference": {"path": str(directory / "reference"), "cache_dir": str(directory / "cache")},
            "data": {"train": str(directory / "pairs.jsonl"), "shuffle": False, "max_length": 64},
            "packing": {
                "pairs_per_step": PAIRS_PER_STEP,
                "mode": "packed" if packs(family) else "padded",
                "token_budget": 256,
            },
            "loss": {"beta": BETA, "router_aux_coef": _router_coefficient(family)},
            "optim": {"lr": LEARNING_RATE, "schedule": "constant", "eps": EPSILON},
            "logging": {"samples": None},
            "export": {"verify": "none"},
        }
    )
    train(recipe, Console(quiet=True))
    return [{name: line[name] for name in METRICS} for line in records(recipe.output_dir, "train")]


def _router_coefficient(family: str) -> float | None:
    """The load-balancing loss that both add: of the model's own coefficient, where TRL can."""
    return 0.0 if family in WITHOUT_BALANCE else None
