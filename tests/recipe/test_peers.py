"""Recipes from the files of TRL, axolotl and LLaMA-Factory, with facts of files of these projects."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from dpo_pack.recipe.mistakes import all_keys
from dpo_pack.recipe.load import Recipe, load_recipe, parse_recipe
from dpo_pack.recipe.loss import LOSS_DECLARATIONS
from dpo_pack.recipe.peers import TABLES, find_rule
from dpo_pack.recipe.peers.rules import TRL_LOSSES
from dpo_pack.recipe.peers.translate import translate
from dpo_pack.system.errors import RecipeError

ORCA_LIKE = {
    "path": "fozziethebeat/alpaca_messages_2k_dpo_test", "type": "chat_template.default",
    "field_messages": "conversation", "field_chosen": "chosen", "field_rejected": "rejected",
}  # fmt: skip
# (peer, what its file says, what the recipe must say). Sources: zephyr-7b-beta/dpo/config_qlora.yaml and
# smollm3/dpo/apo.yaml in recipes/ of huggingface/alignment-handbook; llama-3/instruct-dpo-lora-8b.yml and
# falcon-e/falcon-e-3b-dpo.yaml in examples/ of axolotl; train_lora/qwen3_lora_dpo.yaml of LLaMA-Factory.
FILES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "Zephyr's QLoRA": (
        "trl",
        {
            "model_name_or_path": "alignment-handbook/zephyr-7b-sft-qlora", "torch_dtype": "float16",
            "use_peft": True, "load_in_4bit": True, "lora_r": 16, "lora_alpha": 16, "lora_dropout": 0.05,
            "lora_target_modules": ["q_proj", "k_proj"],
            "dataset_mixer": {"HuggingFaceH4/ultrafeedback_binarized": 1.0},
            "dataset_splits": ["train_prefs", "test_prefs"], "preprocessing_num_workers": 12, "bf16": True,
            "beta": 0.01, "do_eval": True, "evaluation_strategy": "steps", "eval_strategy": "steps",
            "eval_steps": 100, "gradient_accumulation_steps": 2, "gradient_checkpointing": True,
            "gradient_checkpointing_kwargs": {"use_reentrant": False}, "hub_model_id": "zephyr-7b-dpo-qlora",
            "learning_rate": 5e-6, "log_level": "info", "logging_steps": 10, "lr_scheduler_type": "cosine",
            "max_length": 1024, "max_prompt_length": 512, "num_train_epochs": 1, "optim": "paged_adamw_32bit",
            "output_dir": "data/zephyr-7b-dpo-qlora", "per_device_train_batch_size": 4,
            "per_device_eval_batch_size": 8, "push_to_hub": True, "save_strategy": "steps", "save_steps": 100,
            "save_total_limit": 1, "seed": 42, "warmup_ratio": 0.1,
        },
        {
            "model.lora.target_modules": ("q_proj", "k_proj"), "model.lora.alpha": 16.0,
            "model.autocast": "bfloat16", "loss.beta": 0.01, "optim.lr": 5e-6, "optim.schedule": "cosine",
            "optim.warmup_ratio": 0.1, "optim.warmup_steps": None, "packing.pairs_per_step": 8,
            "data.max_prompt_length": 512, "train.eval_every_steps": 100, "checkpoint.keep": 1,
            "data.train.0.split": "train_prefs", "data.eval.0.split": "test_prefs", "train.epochs": 1,
        },
    ),
    "SmolLM3's APO": (
        "trl",
        {
            "model_name_or_path": "HuggingFaceTB/SmolLM3-3B-checkpoints", "model_revision": "it-SFT",
            "torch_dtype": "bfloat16", "attn_implementation": "flash_attention_2", "bf16": True,
            "dataset_mixture": {"datasets": [{
                "id": "HuggingFaceTB/smoltalk2", "config": "Preference",
                "split": "llama_3.1_tulu_3_8b_preference_mixture_no_think", "weight": 0.5,
            }]},
            "learning_rate": 1e-6, "lr_scheduler_type": "cosine_with_min_lr",
            "lr_scheduler_kwargs": {"min_lr_rate": 0.1}, "max_grad_norm": 0.2, "beta": 0.05,
            "loss_type": "apo_zero", "max_length": 24576, "num_train_epochs": 1.0, "padding_free": True,
            "per_device_train_batch_size": 1, "gradient_accumulation_steps": 2, "num_processes": 16,
            "report_to": ["wandb"], "save_steps": 0.5, "use_liger_kernel": True, "run_name": None,
            "warmup_ratio": 0.1, "overwrite_output_dir": True,
        },
        {
            "model.revision": "it-SFT", "model.dtype": "bfloat16", "optim.min_lr_ratio": 0.1,
            "optim.schedule": "cosine", "optim.max_grad_norm": 0.2, "loss.type": "apo_zero",
            "packing.pairs_per_step": 32, "logging.trackers": ("wandb",), "model.kernels": "liger",
            "data.train.0.weight": 0.5, "checkpoint.every_steps": None, "seed": 42, "train.epochs": 1,
        },
    ),
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
    "axolotl's Falcon": (
        "axolotl",
        {
            "base_model": "axolotl-ai-co/Falcon-E-1.2-3B-Exp-prequantized", "rl": "dpo", "sequence_len": 8192,
            "datasets": [{"path": "allenai/Dolci-Think-DPO-7B", "split": "train", "type": "chatml.ultra"}],
            "gradient_accumulation_steps": 4, "micro_batch_size": 1, "num_epochs": 3, "warmup_steps": 128,
            "optimizer": "adamw_torch", "learning_rate": 1e-5, "adam_beta1": 0.9, "adam_beta2": 0.95,
            "bf16": True, "fsdp_version": 2, "fsdp_config": {"offload_params": False}, "weight_decay": 0.01,
            "loss_watchdog_threshold": 15.0, "eot_tokens": ["<|im_end|>"], "save_steps": 500,
            "shuffle_merged_datasets": True, "tensor_parallel_size": 1, "plugins": ["a.b"],
        },
        {
            "optim.betas": (0.9, 0.95), "optim.warmup_steps": 128, "optim.weight_decay": 0.01,
            "optim.schedule": "cosine", "model.autocast": "bfloat16", "checkpoint.every_steps": 500,
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
}  # fmt: skip
INFO = {
    "dpo_en_demo": {
        "file_name": "dpo_en_demo.json", "ranking": True, "formatting": "sharegpt",
        "columns": {"messages": "conversations", "chosen": "chosen", "rejected": "rejected"},
    },
    "orca": {"hf_hub_url": "Intel/orca_dpo_pairs", "ranking": True, "columns": {"prompt": "question"}},
    "sft": {"file_name": "sft.json"},
}  # fmt: skip


@pytest.fixture(autouse=True)
def dataset_info(tmp_path: Path) -> None:
    (tmp_path / "dataset_info.json").write_text(json.dumps(INFO))


def translated(
    tmp_path: Path, peer: str, content: dict[str, Any] | str, name: str = ""
) -> tuple[str, Recipe]:
    """The recipe's text, and the recipe."""
    path = tmp_path / (name or "peer.yaml")
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content), encoding="utf-8")
    text = translate(peer, path)
    (tmp_path / "recipe.yaml").write_text(text, encoding="utf-8")
    return text, load_recipe(tmp_path / "recipe.yaml")


