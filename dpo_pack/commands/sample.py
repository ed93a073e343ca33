"""Writes completions of one or several models for the same prompts, and shows them side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from rich.console import Console
from transformers import PreTrainedTokenizerBase

from dpo_pack.data.tokenizer import bounded_template
from dpo_pack.model.scorer import resolve_precision
from dpo_pack.recipe.load import Recipe, check_environment, load_recipe, parse_recipe
from dpo_pack.recipe.load import TOKENIZER_FILES
from dpo_pack.recipe.schema import SamplesRecipe
from dpo_pack.reports.completions import render_completions
from dpo_pack.run.models import ModelFacts, check_model, load_weights, resolve_model, resolve_policy
from dpo_pack.run.prepare import prepare_data, prepare_prompts, prepare_tokenizer
from dpo_pack.run.run_dir import RECIPE_FILE
from dpo_pack.run.samples import (
    SamplePrompt,
    complete,
    greedy_generator,
    most_prompt_tokens,
    prompt_of,
    sample_prompts,
)
from dpo_pack.system import ranks
from dpo_pack.system.errors import DpoPackError, ModelError, RecipeError, first_line
from dpo_pack.system.memory import release_memory

_CUT = " [...]"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sampled:
    """A model to sample from. `path` is a directory or a hub id; None: the starting policy of `recipe`."""

    recipe: Recipe
    path: str | None

    @property
    def label(self) -> str:
        return self.path or self.recipe.model.path

    def facts(self, device: torch.device) -> ModelFacts:
        precision = resolve_precision(self.recipe.model.dtype, self.recipe.model.autocast, device)
        if self.path is None:
            return resolve_policy(self.recipe, precision)
        return resolve_model(self.recipe, precision, self.path, recipe_key="sample")


def sample_models(models: Sequence[str], console: Console, *, texts: Sequence[str], num: int | None) -> None:
    """Prints what `models` answer to the same prompts. A run in `models` means its start and its model.

    One of `models` may be a recipe file. The prompts are `texts`; if there are none, `num` held-out prompts
    of the recipe file, or else of the first run. Raises RecipeError, ModelError, DataError.
    """
    if texts and num is not None:
        raise RecipeError("sample: give --prompt or --num, not both")
    sampled, recipe = _sampled_models(models)
    if recipe is None:
        if not texts:
            label = sampled[0].label
            raise RecipeError(
                f"sample: {label} is not a run, so it has no prompts; give --prompt TEXT or a recipe"
            )
        recipe = sampled[0].recipe
    check_environment(recipe, trains=False)
    settings = recipe.logging.samples or SamplesRecipe()
    device = Accelerator(cpu=not ranks.uses_cuda()).device
    facts = [model.facts(device) for model in sampled]
    for model, known in zip(sampled, facts, strict=True):
        check_model(model.recipe, known, device)
    tokenizer = prepare_tokenizer(recipe)
    for model in sampled:
        _check_tokenizer(model, tokenizer, recipe)
    room = min(most_prompt_tokens(known.config, settings.max_new_tokens) for known in facts)
    if texts:
        prompts = [_prompt(text, tokenizer, most_tokens=room) for text in texts]
    else:
        read = prepare_data if recipe.online is None else prepare_prompts
        data = read(recipe, tokenizer, console)
        prompts = sample_prompts(recipe, data, tokenizer, num=num or settings.num, most_tokens=room)
    if not prompts:
        raise RecipeError(
            f"sample: no prompt leaves room for {settings.max_new_tokens} tokens in {room} positions; give "
            "--prompt TEXT"
        )
    completions = {}
    for model, known in zip(sampled, facts, strict=True):
        release_memory()
        loaded = load_weights(model.recipe, known, device=device)
        generator = greedy_generator(
            loaded.scorer,
            tokenizer,
            max_new_tokens=settings.max_new_tokens,
            token_budget=recipe.packing.token_budget,
            device=device,
            console=console,
        )
        try:
            completions[model.label] = complete(generator, prompts, cut_mark=_CUT)
        except DpoPackError:
            raise
        except Exception as error:  # the model's code may raise any error
            raise ModelError(f"sample: {model.label} cannot generate ({first_line(error)})") from error
        del loaded, generator
    render_completions([(one.source, one.prompt.text) for one in prompts], completions, console)
    if any(answer.endswith(_CUT) for answers in completions.values() for answer in answers):
        most = f"{settings.max_new_tokens:,} tokens (logging.samples.max_new_tokens)"
        console.print(f"An answer that ends in [...] was cut after {most}")
    if num is not None and len(prompts) < num:
        console.print(f"There are only {len(prompts)} different prompts that leave room for a completion")


def _sampled_models(names: Sequence[str]) -> tuple[list[_Sampled], Recipe | None]:
    """Returns the models, and the recipe whose prompts they get (None: neither recipe nor run is given)."""
    files = [name for name in names if name.endswith((".yaml", ".yml")) or Path(name).is_file()]
    if len(files) > 1 or len(files) == len(names):
        raise RecipeError("sample: give one or several runs or models, and at most one recipe")
    recipe = load_recipe(Path(files[0])) if files else None
    sampled: list[_Sampled] = []
    for name in (name for name in names if name not in files):
        run = Path(name)
        if not (run / RECIPE_FILE).is_file():
            plain = {"output_dir": "unused", "model": {"path": name}, "data": {"train": "unused"}}
            own = recipe or parse_recipe(plain, ["packing.mode=padded"])
            sampled.append(_Sampled(recipe=own, path=name))
            continue
        own = load_recipe(run / RECIPE_FILE)
        if not (run / "model").is_dir():
            raise ModelError(f"sample: {run} has no model yet; finish the run, or give a model")
        sampled += [_Sampled(recipe=own, path=None), _Sampled(recipe=own, path=str(run / "model"))]
        recipe = recipe or own
    return list({model.label: model for model in sampled}.values()), recipe


def _check_tokenizer(sampled: _Sampled, tokenizer: PreTrainedTokenizerBase, recipe: Recipe) -> None:
    """Raises ModelError if the model has another tokenizer, because the same ids then mean other texts."""
    path = sampled.path
    if path is None or path == recipe.model.path:
        return
    if Path(path).is_dir() and not any((Path(path) / name).is_file() for name in TOKENIZER_FILES):
        return  # the directory has no tokenizer
    tree = sampled.recipe.model_dump(mode="json")
    tree["model"] |= {"path": path, "revision": None}
    tree["tokenizer"] |= {"path": None}
    own = prepare_tokenizer(parse_recipe(tree))
    if own.get_vocab() != tokenizer.get_vocab():
        raise ModelError(
            f"sample: {path} has another tokenizer than {recipe.tokenizer.path or recipe.model.path}; sample "
            "them with two commands"
        )


def _prompt(text: str, tokenizer: PreTrainedTokenizerBase, *, most_tokens: int) -> SamplePrompt:
    """Returns the prompt `text` in tokens: in the tokenizer's chat template if it has one, else as it is."""
    if tokenizer.chat_template is None:
        ids = tokenizer([text])["input_ids"][0]
        ids = ids[:-1] if len(ids) > 1 and ids[-1] == tokenizer.eos_token_id else ids
    else:
        message = [{"role": "user", "content": text}]
        try:
            with bounded_template("mend it, or give a model with another"):
                rendered = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
        except ModelError:
            raise
        except Exception as error:  # a template is a program that came with the model
            raise ModelError(
                f"sample: the chat template cannot render --prompt ({first_line(error)})"
            ) from error
        ids = tokenizer([rendered], add_special_tokens=False)["input_ids"][0]
    if not 0 < len(ids) <= most_tokens:
        raise RecipeError(f"--prompt: has {len(ids):,} tokens; give 1 to {most_tokens:,}")
    return SamplePrompt(source="prompt", prompt=prompt_of(np.array(ids, dtype=np.int32), tokenizer))
