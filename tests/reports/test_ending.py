"""The end of a run says what was learned, shows samples before and after, and names the next commands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from rich.console import Console
from support.whole_runs import lines, stop_after, text, whole_run

from dpo_pack.run.samples import read_samples
from dpo_pack.trainer import train
from dpo_pack.training.health import with_interval


def ending_of(console: Console) -> str:
    return text(console).partition("Done: ")[2]


def test_the_ending_has_metrics_and_samples_of_both(assets: Path, tmp_path: Path, console: Console) -> None:
    run = tmp_path / "my run"
    few = ("logging.samples={num: 3, max_new_tokens: 4}", "optim.lr=0.01")
    train(whole_run(assets, run, *few), console)
    told = ending_of(console)
    first, *_, last = lines(run, "eval")
    assert first["rewards/ties"] == 1.0 and {*first["intervals"].values()} == {None}
    assert "after step 0: reward accuracy 0.500 (all ties), margin 0.0000, loss 0.6931" in text(console)
    assert re.search(r"Done: 8 steps, 32 pairs in [^(]+ \([\d.,]+ pairs/s\)\. Model: ", text(console))
    assert re.search(r"\n[\d.]+ (s|min) in all\n\nNext:\n", told)
    for metric, words in (("rewards/accuracies", "reward accuracy"), ("rewards/margins", "reward margin")):
        tied = {"rewards/accuracies": r"0.500 \(all ties\)", "rewards/margins": "0.000"}[metric]
        row = rf"{words} +{tied} +{re.escape(with_interval(last[metric], last['intervals'][metric]))}\s"
        assert re.search(row, told)
    written = read_samples(run / "samples.jsonl")
    both = list(zip(written[:3], written[3:], strict=True))
    changed = [(start, policy) for start, policy in both if start["completion"] != policy["completion"]]
    assert changed
    for start, policy in both:
        shown = f"heldout: {start['prompt']}\n" in told
        assert shown == ((start, policy) in changed[:1])
        assert not shown or all(one["completion"].strip() in told for one in (start, policy))
    assert told.endswith(f"Next:\n  dpopack sample '{run}'\n  dpopack evaluate '{run}/recipe.yaml'\n")
    assert "Warning" not in told and "a tie counts half" in told and "samples are the same" not in told


@pytest.mark.slow
def test_warnings_are_repeated_at_the_end_also_of_a_resumed_run(
    assets: Path, tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dpo_pack.training.health.RULES", {"step": (2, "mend it")})
    recipe = whole_run(assets, tmp_path / "run", "train.eval_every_steps=null", "data.eval=[]")
    stop_after(3, recipe)
    train(recipe, console)
    told = ending_of(console)
    assert re.search(
        r"Warnings of this run:\n  after step 2: mend it\n[\d.]+ (s|min) in all\n\nNext:\n", told
    )
    assert "evaluate" not in told and "before" not in told  # nothing is held out, and there are no samples