def value_at(recipe: Recipe, key: str) -> Any:
    value: Any = recipe
    for part in key.split("."):
        value = value[int(part)] if part.isdecimal() else getattr(value, part)
    return value


@pytest.mark.parametrize("name", FILES)
def test_a_real_file_becomes_a_recipe_that_names_each_of_its_keys(name: str, tmp_path: Path) -> None:
    peer, content, expected = FILES[name]
    text, recipe = translated(tmp_path, peer, content)
    for key, value in expected.items():
        assert value_at(recipe, key) == value, key
    for key in content:
        assert re.search(rf"\b{key}\b", text), f"{key} is nowhere in the recipe"
    assert max(map(len, text.splitlines())) <= 118


def test_a_command_line_of_trl_with_a_config_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "dpo.yaml").write_text("learning_rate: 1e-5\nbeta: 0.2\n")
    line = (
        "pip install trl\n"
        "accelerate launch --num_processes 4 trl/scripts/dpo.py --config dpo.yaml \\\n"
        "  --model_name_or_path Qwen/Qwen2-0.5B-Instruct --dataset_name trl-lib/ultrafeedback_binarized \\\n"
        "  --learning_rate=5.0e-7 --per_device_train_batch_size 2 --max_steps 1000 \\\n"
        "  --gradient_accumulation_steps 8 --eval_strategy steps --eval_steps 50 --loss_type sigmoid sft \\\n"
        "  --loss_weights 1.0 0.2 --no_remove_unused_columns --warmup_steps 0.1\n"
    )
    text, recipe = translated(tmp_path, "trl", line, "run.sh")
    assert recipe.optim.lr == 5e-7 and recipe.loss.beta == 0.2
    assert recipe.loss.terms == (("sigmoid", 1.0), ("sft", 0.2))
    assert recipe.packing.pairs_per_step == 64 and "2 x 8 x 4 devices" in text
    assert recipe.train.max_steps == 1000 and recipe.train.epochs == 1000
    assert recipe.optim.warmup_ratio == 0.1 and recipe.optim.warmup_steps is None
    assert recipe.train.eval_every_steps == 50 and value_at(recipe, "data.eval.0.split") == "test"
    assert "--no_remove_unused_columns" in text


