"""What an earlier release has written is read, or refused in one line: never misread, never a traceback.

scripts/make_golden_values.py --release makes tests/fixtures/release anew, once for each release.
"""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from rich.console import Console
from support.reference_pairs import all_sums, make_table
from support.release import RELEASE, STEPS, STEPS_DONE, losses, release_cache, release_recipe, versions
from support.whole_runs import text

import dpo_pack
from dpo_pack.recipe.load import REMOVED_KEYS
from dpo_pack.system.errors import DpoPackError
from dpo_pack.trainer import train

EXPECTED: dict[str, Any] = json.loads((RELEASE / "expected.json").read_text(encoding="utf-8"))
REMAKE = "these files are of this very release: read them, or run scripts/make_golden_values.py --release"


@pytest.fixture
def release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the release's files, as the working directory."""
    directory = tmp_path / "release"
    shutil.copytree(RELEASE, directory)
    monkeypatch.chdir(directory)
    return directory


def files_in(directory: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_a_checkpoint_of_an_earlier_release_is_gone_on_from_or_refused_in_one_line(
    release: Path, console: Console
) -> None:
    for file in (release / "recipe.yaml", release / "run" / "recipe.yaml"):
        tree = yaml.safe_load(file.read_text())
        for key, (harmless, _) in REMOVED_KEYS.items():
            section, name = key.split(".")
            tree.setdefault(section, {})[name] = "any" if harmless is None else harmless[0]
        file.write_text(yaml.safe_dump(tree))
    before = files_in(release / "run")
    try:
        train(release_recipe(), console)
    except DpoPackError as refusal:
        assert EXPECTED["made_with"] != versions(), f"{refusal}; {REMAKE}"
        assert str(refusal).isprintable() and ("run" in str(refusal) or "checkpoint" in str(refusal))
        assert files_in(release / "run") == before
        return
    assert f"step {STEPS_DONE}" in text(console), "it began anew without a word"
    metrics = (release / "run" / "metrics.jsonl").read_bytes()
    assert metrics.startswith(before[release / "run" / "metrics.jsonl"])
    assert len(losses(release / "run")) == STEPS
    # Log-probs of 20 nats in float32, and two steps of AdamW, on another CPU.
    assert losses(release / "run") == pytest.approx(EXPECTED["losses"], abs=1e-4)
    assert losses(release / "run")[-1] < losses(release / "run")[0] - 1e-3  # the steps are not noise


def test_reference_log_probs_of_an_earlier_release_are_found_or_set_aside_with_one_line(
    release: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Under the same namespace, by keys that today's code makes of the token ids."""
    with caplog.at_level(logging.WARNING):
        sums = all_sums(release_cache(release), [make_table(EXPECTED["pairs"])])
    if np.isnan(sums).all() and caplog.messages:
        assert EXPECTED["made_with"] != versions(), REMAKE
        assert all(message.isprintable() and "part-" in message for message in caplog.messages)
        return
    assert sums.tolist() == EXPECTED["sums"]


def test_commands_that_read_a_run_do_without_what_no_longer_exists_and_training_names_it(
    release: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = release / "run" / "recipe.yaml"
    content = file.read_text().replace("scope: step", "scope: epoch")
    file.write_text(content.replace("type: sigmoid", "type: aot"))
    assert dpo_pack.report("run", quiet=True).is_file()
    assert dpo_pack.sample("run", prompts=["which is red?"], quiet=True)
    found = dpo_pack.evaluate(file, **{"data.eval": "./pairs.jsonl"})
    assert "rewards/margins" in next(iter(found.values()))["intervals"]
    told = " ".join(capsys.readouterr().out.split())
    assert "evaluated without packing.scope 'epoch', which dpo-pack no longer has Note: " in told
    assert "evaluated without loss.type aot, which dpo-pack no longer has, so no loss is shown" in told
    assert '"loss"' not in json.dumps(found) and " loss " not in told.partition("reward accuracy")[2]
    file.write_text(content)
    with pytest.raises(DpoPackError, match=r"^run: this run has packing\.scope 'epoch', .*; copy its recipe"):
        dpo_pack.train("run")
    with pytest.raises(
        DpoPackError, match=r"^output_dir: run holds a run with packing\.scope [^(]*; use ano"
    ):
        dpo_pack.train("recipe.yaml")  # whose run it would resume
