"""Recipes from settings of TRL, axolotl and LLaMA-Factory, with facts of files of these projects."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import dpo_pack
from dpo_pack.recipe.load import REMOVED_LOSSES, Recipe, load_recipe, parse_recipe, recipe_fields
from dpo_pack.recipe.peers.peer_tables import PEERS, READERS, find_row, rows_of
from dpo_pack.recipe.peers.translate import recipe_from, translate
from dpo_pack.recipe.schema import UNSHARED
from dpo_pack.recipe.training import LOSSES
from dpo_pack.system.errors import RecipeError

ORCA_LIKE = {
    "path": "fozziethebeat/alpaca_messages_2k_dpo_test", "type": "chat_template.default",
    "field_messages": "conversation", "field_chosen": "chosen", "field_rejected": "rejected",
}  # fmt: skip
# (peer, what its file says, what the recipe must say). Sources: llama-3/instruct-dpo-lora-8b.yml in
# examples/ of axolotl; train_lora/qwen3_lora_dpo.yaml of LLaMA-Factory. A command line below is TRL's.
FILES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "axolotl's LoRA on Llama 3": (
        "axolotl",
        {
            "base_model": "meta-llama/Meta-Llama-3-8B-Instruct", "model_type": "LlamaForCausalLM",
            "special_tokens": {"pad_token": "<|finetune_right_pad_id|>"}, "load_in_8bit": False,
            "chat_template": "llama3", "rl": "dpo", "datasets": [ORCA_LIKE], "dataset_prepared_path": None,
            "val_set_size": 0.05, "output_dir": "./outputs/lora-out", "sequence_len": 4096,
            "sample_packing": False, "adapter": "lora", "lora_r": 32, "lora_alpha": 16, "lora_dropout": 0.05,
            "lora_target_linear": True, "wandb_project": None, "gradient_accumulation_steps": 4,
            "micro_batch_size": 2, "num_epochs": 4, "optimizer": "adamw_bnb_8bit", "lr_scheduler": "cosine",
            "learning_rate": 0.0002, "bf16": "auto", "tf32": False, "gradient_checkpointing": True,
            "logging_steps": 1, "attn_implementation": "flash_attention_2", "warmup_ratio": 0.1,
            "evals_per_epoch": 4, "saves_per_epoch": 1, "weight_decay": 0.0,
        },
        {
            "model.path": "meta-llama/Meta-Llama-3-8B-Instruct", "model.lora.r": 32,
            "model.dtype": "bfloat16",
            "model.lora.target_modules": "all-linear", "optim.name": "adamw_8bit", "train.epochs": 4,
            "data.eval.fraction": 0.05, "data.max_length": 4096, "data.truncation": "drop", "seed": 42,
            "packing.pairs_per_step": 8, "data.train.0.columns": {"prompt": "conversation"},
        },
    ),
    "LLaMA-Factory's LoRA on Qwen3": (
        "llamafactory",
        {
            "model_name_or_path": "Qwen/Qwen3-4B-Instruct-2507", "trust_remote_code": True, "stage": "dpo",
            "do_train": True, "finetuning_type": "lora", "lora_rank": 8, "lora_target": "all",
            "pref_beta": 0.1, "pref_loss": "sigmoid", "dataset": "dpo_en_demo, orca", "cutoff_len": 2048,
            "template": "qwen3_nothink", "max_samples": 1000, "preprocessing_num_workers": 16,
            "output_dir": "saves/dpo", "logging_steps": 10, "save_steps": 500, "plot_loss": True,
            "report_to": "none", "per_device_train_batch_size": 1, "gradient_accumulation_steps": 8,
            "learning_rate": 5e-6, "num_train_epochs": 3.0, "lr_scheduler_type": "cosine",
            "warmup_ratio": 0.1, "bf16": True, "ddp_timeout": 180000000, "resume_from_checkpoint": None,
            "pref_ftx": 0.5,
        },
        {
            "model.lora.alpha": 16.0, "model.lora.dropout": 0.0, "packing.pairs_per_step": 8,
            "data.truncation": "completion_right", "data.train.1.columns": {"instruction": "question"},
            "data.train.0.format": "sharegpt", "data.train.1.format": "alpaca",
            "data.train.1.path": "Intel/orca_dpo_pairs", "data.train.0.max_pairs": 1000,
            "model.gradient_checkpointing": True, "train.epochs": 3,
        },
    ),
    "the handbook's Zephyr": (
        "trl",
        {
            "model_name_or_path": "garden/rose-7b-sft", "torch_dtype": None, "dataset_mixture": {
                "datasets": [
                    {"id": "garden/talk", "config": "default", "split": "train_a", "weight": 1.0,
                     "columns": ["chosen", "rejected"]},
                    {"id": "garden/talk", "config": "Pairs", "split": "b", "weight": 0.5,
                     "columns": ["prompt", "chosen", "rejected"]},
                ], "test_split_size": 500, "seed": 0,
            },
            "bf16": True, "beta": 0.02, "loss_type": "apo_zero", "dataset_num_proc": 4, "do_eval": True,
            "eval_strategy": "steps", "eval_steps": 50, "gradient_accumulation_steps": 4,
            "gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False},
            "hub_model_id": "garden-dpo", "push_to_hub": True, "learning_rate": 4e-7, "max_grad_norm": 0.2,
            "lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.1},
            "max_length": 1024, "max_prompt_length": 512, "num_train_epochs": 1, "optim": "adamw_torch",
            "output_dir": "data/garden-dpo", "padding_free": True, "per_device_train_batch_size": 2,
            "report_to": ["wandb"], "save_strategy": "steps", "save_steps": 0.5, "save_total_limit": 1,
            "seed": 7, "use_liger_kernel": True, "warmup_ratio": 0.1, "chat_template": "{{ messages }}",
        },
        {
            "data.train.0.split": "train_a", "data.train.0.config": None,
            "data.train.0.columns": {"prompt": None}, "data.train.1.config": "Pairs",
            "data.train.1.columns": {}, "data.train.1.weight": 0.5,
            "data.train.1.share": None, "data.eval.fraction": 0.02, "loss.beta": 0.02,
            "loss.type": "apo_zero", "optim.schedule": "cosine", "optim.min_lr_ratio": 0.1,
            "checkpoint.every_steps": None,
            "export.push_to_hub": None, "packing.pairs_per_step": 8,
        },
    ),
}  # fmt: skip
INFO = {
    "dpo_en_demo": {
        "file_name": "dpo_en_demo.json", "ranking": True, "formatting": "sharegpt",
        "columns": {"messages": "conversations", "chosen": "chosen", "rejected": "rejected"},
    },
    "orca": {"hf_hub_url": "Intel/orca_dpo_pairs", "ranking": True, "columns": {"prompt": "question"}},
    "shapes": {
        "file_name": "shapes.json", "ranking": True, "formatting": "sharegpt",
        "columns": {"messages": "conversations", "images": "pictures"},
    },
    "sft": {"file_name": "sft.json"},
}  # fmt: skip


@pytest.fixture(autouse=True)
def dataset_info(tmp_path: Path) -> None:
    (tmp_path / "dataset_info.json").write_text(json.dumps(INFO))


def translated(tmp_path: Path, peer: str, content: Any, name: str = "peer.yaml") -> tuple[str, Recipe]:
    """The recipe's text, its comments without line breaks, and the recipe."""
    given = content if isinstance(content, str) else yaml.safe_dump(content, sort_keys=False)
    (tmp_path / name).write_text(given)
    text = translate(peer, tmp_path / name)
    (tmp_path / "recipe.yaml").write_text(text, encoding="utf-8")
    return re.sub(r"\n#   |\n +# ", " ", text), load_recipe(tmp_path / "recipe.yaml")