SCRIPT = """
import torch
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
from trl import DPOConfig, DPOTrainer

MODEL = "Qwen/Qwen2-0.5B-Instruct"
def main():
    model = AutoModelForCausalLM.from_pretrained(MODEL, torch_dtype=torch.bfloat16, device_map="auto")
    data = load_dataset("trl-lib/ultrafeedback_binarized", split="train[:500]")
    data = data.map(prepare)
    args = DPOConfig(output_dir="out", per_device_train_batch_size=1, gradient_accumulation_steps=8,
                     max_length=None, beta=get_beta(), ld_alpha=0.5, sync_ref_model=True)
    trainer = DPOTrainer(
        model=model, args=args, train_dataset=data, processing_class=AutoTokenizer.from_pretrained(MODEL),
        peft_config=LoraConfig(r=4, use_rslora=True, target_modules="all-linear"), callbacks=[Own()],
    )
    trainer.train()
"""


def test_a_script_is_read_without_running_it_and_what_it_hides_is_listed(tmp_path: Path) -> None:
    text, recipe = translated(tmp_path, "trl", SCRIPT, "train.py")
    assert recipe.model.path == "Qwen/Qwen2-0.5B-Instruct" and recipe.model.dtype == "bfloat16"
    assert recipe.model.lora is not None and recipe.model.lora.r == 4 and recipe.model.lora.dropout == 0.0
    assert recipe.model.lora.alpha == 16.0  # PEFT's 8, times sqrt(4)
    assert recipe.data.train[0].max_pairs == 500 and recipe.data.max_length == 131072
    assert recipe.data.train[0].split == "train"
    assert recipe.loss.ld_alpha == 0.5 and not recipe.data.eval
    assert (recipe.optim.lr, recipe.train.epochs, recipe.optim.warmup_steps) == (1e-6, 3, 0)  # TRL's defaults
    for hidden in ("beta: get_beta()", "callbacks: [Own()]", "train_dataset, .map(...)"):
        assert hidden in text
    assert "an assumption: multiply by your number of devices" in " ".join(text.replace("#", "").split())


def test_a_script_that_loads_the_model_in_the_checkpoint_s_type_says_so(tmp_path: Path) -> None:
    script = SCRIPT.replace("torch_dtype=torch.bfloat16, ", "")
    text, recipe = translated(tmp_path, "trl", script, "train.py")
    assert recipe.model.dtype == "auto" and "weights are float32 here, whatever the checkpoint has" in text


