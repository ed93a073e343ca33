"""Evaluates on held-out pairs, in a run and for `dpopack evaluate`: a forward pass over all pairs, then
means, 95 % intervals and groups of pairs, also by length, because a policy can raise its accuracy by learning
only that the longer completion wins. Compares two models pair by pair.

Legend: P pairs of the held-out set.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from rich.console import Console
from torch import Tensor

from dpo_pack.data.store import PairTable, distinct_keys
from dpo_pack.losses.preference import Objective
from dpo_pack.model.scorer import CompletionLogps
from dpo_pack.online.win_rate import win_rate_sentence
from dpo_pack.packing.lengths import FloatArray, IntArray
from dpo_pack.recipe.data import source_names
from dpo_pack.recipe.load import Recipe
from dpo_pack.recipe.schema import EvalFraction
from dpo_pack.recipe.training import LOWER_IS_BETTER, OptimRecipe
from dpo_pack.reference.compute import rows_without_gradients
from dpo_pack.run.inputs import Inputs
from dpo_pack.run.models import Setup, check_model, resolve_model
from dpo_pack.run.pairs import exact_reference, exact_tables, prepare_reference, row_builder
from dpo_pack.run.samples import Sampler
from dpo_pack.run.setup import check_data, check_vocabulary, load_proved, prepare
from dpo_pack.run.state import Criterion, TrainState, ends_run, judge
from dpo_pack.system import ranks
from dpo_pack.system.console import shown
from dpo_pack.system.errors import ModelError, RecipeError
from dpo_pack.system.files import Json, written_aside
from dpo_pack.system.hub import HUB_ID
from dpo_pack.system.interrupts import Interruption
from dpo_pack.system.machine import release_memory
from dpo_pack.training.batches import PairRow, RowBuilder
from dpo_pack.training.health import with_interval
from dpo_pack.training.metrics import (
    LOGRATIOS,
    averages,
    join_values,
    margin_rounding,
    mean_intervals,
    pair_metrics,
    pair_values,
    rate_interval,
)
from dpo_pack.training.references import CachedReference, Reference
from dpo_pack.training.step_loss import pair_losses

# The metrics that get intervals and groups.
METRICS_WITH_INTERVALS = ("loss", "rewards/accuracies", "rewards/margins", *LOGRATIOS)
# Groups by the ratio chosen tokens / rejected tokens: the lowest ratio of each group, in rising order.
LENGTH_BUCKETS: dict[str, float] = {
    "chosen_under_half": 0.0,
    "chosen_shorter": 0.5,
    "similar_length": 1 / 1.1,
    "chosen_longer": 1.1,
    "chosen_over_twice": 2.0,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutResult:
    """The result of a policy on one held-out set."""

    name: str
    table: PairTable  # the pairs
    source_names: Sequence[str]
    metrics: dict[str, FloatArray]  # METRICS_WITH_INTERVALS, [P] each in the order of the table
    record: Json  # averages, intervals, groups: the line of metrics.jsonl


def evaluate_sets(
    setup: Setup,
    scorer: CompletionLogps,
    reference: Reference,
    *,
    between_rows: Callable[[], None] = lambda: None,
) -> Iterator[HeldOutResult]:
    """Yields `scorer`'s result on each held-out set. All ranks must take part. Pairs in fp32 are computed in
    the training's precision, too, which measures its rounding. `between_rows`: see `evaluate_pairs`."""
    recipe, all_pairs, exact = setup.recipe, setup.data.eval, exact_tables(setup)
    # If data.eval is a fraction, its pairs come from all training sources. Any other set has one source.
    sources = source_names(recipe.data.train) if isinstance(recipe.data.eval, EvalFraction) else None
    dtype, passes = scorer.compute_dtype, [reference]
    if exact is not None:
        assert reference.exact is not None
        dtype, passes = torch.float32, [reference.exact, reference]
    for name, pairs in (all_pairs if exact is None else exact).items():
        found = []
        for used, in_float32 in zip(passes, (exact is not None, False), strict=False):
            precision = str(torch.float32 if in_float32 else scorer.compute_dtype).removeprefix("torch.")
            with contextlib.ExitStack() as stack:
                work = f"Evaluating {name} in {precision}"
                bar = stack.enter_context(shown(setup.console, work, "pairs", pairs.num_pairs))
                for model in {scorer, used.moving or scorer} if in_float32 else ():
                    stack.enter_context(model.in_float32())
                values = evaluate_pairs(
                    scorer,
                    row_builder(setup, pairs, used),
                    setup.objective,
                    token_budget=setup.reference_token_budget,
                    score=used.score,
                    progress=bar.advance,
                    between_rows=between_rows,
                )
            found.append(values)
        named = sources or (name,)
        result = held_out_result(
            name, found[0], pairs, setup.objective, source_names=named, dtype=dtype, seed=recipe.seed
        )
        if exact is not None:
            margins = pair_metrics(found[1], beta=recipe.loss.beta)["rewards/margins"]
            errors = margins.cpu().numpy() - result.metrics["rewards/margins"]
            result.record["margin_noise"] = float(np.sqrt((errors**2).mean()))
        if pairs.num_pairs < all_pairs[name].num_pairs:
            result.record["held_out_pairs"] = all_pairs[name].num_pairs
        yield result


