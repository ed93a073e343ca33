"""Sample completions: what the policy answers to a few prompts, before the first step and later.

They go to `samples.jsonl`. They use no random numbers and change nothing that a training step reads.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np
import torch
from rich.console import Console
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from dpo_pack.data.load import Data
from dpo_pack.data.store import PairTable
from dpo_pack.data.tokenization import Prompt
from dpo_pack.data.truncation import TokenIds
from dpo_pack.model.config import known_positions
from dpo_pack.model.parallel import is_sharded
from dpo_pack.model.scorer import CompletionLogps
from dpo_pack.online.interface import Draw, Failure
from dpo_pack.online.sampling import SamplingSettings
from dpo_pack.online.transformers_generator import TransformersGenerator
from dpo_pack.recipe.load import Recipe, source_names
from dpo_pack.recipe.types import MAX_ROW_TOKENS
from dpo_pack.run.setup import Setup
from dpo_pack.system import ranks
from dpo_pack.system.errors import RunError, first_line
from dpo_pack.system.files import parse_json, write_text_atomically

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A line of samples.jsonl."""

    step: int  # the completion is of the policy after this step
    source: str  # the held-out set of the prompt; where nothing is held out, the training source
    prompt: str  # as the template renders it, special tokens included
    completion: str  # without the token that ends it
    model: Literal["start", "policy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplePrompt:
    """A prompt of samples, and where it comes from."""

    source: str
    prompt: Prompt


class Sampler:
    """Writes the samples of a run. Rank 0 does all of it, and the other ranks go on.

    If the model is in shards, all ranks generate the same completions together, and rank 0 writes them.
    """

    def __init__(self, setup: Setup, policy: CompletionLogps, path: Path) -> None:
        """Chooses the prompts. `path`: samples.jsonl. Prints why there are no samples, if there are none."""
        self.path = path
        self.console: Console = setup.console
        self.every_steps: int | None = None
        self.prompts: list[SamplePrompt] = []
        settings, recipe = setup.recipe.logging.samples, setup.recipe
        if settings is None:
            return
        if settings.every_evals is not None and recipe.train.eval_every_steps is not None:
            self.every_steps = settings.every_evals * recipe.train.eval_every_steps
        self.generator = greedy_generator(
            policy,
            setup.tokenizer,
            max_new_tokens=settings.max_new_tokens,
            token_budget=recipe.packing.token_budget,
            device=setup.device,
            console=self.console,
        )
        self.is_sharded = is_sharded(policy.model)
        if not policy.model.can_generate():
            self._give_up(f"{type(policy.model).__name__} cannot generate")
        else:
            room = most_prompt_tokens(policy.model.config, settings.max_new_tokens)
            self.prompts = sample_prompts(
                recipe, setup.data, setup.tokenizer, num=settings.num, most_tokens=room
            )
            if not self.prompts:
                self._give_up(f"no prompt leaves the model room for {settings.max_new_tokens} tokens")

    def cut_after(self, step: int) -> None:
        """Removes the samples of later steps; only rank 0 may call it. Raises CacheError."""
        written = read_samples(self.path)
        kept = [sample for sample in written if sample.step <= step]
        if len(kept) < len(written):
            self._write(kept)

    def at_evaluation(self, step: int) -> None:
        """Writes samples if they are due at the evaluation after `step`, see `write`."""
        if step == 0 or (self.every_steps is not None and step % self.every_steps == 0):
            self.write(step)

    def write(self, step: int) -> None:
        """Writes the completions of the policy after `step`, unless they are written already.

        An error of generation or of the disk does not end the run: this method prints it, and the run writes
        no more samples. Every rank must call this method.
        """
        if not self.prompts or not (ranks.is_first() or self.is_sharded):
            return
        try:
            written = self._first_does(lambda: read_samples(self.path))
            if all(sample.step != step for sample in written):
                completions = complete(self.generator, self.prompts)
                samples = [
                    Sample(
                        step=step,
                        source=asked.source,
                        prompt=asked.prompt.text,
                        completion=completion,
                        model="policy" if step else "start",
                    )
                    for asked, completion in zip(self.prompts, completions, strict=True)
                ]
                self._first_does(lambda: self._write([*written, *samples]))
        except Exception as error:  # of any model's code
            self._give_up(first_line(error))

    def _first_does(self, work: Callable[[], Value]) -> Value:
        """Runs `work`; with shards on rank 0 only, and all ranks return its value or raise its error."""

        def work_or_refuse() -> Value:
            try:
                return work()
            except Exception as error:
                raise RunError(first_line(error)) from error

        return ranks.first_does(work_or_refuse) if self.is_sharded else work()

    def _write(self, samples: Sequence[Sample]) -> None:
        lines = (json.dumps(asdict(sample), ensure_ascii=False) + "\n" for sample in samples)
        write_text_atomically(self.path, "".join(lines))

    def _give_up(self, reason: str) -> None:
        self.prompts = []
        self.console.print(f"Samples: none ({reason})")


def read_samples(path: Path) -> list[Sample]:
    """Returns the lines of samples.jsonl, without those that are damaged; none if there is no file."""
    if not path.is_file():
        return []
    lines = (parse_json(line, Sample) for line in path.read_bytes().splitlines())
    return [line for line in lines if line is not None]


def before_and_after(path: Path) -> list[tuple[str, Sample]]:
    """Returns the newest samples, each with the completion of its prompt before the first step."""
    written = read_samples(path)
    newest = written[-1].step if written else 0
    start = {sample.prompt: sample.completion for sample in written if sample.step == 0}
    return [
        (start[sample.prompt], sample)
        for sample in written
        if sample.step == newest > 0 and sample.prompt in start
    ]


def greedy_generator(
    policy: CompletionLogps,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_new_tokens: int,
    token_budget: int,
    device: torch.device,
    console: Console,
) -> TransformersGenerator:
    """Returns a generator of greedy completions; they need no random numbers."""
    return TransformersGenerator(
        policy=policy,
        tokenizer=tokenizer,
        sampling=SamplingSettings(completions_per_prompt=1, max_new_tokens=max_new_tokens, temperature=0.0),
        seed=0,
        token_budget=token_budget,
        device=device,
        console=console,
    )


def complete(
    generator: TransformersGenerator, prompts: Sequence[SamplePrompt], *, cut_mark: str = ""
) -> list[str]:
    """Returns the completion of each prompt as text, with special tokens but without the one that ends it.
    A completion that the policy has not ended gets `cut_mark` at its end."""
    draws = [
        Draw(number=number, prompt_index=number, prompt=asked.prompt) for number, asked in enumerate(prompts)
    ]
    texts = []
    for answer in generator.generate(draws):
        assert not isinstance(answer, Failure)
        (completion,) = answer
        ids = completion.ids[:-1] if completion.is_finished else completion.ids
        text = str(generator.tokenizer.decode(ids.tolist(), skip_special_tokens=False))
        texts.append(text if completion.is_finished else text + cut_mark)
    return texts


def most_prompt_tokens(config: PretrainedConfig, max_new_tokens: int) -> int:
    """Returns the length of the longest prompt that leaves a model positions for a completion."""
    known = known_positions(config)
    return MAX_ROW_TOKENS if known is None else max(known - max_new_tokens, 0)


def sample_prompts(
    recipe: Recipe, data: Data, tokenizer: PreTrainedTokenizerBase, *, num: int, most_tokens: int
) -> list[SamplePrompt]:
    """Returns at most `num` different prompts of at most `most_tokens` tokens.

    The first prompt of each held-out set comes first, then the second of each, and so on. If nothing is held
    out, the prompts are those of the training sources, in the same order.
    """
    most = most_tokens
    sets: dict[str, Iterator[TokenIds]] = {name: _prompts(pairs, most) for name, pairs in data.eval.items()}
    if data.prompts:
        sets = {
            name: (prompt.ids for prompt in prompts if len(prompt.ids) <= most)
            for name, prompts in data.eval_prompts.items()
        }
    if not sets:
        sets = {
            name: _prompts(data.train.select(np.flatnonzero(data.train.source_indices == number)), most)
            for number, name in enumerate(source_names(recipe.data.train))
        }
    rounds = itertools.zip_longest(*(itertools.islice(_distinct(ids), num) for ids in sets.values()))
    found = [
        SamplePrompt(source=source, prompt=prompt_of(ids, tokenizer))
        for one_of_each in rounds
        for source, ids in zip(sets, one_of_each, strict=True)
        if ids is not None
    ]
    return found[:num]


def prompt_of(ids: TokenIds, tokenizer: PreTrainedTokenizerBase) -> Prompt:
    """Returns the prompt that has these token ids, with its text."""
    text = str(tokenizer.decode(ids.tolist(), skip_special_tokens=False))
    return Prompt(ids=ids, text=text, messages=None, row_number=0)


def _prompts(table: PairTable, most_tokens: int) -> Iterator[TokenIds]:
    lengths = table.prompt_lengths
    return (table.prompt(int(pair)) for pair in np.flatnonzero((lengths > 0) & (lengths <= most_tokens)))


def _distinct(prompts: Iterator[TokenIds]) -> Iterator[TokenIds]:
    seen = set()
    for ids in prompts:
        if ids.tobytes() not in seen:
            seen.add(ids.tobytes())
            yield ids
