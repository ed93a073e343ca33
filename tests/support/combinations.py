"""What a recipe can combine: factors, rules that refuse, runs of combinations and what they must equal."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import yaml
from rich.console import Console

import dpo_pack.trainer as train_module
from dpo_pack.recipe.load import Recipe, load_recipe
from support.pairwise import Combination, Forbidden, forbids, pairwise
from support.plain_steps import PlainPair, plain_steps
from support.rows import write_rows
from support.run_files import records
from support.tiny_adapters import saved_adapter
from support.tiny_models import tiny_model
from support.tiny_tokenizer import VOCABULARY_SIZE, tiny_tokenizer
from support.two_ranks import run_on_ranks

NUM_PAIRS = 11  # in steps of 4: the last step of an epoch is a partial one
NUM_STEPS = 3
COMMON = (
    "packing.token_budget=64",
    "packing.pairs_per_step=4",
    "train.max_steps=3",
    "train.epochs=3",
    "data.shuffle=false",
    "optim.schedule=constant",
)

# Losses that differ in what other code must do for them. The runs of one family take its losses in turn.
LOSSES: dict[str, tuple[str, ...]] = {
    "margin": (
        "{type: sigmoid, label_smoothing: 0.1}",
        "{type: sigmoid}",
        "{type: hinge}",
        "{type: discopop, discopop_tau: 0.5}",
        "{type: robust, label_smoothing: 0.2}",
        "{type: exo_pair, label_smoothing: 0.1}",
    ),
    "per token": ("{type: ipo}", "{type: sigmoid_norm}"),
    "each side": (
        "{type: nca_pair}",
        "{type: bco_pair}",
        "{type: sppo_hard}",
        "{type: apo_zero}",
        "{type: apo_down}",
    ),
    "sum": ("{type: [{type: sigmoid}, {type: sft, weight: 0.5}]}", "{type: [{type: ipo}, {type: sft}]}"),
    "free": ("{type: simpo, label_smoothing: 0.1}",),
    "likelihood": ("{type: cpo, cpo_alpha: 0.5}", "{type: orpo}", "{type: sft}"),
    "own": ('{type: "support.combinations:own_loss"}',),
}

# factor -> value -> overrides of the recipe. The first value of a factor goes with every value of the others.
FACTORS: dict[str, dict[str, tuple[str, ...]]] = {
    "loss": {family: () for family in LOSSES},
    "reference": {
        "as it starts": (),
        "another": ("reference.path=${recipe_dir}/other",),
        "mixed": ("reference.path=${recipe_dir}/other", "reference.sync={every_steps: 1, mixup: 0.6}"),
        "copied": ("reference.sync={every_steps: 2, mixup: 1.0}",),
    },
    "layout": {"shared": (), "unshared": ("packing.share_prompt=false",), "padded": ("packing.mode=padded",)},
    "adapter": {
        "none": ("optim.lr=3e-3",),
        "new": ("model.lora={r: 3, alpha: 6}", "optim.lr=1e-2"),
        "saved": ("model.path=${recipe_dir}/adapter", "optim.lr=1e-2"),
    },
    "divergence": {
        "reverse_kl": (),
        "forward_kl": ("loss.f_divergence=forward_kl",),
        "js_divergence": ("loss.f_divergence=js_divergence",),
        "alpha_divergence": ("loss.f_divergence=alpha_divergence", "loss.f_alpha=0.3"),
    },
    "precision": {
        "fp32": (),
        "bf16 parameters": ("model.dtype=bfloat16",),
        "bf16 autocast": ("model.autocast=bfloat16",),
    },
    "optimizer": {
        "adamw": ("optim.eps=1e-6",),
        "adamw, decay": ("optim.eps=1e-6", "optim.weight_decay=0.1"),
        "adafactor": ("optim.name=adafactor", "optim.lr=2e-3"),
    },
    "weighting": {"none": (), "wpo": ("loss.weighting=wpo",)},
    "weights": {"equal": (), "given": ("data.train.0.columns={weight: importance}",)},
    "tokens": {"all": (), "some": ("data.train.0.path=${recipe_dir}/some_scored.jsonl",)},
    "activations": {
        "kept": (),
        "recomputed": (  # and whatever goes with that
            "model.gradient_checkpointing=true",
            "model.activation_offload=true",
            "model.mlp_tile_tokens=16",
        ),
    },
    "processes": {
        "one": (),
        "two with copies": ("distributed.strategy=ddp",),
        "two with shards": ("distributed.strategy=fsdp2",),
    },
}

_DIVERGENCES = ("forward_kl", "js_divergence", "alpha_divergence")
_OTHER_REFERENCES = ("another", "mixed", "copied")
_FREE = ("free", "likelihood")
# What a recipe refuses before anything loads, and words of the refusal.
RULES: list[tuple[Forbidden, str]] = [
    ({"loss": ("each side", *_FREE), "divergence": _DIVERGENCES}, r"^loss\.f_divergence: .*loss\.type \w+"),
    ({"loss": ("sum", "likelihood"), "weighting": ("wpo",)}, r"^loss\.weighting: .*loss\.type (sft|cpo)"),
    ({"loss": _FREE, "reference": _OTHER_REFERENCES}, r"^reference\.(path|sync): .*(simpo|cpo)"),
    (
        {"adapter": ("none",), "precision": ("bf16 parameters",), "optimizer": ("adafactor",)},
        r"^optim\.name: adafactor .*fp32 master weights",
    ),
    ({"precision": ("bf16 parameters",), "reference": ("mixed",)}, r"^reference\.sync: .*bfloat16"),
    (
        {"precision": ("bf16 parameters",), "reference": ("copied",), "adapter": ("new", "saved")},
        r"^reference\.sync: .*bfloat16",
    ),
]
# What the files or the ranks show later, still before the first step.
LATER: list[tuple[Forbidden, str]] = [
    (
        {"adapter": ("saved",), "reference": ("copied",)},
        r"^reference\.sync: the reference \S+ is an adapter; merge it first \(dpopack merge\)$",
    ),
    (
        {"optimizer": ("adafactor",), "processes": ("two with shards",)},
        r"^optim\.name: adafactor updates whole weights only, but with fsdp2 .* a part of the weights; set ",
    ),
]
# How far a metric may be from the plain loop in float64: relative above 1, for the norm of a gradient always.
# On one CPU the largest differences of all runs were a third to a fifth of these.
BOUNDS = {
    "fp32": {"loss": 1e-5, "grad_norm": 1e-5, "rewards": 1e-5, "logps": 1e-6},
    "bf16 parameters": {"loss": 4e-2, "grad_norm": 5e-2, "rewards": 4e-2, "logps": 2e-3},
    "bf16 autocast": {"loss": 4e-2, "grad_norm": 5e-2, "rewards": 4e-2, "logps": 2e-3},
}


def own_loss(policy: Any, reference: Any, options: Any) -> Any:
    """A loss of a user's own."""
    margin = (policy.chosen - reference.chosen) - (policy.rejected - reference.rejected)
    return (options.beta * margin - 1).square()


