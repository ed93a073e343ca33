"""What the host does while the device works: batches ahead, results behind, no waiting between."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from support.device_reads import waiting_is_an_error
from support.reference_pairs import (
    CPU,
    NAMESPACE,
    SmallMemory,
    all_sums,
    load_scorer,
    make_table,
    num_cached,
    random_pairs,
    run_pass,
)
from support.tiny_run import tiny_run

import dpo_pack.reference.compute as reference_pass
import dpo_pack.trainer as train_module
from dpo_pack.model.attention.segments import on_device
from dpo_pack.model.building import load_model
from dpo_pack.model.layout import packed_row
from dpo_pack.packing.lengths import Group
from dpo_pack.recipe.load import load_recipe
from dpo_pack.reference.cache import ReferenceCache
from dpo_pack.reference.compute import find_work
from dpo_pack.run.models import resolve_model
from dpo_pack.system.machine import host_copies
from dpo_pack.trainer import train
from dpo_pack.training import batches as batches_module
from dpo_pack.training.batches import GlobalBatch, OfflineSource, RowBuilder

CUDA = torch.device("cuda")


def make_source(*, num_pairs: int = 14, epochs: int = 2) -> OfflineSource:
    """Steps of 4 pairs in rows of up to 64 tokens, each epoch in an order of its own."""
    builder = RowBuilder(
        table=make_table(random_pairs(num_pairs)),
        reference=None,
        is_packed=True,
        share_prompt=True,
        device=CPU,
    )
    return OfflineSource(
        builder=builder,
        token_budget=64,
        pairs_per_step=4,
        sizes=builder.sizes(),
        source_weights=np.ones(1),
        epochs=epochs,
        max_steps=None,
        shuffle=True,
        seed=0,
    )


def pairs_of(batch: GlobalBatch) -> list[int]:
    indices: list[int] = batch.pair_indices.tolist()
    return indices


# ---- Batches ahead


def test_batches_made_ahead_are_those_made_when_asked_for() -> None:
    asked_for = [pairs_of(batch) for batch in make_source()]
    source, ahead = make_source(), []
    for batch in source:
        source.prepare_next()
        source.prepare_next()  # is done already
        ahead.append(pairs_of(batch))
    assert ahead == asked_for and len(ahead) == source.num_steps == 8
    assert list(source) == []


def test_the_batch_made_ahead_does_not_count_as_handed_out() -> None:
    source = make_source()
    batches = iter(source)
    next(batches)
    source.prepare_next()
    state = source.state_dict()
    resumed = make_source()
    resumed.load_state_dict(state)
    assert pairs_of(next(iter(resumed))) == pairs_of(next(batches))


def test_the_rows_of_a_step_come_largest_first() -> None:
    sizes = [[row.row.num_tokens for row in batch.rows] for batch in make_source(num_pairs=40)]
    assert all(of_step == sorted(of_step, reverse=True) for of_step in sizes)
    assert max(map(len, sizes)) > 1


def test_the_next_batch_is_made_before_the_host_waits_for_the_step(
    tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []

    def note(owner: Any, name: str) -> None:
        function = getattr(owner, name)

        def noted(*arguments: Any, **named: Any) -> Any:
            events.append(name)
            return function(*arguments, **named)

        monkeypatch.setattr(owner, name, noted)

    note(train_module.Trainer, "accumulate_gradients")
    note(train_module.Trainer, "step_record")
    note(batches_module, "global_batch")
    train(load_recipe(tiny_run(tmp_path), ["train.epochs=2"]), console)
    one_step = ["accumulate_gradients", "global_batch", "step_record"]
    assert events == ["global_batch", *3 * one_step, "accumulate_gradients", "step_record"]


# ---- Results behind


def test_a_pass_that_reads_a_row_behind_fills_the_cache_bit_for_bit(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables, scorer = [make_table(random_pairs(12))], load_scorer(model_path)
    at_once, behind = ReferenceCache(tmp_path / "a", NAMESPACE), ReferenceCache(tmp_path / "b", NAMESPACE)
    run_pass(at_once, tables, scorer)
    monkeypatch.setitem(reference_pass.ROWS_BEHIND, "cpu", 1)
    run_pass(behind, tables, scorer)
    assert all_sums(behind, tables).tobytes() == all_sums(at_once, tables).tobytes()
    assert find_work(behind, tables).missing.sum() == 0


def test_behind_as_well_an_interrupted_pass_keeps_what_was_read_and_a_full_memory_loses_nothing(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(reference_pass.ROWS_BEHIND, "cpu", 1)  # as on CUDA
    cache, tables = ReferenceCache(tmp_path, NAMESPACE), [make_table(random_pairs(20))]
    scorer, done = load_scorer(model_path), [0]

    def stop_after_the_third_row(num_sequences: int) -> None:
        done.append(num_sequences)
        if len(done) == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_pass(cache, tables, scorer, progress=stop_after_the_third_row)
    assert num_cached(find_work(cache, tables)) == sum(done)
    small = SmallMemory(scorer, most_tokens=1000, fails_at=(2,))
    run_pass(cache, tables, small, progress=done.append)
    assert find_work(cache, tables).missing.sum() == 0 and sum(done) == 40


# ---- On a device


@pytest.mark.gpu
def test_copies_are_read_without_waiting_for_what_was_queued_later() -> None:
    values = torch.arange(5, device=CUDA)
    copies = host_copies([values])
    values.add_(1)
    assert copies()[0].tolist() == [0, 1, 2, 3, 4]
    assert torch.equal(on_device(np.arange(5), CUDA), torch.arange(5, device=CUDA))


@pytest.mark.gpu
@pytest.mark.parametrize("loss", ["loss.type=sigmoid", "loss.weighting=wpo"])
def test_on_cuda_a_step_of_packed_rows_and_the_next_batch_wait_for_nothing(
    loss: str, tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, prepare = train_module.Trainer.train_step, OfflineSource.prepare_next
    watched: list[int] = []

    def train_step(session: Any, batch: GlobalBatch) -> Any:
        if session.state.step < 2:  # kernels are loaded and memory is reserved by the first steps
            return step(session, batch)
        watched.append(session.state.step)
        with waiting_is_an_error():
            return step(session, batch)

    def prepare_next(source: OfflineSource) -> None:
        with waiting_is_an_error() if watched else contextlib.nullcontext():
            prepare(source)

    monkeypatch.setattr(train_module.Trainer, "train_step", train_step)
    monkeypatch.setattr(OfflineSource, "prepare_next", prepare_next)
    # Compiling waits for the device, and each step may have code of its own.
    overrides = [loss, "train.epochs=3", "model.autocast=bfloat16", "model.compile=false"]
    train(load_recipe(tiny_run(tmp_path), overrides), console)
    assert watched == [2, 3, 4, 5]


@pytest.mark.gpu
def test_on_cuda_a_row_of_more_than_3072_tokens_waits_for_nothing(tmp_path: Path) -> None:
    """From there on the gradient of the embeddings is computed by other code."""
    recipe = load_recipe(tiny_run(tmp_path), ["model.autocast=bfloat16", "model.compile=false"])
    facts = resolve_model(recipe, CUDA)
    scorer = load_model(facts, device=CUDA).scorer
    random = np.random.default_rng(0)
    vocabulary = scorer.model.config.vocab_size
    groups = [
        Group(
            context=random.integers(0, vocabulary, 40),
            completions=(random.integers(0, vocabulary, 30), random.integers(0, vocabulary, 25)),
        )
        for _ in range(60)
    ]
    row = packed_row(groups, CUDA, share_prompt=True)
    assert row.num_tokens > 3072 + 60
    scorer(row).sums.sum().backward()
    with waiting_is_an_error():
        scorer(row).sums.sum().backward()