@torch.no_grad()
def evaluate_pairs(
    policy: CompletionLogps,
    builder: RowBuilder,
    objective: Objective,
    *,
    token_budget: int,
    score: Callable[[PairRow], PairRow] = lambda row: row,
    progress: Callable[[int], None] = lambda num_pairs: None,
    between_rows: Callable[[], None] = lambda: None,
) -> Tensor:
    """Returns the `pair_values` of all pairs of the builder's table, in its order, on every rank. `score`
    adds the reference's log-probs to a row. `progress` gets the number of pairs of each row that this rank
    has computed. `between_rows` is called before each row, equally often on every rank."""
    mean_chosen_tokens = float(builder.table.chosen_scored.mean())
    parts: list[Tensor] = []
    positions = [np.zeros(0, dtype=np.int64)]
    rows = rows_without_gradients(builder.sizes(), token_budget)
    # The ranks of a sharded model compute only together. So all ranks get equally many rows: a rank that has
    # no row left computes the last row again, and that result is not used.
    for first in range(0, len(rows), ranks.num_ranks()):
        number = first + ranks.rank()
        pairs = rows[min(number, len(rows) - 1)]
        between_rows()
        row = score(builder.build(pairs))
        output = policy(row.row)
        if number < len(rows):
            losses = pair_losses(objective, output, row, mean_chosen_tokens)
            parts.append(pair_values(output, row, losses))
            positions.append(pairs)
            progress(len(pairs))
    order = ranks.gather_over_ranks(torch.from_numpy(np.concatenate(positions)).to(builder.device)).argsort()
    return ranks.gather_over_ranks(join_values(parts, builder.device))[order]


def held_out_result(
    name: str,
    values: Tensor,
    table: PairTable,
    objective: Objective,
    *,
    source_names: Sequence[str],
    dtype: torch.dtype,
    seed: int,
) -> HeldOutResult:
    """Returns averages, intervals and groups of `evaluate_pairs`' values, from matrix products in `dtype`."""
    beta, has_reference = objective.options.beta, objective.needs_reference
    columns = pair_metrics(values, beta=beta)
    metrics = {
        metric: columns[metric].cpu().numpy()
        for metric in METRICS_WITH_INTERVALS
        if has_reference or metric not in LOGRATIOS
    }
    noise = margin_rounding(values, beta=beta)
    record = {
        **means_by_group(metrics, table, source_names, seed=seed),
        # These replace its means: another order of summation may change the lowest bit.
        **averages(values, beta=beta, has_reference=has_reference),
        **length_preference(metrics["rewards/accuracies"], table),
        "eval_precision": str(dtype).removeprefix("torch."),
        "margin_noise": float(noise.square().mean().sqrt()),
    }
    return HeldOutResult(name=name, table=table, source_names=source_names, metrics=metrics, record=record)


