"""Completes prompts greedily: samples of a run's policy, and for `dpopack sample` what several models answer.

A run writes samples to `samples.jsonl` before the first step and later. They use no random numbers and change
nothing that a training step reads.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from rich.console import Console
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from dpo_pack.data.sources import Data
from dpo_pack.data.store import TokenIds, distinct_keys
from dpo_pack.data.tokenization import Prompt
from dpo_pack.data.tokenizer import rendering
from dpo_pack.data.values import BadRow
from dpo_pack.model.building import load_model
from dpo_pack.model.config import known_positions
from dpo_pack.model.parallel import is_sharded
from dpo_pack.model.scorer import CompletionLogps
from dpo_pack.online.interface import Draw, Failure, SamplingSettings
from dpo_pack.online.transformers_generator import TransformersGenerator
from dpo_pack.recipe.load import INFO_FILE, Recipe, load_recipe, parse_recipe
from dpo_pack.recipe.schema import SamplesRecipe
from dpo_pack.recipe.types import MAX_ROW_TOKENS
from dpo_pack.run.models import Setup, check_model, resolve_model
from dpo_pack.run.setup import check_vocabulary, prepare_data, prepare_tokenizer
from dpo_pack.system import ranks
from dpo_pack.system.console import shown
from dpo_pack.system.errors import DpoPackError, ModelError, RecipeError, first_line
from dpo_pack.system.files import parse_json, text_of, write_text_atomically
from dpo_pack.system.machine import release_memory

SourcedPrompt = tuple[str, Prompt]  # its held-out set; where nothing is held out, its training source
Sample = dict[str, Any]  # a line of samples.jsonl: step, source, prompt, completion, model


def complete(
    scorer: CompletionLogps,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[SourcedPrompt],
    most: int,
    token_budget: int,
    device: torch.device,
    console: Console,
) -> list[str]:
    """Returns the completion of each prompt, of at most `most` tokens, as text, with special tokens but
    without the one that ends it."""
    generator = TransformersGenerator(
        scorer=scorer,
        tokenizer=tokenizer,
        sampling=SamplingSettings(completions_per_prompt=1, max_new_tokens=most, temperature=0.0),
        seed=0,
        token_budget=token_budget,
        device=device,
        console=console,
    )
    draws = [Draw(number=n, prompt_index=n, prompt=prompt) for n, (_, prompt) in enumerate(prompts)]
    texts = []
    for answer in generator.generate(draws):
        assert not isinstance(answer, Failure)
        (completion,) = answer
        ids = completion.ids[:-1] if completion.is_finished else completion.ids
        texts.append(prompt_of(ids, tokenizer).text)
    return texts


class Sampler:
    """Writes the samples of a run, on rank 0. Ranks that share a model in shards generate together."""

    def __init__(self, setup: Setup, scorer: CompletionLogps, path: Path) -> None:
        """Chooses the prompts. `path`: samples.jsonl. Prints why there are no samples, if there are none."""
        self.setup, self.scorer, self.path = setup, scorer, path
        self.prompts: list[SourcedPrompt] = []
        settings = setup.recipe.logging.samples
        if settings is None:
            return
        room = most_prompt_tokens(scorer.model.config, settings.max_new_tokens)
        if setup.recipe.model.images:
            self._give_up("prompts with images are not answered yet")
        elif not scorer.model.can_generate():
            self._give_up(f"{type(scorer.model).__name__} cannot generate")
        elif prompts := sample_prompts(setup.data, setup.tokenizer, num=settings.num, most_tokens=room):
            self.prompts = prompts
        else:
            self._give_up(f"no prompt leaves the model room for {settings.max_new_tokens} tokens")

    def cut_after(self, step: int) -> None:
        """Removes the samples of later steps; only rank 0 may call it. Raises CacheError."""
        if self.path.exists():
            self._write([sample for sample in read_samples(self.path) if sample["step"] <= step])

    def write(self, step: int, *, at_end: bool = False) -> None:
        """Writes the completions of the policy after `step`, if they are due at this evaluation or `at_end`,
        and not written yet. All ranks must call it. An error ends the samples, but not the run."""
        setup, recipe = self.setup, self.setup.recipe
        settings = recipe.logging.samples or SamplesRecipe()
        every_steps = (settings.every_evals or 0) * (recipe.train.eval_every_steps or 0)
        if not (at_end or step == 0 or (every_steps and step % every_steps == 0)):
            return
        written = read_samples(self.path)
        is_due = bool(self.prompts) and all(sample["step"] != step for sample in written)
        # Rank 0 says whether all generate: it alone knows the file, and errors of the disk.
        sharded = is_sharded(self.scorer.model)
        if not (ranks.first_says(is_due) if sharded else ranks.only_first_does(lambda: is_due)):
            return
        try:
            prompts, device, most = self.prompts, setup.device, settings.max_new_tokens
            budget = recipe.token_budgets(device.type)[0]
            texts = complete(self.scorer, setup.tokenizer, prompts, most, budget, device, setup.console)
            model = "policy" if step else "start"
            for (source, prompt), text in zip(prompts, texts, strict=True):
                sample = {"step": step, "source": source, "prompt": prompt.text, "completion": text}
                written.append({**sample, "model": model})
            ranks.only_first_does(partial(self._write, written))
        except Exception as error:  # of any model's code
            self._give_up(first_line(error))

    def _write(self, samples: Sequence[Sample]) -> None:
        lines = (json.dumps(sample, ensure_ascii=False) + "\n" for sample in samples)
        write_text_atomically(self.path, "".join(lines))

    def _give_up(self, reason: str) -> None:
        self.prompts = []
        self.setup.console.print(f"Samples: none ({reason})")


def read_samples(path: Path) -> list[Sample]:
    """Returns the lines of samples.jsonl, without those that are damaged; none if there is no file."""
    lines = (parse_json(line) for line in text_of(path).encode().splitlines())
    return [line for line in lines if line is not None]


def most_prompt_tokens(config: PretrainedConfig, max_new_tokens: int) -> int:
    """Returns the length of the longest prompt that leaves a model positions for a completion."""
    known = known_positions(config)
    return MAX_ROW_TOKENS if known is None else max(known - max_new_tokens, 0)


def sample_prompts(
    data: Data, tokenizer: PreTrainedTokenizerBase, *, num: int, most_tokens: int
) -> list[SourcedPrompt]:
    """Returns at most `num` different prompts of at most `most_tokens` tokens: the first one of each held-out
    set, then the second of each, and so on; if nothing is held out, of each training source."""
    tables = dict(data.eval)
    if not tables and not data.eval_prompts:
        for number, source in enumerate(data.report["train"]["sources"]):
            tables[source["name"]] = data.train.select(data.train.source_indices == number)
    sets: dict[str, list[TokenIds]] = {}
    for name, table in tables.items():
        lengths = table.prompt_lengths
        pairs = np.flatnonzero((lengths > 0) & (lengths <= most_tokens))
        first, _ = distinct_keys(table.prompt_keys[pairs])
        contexts = (table.group(pair).context for pair in pairs[np.sort(first)[:num]].tolist())
        sets[name] = [context.astype(np.int32, copy=False) for context in contexts]
    for name, prompts in data.eval_prompts.items():
        different = {one.ids.tobytes(): one.ids for one in prompts if len(one.ids) <= most_tokens}
        sets[name] = list(different.values())[:num]
    rounds = zip_longest(*([(name, ids) for ids in found] for name, found in sets.items()))
    in_turn = [one for one in chain.from_iterable(rounds) if one is not None]
    return [(name, prompt_of(ids, tokenizer)) for name, ids in in_turn[:num]]


def prompt_of(ids: TokenIds, tokenizer: PreTrainedTokenizerBase) -> Prompt:
    text = str(tokenizer.decode(ids.tolist(), skip_special_tokens=False))
    return Prompt(ids=ids, text=text, messages=None, row_number=0)


# ----------------------------------------------------------------------------- several models side by side


def sample_models(
    names: Sequence[str],
    console: Console,
    *,
    texts: Sequence[str],
    num: int | None,
    max_new_tokens: int | None = None,
    paths: Mapping[str, str] = {},
) -> tuple[list[tuple[str, str]], dict[str, list[str]]]:
    """Returns prompts, (source, text) each, and what each model answers to them, by the model's name. names:
    runs, models, and at most one recipe file. A run means its start and its model, which is in `paths` if it
    is not in model/. The prompts are `texts`, or else `num` held-out ones of the recipe file or the first
    run. max_new_tokens: None: the recipe's. Raises RecipeError, ModelError, DataError."""
    if texts and num is not None:
        raise RecipeError("sample: give --prompt or --num, not both")
    models, recipe = _models_and_recipe(names, paths)
    if recipe is None and not texts:
        what = f"{names[0]} is not a run, so it has no prompts"
        raise RecipeError(f"sample: {what}; give --prompt TEXT or a recipe")
    recipe = recipe or next(iter(models.values()))[0]
    if recipe.model.images and not texts:
        raise RecipeError("sample: prompts with images are not answered yet; give --prompt TEXT")
    settings = recipe.logging.samples or SamplesRecipe()
    most = settings.max_new_tokens if max_new_tokens is None else max_new_tokens
    device = Accelerator(cpu=not ranks.uses_cuda()).device
    images = resolve_model(recipe, device, gathers=False).processor if recipe.model.images else None
    tokenizer = prepare_tokenizer(recipe, images)
    facts = {}
    for name, (own, path) in models.items():
        key = "model.path" if path is None else "sample"
        facts[name] = resolve_model(own, device, path, recipe_key=key, gathers=False)
        check_model(facts[name], device)
        if path is not None:
            check_vocabulary(facts[name], tokenizer, writes=True)
    room = min(most_prompt_tokens(known.config, most) for known in facts.values())
    if texts:
        options = recipe.data.chat_template_kwargs
        prompts = [("prompt", _prompt(text, tokenizer, options, most_tokens=room)) for text in texts]
    else:
        data = prepare_data(recipe, tokenizer, console, takes_prompts=True)
        prompts = sample_prompts(data, tokenizer, num=num or settings.num, most_tokens=room)
    if not prompts:
        what = f"no prompt leaves room for {most} tokens in {room} positions"
        raise RecipeError(f"sample: {what}; give --prompt TEXT")
    console.print(f"An answer has at most {most} tokens (--max-new-tokens)")
    answers, budget = {}, recipe.token_budgets(device.type)[0]
    for name, known in facts.items():
        release_memory()
        with shown(console, f"Loading {name}"):
            scorer = load_model(known, device=device).scorer
        try:
            answers[name] = complete(scorer, tokenizer, prompts, most, budget, device, console)
        except DpoPackError:
            raise
        except Exception as error:  # the model's code may raise any error
            raise ModelError(f"sample: {name} cannot generate ({first_line(error)})") from error
        del scorer
    return [(source, prompt.text) for source, prompt in prompts], answers


