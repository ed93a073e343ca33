"""A reference that follows the policy: its arithmetic, whole runs, resumption."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from math import log
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support.marks import slow
from support.run_files import losses, records
from support.tiny_run import tiny_checkpoint

from dpo_pack.recipe.load import Recipe, load_recipe
from dpo_pack.system.errors import ModelError
from dpo_pack.trainer import train

Make = Callable[..., Recipe]


@pytest.fixture
def make(assets: Path, tmp_path: Path) -> Make:
    """A recipe of the tiny run, in an output_dir of the given name. Tests share its cache."""

    def recipe(name: str, sync: str, *overrides: str) -> Recipe:
        fixed = (f"output_dir={tmp_path / name}", f"reference.sync={sync}", "optim.warmup_steps=0")
        return load_recipe(assets / "recipe.yaml", [*fixed, *overrides])

    return recipe


def test_a_moving_reference_is_not_computed_beforehand_and_its_log_probs_are_not_cached(
    make: Make, console: Console, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    monkeypatch.setattr("dpo_pack.run.inputs.prepare_reference", lambda *_: pytest.fail("a reference pass"))
    recipe = make("run", "{every_steps: 1, mixup: 0.5}", f"reference.cache_dir={cache}")
    train(recipe, console)
    assert not (recipe.output_dir / "reference.parquet").exists()
    assert cache.exists() and not (cache / "reference").exists()


@pytest.mark.parametrize("lora", ["model.lora={r: 4, alpha: 8}", *slow("")])
def test_a_reference_that_follows_at_once_is_the_policy(lora: str, make: Make, console: Console) -> None:
    """Its loss is log 2 whatever was learned, and so is that of the evaluation at the end."""
    if lora and importlib.util.find_spec("peft") is None:
        pytest.skip("no peft")
    overrides = [lora] if lora else []
    recipe = make("run", "{every_steps: 1, mixup: 1.0}", "train.epochs=2", "optim.lr=1e-2", *overrides)
    train(recipe, console)
    assert losses(recipe.output_dir) == pytest.approx([log(2)] * 4, abs=1e-5)
    assert records(recipe.output_dir, "eval")[-1]["loss"] == pytest.approx(log(2), abs=1e-5)
    evaluations = records(recipe.output_dir, "eval")
    changes = [r["logps/chosen"] - evaluations[0]["logps/chosen"] for r in evaluations]
    assert abs(changes[-1]) > 0.1


@pytest.fixture(scope="module")
def biased(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base model whose projections have biases."""
    return tiny_checkpoint(tmp_path_factory.mktemp("biased"), attention_bias=True)


@pytest.mark.parametrize(
    ("settings", "trained"),
    [
        *slow(({"use_dora": True}, "q_proj.lora_A"), ({"bias": "lora_only"}, "q_proj.base_layer.bias")),
        pytest.param(
            {"lora_bias": True},
            "q_proj.lora_B.default.bias",
            # peft takes a bias for a part of a sharded weight when it saves.
            marks=pytest.mark.filterwarnings("ignore:Adapter 'default'. 2 LoRA tensor"),
        ),
        ({"bias": "all"}, ".bias"),
        ({"trainable_token_indices": [1]}, "embed_tokens"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else value,
)
def test_an_adapter_that_is_more_than_low_rank_is_refused(
    settings: dict[str, Any], trained: str, biased: Path, make: Make, console: Console, tmp_path: Path
) -> None:
    pytest.importorskip("peft")
    from support.refusals import refusal
    from support.tiny_adapters import saved_adapter

    adapter = saved_adapter(tmp_path / "adapter", biased, target_modules=["q_proj"], **settings)
    recipe = make("run", "{every_steps: 1, mixup: 0.5}", f"model.path={adapter}", f"reference.path={biased}")
    message = refusal(lambda: train(recipe, console), ModelError)
    assert "reference.sync: a reference cannot follow" in message and trained in message


@pytest.mark.parametrize(
    "adapter",
    [
        {"modules_to_save": ["lm_head"]},
        *slow({"target_modules": ["q_proj", "up_proj"], "modules_to_save": ["lm_head"], "use_rslora": True}),
    ],
)
def test_a_reference_of_other_weights_becomes_the_policy_with_its_adapter(
    adapter: dict[str, Any], make: Make, console: Console, tmp_path: Path
) -> None:
    """All weights are mixed, those too that the adapter leaves as they are."""
    pytest.importorskip("peft")
    from support.tiny_adapters import saved_adapter

    base, other = Path(make("run", "{}").model.path), tmp_path / "other"
    tiny_checkpoint(other, seed=1)
    path = saved_adapter(tmp_path / "adapter", base, **adapter)
    recipe = make("run", "{every_steps: 1, mixup: 1.0}", f"model.path={path}", f"reference.path={other}",
                  "train.epochs=2", "optim.lr=1e-2")  # fmt: skip
    train(recipe, console)
    first, *later = losses(recipe.output_dir)
    assert first != pytest.approx(log(2), abs=1e-2)
    assert later == pytest.approx([log(2)] * 3, abs=1e-5)


@pytest.mark.parametrize(
    ("family", "changes", "unlike"),
    [
        ("llama", {"tie_word_embeddings": True}, "lm_head.weight"),
        ("llama", {"intermediate_size": 64}, "model.layers.0.mlp.gate_proj.weight"),
        *slow(
            ("gpt2", {}, "model.embed_tokens.weight"),
            ("llama", {"num_hidden_layers": 3}, "model.layers.2.self_attn.q_proj.weight"),
        ),
    ],
    ids=["tied", "wider", "gpt2", "deeper"],
)
def test_a_reference_of_another_architecture_is_refused(
    family: str, changes: dict[str, Any], unlike: str, make: Make, console: Console, tmp_path: Path
) -> None:
    other = tiny_checkpoint(tmp_path / "other", family, **changes)
    with pytest.raises(ModelError, match=f"^reference.sync: .* in the shape of {unlike};"):
        train(make("run", "{}", f"reference.path={other}"), console)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
