"""Proofs as commands use them: shown, remembered, and in the way of a run when one fails."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from support.dpopack import Dpopack
from support.tiny_run import tiny_checkpoint

import dpo_pack.model.attention as attention
from dpo_pack.model.fast_layers import speed_key
from dpo_pack.proofs.start_up import prove
from dpo_pack.recipe.load import load_recipe
from dpo_pack.run.models import own_code, resolve_model
from dpo_pack.run.setup import autocast_advice, load_proved, prepare
from dpo_pack.system.files import write_json_atomically
from dpo_pack.system.machine import package_versions

NAMES = ["wiring", "functions", "isolation", "equivalence"]


@pytest.fixture
def broken_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kernel's scale is off by 2 percent."""
    exact = attention.BACKENDS["sdpa"]

    def off(*inputs: Any) -> Any:
        return exact(*inputs[:-1], replace(inputs[-1], scale=1.02 * inputs[-1].scale))

    monkeypatch.setitem(attention.BACKENDS, "sdpa", off)


@pytest.fixture
def num_proved(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """One entry for each time that a model was proved, not remembered."""
    entries = []

    def counting(*arguments: Any) -> Any:
        entries.append("proved")
        return prove(*arguments)

    monkeypatch.setattr("dpo_pack.run.models.prove", counting)
    return entries


# --------------------------------------------------------------------------------------------- the command


def test_doctor_shows_every_proof_with_its_numbers_and_bound(recipe: Path, dpopack: Dpopack) -> None:
    status, out, err = dpopack("doctor", recipe)
    assert (status, err) == (0, "")
    for told in (*NAMES, "relative error", "1e-04", "Packed rows are exact on this model"):
        assert told in out
    status, out, _ = dpopack("doctor", recipe, "--json")
    proofs = json.loads(out)["proofs"]
    assert status == 0
    assert [proof["name"] for proof in proofs] == NAMES
    for proof in proofs:
        assert proof.keys() == {"name", "passed", "numbers", "bound", "remedy"}
        assert proof["passed"] and proof["numbers"] and proof["bound"] and proof["remedy"]


@pytest.mark.usefixtures("broken_kernel")
def test_a_failing_proof_is_exit_status_2_with_numbers_and_remedy(recipe: Path, dpopack: Dpopack) -> None:
    status, out, err = dpopack("doctor", recipe, "--json")
    failed = [proof["name"] for proof in json.loads(out)["proofs"] if not proof["passed"]]
    assert status == 2 and failed[0] == "functions"
    assert err.startswith("error: packed rows are not exact on this model: the functions proof measured")
    assert "relative error" in err and "1.0e-05" in err and "model.attention: sdpa" in err
    assert err.count("\n") == 1
    status, out, err = dpopack("doctor", recipe)
    assert status == 2 and "NO" in out and "exact on this model" not in out and err.count("\n") == 1


@pytest.mark.usefixtures("broken_kernel")
@pytest.mark.parametrize("command", ["train", "precompute-ref"])
def test_a_failing_proof_stops_a_run_before_it_computes(command: str, recipe: Path, dpopack: Dpopack) -> None:
    for _ in range(2):  # a failure is not remembered
        status, _, err = dpopack(command, recipe)
        assert status == 2 and "the functions proof measured" in err and err.count("\n") == 1
    assert not (recipe.parent / "run").exists()
    assert not list((recipe.parent / "cache").rglob("*.parquet"))


# ---------------------------------------------------------------------------------------------- remembered


def start(recipe: Path, console: Console, *overrides: str) -> None:
    load_proved(prepare(load_recipe(recipe, overrides), console))


def test_the_same_model_is_proved_once_and_by_doctor_again(
    recipe: Path, dpopack: Dpopack, console: Console, num_proved: list[str]
) -> None:
    start(recipe, console)
    assert len(num_proved) == 1
    start(recipe, console, "optim.lr=1e-4", "packing.token_budget=64", "seed=5", "output_dir=elsewhere")
    assert len(num_proved) == 1
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert text.count("Proof: packed rows are exact on this model") == 2
    assert text.count("passed before") == text.count("passed now") == 1
    assert dpopack("doctor", recipe)[0] == 0
    assert len(num_proved) == 2


def test_every_module_of_the_package_is_its_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "__init__.py").touch()
    (tmp_path / "data" / "layout.py").write_text("one")
    monkeypatch.setattr("dpo_pack.__file__", str(tmp_path / "__init__.py"))
    before = own_code.__wrapped__()
    (tmp_path / "data" / "layout.py").write_text("two")
    assert own_code.__wrapped__() != before


