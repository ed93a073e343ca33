"""The load-balancing loss of a mixture of experts is the whole step's, whatever rows its tokens lie in."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from support.groups import CPU, group
from support.rows import write_rows
from support.run_files import records
from support.tiny_recipe import message_of
from support.tiny_run import tiny_checkpoint
from support.tiny_tokenizer import VOCABULARY_SIZE
from support.two_ranks import run_on_ranks
from transformers import AutoModelForCausalLM
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from dpo_pack.model.layout import packed_row, padded_row
from dpo_pack.recipe.load import Recipe, parse_recipe
from dpo_pack.run.setup import check_recipe
from dpo_pack.system import ranks
from dpo_pack.system.errors import RunError
from dpo_pack.trainer import Trainer, train

COEFFICIENT = 0.05
PAIRS_PER_STEP, NUM_STEPS = 6, 2
NAMES = ("loss", "aux_loss", "grad_norm", "experts/max_load", "experts/min_load", "experts/unused")
# Ways to compute the same steps. Six pairs of one step have three prompts, so two pairs share one.
LAYOUTS: dict[str, dict[str, Any]] = {
    "one row": {"token_budget": 4096},
    "a row a pair": {"token_budget": 16},
    "some rows": {"token_budget": 64},
    "unshared": {"token_budget": 64, "share_prompt": False},
    "padded": {"mode": "padded", "token_budget": 128},
    "recomputed activations": {"token_budget": 64},
}


def pairs() -> list[dict[str, list[int]]]:
    rng = random.Random(0)

    def ids(least: int, most: int) -> list[int]:
        return [rng.randrange(3, VOCABULARY_SIZE) for _ in range(rng.randint(least, most))]

    rows = []
    for _ in range(NUM_STEPS * PAIRS_PER_STEP // 2):
        prompt, chosen = ids(3, 15), ids(2, 9)
        rows += [
            {"prompt_ids": prompt, "chosen_ids": [*chosen, 2], "rejected_ids": [*ids(1, 9), 2]},
            {"prompt_ids": prompt, "chosen_ids": [*chosen, 2], "rejected_ids": [*chosen[:2], *ids(1, 9), 2]},
        ]
    return rows


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_pairs(tmp_path_factory.mktemp("mixture"), "mixtral")


def with_pairs(directory: Path, family: str) -> Path:
    tiny_checkpoint(directory / "model", family)
    write_rows(directory / "pairs.jsonl", pairs())
    return directory


def recipe_of(
    assets: Path, run: Path, *, packing: dict[str, Any], loss: dict[str, Any], **sections: Any
) -> Recipe:
    return parse_recipe(
        {
            "output_dir": str(run),
            "model": {"path": str(assets / "model"), **sections.pop("model", {})},
            "reference": {"cache_dir": str(assets / "cache")},
            "data": {"train": str(assets / "pairs.jsonl"), "shuffle": False, "max_length": 64},
            "packing": {"pairs_per_step": PAIRS_PER_STEP, **packing},
            "loss": loss,
            "optim": {"lr": 1e-3, "schedule": "constant", "eps": 1e-6},
            "logging": {"samples": None},
            "export": {"verify": "none"},
            **sections,
        }
    )


def steps_of(assets: Path, run: Path, coefficient: float | None = COEFFICIENT, **options: Any) -> list[Any]:
    packing = options.pop("packing", LAYOUTS["one row"])
    loss = {"router_aux_coef": coefficient, **options.pop("loss", {})}
    train(recipe_of(assets, run, packing=packing, loss=loss, **options), Console(quiet=True))
    return records(run, "train")


def assert_same_steps(ours: list[Any], theirs: list[Any]) -> None:
    assert len(ours) == len(theirs) == NUM_STEPS
    for mine, expected in zip(ours, theirs, strict=True):
        for name in NAMES:
            assert mine[name] == pytest.approx(expected[name], rel=2e-5 if name == "grad_norm" else 2e-6), (
                name
            )


@pytest.fixture(scope="module")
def one_row(assets: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return steps_of(assets, tmp_path_factory.mktemp("one-row") / "run")


def test_the_load_balancing_loss_is_that_of_transformers_for_all_sequences_of_the_step(
    assets: Path, one_row: list[Any], tmp_path: Path
) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(assets / "model", attn_implementation="eager")
    sequences = [
        torch.tensor(row["prompt_ids"] + row[side])
        for row in pairs()[:PAIRS_PER_STEP]
        for side in ("chosen_ids", "rejected_ids")
    ]
    ids = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True)
    lengths = torch.tensor([len(sequence) for sequence in sequences])
    mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
    with torch.no_grad():
        logits = model(ids, attention_mask=mask, output_router_logits=True).router_logits
    expected = load_balancing_loss_func(logits, model.num_experts, model.num_experts_per_tok, mask)
    assert one_row[0]["aux_loss"] == pytest.approx(float(expected), abs=1e-6)
    without = steps_of(assets, tmp_path / "none", 0.0)
    assert not {"aux_loss", "experts/unused"} & without[0].keys()
    assert one_row[0]["loss"] == pytest.approx(without[0]["loss"] + COEFFICIENT * float(expected), abs=1e-6)
    assert abs(one_row[1]["logps/chosen"] - without[1]["logps/chosen"]) > 1e-4  # it changes the update


def test_null_takes_the_coefficient_of_the_models_config(assets: Path, tmp_path: Path) -> None:
    own = steps_of(assets, tmp_path / "null", None)
    assert_same_steps(own, steps_of(assets, tmp_path / "same", 0.001))


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "one row"])
def test_the_load_balancing_loss_does_not_depend_on_rows_or_sharing(
    layout: str, assets: Path, one_row: list[Any], tmp_path: Path
) -> None:
    model = {"gradient_checkpointing": layout == "recomputed activations"}
    steps = steps_of(assets, tmp_path / "run", packing=LAYOUTS[layout], model=model)
    assert steps[0]["rows"] > 1
    assert_same_steps(steps, one_row)


# A step of one pair leaves a rank without rows.
ONE_PAIR: dict[str, Any] = {"packing": {"pairs_per_step": 1}, "train": {"max_steps": NUM_STEPS}}


def _train_on_ranks(assets: Path, directory: Path) -> None:
    for strategy in ("ddp", "fsdp2"):
        options: dict[str, Any] = {"distributed": {"strategy": strategy}}
        steps_of(assets, directory / f"{strategy}-rows", packing=LAYOUTS["some rows"], **options)
        steps_of(assets, directory / f"{strategy}-pair", **options, **ONE_PAIR)
        ranks.wait_for_all()


@pytest.mark.slow
@pytest.mark.multiprocess
def test_two_processes_balance_as_one(assets: Path, one_row: list[Any], tmp_path: Path) -> None:
    run_on_ranks(_train_on_ranks, assets, tmp_path)
    one_pair = steps_of(assets, tmp_path / "alone", **ONE_PAIR)
    for strategy in ("ddp", "fsdp2"):
        assert_same_steps(records(tmp_path / f"{strategy}-rows", "train"), one_row)
        assert_same_steps(records(tmp_path / f"{strategy}-pair", "train"), one_pair)


def test_a_token_counts_once_for_each_sequence_that_has_it() -> None:
    groups = [group([1, 2], [7, 8], [7, 5, 6]), group([3], [4], [4, 5])]

    def copies(share_prompt: bool) -> list[float]:
        row = packed_row(groups, CPU, share_prompt=share_prompt, counts_copies=True)
        assert row.token_copies is not None
        return row.token_copies.tolist()

    #                      1  2  7  8  5  6  3  4  5
    assert copies(True) == [2, 2, 2, 1, 1, 1, 2, 2, 1]
    assert copies(False) == [1] * 14
    padded = padded_row(groups, device=CPU, counts_copies=True).token_copies
    assert padded is not None and padded.reshape(4, 5).sum(dim=1).tolist() == [4, 5, 2, 3]


def test_a_coefficient_is_refused_where_transformers_has_no_such_loss(assets: Path, tmp_path: Path) -> None:
    loss = {"router_aux_coef": 0.01}
    for family, what in (("llama", "llama models"), ("deepseek_v3", "deepseek_v3 mixtures")):
        directory = with_pairs(tmp_path / family, family)
        recipe = recipe_of(directory, tmp_path / "run", packing=LAYOUTS["some rows"], loss=loss)
        message = message_of(partial(train, recipe, Console(quiet=True)))
        assert message.startswith("loss.router_aux_coef: ") and what in message
        assert message in check_recipe(recipe)[1]
        assert not (tmp_path / "run").exists()


def test_a_mixture_does_not_go_on_with_another_load_balancing_loss(assets: Path, tmp_path: Path) -> None:
    def recipe(run: str, coefficient: float | None) -> Recipe:
        options: dict[str, Any] = {"packing": {}, "checkpoint": {"every_steps": 1}}
        return recipe_of(assets, tmp_path / run, loss={"router_aux_coef": coefficient}, **options)

    def stop(trainer: Trainer) -> None:
        if trainer.state.step == NUM_STEPS:
            raise RunError("stopped")

    for run, then, now in (("without", 0.0, None), ("with", None, 0.0)):
        with pytest.raises(RunError, match="stopped"):
            train(recipe(run, then), Console(quiet=True), after_step=stop)
        with pytest.raises(RunError, match="another loss.router_aux_coef"):
            train(recipe(run, now), Console(quiet=True))


@pytest.mark.slow
def test_a_finished_mixture_is_not_finished_with_another_balancing_loss(assets: Path, tmp_path: Path) -> None:
    def recipe(run: str, coefficient: float | None, assets: Path = assets) -> Recipe:
        return recipe_of(assets, tmp_path / run, packing={}, loss={"router_aux_coef": coefficient})

    for run, then, now in (("without", 0.0, None), ("with", None, 0.0)):
        train(recipe(run, then), Console(quiet=True))
        with pytest.raises(RunError, match=r"another loss\.router_aux_coef"):
            train(recipe(run, now), Console(quiet=True))
    dense = with_pairs(tmp_path / "dense", "llama")
    for coefficient in (None, 0.0):  # the second run is finished: it has no such loss in any case
        train(recipe("plain", coefficient, dense), Console(quiet=True))