def means_by_group(
    metrics: Mapping[str, FloatArray],
    table: PairTable,
    source_names: Sequence[str],
    *,
    seed: int,
    of_differences: bool = False,
) -> Json:
    """Returns means of `metrics` (or of their differences), [P] each, with intervals: over all pairs,
    `by_source` if they have several sources, `by_length`, by LENGTH_BUCKETS. Empty groups are left out."""
    first, same = distinct_keys(table.whole_prompt_keys)
    prompts = first[same]  # [P] the first pair that has the same prompt
    rates = None if of_differences else metrics.get("rewards/accuracies")

    def described(pairs: IntArray) -> Json:
        values = np.stack([column[pairs] for column in metrics.values()], axis=1)
        found = mean_intervals(values, seed=seed, prompts=prompts[pairs]).tolist()
        means = dict(zip(metrics, values.mean(axis=0).tolist(), strict=True))
        intervals, sizes = Json(zip(metrics, found, strict=True)), Json(pairs=len(pairs))
        if rates is not None:
            bounds, sizes["effective_pairs"] = rate_interval(rates[pairs], prompts[pairs])
            # Before the first step all pairs are ties, and no number tells how other pairs would differ.
            intervals |= {"rewards/accuracies": bounds} if bounds is not None else dict.fromkeys(metrics)
        return {**sizes, "prompts": len(np.unique(prompts[pairs])), **means, "intervals": intervals}

    ratios = table.chosen_scored / table.rejected_scored
    buckets = np.searchsorted(list(LENGTH_BUCKETS.values()), ratios, side="right") - 1
    every = described(np.arange(len(ratios)))
    kinds = (("by_source", table.source_indices, source_names), ("by_length", buckets, list(LENGTH_BUCKETS)))
    for kind, numbers, names in kinds:
        groups = {name: np.flatnonzero(numbers == number) for number, name in enumerate(names)}
        of_groups = {name: described(at) for name, at in groups.items() if len(at)}
        if kind != "by_source" or len(of_groups) > 1:
            every[kind] = of_groups
    return every


def length_preference(accuracies: FloatArray, table: PairTable) -> dict[str, float]:
    """Returns the part of pairs whose chosen completion is longer, and the part whose longer one has the
    larger reward (a tie counts half), of pairs that have a longer one. accuracies: [P] of `pair_metrics`."""
    difference = table.chosen_scored - table.rejected_scored
    is_longer, differs = difference > 0, difference != 0
    prefers_longer = np.where(is_longer, accuracies, 1 - accuracies)
    columns = {"length/chosen_longer": is_longer, "length/prefers_longer": prefers_longer}
    return {name: float(column[differs].mean()) for name, column in columns.items() if differs.any()}


# -------------------------------------------------------------------------------- the policy of a run


def write_held_out_pairs(results: Sequence[HeldOutResult], path: Path, *, step: int) -> None:
    """Writes the metrics of each pair, of which the record has the means: `row` is that in `row_source`,
    `source` the set. Raises CacheError."""
    tables = []
    for result in results:
        table = result.table
        first, same = distinct_keys(table.whole_prompt_keys)
        keys = np.concatenate([table.chosen_keys, table.rejected_keys], axis=1)  # [P, bytes of both]
        columns: dict[str, Any] = {
            "step": [step] * table.num_pairs,
            "source": [result.name] * table.num_pairs,
            "pair": [key.tobytes() for key in keys],
            "prompt": first[same],  # the first pair that has it
            "row_source": [result.source_names[number] for number in table.source_indices],
            "row": table.row_numbers.astype(np.int64),
            "eval_precision": [result.record["eval_precision"]] * table.num_pairs,
        }
        scores = {"score_margin": pa.array(table.score_margins, from_pandas=True)}  # NaN: null
        tables.append(pa.table(columns | result.metrics | scores))
    with written_aside(path) as temporary:
        pq.write_table(pa.concat_tables(tables), temporary, write_page_checksum=True)