def plan() -> list[tuple[Combination, tuple[str, ...]]]:
    """Pairwise combinations that must train, with the overrides that say so; all losses are among them."""
    values = {factor: tuple(options) for factor, options in FACTORS.items()}
    rules = [where for where, _ in (*RULES, *LATER)]
    turns = {family: count() for family in LOSSES}
    found = pairwise(values, rules)
    runs = [(each, overrides_of(each, turn=next(turns[each["loss"]]))) for each in found]
    for family, members in LOSSES.items():  # losses whose turn has not come
        plain = whole({"loss": family})
        runs += [(plain, overrides_of(plain, turn=n)) for n in range(next(turns[family]), len(members))]
    return runs


def whole(part: Combination) -> Combination:
    """The combination with each factor's first value where it says nothing."""
    return {factor: part.get(factor, next(iter(options))) for factor, options in FACTORS.items()} | part


def overrides_of(combination: Combination, *, turn: int = 0) -> tuple[str, ...]:
    members = LOSSES[combination["loss"]]
    chosen: list[str] = [f"loss={members[turn % len(members)]}", "loss.beta=0.5"]
    for factor, value in combination.items():
        chosen += FACTORS[factor][value]
    return (*COMMON, *chosen)


def refusal_of(combination: Combination) -> str | None:
    """The words by which the recipe alone refuses the combination; None: it must not."""
    return next((words for where, words in RULES if forbids(where, combination)), None)


