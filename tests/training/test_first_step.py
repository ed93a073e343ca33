"""Before the first step: a run whose policy is not its cached reference stops and says why."""

from __future__ import annotations

import contextlib
import hashlib
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from safetensors.torch import load_file, save_file
from start_check import OTHER_KERNEL, run_trial
from support.kernels import OtherKernel
from support.marks import slow
from support.tiny_models import tiny_model
from support.tiny_run import tiny_checkpoint, tiny_run
from support.tiny_tokenizer import tiny_tokenizer

from dpo_pack.model.layout import Row
from dpo_pack.model.scorer import CompletionLogps
from dpo_pack.recipe.load import Recipe, load_recipe
from dpo_pack.run import inputs
from dpo_pack.run.inputs import prepare_run
from dpo_pack.run.run_dir import find_run
from dpo_pack.run.setup import load_proved
from dpo_pack.system.errors import RunError
from dpo_pack.training import references


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_run(tmp_path_factory.mktemp("job")).parent


def start(job: Path, cache: Path, console: Console, *overrides: str) -> None:
    """Everything up to the first step."""
    recipe = load(job, f"reference.cache_dir={cache}", *overrides)
    prepare_run(recipe, find_run(recipe, overwrite=False), console)


def load(job: Path, *overrides: str) -> Recipe:
    return load_recipe(job / "recipe.yaml", overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("model.autocast=bfloat16",),
        ("packing.mode=padded",),
        pytest.param(("reference.token_budget=4096",), marks=pytest.mark.slow),
        pytest.param(("packing.share_prompt=false",), marks=pytest.mark.slow),
    ],
)
def test_the_policy_as_it_starts_is_its_reference(
    overrides: tuple[str, ...], job: Path, tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    forwards: list[Row] = []
    compared = references.check_start

    def counted(scorer: CompletionLogps, *arguments: Any) -> None:
        hook = scorer.register_forward_hook(lambda module, inputs, output: forwards.append(inputs[0]))
        compared(scorer, *arguments)
        hook.remove()

    monkeypatch.setattr(inputs, "check_start", counted)
    for _ in range(2):  # computed, then cached
        start(job, tmp_path / "cache", console, *overrides)
    assert len(forwards) == 2  # one forward a start shows that they agree


@pytest.mark.parametrize("autocast", [pytest.param("none", marks=pytest.mark.slow), "bfloat16"])
def test_experts_near_ties_are_no_failure(autocast: str, job: Path, tmp_path: Path, console: Console) -> None:
    model = tiny_checkpoint(tmp_path / "model", "qwen3_moe")
    overrides = (f"model.path={model}", f"model.autocast={autocast}", "packing.token_budget=64")
    start(job, tmp_path / "cache", console, *overrides, "reference.token_budget=4096")


def change_cached_values(cache: Path, change: float) -> None:
    """Every cached log-prob, in parts that are whole by their checksum."""
    parts = list((cache / "reference").rglob("part-*.parquet"))
    assert parts
    for part in parts:
        table = pq.read_table(part)
        for number, field in enumerate(table.schema):
            if pa.types.is_float64(field.type):
                values = pa.array(table.column(number).to_numpy() + change)
                table = table.set_column(number, field, values)
        part.unlink()
        pq.write_table(table, part)
        part.rename(part.with_name(f"part-{hashlib.sha256(part.read_bytes()).hexdigest()}.parquet"))


@pytest.mark.parametrize(("change", "autocast"), [(0.01, "none"), *slow((-3.0, "bfloat16"))])
def test_an_altered_cache_stops_the_run_before_the_first_step(
    change: float, autocast: str, job: Path, tmp_path: Path, console: Console
) -> None:
    start(job, tmp_path / "cache", console, f"model.autocast={autocast}")
    change_cached_values(tmp_path / "cache", change)
    with pytest.raises(RunError, match="not its cached reference.*differs by .*reference.cache_dir") as stop:
        start(job, tmp_path / "cache", console, f"model.autocast={autocast}")
    assert "\n" not in str(stop.value)
    start(job, tmp_path / "another cache", console, f"model.autocast={autocast}")


@pytest.mark.parametrize("fills_cache", [True, False])
def test_dropout_stops_the_run_before_the_first_step(
    fills_cache: bool, job: Path, tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the reference was computed with it."""
    if not fills_cache:
        start(job, tmp_path / "cache", console)

    def with_dropout(*arguments: Any) -> Any:
        loaded = load_proved(*arguments)
        loaded.model.get_input_embeddings().register_forward_hook(
            lambda module, inputs, output: F.dropout(output, 0.1, training=True)
        )
        return loaded

    monkeypatch.setattr("dpo_pack.run.inputs.load_proved", with_dropout)
    torch.manual_seed(0)
    with pytest.raises(RunError, match="not repeatable.*dropout.*config.json"):
        start(job, tmp_path / "cache", console)


@pytest.mark.parametrize("what", ["adapter", "files"])
def test_a_start_is_refused_by_its_weights_where_rounding_hides_them(
    what: str, job: Path, tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An adapter that has moved by one step, and a model of another revision whose values are not read."""
    model = shutil.copytree(load(job).model.path, tmp_path / "model")

    def moved(*arguments: Any) -> Any:
        loaded = load_proved(*arguments)
        if what == "adapter":
            for name, weight in loaded.model.named_parameters():
                weight.data += 1e-4 * (".lora_B." in name)
        else:
            state = load_file(model / "model.safetensors")
            name = next(name for name in state if name.endswith("norm.weight"))
            save_file({**state, name: state[name] * 1.001}, model / "model.safetensors", {"format": "pt"})
        return loaded

    monkeypatch.setattr("dpo_pack.run.inputs.load_proved", moved)
    expected = "lora_B.* is not zero" if what == "adapter" else "changed on disk while it was read"
    overrides = (f"model.path={model}", "model.autocast=bfloat16", "model.lora={r: 2}")
    with pytest.raises(RunError, match=expected):
        start(job, tmp_path / "cache", console, *overrides)


@pytest.mark.parametrize(("level", "number"), [("here", 21), *slow(*((OTHER_KERNEL, n) for n in (4, 7, 12)))])
def test_random_models_start_and_planted_faults_do_not(level: str, number: int, tmp_path: Path) -> None:
    """A sample of docs/dev/start-check.md: small models in fp32, bf16 autocast, a mixture in bf16."""
    with OtherKernel(more_than_rows=100) if level == OTHER_KERNEL else contextlib.nullcontext():
        found = run_trial(number, tmp_path)
    assert found["refused"] == "" and found["missed"] == [] and not found["is_large"]


@pytest.mark.parametrize("autocast", ["bfloat16", "none"])
def test_another_kernel_for_longer_rows_is_rounding(
    autocast: str, job: Path, tmp_path: Path, console: Console
) -> None:
    """The head adds one number to all logits, up to some hundred, which changes log-probs by rounding alone.
    A row's products round otherwise than those of its halves, or all otherwise than the reference pass's."""
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(tmp_path / "model")
    changes: dict[str, Any] = {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "vocab_size": len(tokenizer),
        "tie_word_embeddings": False,
    }
    model = tiny_model("llama", **changes)
    model.get_output_embeddings().weight.data.add_(20.0 * torch.randn(256))
    model.save_pretrained(tmp_path / "model")
    overrides = (f"model.path={tmp_path / 'model'}", f"model.autocast={autocast}", "packing.token_budget=128")
    start(job, tmp_path / "cache", console, *overrides)
    for most_rows in (96, 0):
        with OtherKernel(more_than_rows=most_rows):
            start(job, tmp_path / "cache", console, *overrides)