def value_at(recipe: Recipe, key: str) -> Any:
    value: Any = recipe.model_dump()
    for part in key.split("."):
        value = value[int(part)] if part.isdecimal() else value[part]
    return value


@pytest.mark.parametrize("name", FILES)
def test_a_real_file_becomes_a_recipe_that_names_each_of_its_keys(name: str, tmp_path: Path) -> None:
    peer, content, expected = FILES[name]
    text, recipe = translated(tmp_path, peer, content)
    for key, value in expected.items():
        assert value_at(recipe, key) == value, key
    for key in content:
        assert re.search(rf"\b{key}\b", text), f"{key} is nowhere in the recipe"


# ------------------------------------------------------------------------------- every line of every table

BASE: dict[str, dict[str, Any]] = {
    "trl": {"model_name_or_path": "a/b", "dataset_name": "c/d", "eval_strategy": "steps"},
    "axolotl": {"base_model": "a/b", "rl": "dpo", "datasets": [{"path": "c/d"}], "val_set_size": 0.1},
    "llamafactory": {"model_name_or_path": "a/b", "stage": "dpo", "dataset": "orca", "val_size": 0.1},
}
# A value for each recipe key that has the value of a peer's key, and the settings that it needs beside it.
VALUES: dict[str, Any] = {
    "output_dir": "out", "seed": 7, "model.path": "e/f", "model.trust_remote_code": True,
    "model.gradient_checkpointing": True, "model.compile": True, "tokenizer.path": "e/f",
    "reference.path": "e/f", "data.max_length": 640, "data.max_prompt_length": 32,
    "data.system_prompt": "Be kind.", "data.chat_template_kwargs": {"enable_thinking": False},
    "data.shuffle": False, "loss.beta": 0.3, "loss.label_smoothing": 0.1,
    "loss.f_alpha": 0.3, "loss.discopop_tau": 0.1, "loss.simpo_gamma": 1.3,
    "loss.router_aux_coef": 0.02, "optim.lr": 3e-6, "optim.warmup_ratio": 0.2, "optim.weight_decay": 0.1,
    "optim.eps": 1e-6, "optim.min_lr_ratio": 0.1, "train.eval_every_steps": 5, "checkpoint.keep": 3,
    "logging.run_name": "mine", "train.max_steps": 90,
}  # fmt: skip
BESIDE: dict[str, dict[str, Any]] = {
    "loss.f_alpha": {"f_divergence_type": "alpha_divergence"},
    "loss.discopop_tau": {"loss_type": "discopop"},
    "loss.simpo_gamma": {"rl": "simpo", "cpo_alpha": 0.0, "pref_loss": "simpo"},
    "model.quantize": {"use_peft": True, "adapter": "qlora", "finetuning_type": "lora"},
}
PLAIN = [(peer, name) for peer in PEERS for name, row in rows_of(peer).items() if row.ours and not row.reader]