OLDER_SCRIPT = """
model = AutoModelForCausalLM.from_pretrained("org/model")
ds = load_dataset("json", data_files={"train": "pairs.jsonl", "test": "held_out.jsonl"})
args = TrainingArguments(evaluation_strategy="steps", eval_steps=20, max_steps=200, fp16=True, **more)
DPOTrainer(model, None, args=args, beta=0.2, train_dataset=ds["train"], eval_dataset=ds["test"], tokenizer=t)
"""


def test_a_script_of_an_older_release_holds_out_what_it_held_out(tmp_path: Path) -> None:
    text, recipe = translated(tmp_path, "trl", OLDER_SCRIPT, "train.py")
    assert [source.path for source in recipe.data.train] == ["pairs.jsonl"]
    assert value_at(recipe, "data.eval.0.path") == "held_out.jsonl" and recipe.train.eval_every_steps == 20
    assert recipe.loss.beta == 0.2 and recipe.model.autocast == "bfloat16"
    assert "evaluation_strategy: steps" in text and "**: more" in text


def test_options_of_a_model_that_only_the_running_script_knows_are_listed(tmp_path: Path) -> None:
    script = """
model = AutoModelForCausalLM.from_pretrained("org/model", quantization_config=bits, **more)
DPOTrainer(model, args=DPOConfig(model_init_kwargs=options))
"""
    text, recipe = translated(tmp_path, "trl", script, "train.py")
    assert recipe.model.path == "org/model"
    for hidden in ("quantization_config: bits", "**: more", "model_init_kwargs: options"):
        assert f"# - {hidden} - only running the script gives the value" in text


def test_what_a_file_does_not_say_is_to_be_filled_in(tmp_path: Path) -> None:
    text, recipe = translated(tmp_path, "trl", {"beta": 0.3})
    assert "# Fill in: model.path, data.train." in text and recipe.model.path == "FILL-IN/model"


def test_values_that_a_recipe_may_not_have_are_listed_and_left_out(tmp_path: Path) -> None:
    content = {
        "model_name_or_path": "a/b", "dataset_name": "a/c", "learning_rate": "fast", "warmup_steps": "some",
        "beta": -1, "no_such_key": 3,
    }  # fmt: skip
    text, recipe = translated(tmp_path, "trl", content)
    assert recipe.loss.beta == 0.1 and recipe.optim.lr == 5e-7
    for line in (
        "beta: must be a number > 0",
        "no_such_key: 3 - not a key of TRL",
        "warmup_steps: some - a value",
    ):
        assert line in text


def test_of_an_adapter_only_the_part_that_a_recipe_may_not_have_is_left_out(tmp_path: Path) -> None:
    content = {"use_peft": True, "lora_r": 4, "lora_dropout": 0.1, "loss_type": "aot"}
    text, recipe = translated(tmp_path, "trl", content)
    assert recipe.model.lora is not None
    assert (recipe.model.lora.r, recipe.model.lora.dropout) == (4, 0.0)
    assert "model.lora.dropout: must be 0" in text


@pytest.mark.parametrize(
    ("peer", "content", "message"),
    [
        ("trl", {"loss_type": "nonsense"}, "peer.yaml: loss_type: nonsense: TRL's DPO has no such loss"),
        ("trl", {"loss_type": "simpo"}, "loss_type: simpo: TRL's DPO has no such loss"),
        ("axolotl", {"rl": "dpo", "dpo_loss_type": ["cpo"]}, "dpo_loss_type: cpo: TRL's DPO has no such"),
        ("axolotl", {"base_model": "a/b"}, "no key rl"),
        ("axolotl", {"rl": "grpo"}, "rl: grpo: no training on preference pairs"),
        ("llamafactory", {"stage": "sft"}, "stage: sft: no training on preference pairs"),
        ("llamafactory", {"stage": "dpo", "dataset": "x"}, "dataset x: not in dataset_info.json"),
        ("llamafactory", {"stage": "dpo", "dataset": "sft"}, "dataset sft: no preference data"),
        ("llamafactory", {"stage": "dpo", "finetuning_type": "oft"}, "finetuning_type: oft"),
        ("trl", "- a list", "no mapping"),
        ("nemo", {}, "--from nemo: must be one of trl, axolotl, llamafactory"),
    ],
)
def test_a_file_that_trains_something_else_is_refused(
    peer: str, content: Any, message: str, tmp_path: Path
) -> None:
    with pytest.raises(RecipeError, match=re.escape(message)):
        translated(tmp_path, peer, content)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.py", "print(1)", "no call of DPOTrainer"),
        ("a.py", "def", "line 1: not valid Python"),
        ("a.py", "TrlParser()\nDPOTrainer()", "takes its settings from a command line"),
        ("a.sh", "echo hello", "no command line of `trl dpo`"),
        ("a.sh", "trl dpo --config absent.yaml", "--config absent.yaml: no such file"),
    ],
)
def test_what_cannot_be_read_is_refused(name: str, text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=re.escape(message)):
        translated(tmp_path, "trl", text, name)