def _models_and_recipe(
    names: Sequence[str], paths: Mapping[str, str]
) -> tuple[dict[str, tuple[Recipe, str | None]], Recipe | None]:
    """Returns each model's recipe and path (None: the recipe's start), by the name that is shown; and the
    recipe of the prompts (None: neither recipe nor run is given)."""
    files = [name for name in names if name.endswith((".yaml", ".yml")) or Path(name).is_file()]
    if len(files) > 1 or len(files) == len(names):
        raise RecipeError("sample: give one or several runs or models, and at most one recipe")
    recipe = load_recipe(Path(files[0]), lenient=True) if files else None
    models: dict[str, tuple[Recipe, str | None]] = {}
    for name in (name for name in names if name not in files):
        run = Path(name)
        if not (run / INFO_FILE).is_file():
            plain = {"output_dir": "unused", "model": {"path": name}, "data": {"train": "unused"}}
            models[name] = (recipe or parse_recipe(plain, ["packing.mode=padded"]), name)
            continue
        own, trained = load_recipe(run, lenient=True), paths.get(name, str(run / "model"))
        models |= {own.model.path: (own, None), trained: (own, trained)}
        recipe = recipe or own
    return models, recipe


def _prompt(
    text: str, tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any], *, most_tokens: int
) -> Prompt:
    """Returns the prompt `text` in tokens: in the tokenizer's chat template if it has one, else as it is."""
    if tokenizer.chat_template is None:
        ids = tokenizer([text])["input_ids"][0]
        ids = ids[:-1] if len(ids) > 1 and ids[-1] == tokenizer.eos_token_id else ids
    else:
        turns = [{"role": "user", "content": text}]
        try:
            with rendering():
                rendered = tokenizer.apply_chat_template(
                    turns, add_generation_prompt=True, tokenize=False, **options
                )
        except BadRow as bad:
            raise ModelError(f"sample: {bad.detail}") from bad
        ids = tokenizer([rendered], add_special_tokens=False)["input_ids"][0]
    if not 0 < len(ids) <= most_tokens:
        raise RecipeError(f"--prompt: has {len(ids):,} tokens; give 1 to {most_tokens:,}")
    return prompt_of(np.array(ids, dtype=np.int32), tokenizer)