PATCHES = {  # an editable install keeps its version; nodes of a cluster share a cache
    "package_versions": lambda: {**package_versions(), "transformers": "99.0"},
    "own_code": lambda: "changed",
    "cpu_name": lambda: "another",
}


@pytest.mark.slow
def test_another_model_or_version_is_proved_again(
    recipe: Path, console: Console, num_proved: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    start(recipe, console)
    model = recipe.parent / "model"
    config = json.loads((model / "config.json").read_text()) | {"rms_norm_eps": 1e-3}
    changes: list[Callable[[], object]] = [
        lambda: (recipe.parent / "cache" / "proofs.json").unlink(),
        lambda: tiny_checkpoint(model, seed=1),
        lambda: (model / "config.json").write_text(json.dumps(config)),
        *(partial(monkeypatch.setattr, f"dpo_pack.run.models.{name}", new) for name, new in PATCHES.items()),
    ]
    for number, change in enumerate(changes):
        change()
        start(recipe, console)
        assert len(num_proved) == 2 + number, number


# -------------------------------------------------------------------------------- what a CPU's products reach


def remember(threads: int = 1, **speeds: float) -> Path:
    file = Path(os.environ["DPO_PACK_CACHE"], "cpu_gflops.json")
    write_json_atomically(file, {speed_key(threads): speeds})
    return file


def test_check_and_a_new_run_recommend_bf16_that_is_twice_as_fast(recipe: Path, dpopack: Dpopack) -> None:
    remember(float32=50, bfloat16=100), (told := "2 times as fast in bf16")
    for command in (["recipe", "--check"], ["train"]):
        assert dpopack(*command, recipe).out.count(told) == 1
    assert told not in dpopack("recipe", "--check", recipe).out  # a run that has begun keeps its type


def test_no_other_recipe_machine_or_cache_is_recommended_bf16(
    recipe: Path, dpopack: Dpopack, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_told(*overrides: str) -> bool:
        return bool(autocast_advice(resolve_model(load_recipe(recipe, overrides), torch.device("cpu"))))

    fast: dict[str, Any] = {"float32": 50, "bfloat16": 100}
    file = remember(**fast)
    assert is_told() and is_told("model.dtype=float32")
    for choice in ("model.autocast=none", "model.autocast=bfloat16", "model.dtype=bfloat16"):
        assert not is_told(choice), choice
    for name, value in (("model.fast_layers.cpu_name", "another"), ("system.ranks.uses_cuda", True)):
        with monkeypatch.context() as patch:
            patch.setattr(f"dpo_pack.{name}", lambda value=value: value)
            assert not is_told(), name
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert not is_told()
    for speeds in ({"bfloat16": 99}, {"float32": 0}, {"threads": 2}, {"float32": "x"}):
        remember(**{**fast, **speeds})
        assert not is_told(), speeds
    file.write_text("{")
    assert not is_told() and dpopack("doctor").status == 0 and len(json.loads(file.read_text())) == 1
    monkeypatch.setenv("DPO_PACK_CACHE", "/proc/no")  # nothing can be written there
    outcome = dpopack("doctor")
    assert (outcome.status, outcome.err) == (0, "") and "CPU products" in outcome.out and not is_told()
