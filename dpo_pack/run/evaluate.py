"""Evaluates models on a recipe's held-out sets, in a run and for `dpopack evaluate`; compares two models."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from dpo_pack.data.store import PairTable
from dpo_pack.model.scorer import CompletionLogps
from dpo_pack.online.win_rate import WinRate, win_rate_sentence
from dpo_pack.recipe.load import Recipe, source_names
from dpo_pack.recipe.schema import EvalFraction
from dpo_pack.run.log import RunLog
from dpo_pack.run.models import check_model, resolve_model
from dpo_pack.run.pairs import exact_reference, exact_tables, prepare_reference, row_builder
from dpo_pack.run.samples import Sampler
from dpo_pack.run.setup import Setup, check_data, check_vocabulary, load_proved, prepare
from dpo_pack.run.state import Criterion, TrainState, ends_run, judge
from dpo_pack.system import ranks
from dpo_pack.system.console import shown
from dpo_pack.system.errors import ModelError, RecipeError
from dpo_pack.system.hub import HUB_ID
from dpo_pack.system.interrupts import Interruption
from dpo_pack.system.machine import release_memory
from dpo_pack.training.held_out import (
    HeldOutResult,
    compare_results,
    evaluate_pairs,
    held_out_result,
    write_held_out_pairs,
)
from dpo_pack.training.metrics import pair_metrics
from dpo_pack.training.references import CachedReference, Reference


def evaluate_sets(
    setup: Setup,
    scorer: CompletionLogps,
    reference: Reference,
    *,
    between_rows: Callable[[], None] = lambda: None,
) -> Iterator[HeldOutResult]:
    """Yields `scorer`'s result on each held-out set. All ranks must take part.

    Pairs in fp32 are computed in the training's precision, too, which measures its rounding. `between_rows`
    is called before each row, equally often on every rank.
    """
    recipe, all_pairs, exact = setup.recipe, setup.data.eval, exact_tables(setup)
    # If data.eval is a fraction, its pairs come from all training sources. Any other set has one source.
    sources = source_names(recipe.data.train) if isinstance(recipe.data.eval, EvalFraction) else None
    dtype = scorer.compute_dtype if exact is None else torch.float32
    for name, pairs in (all_pairs if exact is None else exact).items():
        evaluate = partial(_evaluate, setup, scorer, reference, pairs, between_rows=between_rows)
        with shown(setup.console, f"Evaluating {name}", "pairs", pairs.num_pairs) as bar:
            values = evaluate(in_float32=exact is not None, progress=bar.advance)
            rounded = values if exact is None else evaluate(in_float32=False)
        named = sources or (name,)
        result = held_out_result(
            name, values, pairs, setup.objective, source_names=named, dtype=dtype, seed=recipe.seed
        )
        if exact is not None:
            margins = pair_metrics(rounded, beta=recipe.loss.beta, dtype=dtype)["rewards/margins"]
            errors = margins.cpu().numpy() - result.metrics["rewards/margins"]
            result.record["margin_noise"] = float(np.sqrt((errors**2).mean()))
        if pairs.num_pairs < all_pairs[name].num_pairs:
            result.record["held_out_pairs"] = all_pairs[name].num_pairs
        yield result


def _evaluate(
    setup: Setup,
    scorer: CompletionLogps,
    reference: Reference,
    pairs: PairTable,
    *,
    in_float32: bool,
    **options: Any,
) -> Tensor:
    """Returns the `pair_values` of the pairs; `options` are those of `evaluate_pairs`."""
    with contextlib.ExitStack() as stack:
        if in_float32:
            assert reference.exact is not None
            reference = reference.exact
            for used in {scorer, reference.moving or scorer}:
                stack.enter_context(used.in_float32())
        return evaluate_pairs(
            scorer,
            row_builder(setup, pairs, reference),
            setup.objective,
            token_budget=setup.reference_token_budget,
            score=reference.score,
            **options,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluator:
    """Evaluates the policy of a run on its held-out sets."""

    setup: Setup
    reference: Reference
    win_rate: WinRate | None  # only for an online run with held-out prompts, else None
    criterion: Criterion | None  # None if nothing is held out
    interruption: Interruption
    sampler: Sampler

    def evaluate(self, state: TrainState, log: RunLog) -> None:
        """Computes the metrics of every held-out set; writes them to metrics.jsonl and `state`."""
        begun = time.monotonic()
        evaluation: dict[str, dict[str, Any]] = {}
        results = []
        for held_out in evaluate_sets(
            self.setup, state.scorer, self.reference, between_rows=self.interruption.poll
        ):
            results.append(held_out)
            evaluation[held_out.name] = result = held_out.record
            low, high = result["intervals"]["rewards/accuracies"]
            sentence = (
                f"reward accuracy {result['rewards/accuracies']:.3f} ({low:.3f} to {high:.3f}), "
                f"margin {result['rewards/margins']:.4f}, loss {result['loss']:.4f}"
            )
            if "held_out_pairs" in result:
                sentence += f", of {result['pairs']:,} of {result['held_out_pairs']:,} held-out pairs"
            if result["eval_precision"] != "float32":
                sentence += f"; {result['eval_precision']} rounds a margin by {result['margin_noise']:.2g}"
            log.write_evaluation(state.step, held_out.name, result, sentence)
        if results:
            ranks.only_first_does(lambda: write_held_out_pairs(results, log.run.held_out, step=state.step))
        with self.interruption.ending_at_once():  # a signal ends it at once; a resumed run repeats it
            win_rates = [] if self.win_rate is None else list(self.win_rate.evaluate())
        for name, result in win_rates:
            evaluation[name] = result
            log.write_evaluation(state.step, name, result, win_rate_sentence(result))
        with self.interruption.ending_at_once():
            self.sampler.write(state.step)
        state.evaluation, state.owes_evaluation = evaluation, False
        if self.criterion is not None:
            state.standing = judge(state.standing, self.criterion, evaluation, step=state.step)
        log.eval_seconds += time.monotonic() - begun

    def conclusions(self, state: TrainState) -> Iterator[str]:
        """Yields that the run has stopped early, and that no evaluation is better than the first one."""
        standing, criterion = state.standing, self.criterion
        if criterion is None:
            return
        judged = f"{criterion.metric} of {criterion.eval_set}"
        if ends_run(criterion, standing):
            evaluations = f"in {standing.num_since_improvement} evaluations"
            yield f"Stopped early after step {state.step}: {judged} has not improved {evaluations}"
        if not standing.best or standing.start is None:
            return
        step, value = standing.best[0]
        if not criterion.is_better(value, standing.start):
            yield (
                f"Warning: no evaluation is better than the one before the first step: {judged} was "
                f"{standing.start:.4g} then, and at best {value:.4g} later, after step {step}. Check that "
                "chosen and rejected are not swapped, and lower optim.lr"
            )


def evaluate_models(
    recipe: Recipe, models: Sequence[str], console: Console
) -> list[dict[str, HeldOutResult]]:
    """Returns for each model its results by the name of the held-out set. One model at a time is in memory.

    A model is a directory or a hub id. Raises RecipeError if the recipe has no held-out set, ModelError if a
    model cannot be loaded.
    """
    if not recipe.data.eval:
        raise RecipeError("data.eval: the recipe has no held-out data; name a source or a fraction")
    for model in models:
        if not (Path(model).is_dir() or HUB_ID.fullmatch(model)):
            raise ModelError(f"{model}: no trained model; finish the run first, or name one with --model")
    setup = prepare(recipe, console)
    facts_of = [resolve_model(recipe, setup.device, model, recipe_key="--model") for model in models]
    reference = CachedReference(lookup=None)
    if setup.objective.needs_reference:
        held_out = prepare_reference(setup, tables=list(setup.data.eval.values()))
        reference = CachedReference(lookup=held_out.values.of)
    reference = replace(reference, exact=exact_reference(setup))
    results = []
    for facts in facts_of:
        release_memory()
        facts = replace(facts, processor=setup.policy_facts.processor)
        check_model(facts, setup.device)
        check_data(setup, facts)
        check_vocabulary(facts, setup.tokenizer)
        scorer = load_proved(setup, facts).scorer
        results.append({r.name: r for r in evaluate_sets(setup, scorer, reference)})
        del scorer
    return results


def compare_models(
    results: Sequence[Mapping[str, HeldOutResult]], models: Sequence[str], *, seed: int
) -> dict[str, dict[str, Any]]:
    """Returns for each held-out set, by name, the metrics of `a`, of `b` and the `difference` b - a."""
    return {
        name: {
            "a": {"model": models[0], **first.record},
            "b": {"model": models[1], **results[1][name].record},
            "difference": compare_results(first, results[1][name], seed=seed),
        }
        for name, first in results[0].items()
    }
