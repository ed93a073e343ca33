"""Two models answer the same prompts, with the same random numbers, one model after the other.

The prompts are rows as they were written, and none that was trained on. Answers are kept as JSON lines, so a
verdict that is stopped goes on.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from rich.console import Console
from transformers import PreTrainedTokenizerBase

from dpo_pack.data.ingest import Ingestion
from dpo_pack.data.sources import HELD_OUT, Data, locate_source
from dpo_pack.data.store import content_key
from dpo_pack.data.tokenization import Prompt, tokenizer_fingerprint
from dpo_pack.model.building import load_model
from dpo_pack.model.facts import ModelFacts
from dpo_pack.online.interface import Completion, Draw, Failure, Rollout, SamplingSettings
from dpo_pack.online.judges import without_reasoning
from dpo_pack.online.transformers_generator import TransformersGenerator
from dpo_pack.recipe.load import INFO_FILE, Recipe
from dpo_pack.recipe.schema import EvalFraction, SourceRecipe
from dpo_pack.recipe.types import MAX_ROW_TOKENS
from dpo_pack.reference.cache import namespace_digest
from dpo_pack.run.models import check_model, resolve_model
from dpo_pack.run.run_dir import input_fingerprints
from dpo_pack.run.samples import most_prompt_tokens, read_samples
from dpo_pack.run.setup import other_tokens, prepare_data, prepare_tokenizer
from dpo_pack.system import ranks
from dpo_pack.system.console import shown
from dpo_pack.system.errors import DpoPackError, ModelError, RecipeError, RunError, first_line
from dpo_pack.system.files import Json, read_json, write_text_atomically
from dpo_pack.system.machine import release_memory
from dpo_pack.system.process import counted

_BATCH_PROMPTS = 32  # answers are kept in batches of so many
_MUCH = 0.2  # a warning is printed if more of a model's answers are cut off


@dataclass(frozen=True, slots=True, kw_only=True)
class Contest:
    """Two models that answer the same prompts, and what they share: dtype, tokenizer, chat template."""

    recipe: Recipe  # of the run; without a run, one whose model.path is the start
    start: ModelFacts
    new: ModelFacts
    tokenizer: PreTrainedTokenizerBase
    device: torch.device
    console: Console


def prepare_contest(recipe: Recipe, new: str, console: Console, *, against: str | None = None) -> Contest:
    """new: a directory or hub id of a model or an adapter. against: another one in place of the recipe's
    start. Loads no weights. Raises RecipeError, ModelError."""
    device, tokenizer = Accelerator(cpu=not ranks.uses_cuda()).device, prepare_tokenizer(recipe)
    models = list[ModelFacts]()
    for path, key in ((against, "verdict" if against else "model.path"), (new, "verdict")):
        facts = resolve_model(recipe, device, path, recipe_key=key, gathers=False)
        if path is not None and (told := other_tokens(facts, tokenizer, writes=True)):
            raise ModelError(f"{told}; compare models with the same tokenizer")
        plain = facts.settings.model_copy(update={"compile": False})  # for transformers' own forward
        precision = models[0].precision if models else facts.precision
        models.append(replace(facts, settings=plain, precision=precision, is_packed=False))
        check_model(models[-1], device)
    both = {"start": models[0], "new": models[1]}
    return Contest(recipe=recipe, tokenizer=tokenizer, device=device, console=console, **both)


# ------------------------------------------------------------------------------------------------ prompts


def choose_prompts(
    contest: Contest, source: SourceRecipe | None, *, num: int, max_new_tokens: int
) -> list[Prompt]:
    """Returns at most `num` distinct prompts, the same ones every time: of `source` (`verdict.prompts`), or
    else held-out ones of the run in `recipe.output_dir`. Prints how many there are, and what is left out.
    Raises DataError, RecipeError, and RunError if data files have changed since the run."""
    recipe, console, data = contest.recipe, contest.console, None
    if recipe.model.images:
        raise RecipeError("verdict.judges: prompts with images are not answered yet; take tasks or a command")
    info = read_json(recipe.output_dir / INFO_FILE)
    if source is None and not (info and recipe.data.eval):
        raise RecipeError("verdict.prompts: no prompts are held out of a training; name a data source")
    try:
        data = info and _data_of_run(contest, info)
    except DpoPackError as error:
        if source is None:
            raise
        console.print(f"Warning: the prompts that were trained on are unknown, so all count ({error})")
    trained = set(map(bytes, data.train.whole_prompt_keys)) if data else set()
    found = list(_candidates(contest, source, data))
    every = {prompt.ids.tobytes(): prompt for _, prompt in found}
    seen = {prompt.ids.tobytes() for key, prompt in found if key in trained}
    salt = str(recipe.seed).encode()  # with a larger `num`, the same prompts and others
    order = sorted(every.keys() - seen, key=lambda ids: hashlib.blake2b(ids, key=salt).digest())
    room = min(most_prompt_tokens(model.config, max_new_tokens) for model in (contest.start, contest.new))
    prompts = [every[ids] for ids in order if len(every[ids].ids) <= room]
    left_out = {"trained on": len(seen), f"too long for {max_new_tokens:,} more": len(order) - len(prompts)}
    told = f"{len(every):,} different ones" + "".join(f", {n:,} {why}" for why, n in left_out.items() if n)
    if not prompts:
        raise RunError(
            f"verdict.prompts: none is left ({told}); name others, or lower verdict.max_new_tokens"
        )
    console.print(f"Prompts: {len(prompts[:num]):,} ({told})")
    return prompts[:num]


def _data_of_run(contest: Contest, info: Json) -> Data:
    """Raises RunError if data are not as the run has read them."""
    recipe, console = contest.recipe, contest.console
    with shown(console, "Reading the data of the run"):
        data = prepare_data(recipe, contest.tokenizer, Console(quiet=True), takes_prompts=True)
    then = {key: value for key, value in info.get("inputs", {}).items() if key.startswith("data.")}
    now = input_fingerprints(recipe, then)
    changed = [str(recipe.inputs[key]) for key in now if now[key] != then[key]]
    if info.get("fingerprints", {}).get("data") != data.fingerprint:  # of the hub, or read in another way
        changed.append("the training data")
    if changed:
        what = f"verdict: {changed[0]} changed since the run, so the held-out prompts are unknown"
        raise RunError(f"{what}; put the data back, or name other prompts in verdict.prompts")
    return data


def _candidates(
    contest: Contest, source: SourceRecipe | None, data: Data | None
) -> Iterator[tuple[bytes, Prompt]]:
    """Yields prompts as their rows have them, each with the key of its text in the training's tables."""
    settings = contest.recipe.data
    sources = [("verdict.prompts", source)] if source else []
    rows = dict[str, set[int]]()  # what is held out of a source; without an entry all rows are
    if source is None and isinstance(settings.eval, EvalFraction):
        assert data is not None
        if data.eval_prompts:  # an online run has them as they were written
            yield from ((b"", prompt) for prompt in data.eval_prompts[HELD_OUT])
            return
        table = data.eval[HELD_OUT]
        for number, one in enumerate(settings.train):
            sources.append((key := f"data.train.{number}", one))
            rows[key] = set(table.row_numbers[table.source_indices == number].tolist())
    elif source is None:
        sources = [(f"data.eval.{number}", one) for number, one in enumerate(settings.eval_sources)]
    limits = {"max_length": MAX_ROW_TOKENS, "max_prompt_length": None, "num_workers": 0}
    for key, one in sources:
        ingestion = Ingestion(
            located=locate_source(one, key, None),
            source=one,
            data=settings.model_copy(update=limits),
            tokenizer=contest.tokenizer,
            completion_tokens=0,  # rows are prompts
        )
        with ingestion.start() as numbered:
            wanted = (row for row in numbered if key not in rows or row[0] in rows[key])
            for batch in ingestion.batches(wanted) if rows.get(key, True) else ():
                keys = batch.pairs.records["whole_prompt_key"]
                yield from zip(map(bytes, keys), batch.prompts, strict=True)
        if dropped := ingestion.dropped_counts.total():
            contest.console.print(f"Warning: {one.path}: {counted(dropped, 'row')} without a prompt left out")