def make_assets(directory: Path) -> Path:
    """Two models, an adapter of the first, tokenized pairs and recipe.yaml, in `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    model = tiny_model("llama", vocab_size=VOCABULARY_SIZE)
    with torch.no_grad():  # half as wide: bfloat16 then rounds a completion's log-prob by hundredths of a nat
        for parameter in model.parameters():
            parameter.mul_(0.5 if parameter.ndim > 1 else 1.0)
    for name in ("model", "other"):
        tiny_tokenizer().save_pretrained(directory / name)
        model.save_pretrained(directory / name)
        with torch.no_grad():  # a reference some nats a completion from the policy
            for parameter in model.parameters():
                parameter.mul_(1 + 0.1 * torch.randn_like(parameter))
    saved_adapter(directory / "adapter", directory / "model")
    tiny_tokenizer().save_pretrained(directory / "adapter")
    rows, rng = list(_rows(random.Random(0))), random.Random(1)
    write_rows(directory / "pairs.jsonl", rows)
    write_rows(directory / "some_scored.jsonl", [row | _scored(row, rng) for row in rows])
    tree = {
        "output_dir": "${recipe_dir}/run",
        "model": {"path": "${recipe_dir}/model"},
        "reference": {"cache_dir": "${recipe_dir}/cache"},
        "data": {"train": [{"path": "${recipe_dir}/pairs.jsonl"}], "max_length": 64},
        "logging": {"samples": None},
        "export": {"verify": "none"},
    }
    (directory / "recipe.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    return directory


def _rows(rng: random.Random) -> Iterator[dict[str, Any]]:
    """Prompts that begin alike or come several times, completions that begin alike or come twice, weights of
    0 to 2."""

    def ids(least: int, most: int) -> list[int]:
        return [rng.randrange(3, VOCABULARY_SIZE) for _ in range(rng.randint(least, most))]

    beginning = ids(17, 17)
    for number in range(NUM_PAIRS):
        if number % 3 == 0:
            prompt, common = [*beginning[number % 2 :], *ids(3, 9)], ids(1, 3)
            chosen = [*common, *ids(1, 9), 2]
        elif number % 3 == 2:
            chosen = [*ids(1, 4), 2]
        rejected = [*(common if number % 2 else []), *ids(1, 9), 2]
        yield {
            "prompt_ids": prompt,
            "chosen_ids": chosen,
            "rejected_ids": rejected,
            "importance": (1, 2, 1, 0)[number % 4],
        }


def _scored(row: dict[str, Any], rng: random.Random) -> dict[str, list[int]]:
    """Which completion tokens are scored; a completion that comes twice has others each time."""
    weights = {
        f"{side}_weights": [rng.choice((0, 0, 1)) for _ in row[f"{side}_ids"]]
        for side in ("chosen", "rejected")
    }
    for of_side in weights.values():
        of_side[-1] = 1  # of a completion, something must be scored
    return weights


def recipe_of(assets: Path, run: Path, overrides: Sequence[str]) -> Recipe:
    return load_recipe(assets / "recipe.yaml", (*overrides, f"output_dir={run}"))


def train_and_watch(recipe: Recipe, processes: str = "one") -> list[list[int]]:
    """Trains on one process or on two; returns the pairs of each step, of all ranks."""
    if processes != "one":
        one, other = run_on_ranks(train_and_watch, recipe)
        assert one == other
        return list(one)
    steps: list[list[int]] = []
    accumulate = train_module.Trainer.accumulate_gradients

    def watching(trainer: Any, batch: Any) -> Any:
        steps.append(sorted(int(pair) for row in batch.row_pairs for pair in row))
        return accumulate(trainer, batch)

    with patch.object(train_module.Trainer, "accumulate_gradients", watching):
        train_module.train(recipe, Console(quiet=True))
    return steps


def assert_plain_steps(
    recipe: Recipe, steps: Sequence[Sequence[int]], precision: str, *, where: str = ""
) -> None:
    """The run in the recipe's output_dir has trained on `steps` and logged what the plain loop computes."""
    ours = records(recipe.output_dir, "train")
    assert len(ours) == len(steps) == NUM_STEPS, where
    assert steps == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]], where
    rows = [json.loads(line) for line in Path(recipe.data.train[0].path).read_text().splitlines()]
    is_weighted = "weight" in recipe.data.train[0].columns
    pairs = [
        PlainPair(
            prompt=row["prompt_ids"],
            chosen=row["chosen_ids"],
            rejected=row["rejected_ids"],
            weight=row["importance"] if is_weighted else 1,
            chosen_weights=row.get("chosen_weights", [1] * len(row["chosen_ids"])),
            rejected_weights=row.get("rejected_weights", [1] * len(row["rejected_ids"])),
        )
        for row in rows
    ]
    for line, plain in zip(ours, plain_steps(recipe, pairs, steps), strict=True):
        for name, value in plain.items():
            bound = BOUNDS[precision][name.partition("/")[0]]
            expected = pytest.approx(value, rel=bound, abs=0.0 if name == "grad_norm" else bound)
            assert line[name] == expected, f"{where} step {line['step']}: {name} with {recipe.loss}"