def test_llama_factory_without_its_dataset_info_is_refused(tmp_path: Path) -> None:
    (tmp_path / "dataset_info.json").unlink()
    with pytest.raises(RecipeError, match="dataset_info.json is not in data, "):
        translated(tmp_path, "llamafactory", {"stage": "dpo", "dataset": "x"})


def test_every_key_of_trl_has_a_rule() -> None:
    trl = pytest.importorskip("trl", reason="TRL is not installed")
    classes = (trl.DPOConfig, trl.ModelConfig, trl.ScriptArguments, trl.DatasetMixtureConfig)
    names = {field.name for each in classes for field in dataclasses.fields(each)}
    missing = {name for name in names if find_rule(TABLES["trl"], name) is None}
    assert len(names) > 150 and not missing


def test_the_losses_of_trl_are_those_of_its_trainer_and_dpo_pack_has_them() -> None:
    trl = pytest.importorskip("trl", reason="TRL is not installed")
    assert set(TRL_LOSSES) == set(re.findall(r'loss_type == "(\w+)"', inspect.getsource(trl.DPOTrainer)))
    assert set(TRL_LOSSES) <= LOSS_DECLARATIONS.keys()


@pytest.mark.parametrize("peer", TABLES)
def test_rules_name_keys_of_a_recipe(peer: str) -> None:
    known = set(all_keys(Recipe))
    assert all(set(rule.keys) <= known for rule in TABLES[peer].values())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"learning_rate": 1e-6}, "learning_rate: unknown key; TRL's learning_rate is optim.lr here"),
        (
            {"optim": {"learning_rate": 1e-6}},
            "optim.learning_rate: unknown key; TRL's learning_rate is optim.lr",
        ),
        ({"per_device_train_batch_size": 4}, "is packing.pairs_per_step here"),
        ({"bf16": True}, "is model.autocast here (true: bfloat16"),
        ({"micro_batch_size": 4}, "axolotl's micro_batch_size is packing.pairs_per_step here"),
        ({"pref_beta": 0.1}, "LLaMA-Factory's pref_beta is loss.beta here"),
        ({"padding_free": True}, "TRL's padding_free is not needed here: nothing is padded"),
        ({"loss": {"type": "dpo"}}, "not 'dpo', which is sigmoid here"),
        ({"optim": {"name": "adamw_torch"}}, "which is adamw here"),
        ({"model": {"path": "a/b", "attention": "flash_attention_2"}}, "which is flash_attn here"),
        ({"data": {"train": "a.jsonl", "truncation": "keep_start"}}, "which is completion_right here"),
    ],
)
def test_an_error_about_a_peer_s_word_names_ours(settings: dict[str, Any], message: str) -> None:
    valid = {"output_dir": "runs/x", "model": {"path": "a/b"}, "data": {"train": "a.jsonl"}}
    with pytest.raises(RecipeError, match=re.escape(message)):
        parse_recipe({**valid, **settings})


def test_evaluations_are_as_often_as_lines_are_logged_where_trl_does_so(tmp_path: Path) -> None:
    content = {
        "model_name_or_path": "a/b",
        "dataset_name": "a/c",
        "eval_strategy": "steps",
        "logging_steps": 7,
    }
    assert translated(tmp_path, "trl", content)[1].train.eval_every_steps == 7
    assert translated(tmp_path, "trl", {**content, "eval_steps": 9})[1].train.eval_every_steps == 9
    assert translated(tmp_path, "trl", {**content, "eval_strategy": "no"})[1].data.eval == ()


