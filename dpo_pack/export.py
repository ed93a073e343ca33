"""The trained model in Hugging Face layout, with a model card that says how it came to be."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import yaml
from safetensors import SafetensorError
from transformers import PreTrainedTokenizerBase

import dpo_pack
from dpo_pack.console import format_seconds
from dpo_pack.files import written_aside
from dpo_pack.models import LoadedModel, save_model
from dpo_pack.recipe import Recipe, dump_recipe
from dpo_pack.recipe_checks import HUB_ID


def export_model(
    loaded: LoadedModel,
    tokenizer: PreTrainedTokenizerBase,
    target: Path,
    *,
    recipe: Recipe,
    totals: dict[str, Any],
    evaluation: dict[str, dict[str, float]],
) -> None:
    """Write weights, config, generation config, tokenizer and README.md; the directory is whole or absent.

    `evaluation` is the last metrics of each held-out set by name.
    """
    with written_aside(target) as temporary:
        temporary.mkdir()
        try:
            save_model(loaded, tokenizer, temporary)
        except SafetensorError as error:
            raise OSError(f"the weights could not be written in full ({error})") from error
        card = model_card(recipe, totals=totals, evaluation=evaluation)
        (temporary / "README.md").write_text(card, encoding="utf-8")
        for weights in temporary.glob("*.safetensors"):
            # safetensors lets only the owner read what it writes; a model is for whoever may read its config.
            shutil.copymode(temporary / "config.json", weights)


def model_card(recipe: Recipe, *, totals: dict[str, Any], evaluation: dict[str, dict[str, float]]) -> str:
    """Markdown with the front matter the Hugging Face hub reads."""
    front: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": "text-generation"}
    # The hub refuses a card that names a base model or data set it does not have.
    if _is_on_hub(recipe.model.path):
        front["base_model"] = recipe.model.path
    datasets = [source.path for source in recipe.data.train if _is_on_hub(source.path)]
    if datasets:
        front["datasets"] = list(dict.fromkeys(datasets))
    front["tags"] = ["dpo", "preference-optimization", "dpo-pack"]
    lines = [
        "---",
        yaml.safe_dump(front, sort_keys=False).strip(),
        "---",
        "",
        f"# {recipe.logging.run_name or recipe.output_dir.name}",
        "",
        f"{recipe.model.path} fine-tuned with DPO (Rafailov et al. 2023, arXiv 2305.18290) by dpo-pack "
        f"{dpo_pack.__version__}.",
        "",
    ]
    if evaluation:
        lines += [
            "| held-out set | reward accuracy | reward margin | loss |",
            "|---|---|---|---|",
            *(
                f"| {name} | {m['rewards/accuracies']:.3f} | {m['rewards/margins']:.4f} | {m['loss']:.4f} |"
                for name, m in evaluation.items()
            ),
            "",
        ]
    lines += [
        f"Training: {totals['steps']:,} steps, {totals['pairs']:,} preference pairs, "
        f"{totals['tokens']:,} tokens, {format_seconds(totals['train_seconds'])}.",
        "",
        "## Recipe",
        "",
        "```yaml",
        dump_recipe(recipe).strip(),
        "```",
        "",
    ]
    return "\n".join(lines)


def _is_on_hub(path: str) -> bool:
    """Whether a recipe's path is a hub id, in the form owner/name, and not something on this machine."""
    return HUB_ID.fullmatch(path) is not None and "/" in path and not Path(path).exists()
