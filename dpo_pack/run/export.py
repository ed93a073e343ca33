"""Writes the trained model in Hugging Face layout, with a model card that describes the training."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from torch import Tensor
from transformers import PreTrainedTokenizerBase

import dpo_pack
from dpo_pack.model.loading import save_model
from dpo_pack.model.parallel import full_state, is_sharded
from dpo_pack.model.scorer import LoadedModel
from dpo_pack.recipe.load import Recipe, dump_recipe
from dpo_pack.run.samples import Sample
from dpo_pack.system import ranks
from dpo_pack.system.console import format_seconds
from dpo_pack.system.files import written_aside
from dpo_pack.system.hub import HUB_ID


def export_model(
    loaded: LoadedModel,
    tokenizer: PreTrainedTokenizerBase,
    target: Path,
    *,
    recipe: Recipe,
    totals: dict[str, Any],
    evaluation: dict[str, dict[str, float]],
    samples: Sequence[tuple[str, Sample]] = (),
) -> None:
    """Writes weights, config, generation config, tokenizer and README.md; the directory is whole or absent.

    `evaluation` maps the name of each held-out set to its latest metrics; `samples` are those of
    `before_and_after`, for the card. All ranks must call this; rank 0 writes. If the model is sharded, rank 0
    gathers the shards first.
    """
    state = None
    if is_sharded(loaded.model):
        state = full_state(loaded.model, trained_only=loaded.adapter is not None)
    with ranks.first_goes_first():
        if not ranks.is_first():
            return
        with written_aside(target) as temporary:
            base = None if loaded.adapter is None else loaded.adapter.base
            card = model_card(
                recipe, totals=totals, evaluation=evaluation, samples=samples, adapter_base=base
            )
            write_model(loaded, tokenizer, temporary, card, state=state)


def write_model(
    loaded: LoadedModel,
    tokenizer: PreTrainedTokenizerBase,
    directory: Path,
    card: str,
    *,
    state: dict[str, Tensor] | None = None,
) -> None:
    """Creates and fills `directory`; `state` holds the gathered tensors if the model is sharded."""
    directory.mkdir()
    save_model(loaded, tokenizer, directory, state=state)
    (directory / "README.md").write_text(card, encoding="utf-8")
    for weights in directory.glob("*.safetensors"):
        # safetensors lets only the owner read its files. Users who may read the card may read the weights.
        shutil.copymode(directory / "README.md", weights)


def model_card(
    recipe: Recipe,
    *,
    totals: dict[str, Any],
    evaluation: dict[str, dict[str, float]],
    samples: Sequence[tuple[str, Sample]] = (),
    adapter_base: str | None = None,
) -> str:
    """Returns the model card in Markdown, with front matter; `adapter_base` is the base of an adapter."""
    library = "transformers" if adapter_base is None else "peft"
    front: dict[str, Any] = {"library_name": library, "pipeline_tag": "text-generation"}
    base = adapter_base or recipe.model.path
    # The hub refuses a card that names a base model or data set which the hub does not have.
    if _is_on_hub(base):
        front["base_model"] = base
    datasets = [source.path for source in recipe.data.train if _is_on_hub(source.path)]
    if datasets:
        front["datasets"] = list(dict.fromkeys(datasets))
    front["tags"] = ["dpo", "preference-optimization", "dpo-pack"] + ["lora"] * (adapter_base is not None)
    adapter = "" if adapter_base is None else f"A LoRA adapter for {adapter_base}: "
    lines = [
        "---",
        yaml.safe_dump(front, sort_keys=False).strip(),
        "---",
        "",
        f"# {recipe.logging.run_name or recipe.output_dir.name}",
        "",
        f"{adapter}{recipe.model.path} fine-tuned with DPO (Rafailov et al. 2023, arXiv 2305.18290) by "
        f"dpo-pack {dpo_pack.__version__}.",
        "",
    ]
    columns = _ONLINE_COLUMNS if recipe.online is not None else _COLUMNS
    if evaluation:
        lines += [
            f"| held-out set | {' | '.join(columns.values())} |",
            f"|---|{'---|' * len(columns)}",
            *(f"| {name} | {_cells(metrics, columns)} |" for name, metrics in evaluation.items()),
            "",
        ]
    lines += [
        f"Training: {totals['steps']:,} steps, {totals['pairs']:,} preference pairs, "
        f"{totals['tokens']:,} tokens, {format_seconds(totals['train_seconds'])}.",
        "",
        *_samples_in_markdown(samples),
        "## Recipe",
        "",
        "```yaml",
        dump_recipe(recipe).strip(),
        "```",
        "",
    ]
    return "\n".join(lines)


def _samples_in_markdown(samples: Sequence[tuple[str, Sample]]) -> list[str]:
    lines = ["## Samples", "", "Greedy completions, before training and later.", ""] if samples else []
    for before, after in samples:
        texts = {"Prompt": after.prompt, "Before": before, f"After step {after.step}": after.completion}
        for title, text in texts.items():
            lines += [f"{title}:", "", textwrap.indent(text, "    ", lambda line: True), ""]
    return lines


def _is_on_hub(path: str) -> bool:
    """Returns whether a recipe's path is a hub id of the form owner/name, and not a path on this machine."""
    return HUB_ID.fullmatch(path) is not None and "/" in path and not Path(path).exists()


def _cells(metrics: Mapping[str, float], columns: Mapping[str, str]) -> str:
    cells = (f"{metrics[name]:{_FORMATS.get(name, '.4f')}}" if name in metrics else "" for name in columns)
    return " | ".join(cells)


_COLUMNS = {"rewards/accuracies": "reward accuracy", "rewards/margins": "reward margin", "loss": "loss"}
_FORMATS = {"rewards/accuracies": ".3f", "online/win_rate": ".3f"}
_ONLINE_COLUMNS = {
    "online/win_rate": "wins against the starting policy",
    "online/scores": "score",
    "online/scores_start": "score of the starting policy",
}