def test_several_trackers_of_axolotl_are_all_named(tmp_path: Path) -> None:
    content = {
        "rl": "dpo",
        "wandb_project": "p",
        "use_tensorboard": True,
        "val_set_size": 0.1,
        "eval_steps": 5,
    }
    recipe = translated(tmp_path, "axolotl", content)[1]
    assert recipe.logging.trackers == ("wandb", "tensorboard") and recipe.train.eval_every_steps == 5
    assert recipe.optim.warmup_ratio == 0.03 and recipe.data.max_length == 512  # axolotl's defaults


def test_it_is_said_that_axolotl_rounds_the_steps_of_a_warm_up_ratio_down(tmp_path: Path) -> None:
    text, recipe = translated(tmp_path, "axolotl", {"rl": "dpo", "warmup_ratio": 0.07})
    assert recipe.optim.warmup_ratio == 0.07
    assert "# warmup_ratio (axolotl rounds the number of steps down, dpo-pack up" in text


@pytest.mark.parametrize(
    ("settings", "is_said"),
    [({}, True), ({"save_strategy": "no"}, False), ({"save_total_limit": 3}, False)],
)
def test_it_is_said_that_trl_keeps_every_checkpoint(
    settings: dict[str, Any], is_said: bool, tmp_path: Path
) -> None:
    text = translated(tmp_path, "trl", {"model_name_or_path": "a/b", "dataset_name": "c/d", **settings})[0]
    assert ("TRL keeps every checkpoint, dpo-pack the newest two" in text) is is_said


def test_the_reason_why_a_key_is_not_needed_is_its_own_and_unnamed_columns_are_pointed_at(
    tmp_path: Path,
) -> None:
    config = {"eval_on_start": True, "liger_kernel_config": {"rms_norm": True}, "generate_during_eval": True}
    text, _ = translated(tmp_path, "trl", {"dataset_name": "c/d", **config})
    assert "# - eval_on_start: true - the first evaluation is always before step 1\n" in text
    assert "liger_kernel_config: {rms_norm: true} - dpo-pack chooses these options itself" in text
    assert "generate_during_eval: true - logging.samples writes completions" in text
    hint = "# Columns that dpo-pack does not find by itself: name them in data.train.0.columns.\n"
    assert hint in text
    sources = [{"path": "c/d", "type": "intel"}]  # names a column
    assert hint not in translated(tmp_path, "axolotl", {"rl": "dpo", "datasets": sources})[0]


@pytest.mark.parametrize(
    ("target", "modules"),
    [("all", "all-linear"), (None, "all-linear"), ("q_proj,v_proj", ("q_proj", "v_proj"))],
)
def test_the_modules_of_llamafactory_s_lora_are_those_of_the_recipe(
    target: str | None, modules: Any, tmp_path: Path
) -> None:
    content = {"model_name_or_path": "a/b", "stage": "dpo", "finetuning_type": "lora", "lora_rank": 8}
    content |= {"dataset": "pairs", "output_dir": "out"} | ({} if target is None else {"lora_target": target})
    described = {"pairs": {"hf_hub_url": "c/d", "ranking": True}}
    (tmp_path / "dataset_info.json").write_text(json.dumps(described))
    _, recipe = translated(tmp_path, "llamafactory", content | {"dataset_dir": str(tmp_path)})
    assert recipe.model.lora is not None and recipe.model.lora.target_modules == modules


@pytest.mark.parametrize(("peer", "key"), [("axolotl", "rl"), ("llamafactory", "pref_loss")])
def test_the_margin_of_simpo_is_the_recipe_s(peer: str, key: str, tmp_path: Path) -> None:
    content = {"stage": "dpo", key: "simpo", "simpo_gamma": 1.3}
    assert translated(tmp_path, peer, content)[1].loss.simpo_gamma == 1.3
    text, _ = translated(tmp_path, peer, content | {key: "ipo"})
    assert "# - simpo_gamma: 1.3 - only simpo reads it" in text