@pytest.mark.parametrize(("peer", "name"), PLAIN)
def test_a_key_without_reader_gives_its_value_or_its_map_s(peer: str, name: str, tmp_path: Path) -> None:
    row = find_row(peer, name)
    (key,) = row.ours
    for word, ours in row.values.items() or [("", VALUES[key])]:
        theirs = yaml.safe_load(word) if word else ours
        text, recipe = translated(tmp_path, peer, {**BASE[peer], **BESIDE.get(key, {}), name: theirs})
        found = value_at(recipe, key)
        assert (str(found) if isinstance(found, Path) else found) == (
            tuple(ours) if isinstance(ours, list) else ours
        )
        assert re.search(rf"\b{name}\b", text)


LORA = {"r": 4, "alpha": 16.0, "dropout": 0.1, "target_modules": ("q", "v")}
SOURCE = {"path": "g/h", "split": "train[:9]", "fraction": 0.5}


def terms(**weights: float) -> tuple[dict[str, Any], ...]:
    return tuple({"type": name, "weight": weight} for name, weight in weights.items())


READ: dict[str, list[tuple[dict[str, Any], dict[str, Any]]]] = {
    "trl": [
        ({"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_processes": 3},
         {"packing.pairs_per_step": 24}),
        ({"nproc_per_node": 3, "nproc-per-node": 4}, {"packing.pairs_per_step": 32}),
        ({"num_train_epochs": 1.5}, {"train.epochs": 2, "train.max_steps": None}),
        ({"num_train_epochs": 2, "max_steps": 90}, {"train.max_steps": 90, "train.epochs": 1000}),
        ({"max_steps": -1}, {"train.max_steps": None, "train.epochs": 3}),
        ({"lr_scheduler_type": "cosine"}, {"optim.schedule": "cosine", "optim.min_lr_ratio": 0.0}),
        ({"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-7}},
         {"optim.schedule": "cosine", "optim.min_lr_ratio": pytest.approx(0.1)}),
        ({"warmup_steps": 12}, {"optim.warmup_steps": 12}),
        ({"warmup_steps": 0.25}, {"optim.warmup_steps": None, "optim.warmup_ratio": 0.25}),
        ({"warmup_steps": 0, "warmup_ratio": 0.2}, {"optim.warmup_steps": None}),
        ({"adam_beta1": 0.8, "adam_beta2": 0.99}, {"optim.betas": (0.8, 0.99)}),
        ({"max_grad_norm": 0.0}, {"optim.max_grad_norm": None}),
        ({"bf16": False}, {"model.autocast": "none"}),
        ({"fp16": True, "bf16": False}, {"model.autocast": "bfloat16"}),
        ({"logging_steps": 7}, {"logging.every_steps": 7, "train.eval_every_steps": 7}),
        ({"report_to": "wandb"}, {"logging.trackers": ("wandb",)}),
        ({"report_to": "none"}, {"logging.trackers": ()}),
        ({"eval_steps": 9}, {"train.eval_every_steps": 9}),
        ({"eval_strategy": "no", "eval_steps": 9}, {"train.eval_every_steps": None, "data.eval": ()}),
        ({"evaluation_strategy": "epoch"}, {"train.eval_every_steps": None}),
        ({"save_strategy": "steps", "save_steps": 7}, {"checkpoint.every_steps": 7}),
        ({"save_strategy": "no"}, {"checkpoint.every_steps": None}),
        ({"load_best_model_at_end": True, "metric_for_best_model": "eval_rewards/margins"},
         {"checkpoint.load_best": True, "checkpoint.keep_best": 1, "checkpoint.metric": "rewards/margins"}),
        ({"early_stopping_patience": 2}, {"train.early_stopping.patience": 2}),
        ({"push_to_hub": True, "hub_model_id": "x/y", "hub_private_repo": True},
         {"export.push_to_hub": {"repo": "x/y", "private": True}}),
        ({"dtype": "float32"}, {"model.dtype": "float32"}),
        ({"torch_dtype": "torch.bfloat16"}, {"model.dtype": "bfloat16"}),
        ({"dtype": "bfloat16", "optim": "adafactor"}, {"model.dtype": "auto"}),
        ({"dtype": "bfloat16", "optim": "adafactor", "use_peft": True}, {"model.dtype": "bfloat16"}),
        ({"use_peft": True, "lora_r": 4, "lora_alpha": 8, "lora_dropout": 0.1, "use_rslora": True,
          "lora_target_modules": ["q", "v"]}, {"model.lora": LORA}),
        ({"use_peft": True}, {"model.lora.r": 16, "model.lora.target_modules": ("q_proj", "v_proj")}),
        ({"lora_r": 4}, {"model.lora": None}),
        ({"dataset_config": "k", "dataset_train_split": "train_x", "dataset_test_split": "t", "data_dir": "d",
          "eval_dataset_name": "e/f"},
         {"data.train.0.config": "k", "data.train.0.split": "train_x", "data.train.0.data_dir": "d",
          "data.eval.0.path": "e/f", "data.eval.0.split": "t"}),
        ({"dataset_name": "json", "data_files": {"train": ["u.jsonl", "v.jsonl"], "test": "w.jsonl"}},
         {"data.train.1.path": "v.jsonl", "data.eval.0.path": "w.jsonl", "data.eval.0.split": "train"}),
        ({"datasets": [SOURCE], "test_split_size": 0.1},
         {"data.train.0.path": "g/h", "data.train.0.max_pairs": 9, "data.train.0.share": 0.5,
          "data.eval.fraction": 0.1}),
        ({"dataset_mixture": {"datasets": [{"id": "g/h", "config": "k"}], "test_split_size": 100}},
         {"data.train.0.path": "g/h", "data.train.0.config": "k", "data.eval.fraction": 0.02}),
        ({"dataset_name": "u.jsonl", "dataset_train_split": "train_x"},
         {"data.train.0.path": "u.jsonl", "data.train.0.split": "train", "data.eval": ()}),
        ({"dataset_name": "u.jsonl", "dataset_train_split": "train[:9]"}, {"data.train.0.max_pairs": 9}),
        ({"dataset_name": "u.jsonl", "eval_dataset_name": "v.jsonl"}, {"data.eval.0.path": "v.jsonl"}),
        ({"push_to_hub": True, "hub_model_id": "y"}, {"export.push_to_hub": None}),
        ({"push_to_hub": True, "hub_model_id": None}, {"export.push_to_hub": None}),
        ({"save_steps": 0.5}, {"checkpoint.every_steps": None}),
        ({"dataset_mixer": {"i/j": 1.0, "k/l": 0.5}, "dataset_splits": ["train_a", "test_b"]},
         {"data.train.1.weight": 0.5, "data.train.0.split": "train_a", "data.eval.1.split": "test_b"}),
        ({"loss_type": ["kto_pair"]}, {"loss.type": "bco_pair"}),
        ({"loss_type": ["sigmoid", "ipo"], "loss_weights": [1.0, 0.5], "rpo_alpha": 2.0},
         {"loss.type": terms(sigmoid=1.0, ipo=0.5, sft=2.0)}),
        ({"label_smoothing": 0.1}, {"loss.type": "sigmoid", "loss.label_smoothing": 0.0}),
        ({"label_smoothing": 0.1, "loss_type": ["robust"]}, {"loss.label_smoothing": 0.1}),
        ({"label_smoothing": 0.1, "loss_type": ["sigmoid", "robust"]}, {"loss.label_smoothing": 0.1}),
        ({"f_divergence_type": "FDivergenceType.FORWARD_KL"}, {"loss.f_divergence": "forward_kl"}),
        ({"sync_ref_model": True, "ref_model_sync_steps": 5, "ref_model_mixup_alpha": 0.9},
         {"reference.sync": {"every_steps": 5, "mixup": 0.9}}),
    ],
    "axolotl": [
        ({"rl": "ipo"}, {"loss.type": "ipo"}),
        ({"rl": "orpo", "orpo_alpha": 0.3}, {"loss.type": "orpo", "loss.beta": 0.3}),
        ({"rl": "simpo", "cpo_alpha": 0.5}, {"loss.type": terms(simpo=1.0, sft=0.5)}),
        ({"rl": "simpo", "cpo_alpha": 0.0, "dpo_label_smoothing": 0.1}, {"loss.label_smoothing": 0.0}),
        ({"dpo_label_smoothing": 0.1}, {"loss.label_smoothing": 0.1}),
        ({"dpo_loss_type": ["sigmoid"], "dpo_loss_weights": [1.0], "rpo_alpha": 0.2},
         {"loss.type": terms(sigmoid=1.0, sft=0.2)}),
        ({"datasets": [{"path": "json", "data_files": "u.jsonl", "type": "chatml.intel"}]},
         {"data.train.0.path": "u.jsonl", "data.train.0.columns": {"prompt": "question"}}),
        ({"datasets": [{"path": "g/h", "name": "k", "revision": "v", "field_system": "s"}]},
         {"data.train.0.config": "k", "data.train.0.revision": "v", "data.train.0.columns": {"system": "s"},
          "data.eval.fraction": 0.1}),
        ({"val_set_size": 0, "test_datasets": [{"path": "g/h"}]}, {"data.eval.0.path": "g/h"}),
        ({"val_set_size": 300}, {"data.eval": ()}),
        ({"adapter": "lora", "lora_target_linear": True, "lora_target_modules": ["q"],
          "peft_use_rslora": True}, {"model.lora.target_modules": "all-linear"}),
        ({"adapter": "lora", "bf16": True}, {"model.dtype": "bfloat16", "model.autocast": "auto"}),
        ({"bf16": "auto"}, {"model.dtype": "auto", "model.autocast": "bfloat16"}),
        ({"bf16": False}, {"model.dtype": "auto", "model.autocast": "none"}),
        ({"micro_batch_size": 3, "num_epochs": 2}, {"packing.pairs_per_step": 3, "train.epochs": 2}),
        ({"lr_scheduler": "constant", "warmup_ratio": 0.0}, {"optim.schedule": "constant"}),
        ({"wandb_project": "p", "use_tensorboard": True, "use_wandb": True},
         {"logging.trackers": ("wandb", "tensorboard")}),
        ({"use_mlflow": True, "use_comet": True, "use_trackio": True, "use_swanlab": True},
         {"logging.trackers": ("mlflow", "comet_ml", "trackio", "swanlab")}),
    ],
    "llamafactory": [
        ({"finetuning_type": "full"}, {"model.lora": None}),
        ({"enable_thinking": False}, {"data.chat_template_kwargs": {"enable_thinking": False}}),
        ({"lora_rank": 4, "lora_alpha": 8, "lora_dropout": 0.1, "use_rslora": True, "lora_target": "q, v"},
         {"model.lora": LORA}),
        ({"lora_rank": 4}, {"model.lora.alpha": 8, "model.lora.target_modules": "all-linear"}),
        ({"pref_loss": "hinge"}, {"loss.type": "hinge"}),
        ({"pref_loss": "ipo", "pref_bco_weight": 0.25, "pref_ftx": 0.3},
         {"loss.type": terms(ipo=0.8, bco_pair=0.2, sft=0.3)}),
        ({"eval_dataset": ["dpo_en_demo"], "val_size": 0.0, "max_samples": 5, "dataset": "orca"},
         {"data.train.0.columns": {"instruction": "question"}, "data.train.0.max_pairs": 5,
          "data.eval.0.format": "sharegpt", "data.eval.0.columns": {}}),
        ({"dataset_dir": "."}, {"data.train.0.format": "alpaca", "model.images": False,
         "data.max_pixels": None}),
        ({"dataset": "shapes"}, {"model.images": True, "data.max_pixels": 768 * 768}),
        ({"dataset": "orca, shapes", "image_max_pixels": 262144, "media_dir": "m"},
         {"model.images": True, "data.max_pixels": 262144, "data.train.0.image_folder": None,
          "data.train.1.columns": {"images": "pictures"}, "data.train.1.image_folder": Path("m")}),
        ({"val_size": 0.2}, {"data.eval.fraction": 0.2}),
        ({"cutoff_len": 99}, {"data.max_length": 99, "data.truncation": "completion_right"}),
        ({"early_stopping_steps": 2, "eval_strategy": "steps", "eval_steps": 5},
         {"train.early_stopping.patience": 2}),
    ],
}  # fmt: skip


@pytest.mark.parametrize(("peer", "number"), [(peer, n) for peer in PEERS for n in range(len(READ[peer]))])
def test_a_reader_gives_values_of_a_recipe(peer: str, number: int, tmp_path: Path) -> None:
    settings, expected = READ[peer][number]
    text, recipe = translated(tmp_path, peer, {**BASE[peer], **settings})
    assert {key: value_at(recipe, key) for key in expected} == expected
    for name in settings:
        assert re.search(rf"\b{name}\b", text), name


@pytest.mark.parametrize("peer", PEERS)
def test_each_line_of_a_table_is_exercised_and_names_keys_and_readers_that_exist(peer: str) -> None:
    shared, seen = (
        rows_of("transformers"),
        {each: {n for names, _ in READ[each] for n in names} for each in PEERS},
    )
    for name, row in rows_of(peer).items():
        assert set(row.ours) <= recipe_fields().keys() and row.reader in {"", *READERS}, name
        same = PEERS if row is shared.get(name) else (peer,)
        assert not row.reader or any(name in seen[each] for each in same), f"no line of READ has {name}"


@pytest.mark.parametrize("peer", PEERS)
def test_keys_that_set_nothing_are_listed_with_the_reason(peer: str, tmp_path: Path) -> None:
    rows = {name.replace("*", "x"): row for name, row in rows_of(peer).items() if not row.ours}
    rows = {name: row for name, row in rows.items() if name not in BASE[peer]}
    text, recipe = translated(tmp_path, peer, {**BASE[peer], **dict.fromkeys(rows, 3)})
    assert recipe == translated(tmp_path, peer, BASE[peer])[1]
    absent, _, unneeded = text.partition("# Not needed here:")
    for name in rows:
        row = find_row(peer, name)
        (line,) = re.findall(rf"(?m)^# - .*\b{name}: 3\b.*$", text)
        assert row.remark in line and line in (unneeded if row.kind == "not needed" else absent)


# ------------------------------------------------------------------------------------ how settings are given


@pytest.mark.parametrize(
    "program",
    [
        "--num_processes 4 trl/scripts/dpo.py",
        "--num_processes 4 trl dpo",
        "--multi_gpu --num_processes=4 -m trl.scripts.dpo",
        "-m trl.scripts.dpo --num_processes 4",
    ],
)
def test_a_command_line_of_trl_with_a_config_file_is_read(program: str, tmp_path: Path) -> None:
    (tmp_path / "dpo.yaml").write_text("learning_rate: 1e-5\nbeta: 0.2\n")
    line = (
        "pip install trl\n"
        f"accelerate launch {program} --config dpo.yaml \\\n"
        "  --model_name_or_path Qwen/Qwen2-0.5B-Instruct --dataset_name trl-lib/ultrafeedback_binarized \\\n"
        "  --learning_rate=5.0e-7 --per_device_train_batch_size 2 --max_steps 1000 \\\n"
        "  --gradient_accumulation_steps 8 --eval_strategy steps --eval_steps 50 --loss_type sigmoid sft \\\n"
        "  --loss_weights 1.0 0.2 --no_gradient_checkpointing --bf16 --warmup_steps 0.1  # a comment\n"
    )
    text, recipe = translated(tmp_path, "trl", line, "run.sh")
    assert (recipe.optim.lr, recipe.loss.beta) == (5e-7, 0.2)
    assert recipe.loss.terms == (("sigmoid", 1.0), ("sft", 0.2))
    assert recipe.packing.pairs_per_step == 64 and "2 x 8 x 4 devices" in text
    assert (recipe.train.max_steps, recipe.optim.warmup_ratio) == (1000, 0.1)
    assert recipe.model.autocast == "bfloat16" and recipe.model.gradient_checkpointing is False
    assert value_at(recipe, "data.eval.0.split") == "test"


def test_a_mapping_of_a_python_program_gives_the_recipe_of_a_file(tmp_path: Path) -> None:
    class Strategy(enum.StrEnum):
        STEPS = "steps"

    settings = {**BASE["trl"], "eval_steps": 5, "output_dir": "out"}
    text = dpo_pack.recipe_from(
        "trl", {**settings, "eval_strategy": Strategy.STEPS, "output_dir": Path("out")}
    )
    (tmp_path / "peer.json").write_text(json.dumps(settings))
    assert text == translate("trl", tmp_path / "peer.json")
    info = {**BASE["llamafactory"], "dataset_dir": str(tmp_path)}
    assert (
        yaml.safe_load(recipe_from("llamafactory", info))["data"]["train"][0]["path"]
        == "Intel/orca_dpo_pairs"
    )


# --------------------------------------------------------------------------------------- what is left to do


def test_what_the_settings_do_not_say_is_to_be_filled_in(tmp_path: Path) -> None:
    text, recipe = translated(tmp_path, "trl", {"beta": 0.3})
    assert text.count("fill this in") == 2 and recipe.model.path == "FILL-IN/model"
    (tmp_path / "dataset_info.json").unlink()
    text, recipe = translated(tmp_path, "llamafactory", {**BASE["llamafactory"], "pref_beta": 0.3})
    assert recipe.data.train[0].path == "FILL-IN.jsonl" and recipe.loss.beta == 0.3
    assert re.search(r"(?m)^# - dataset: orca - .*dataset_info\.json", text)


def test_keys_of_data_sets_that_are_not_read_are_listed(tmp_path: Path) -> None:
    source = {"path": "g/h", "split": "train", "type": "chat_template.default", "roles": {"user": ["human"]}}
    for peer, more in (("axolotl", {}), ("trl", {"columns": ["chosen"]})):
        text, _ = translated(tmp_path, peer, {**BASE[peer], "datasets": [{**source, **more}]})
        assert re.search(r"(?m)^# - datasets: .*not read: roles$", text.partition("output_dir:")[0])


def test_values_that_a_recipe_may_not_have_are_listed_and_left_out(tmp_path: Path) -> None:
    content = {
        **BASE["trl"], "learning_rate": -1, "beta": -1, "no_such_key": 3,
        "optim": "lion", "simpo_gamma": 1.3, "lr_scheduler_kwargs": {"num_cycles": 2},
        "loss_type": ["aot", "sft"],
    }  # fmt: skip
    text, recipe = translated(tmp_path, "trl", content)
    assert recipe.loss.type == "sigmoid" and recipe.loss.beta == 0.1
    assert recipe.optim.lr == 5e-7 and recipe.optim.name == "adamw"
    for line in (
        "beta - loss.beta: must be", "no_such_key: 3", "num_cycles",
        "[aot, sft] - aot is not here; set loss.type", "learning_rate - optim.lr: must be",
        "optim - optim.name: must be one of adamw,",
    ):  # fmt: skip
        assert line in text.partition("output_dir:")[0]


@pytest.mark.parametrize(
    ("peer", "content", "message"),
    [
        ("trl", {"loss_type": "nonsense"}, "loss.type.*'nonsense'"),
        ("trl", {"use_peft": "oft"}, "use_peft: oft"),
        ("axolotl", {"rl": "dpo", "dpo_loss_type": ["nonsense"]}, "loss.type.*'nonsense'"),
        ("axolotl", {"base_model": "a/b"}, "rl: .*dpo or ipo or simpo or orpo"),
        ("axolotl", {"rl": "grpo"}, "rl: grpo"),
        ("axolotl", {"rl": "dpo", "adapter": "oft"}, "adapter: oft"),
        ("llamafactory", {"stage": "sft"}, "stage: sft"),
        ("llamafactory", {"stage": "dpo", "dataset": "x"}, "dataset: x: .*dpo_en_demo, orca"),
        ("llamafactory", {"stage": "dpo", "dataset": "sft"}, "dataset: sft: .*ranking"),
        ("llamafactory", {"stage": "dpo", "finetuning_type": "oft"}, "finetuning_type: oft"),
        ("llamafactory", {"stage": "dpo", "pref_loss": "kto_pair"}, "pref_loss: kto_pair"),
        (
            "trl",
            {"datasets": [{"path": "json", "data_files": ["a", "b"], "fraction": 1}]},
            "datasets: .*folder",
        ),
        (
            "trl",
            {"dataset_name": "u.jsonl", "dataset_train_split": "train[:1%]"},
            r"train\[:1%\].*set max_pairs",
        ),
        (
            "trl",
            {"datasets": [{"path": "json", "data_files": {"train": "u.jsonl"}, "split": "train[5:]"}]},
            "set max_pairs",
        ),
        ("trl", {"learning_rate": "fast"}, "learning_rate: .*must be a number > 0, not 'fast'"),
        ("trl", {"max_steps": "many", "num_train_epochs": 2}, "max_steps: .*must be a whole number"),
        ("trl", {"warmup_steps": "some"}, "warmup_steps: some: cannot be read; .* must be a whole number"),
        (
            "trl",
            {"per_device_train_batch_size": "four"},
            "per_device_train_batch_size .*must be .*, not 'four'",
        ),
        ("trl", {"use_peft": True, "lora_dropout": "high"}, "lora_dropout: high: .*must be a number"),
        ("axolotl", {**BASE["axolotl"], "learning_rate": "fast"}, "learning_rate: .*must be a number > 0"),
        ("llamafactory", {"stage": "dpo", "pref_beta": "low"}, "pref_beta: .*must be a number > 0"),
        ("trl", "- a list", "no mapping"),
        ("trl", "beta: 1\nbeta: 2\n", "line 2.*'beta' is given twice"),
    ],
)
def test_settings_of_other_training_are_refused(
    peer: str, content: Any, message: str, tmp_path: Path
) -> None:
    with pytest.raises(RecipeError, match=message) as refused:
        translated(tmp_path, peer, content)
    assert str(refused.value).count("peer.yaml") == 1 and "\n" not in str(refused.value)


def test_a_misspelt_key_is_answered_with_the_one_that_is_meant(tmp_path: Path) -> None:
    text, _ = translated(tmp_path, "trl", {**BASE["trl"], "learnig_rate": 1e-6, "zebra": 1})
    assert re.search(r"(?m)^# - learnig_rate: .*; did you mean learning_rate\?$", text)
    assert re.search(r"(?m)^# - zebra: 1 - dpo-pack does not know this key$", text)


def test_adapters_with_dropout_are_said_to_share_no_prompts(tmp_path: Path) -> None:
    lora = {**BASE["trl"], "use_peft": True}
    text, recipe = translated(tmp_path, "trl", lora)
    assert UNSHARED in text and recipe.sharing_note == UNSHARED
    text, recipe = translated(tmp_path, "trl", {**lora, "lora_dropout": 0.0})
    assert UNSHARED not in text and not recipe.sharing_note


def test_a_trainer_is_named_in_capitals_too_and_an_unknown_one_is_refused(tmp_path: Path) -> None:
    settings = BASE["llamafactory"]
    assert recipe_from("LLaMA-Factory", settings) == recipe_from("llamafactory", settings)
    with pytest.raises(RecipeError, match="--from nemo: .* trl, axolotl, llamafactory"):
        translate("nemo", tmp_path / "absent.yaml")
    with pytest.raises(RecipeError, match=r"^[^\[]*absent\.yaml: cannot be read: No such file"):
        translate("TRL", tmp_path / "absent.yaml")


def test_a_file_without_a_command_is_refused(tmp_path: Path) -> None:
    for text in ("echo hello", "trl dpo --config absent.yaml", "trl dpo --beta 'x"):
        with pytest.raises(RecipeError, match=r"(run\.sh|absent\.yaml): "):
            translated(tmp_path, "trl", text, "run.sh")


# ------------------------------------------------------------------------------------- what TRL and we have


def test_every_key_of_trl_has_a_row() -> None:
    trl = pytest.importorskip("trl", reason="TRL is not installed")
    classes = (trl.DPOConfig, trl.ModelConfig, trl.ScriptArguments, trl.DatasetMixtureConfig)
    names = {field.name for each in classes for field in dataclasses.fields(each)}
    missing = {name for name in names if "know this key" in find_row("trl", name).remark}
    assert len(names) > 150 and not missing


def test_dpo_pack_has_the_losses_of_trl() -> None:
    trl = pytest.importorskip("trl", reason="TRL is not installed")
    losses = set(re.findall(r'loss_type == "(\w+)"', inspect.getsource(trl.DPOTrainer)))
    assert len(losses) == 15 and losses - LOSSES.keys() <= set(REMOVED_LOSSES)


@pytest.mark.parametrize(
    ("settings", "fragments"),
    [
        ({"learning_rate": 1e-6}, ["learning_rate: unknown key", "TRL's", "optim.lr here"]),
        ({"learning_rte": 1e-6}, ["learning_rte: unknown key", "TRL's learning_rate is optim.lr here"]),
        ({"optim": {"learning_rate": 1e-6}}, ["optim.learning_rate: unknown key", "is optim.lr here"]),
        ({"micro_batch_size": 4}, ["axolotl's micro_batch_size is packing.pairs_per_step here"]),
        ({"pref_loss": "ipo"}, ["LLaMA-Factory's pref_loss is loss.type here"]),
        ({"padding_free": True}, ["padding_free is not needed here: nothing is padded"]),
        ({"use_dora": True}, ["use_dora has no counterpart here: plain LoRA"]),
    ],
)
def test_an_error_about_a_peer_s_word_names_ours(settings: dict[str, Any], fragments: list[str]) -> None:
    valid = {"output_dir": "runs/x", "model": {"path": "a/b"}, "data": {"train": "a.jsonl"}}
    with pytest.raises(RecipeError) as refused:
        parse_recipe({**valid, **settings})
    for fragment in fragments:
        assert fragment in str(refused.value)


def test_the_value_of_a_key_is_not_in_the_comments() -> None:
    text = recipe_from(
        "trl", {"hub_token": "hf_s3cret", "wandb_api_key": "s3cret", "env": {"HF_TOKEN": "s3cret"},
                "datasets": [{"path": "a/b", "token": "hf_s3cret"}]},
    )  # fmt: skip
    assert "s3cret" not in text and "hub_token: ..." in text
