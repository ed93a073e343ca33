"""The trained model in Hugging Face layout, with a model card that says how it came to be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml
from transformers import PreTrainedTokenizerBase

import dpo_pack
from dpo_pack.files import written_aside
from dpo_pack.models import LoadedModel, save_model
from dpo_pack.recipe import Recipe, dump_recipe


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
        save_model(loaded, tokenizer, temporary)
        card = model_card(recipe, totals=totals, evaluation=evaluation)
        (temporary / "README.md").write_text(card, encoding="utf-8")


def model_card(
    recipe: Recipe, *, totals: dict[str, Any], evaluation: dict[str, dict[str, float]]
) -> str:
    """Markdown with the front matter the Hugging Face hub reads."""
    front = {
        "base_model": recipe.model.path,
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["dpo", "preference-optimization", "dpo-pack"],
    }
    lines = [
        "---",
        yaml.safe_dump(front, sort_keys=False).strip(),
        "---",
        "",
        f"# {recipe.logging.run_name or recipe.output_dir.name}",
        "",
        f"{recipe.model.path} fine-tuned with DPO (Rafailov et al. 2023, arXiv 2305.18290) on "
        f"{totals['pairs']:,} preference pairs by dpo-pack {dpo_pack.__version__}.",
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
    lines += ["## Recipe", "", "```yaml", dump_recipe(recipe).strip(), "```", ""]
    lines += ["## Totals", "", "```json", json.dumps(totals, indent=2), "```", ""]
    return "\n".join(lines)