def test_axolotl_smooths_labels_for_dpo_alone(tmp_path: Path) -> None:
    content = {"rl": "dpo", "dpo_label_smoothing": 0.1}
    assert translated(tmp_path, "axolotl", content)[1].loss.label_smoothing == 0.1
    text, recipe = translated(tmp_path, "axolotl", content | {"rl": "simpo"})
    assert recipe.loss.label_smoothing == 0.0 and "# - dpo_label_smoothing: 0.1 - only dpo reads it" in text


@pytest.mark.parametrize(("old", "new"), [("kto_pair", "bco_pair"), ("aot_pair", "aot")])
def test_losses_under_trl_s_earlier_names_are_known(old: str, new: str, tmp_path: Path) -> None:
    assert translated(tmp_path, "trl", {"loss_type": old})[1].loss.type == new


@pytest.mark.parametrize(("size", "fraction"), [(0.1, 0.1), (1, 0.02), (100, 0.02)])
def test_a_mixture_s_test_split_is_a_fraction_and_a_number_of_pairs_is_said_to_be_none(
    size: float, fraction: float, tmp_path: Path
) -> None:
    content = {
        "model_name_or_path": "a/b", "output_dir": "out", "eval_strategy": "steps", "eval_steps": 10,
        "datasets": [{"path": "c/d"}], "test_split_size": size,
    }  # fmt: skip
    text, recipe = translated(tmp_path, "trl", content)
    assert value_at(recipe, "data.eval.fraction") == fraction
    assert ("TRL holds out" in text) is (size >= 1)


def test_formats_of_axolotl_that_add_text_are_said_not_to_be_applied(tmp_path: Path) -> None:
    def header(**formats: str) -> str:
        kind = {"field_prompt": "question", "field_chosen": "good", "field_rejected": "bad", **formats}
        content = {
            "base_model": "a/b", "rl": "dpo", "output_dir": "out",
            "datasets": [{"path": "pairs.jsonl", "ds_type": "json", "type": kind}],
        }  # fmt: skip
        text, recipe = translated(tmp_path, "axolotl", content)
        columns = recipe.data.train[0].columns
        assert columns == {"prompt": "question", "chosen": "good", "rejected": "bad"}
        return " ".join(text.partition("output_dir:")[0].replace("#", "").split())

    plain = {"prompt_format": "{prompt}", "chosen_format": "{chosen}</s>", "rejected_format": "{bad}[/s]"}
    for formats in ({}, plain, {**plain, "field_system": "system"}):
        assert "NOT applied" not in header(**formats)
    for name, text, column in (
        ("prompt_format", "Question: {prompt} Answer: ", "question"),
        ("prompt_format", "{prompt}</s>", "question"),
        ("chosen_format", "{chosen} END", "good"),
        ("rejected_format", "{rejected}</s></s>", "bad"),
    ):
        said = header(**{**plain, name: text})
        assert f"{name}: {text!r} - NOT applied: dpo-pack takes the text of column {column} as" in said
        assert said.count("NOT applied") == 1


def test_a_notebook_is_read_as_the_script_of_its_cells(tmp_path: Path) -> None:
    cells = ["%pip install trl\n!nvidia-smi\n", "from trl import DPOConfig, DPOTrainer\n"]
    cells += ["args = DPOConfig(output_dir='out', beta=0.3)\n", "DPOTrainer(model='a/b', args=args).train()"]
    notebook = {
        "cells": [
            {"cell_type": "markdown", "source": ["# DPOTrainer("]},
            *({"cell_type": "code", "source": cell.splitlines(keepends=True)} for cell in cells),
        ]
    }
    _, recipe = translated(tmp_path, "trl", json.dumps(notebook), "dpo.ipynb")
    assert (recipe.model.path, recipe.loss.beta, recipe.optim.lr) == ("a/b", 0.3, 1e-6)
    for broken in ("{", "[]", '{"cells": 3}'):
        with pytest.raises(RecipeError, match="cannot be read as a notebook; save its cells as a .py file"):
            translated(tmp_path, "trl", broken, "dpo.ipynb")
