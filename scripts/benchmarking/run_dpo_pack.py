"""One run of dpo-pack: reference pass and training steps, as `dpopack train` has them, no export."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch._dynamo.utils import counters

import dpo_pack.run.inputs
import dpo_pack.trainer
from benchmarking.contenders import (
    BETA,
    LEARNING_RATE,
    LORA_ALPHA,
    LORA_RANK,
    Contender,
    Measurement,
    Setting,
)
from benchmarking.workloads import digest_of
from dpo_pack.data.store import PairTable, pair_lengths
from dpo_pack.model.scorer import LoadedModel
from dpo_pack.proofs import proof_groups, proof_row
from dpo_pack.recipe.load import Recipe, parse_recipe
from dpo_pack.run.models import Setup
from dpo_pack.run.pairs import ReferencePass, prepare_reference
from dpo_pack.system.console import make_console
from dpo_pack.trainer import AfterStep, Trainer
from dpo_pack.training.batches import OfflineSource

REFERENCE_TOKEN_BUDGET = 65536  # on CUDA; a short run does not search for the largest budget


def run_dpo_pack(
    contender: Contender, setting: Setting, scratch: Path, spawned_at: float | None
) -> Measurement:
    """Measure it in this process; `spawned_at` is when the process was started (Unix time)."""
    begun = time.time()
    graphs: list[int] = []  # compiled until the end of each step
    cpu_seconds: list[float] = []
    trainer = train_without_export(
        make_recipe(contender, setting, scratch),
        after_step=lambda _: graphs.append(counters["stats"]["unique_graphs"]),
        cpu_seconds=cpu_seconds,
    )
    startup_seconds = None
    if spawned_at is not None:
        startup_seconds = begun - spawned_at + trainer.log.startup_seconds
    assert isinstance(trainer.source, OfflineSource)
    plan = trainer.source.first_plan
    tokens = pair_lengths(trainer.setup.data.train).row_tokens(share_prompt=False)
    lines = [json.loads(line) for line in trainer.run.metrics.read_text(encoding="utf-8").splitlines()]
    steps = [line for line in lines if line["split"] == "train"]
    return Measurement(
        contender=contender.name,
        digest=digest_of_table(trainer.setup.data.train),
        pairs=sum(step["pairs"] for step in steps),
        step_seconds=[step["seconds"] for step in steps],
        step_tokens=[int(tokens[plan.pairs(step)].sum()) for step in range(len(steps))],
        reference_seconds=trainer.log.reference_seconds,
        startup_seconds=startup_seconds,
        cpu_seconds=sum(cpu_seconds),
        computed_tokens=sum(
            plan.sizes.of_row(row).tokens for ranks in plan for rows in ranks for row in rows
        ),
        losses=[step["loss"] for step in steps],
        grad_norms=[step["grad_norm"] for step in steps],
        chosen_logps=[step["logps/chosen"] for step in steps],
        rejected_logps=[step["logps/rejected"] for step in steps],
        step_graphs=np.diff(graphs, prepend=graphs[0]).tolist(),  # those of the first step are not known
    )


def train_without_export(
    recipe: Recipe, *, after_step: AfterStep | None = None, cpu_seconds: list[float] | None = None
) -> Trainer:
    """Train as `dpopack train` does, but leave the model where it is; the trainer when it is over.

    A compiled model makes its code, for the reference and for training, before the reference pass begins, so
    that this counts as start-up, where `dpopack train` makes it on the first rows. `cpu_seconds` gets
    those of the reference pass and those of the steps.
    """
    finished: list[Trainer] = []
    run_steps = Trainer.run_steps

    def counted(work: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        begun = time.process_time()
        result = work(*arguments, **named)
        if cpu_seconds is not None:
            cpu_seconds.append(time.process_time() - begun)
        return result

    def prepare_warmed(setup: Setup, policy: LoadedModel | None, **tables: Any) -> ReferencePass:
        if policy is not None:
            warm_up(policy, setup.device)
        filled: ReferencePass = counted(prepare_reference, setup, policy, **tables)
        return filled

    with (
        patch.object(Trainer, "run_steps", lambda *arguments: counted(run_steps, *arguments)),
        patch.object(Trainer, "finish", lambda trainer: finished.append(trainer)),
        patch.object(dpo_pack.run.inputs, "prepare_reference", prepare_warmed),
    ):
        dpo_pack.trainer.train(recipe, make_console(quiet=True), after_step=after_step)
    return finished[0]


def warm_up(policy: LoadedModel, device: torch.device) -> None:
    """Rows of two sizes, because the second makes code for all sizes: as the reference, which takes no
    statistics, then forward and backward as in training, with statistics and without."""
    scorer = policy.scorer
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        groups = proof_groups(int(policy.model.config.get_text_config().vocab_size))
        rows = [proof_row(scorer, some, device) for some in (groups[:2], groups)]
        with torch.no_grad(), policy.as_reference():
            for row in rows:
                scorer(row)
        for row, measures in itertools.product(rows, (True, False)):
            with scorer.measuring(measures):
                scorer(row).sums.sum().backward()
        scorer.zero_grad(set_to_none=True)


def make_recipe(contender: Contender, setting: Setting, scratch: Path) -> Recipe:
    """The run's recipe: everything computed anew, pairs in the workload's order."""
    model: dict[str, Any] = {
        "path": setting.model,
        "dtype": setting.parameters,
        "gradient_checkpointing": setting.gradient_checkpointing,
        "compile": False,  # the contender's settings may switch it on
    }
    if setting.device == "cuda" or setting.autocast:  # like TRL's bf16=True, also with bf16 parameters
        model["autocast"] = "bfloat16"
    if setting.lora:
        model["lora"] = {"r": LORA_RANK, "alpha": float(LORA_ALPHA)}
    reference: dict[str, Any] = {"cache_dir": f"{scratch}/cache"}
    if setting.device == "cuda":
        reference["token_budget"] = REFERENCE_TOKEN_BUDGET
    pairs = {"path": f"{setting.workload}/pairs.jsonl", "format": "tokenized", "max_pairs": setting.num_pairs}
    tree = {
        "output_dir": f"{scratch}/run",
        "model": model,
        "reference": reference,
        "data": {"train": pairs, "max_length": setting.max_length, "shuffle": False},
        "packing": {"pairs_per_step": setting.pairs_per_step},
        "loss": {"beta": BETA},
        "optim": {"lr": LEARNING_RATE, "schedule": "constant"},
        "logging": {"samples": None},
    }
    return parse_recipe(tree, contender.settings)


def digest_of_table(table: PairTable) -> str:
    """Of the token ids as the layout reads them, in the order of training."""
    return digest_of(
        tuple(ids.tolist() for ids in (group.context, *group.completions))
        for group in map(table.group, range(table.num_pairs))
    )