# ------------------------------------------------------------------------------------------------ answers


def read_kept(path: Path) -> dict[str, Json]:
    """Returns the lines of a file by their keys."""
    return {line["key"]: line for line in read_samples(path) if "key" in line}


def keep(path: Path, kept: dict[str, Json], lines: Sequence[Json]) -> None:
    """Adds lines to what `read_kept` has returned, and to the file. Raises CacheError."""
    kept |= {line["key"]: line for line in lines}
    every = (json.dumps(line, ensure_ascii=False) + "\n" for line in kept.values())
    write_text_atomically(path, "".join(every))


def answer_prompts(
    contest: Contest, prompts: Sequence[Prompt], sampling: SamplingSettings, directory: Path
) -> list[Rollout]:
    """Returns each prompt with two completions, the start's and the new model's, whose texts have no
    reasoning. `directory` (output_dir/verdict) keeps them in answers.jsonl; what it has is not written again.
    Prints lengths, and the parts that are cut off and identical. Raises ModelError, CacheError."""
    draws = [Draw(number=n, prompt_index=n, prompt=prompt) for n, prompt in enumerate(prompts)]
    path, models = directory / "answers.jsonl", (contest.start, contest.new)
    both = [_answers_of(model, contest, draws, sampling, path) for model in models]
    tokens = [np.mean([len(answer.ids) for answer in answers]) for answers in both]
    cut = [1 - np.mean([answer.is_finished for answer in answers]) for answers in both]
    same = np.mean([one.text == other.text for one, other in zip(*both, strict=True)])
    contest.console.print(
        f"Answers of the start and of the new model: {tokens[0]:,.0f} and {tokens[1]:,.0f} tokens on "
        f"average; verdict.max_new_tokens cuts off {cut[0]:.0%} and {cut[1]:.0%}; {same:.0%} are identical"
    )
    if max(cut) > _MUCH:
        what = f"Warning: judges see only the beginnings of {max(cut):.0%} of a model's answers"
        contest.console.print(f"{what}; raise verdict.max_new_tokens ({sampling.max_new_tokens:,})")
    games = zip(draws, zip(*both, strict=True), strict=True)
    return [Rollout(draw=draw, completions=answers) for draw, answers in games]


