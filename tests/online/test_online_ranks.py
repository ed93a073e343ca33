"""Online runs on two processes: the same rollouts, pairs, steps and evaluations as on one."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from support.run_files import assert_same_metrics, records, weights
from support.stub_server import Stub, completions, serving
from support.tiny_online import online_recipe, rollouts
from support.tiny_recipe import message_of
from support.two_ranks import run_on_ranks
from support.whole_runs import kill_after

import dpo_pack.run.models as strategies
from dpo_pack import api
from dpo_pack.model.parallel import Strategy
from dpo_pack.recipe.load import Recipe
from dpo_pack.run.models import resolve_model
from dpo_pack.system import ranks
from dpo_pack.trainer import train

Settings = tuple[tuple[str, ...], dict[str, Any]]  # overrides, keys of `online`

# Five prompts a phase and five held out: ranks have unequal parts of them. The judge fails on some prompts.
PICKY: Settings = (
    ("data.eval=[{path: ${recipe_dir}/heldout.jsonl, max_pairs: 5}]", "train.eval_every_steps=3"),
    {
        "judges": [{"type": "function", "function": "support.online_judges:dislikes_bread", "retries": 0}],
        "pairing": {"type": "all_pairs"},
        "rollouts_per_update": 5,
    },
)
# One prompt a phase and one pair a step: the other rank answers nothing and computes an idle row.
FEWEST: Settings = (("packing.pairs_per_step=1",), {"rollouts_per_update": 1})
QUICK = {"picky": PICKY, "fewest": FEWEST}
LORA = "model.lora={r: 4, alpha: 8}"
MORE: dict[str, Settings] = {
    "lora": ((LORA, "optim.lr=1e-2", "packing.pairs_per_step=5"), {}),
    "moving": (("reference.sync={every_steps: 2, mixup: 0.6}", "packing.pairs_per_step=3"), {}),
    "offloaded": (("online.offload_reference=true", "packing.token_budget=1"), {}),
    "padded": (("packing.mode=padded", "packing.pairs_per_step=3"), {"pairing": {"type": "all_pairs"}}),
    "random": (("packing.pairs_per_step=1",), {"pairing": {"type": "random"}}),
    "free": (("loss.type=simpo",), {"max_staleness_steps": 0, "pairing": {"type": "all_pairs"}}),
}


def test_ranks_are_asked_for_the_same_servers_and_do_not_show_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []

    def take(number: Any, command: Any, settings: Any, **more: Any) -> Any:
        told.append(settings())
        return contextlib.nullcontext()

    monkeypatch.setattr("dpo_pack.system.launch.on_every_rank", take)
    for host in ("zebra", "zebra", "zebu"):
        judge = {"type": "llm", "endpoint": {"url": f"http://{host}/v1", "model": "served"}}
        with api._on_every_rank(online_recipe(tmp_path, tmp_path / "run", judges=[judge]), {}, None):
            pass
    assert told[0] == told[1] != told[2] and "http:" not in repr(told)


def recipe_of(directory: Path, run: str, settings: Settings, *more: str) -> Recipe:
    overrides, online = settings
    placed = (override.replace("${recipe_dir}", str(directory / "assets")) for override in overrides)
    # A number drawn next to the border between two tokens may, rounded otherwise, fall on the other side. Of
    # four tokens there are three borders; of the whole vocabulary there are so many that it happens.
    drawn = {"top_k": 4, **online}
    # With a tiny eps Adam's first steps turn gradients that are nothing but rounding into whole steps.
    return online_recipe(directory / "assets", directory / run, "optim.eps=1e-4", *placed, *more, **drawn)


def _train(directory: Path, runs: dict[str, Settings], *more: str) -> None:
    for name, settings in runs.items():
        train(recipe_of(directory, f"two-{name}", settings, *more), Console(quiet=True))
        ranks.wait_for_all()


def _train_and_die(directory: Path, runs: dict[str, Settings]) -> None:
    """The runs, and once more the first one, which is left after step 5 with a checkpoint of step 4."""
    _train(directory, runs)
    name, settings = next(iter(runs.items()))
    recipe = recipe_of(directory, "dead", settings, "checkpoint.every_steps=2")
    kill_after(5, recipe)
    ranks.wait_for_all()
    train(recipe, Console(quiet=True))


def assert_same_runs(directory: Path, runs: dict[str, Settings]) -> None:
    """`two-NAME` is what `alone-NAME` becomes here."""
    for name, settings in runs.items():
        train(recipe_of(directory, f"alone-{name}", settings), Console(quiet=True))
        ours, alone = directory / f"two-{name}", directory / f"alone-{name}"
        assert rollouts(ours) == rollouts(alone), name
        assert_same_metrics(records(ours), records(alone), ("", name, ()), counts=("pairs",))
        if "lora" not in name:
            trained = weights(ours)
            for tensor_name, tensor in weights(alone).items():
                torch.testing.assert_close(trained[tensor_name], tensor, rtol=0, atol=5e-5)
        assert json.loads((ours / "run.json").read_text())["status"] == "finished"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    directory = tmp_path_factory.mktemp("online-ranks")
    recipe_of(directory, "none", FEWEST)
    yield directory


@pytest.mark.slow
@pytest.mark.multiprocess
def test_two_processes_write_and_learn_what_one_does(directory: Path) -> None:
    run_on_ranks(_train_and_die, directory, QUICK)
    assert_same_runs(directory, QUICK)
    # Both ranks had prompts that the judge failed on, and prompts that it did not.
    places = {(row["draw"] % 5 % 2, row["failure"] is None) for row in rollouts(directory / "two-picky")}
    assert places == {(0, False), (0, True), (1, False), (1, True)}
    # What died went on as if nothing had happened, and without rollouts of steps that it took twice.
    assert rollouts(directory / "dead") == rollouts(directory / "two-picky")
    last, expected = (records(directory / run)[-2] for run in ("dead", "two-picky"))
    for name in ("step", "loss", "grad_norm", "online/win_margin", "online/total_prompts"):
        assert last[name] == expected[name], name


@pytest.mark.slow
@pytest.mark.multiprocess
def test_every_kind_of_online_run_is_the_same_on_two_processes(directory: Path) -> None:
    run_on_ranks(_train, directory, MORE)
    assert_same_runs(directory, MORE)


def _letters(seed: int, number: int) -> str:
    """At most eight tokens, and EOS."""
    return "".join("aeiou"[(seed >> (2 * place + number)) % 5] for place in range(1 + seed % 8))


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_sharded_policy_learns_from_a_server_s_answers_as_a_whole_one(directory: Path) -> None:
    with serving(Stub(completions(_letters))) as stub:
        generator = {"type": "http", "endpoint": {"url": stub.url, "model": "m", "concurrency": 2}}
        served: dict[str, Settings] = {
            "served": (("packing.token_budget=1", "packing.pairs_per_step=3"), {"generator": generator}),
            "served, lora": ((LORA, "optim.lr=1e-2", "packing.pairs_per_step=1"), {"generator": generator}),
        }
        run_on_ranks(_train, directory, served, "distributed.strategy=fsdp2")
        assert stub.most_under_way <= 4  # two on each rank
        assert_same_runs(directory, served)


def test_a_policy_that_writes_itself_is_not_sharded(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served = {"generator": {"type": "http", "endpoint": {"url": "http://localhost:1/v1", "model": "m"}}}
    fsdp2 = "distributed.strategy=fsdp2"
    held_out = f"data.eval={directory}/assets/heldout.jsonl"
    refused: list[tuple[Settings, str]] = [
        (FEWEST, "the policy answers the prompts itself"),
        (((held_out,), served), "the policy answers the prompts of data.eval itself"),
        ((("data.eval={fraction: 0.2}",), served), "the policy answers the prompts of data.eval itself"),
        ((("online.offload_reference=true",), served), "online.offload_reference moves a whole model"),
    ]
    monkeypatch.setattr(ranks, "num_ranks", lambda: 2)
    monkeypatch.setattr(ranks, "every_rank_says", lambda value: [value])
    monkeypatch.setattr(strategies, "by_size", lambda *_, **__: ("fsdp2", "size"))
    monkeypatch.setattr(strategies, "_mesh", lambda *_, **__: "mesh")
    for settings, why in refused:
        message = message_of(lambda: recipe_of(directory, "none", settings, fsdp2))  # noqa: B023
        assert message.startswith(f"distributed.strategy: {why}") and message.endswith("set ddp"), message
        chosen = _chosen(recipe_of(directory, "none", settings))
        assert chosen.name == "ddp" and why in chosen.sentence()
    assert _chosen(recipe_of(directory, "none", ((), served))).name == "fsdp2"
    assert _chosen(recipe_of(directory, "none", ((), served), fsdp2)).name == "fsdp2"


def _chosen(recipe: Recipe) -> Strategy:
    device = torch.device("cpu")
    return strategies.choose_strategy(recipe, resolve_model(recipe, device), device)