def evaluate_run(inputs: Inputs, sampler: Sampler, interruption: Interruption) -> None:
    """Computes the metrics of every held-out set; writes them to metrics.jsonl and the run's state."""
    begun, state, log = time.monotonic(), inputs.state, inputs.log
    evaluation: dict[str, Json] = {}
    results = []
    poll = interruption.poll
    for held_out in evaluate_sets(inputs.setup, state.scorer, inputs.reference, between_rows=poll):
        results.append(held_out)
        evaluation[held_out.name] = result = held_out.record
        accuracy = with_interval(result["rewards/accuracies"], result["intervals"]["rewards/accuracies"])
        sentence = (
            f"reward accuracy {accuracy}, margin {result['rewards/margins']:z.4f}, loss {result['loss']:z.4f}"
        )
        if "held_out_pairs" in result:
            sentence += f", of {result['pairs']:,} of {result['held_out_pairs']:,} held-out pairs"
        if result["eval_precision"] != "float32":
            sentence += f"; {result['eval_precision']} rounds a margin by {result['margin_noise']:.2g}"
        log.write_evaluation(held_out.name, result, sentence)
    if results:
        ranks.only_first_does(lambda: write_held_out_pairs(results, log.run.held_out, step=state.step))
    with interruption.ending_at_once():  # a signal ends it at once; a resumed run repeats it
        win_rates = [] if inputs.win_rate is None else list(inputs.win_rate.evaluate())
    for name, result in win_rates:
        evaluation[name] = result
        log.write_evaluation(name, result, win_rate_sentence(result))
    with interruption.ending_at_once():
        sampler.write(state.step)
    state.evaluation, state.owes_evaluation = evaluation, False
    if inputs.criterion is not None:
        state.standing = judge(state.standing, inputs.criterion, evaluation, step=state.step)
    log.eval_seconds += time.monotonic() - begun


def conclusions(state: TrainState, criterion: Criterion | None, optim: OptimRecipe) -> Iterator[str]:
    """Yields that the run has stopped early, and that no evaluation is better than the first one."""
    standing = state.standing
    if criterion is None:
        return
    judged = f"{criterion.metric} of {criterion.eval_set}"
    if ends_run(criterion, standing):
        evaluations = f"in {standing.num_since_improvement} evaluations"
        yield f"Stopped early after step {state.step}: {judged} has not improved {evaluations}"
    if not standing.best or standing.start is None:
        return
    step, value = standing.best[0]
    if criterion.gain(value, standing.start) <= 0:
        num_steps = state.source.num_steps
        remedy = ", and lower optim.lr" if optim.num_warmup_steps(num_steps) < num_steps else ""
        remedy = f"Check that chosen and rejected are not swapped{remedy}"
        # Unlike a loss, an accuracy may be the same after large steps.
        if criterion.metric in LOWER_IS_BETTER and f"{value:.4g}" == f"{standing.start:.4g}":
            remedy = "The run hardly moved: train more steps, or raise optim.lr"
        yield (
            f"Warning: no evaluation is better than the one before the first step: {judged} was "
            f"{standing.start:.4g} then, and at best {value:.4g} later, after step {step}. {remedy}"
        )


# -------------------------------------------------------------------------------- models on the disk


def evaluate_models(
    recipe: Recipe, models: Sequence[str], console: Console
) -> list[dict[str, HeldOutResult]]:
    """Returns for each model, a directory or a hub id, its results by held-out set. One model at a time is in
    memory. Raises RecipeError without a held-out set, ModelError if a model cannot be loaded."""
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
        check_data(facts, setup.tokenizer, setup.tables, setup.reference_token_budget, recipe.online)
        check_vocabulary(facts, setup.tokenizer)
        scorer = load_proved(setup, facts).scorer
        results.append({r.name: r for r in evaluate_sets(setup, scorer, reference)})
        del scorer
        for found in results[-1].values() if any(line.startswith("loss.") for line in recipe.dropped) else ():
            of_groups = (found.record.get(kind, {}).values() for kind in ("by_source", "by_length"))
            for record in (found.record, *itertools.chain(*of_groups)):
                del record["loss"], record["intervals"]["loss"]
            del found.metrics["loss"]
    return results


def compare_models(
    results: Sequence[Mapping[str, HeldOutResult]], models: Sequence[str], *, seed: int
) -> dict[str, Json]:
    """Returns by held-out set the records of `a` and `b`, and means of the pairs' `difference`, b - a."""
    compared = {}
    for name, one in results[0].items():
        other = results[1][name]
        differences = {metric: other.metrics[metric] - values for metric, values in one.metrics.items()}
        found = means_by_group(differences, one.table, one.source_names, seed=seed, of_differences=True)
        compared[name] = {
            "a": {"model": models[0], **one.record},
            "b": {"model": models[1], **other.record},
            "difference": found,
        }
    return compared