def _answers_of(
    model: ModelFacts, contest: Contest, draws: Sequence[Draw], sampling: SamplingSettings, path: Path
) -> list[Completion]:
    recipe, tokenizer, device, kept = contest.recipe, contest.tokenizer, contest.device, read_kept(path)
    decided = [namespace_digest(model.namespace), tokenizer_fingerprint(tokenizer), asdict(sampling)]
    key_of = {
        draw.number: content_key([*decided, recipe.seed, draw.number, draw.prompt.ids.tolist()])
        for draw in draws
    }
    # A verdict that goes on has the same batches: in another one, rounding may choose another token.
    order = sorted(draws, key=lambda draw: -len(draw.prompt.ids))
    batches = [order[first : first + _BATCH_PROMPTS] for first in range(0, len(order), _BATCH_PROMPTS)]
    batches = [batch for batch in batches if any(key_of[draw.number] not in kept for draw in batch)]
    if batches:
        release_memory()
        with shown(contest.console, f"Loading {model.label}"):
            scorer = load_model(model, device=device).scorer
        generator = TransformersGenerator(
            scorer=scorer,
            tokenizer=tokenizer,
            sampling=sampling,
            seed=recipe.seed,
            token_budget=recipe.token_budgets(device.type)[1],
            device=device,
            console=Console(quiet=True),
        )
        with shown(contest.console, f"Answers of {model.label}", "prompts", sum(map(len, batches))) as bar:
            for batch in batches:
                try:
                    answers = generator.generate(batch)
                except Exception as error:  # the model's code may raise any error
                    raise ModelError(f"verdict: {model.label} cannot answer ({first_line(error)})") from error
                lines = list[Json]()
                for draw, answer in zip(batch, answers, strict=True):
                    assert not isinstance(answer, Failure)
                    said = _said(answer[0], draw.prompt, tokenizer, sampling.stop)
                    line: Json = {"key": key_of[draw.number], "model": model.label, "answer": said}
                    line |= {"prompt": draw.prompt.text, "is_finished": answer[0].is_finished}
                    lines.append({**line, "ids": answer[0].ids.tolist()})
                keep(path, kept, lines)
                bar.advance(len(batch))
    return [
        Completion(ids=np.array(one["ids"], np.int32), text=one["answer"], is_finished=one["is_finished"])
        for one in (kept[key_of[draw.number]] for draw in draws)
    ]


def _said(answer: Completion, prompt: Prompt, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str]) -> str:
    """Returns the answer's text without its reasoning, whose marks may be special tokens."""
    whole = str(tokenizer.decode(answer.ids.tolist(), skip_special_tokens=False))
    if (said := without_reasoning(whole, prompt=prompt.text)) == whole:
        return answer.text.strip()
    for token in tokenizer.added_tokens_decoder.values():
        said = said.replace(token.content, "") if token.special else said
    return said[: min((at for string in stop if (at := said.find(string)) >= 0), default=len(said))].strip()
