"""scripts/benchmark.py: the same work for every contender, what is counted, and what its page says."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import benchmark
import numpy as np
import pytest
from benchmark import Plan, compare_work, run_plan
from benchmarking.contenders import MALLOCS, Contender, Measurement, Setting, ours, trl, trl_variants
from benchmarking.report import NOT_COMPARABLE, Profile, Report, markdown
from benchmarking.results import TOLERANCES, Results, largest_differences, other_work
from benchmarking.run_dpo_pack import make_recipe
from benchmarking.run_trl import trl_config
from benchmarking.shapes import SHAPES, Work, flops_shape, forward_parts, save_model, work_of
from benchmarking.workloads import (
    AGENTS_ANSWER,
    AGENTS_COMMON,
    AGENTS_TURN,
    HH_WORKLOADS,
    Workload,
    make_workload,
)
from support.tiny_tokenizer import tiny_tokenizer

from dpo_pack.packing.lengths import causal_area


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    """Eight short pairs and a model of two layers."""
    directory = tmp_path_factory.mktemp("benchmark")
    workload = make_workload(
        "hh-like", directory / "pairs", num_pairs=8, vocabulary=SHAPES["tiny"]["vocab_size"], hh_pairs=None
    )
    save_model("tiny", directory / "model", parameters="float32", device="cpu")
    return Setting(
        workload=str(workload.directory),
        model=str(directory / "model"),
        num_pairs=8,
        pairs_per_step=2,
        max_length=workload.max_length,
        device="cpu",
        parameters="float32",
        autocast=False,
        lora=False,
        gradient_checkpointing=False,
        warmup_steps=0,
    )


def workload_of(setting: Setting) -> Workload:
    return make_workload(
        "hh-like", Path(setting.workload), num_pairs=8, vocabulary=SHAPES["tiny"]["vocab_size"], hh_pairs=None
    )


# ---- Contenders and measurements


def test_time_a_pair_has_the_reference_in_it_and_warm_up_steps_are_left_out() -> None:
    run = Measurement(contender="x", pairs=8, step_seconds=[9.0, 2.0, 2.0, 4.0], reference_seconds=4.0)
    # 8/3 s a step of 2 pairs, and half a second of reference a pair
    assert run.seconds_a_pair(warmup_steps=1) == pytest.approx(8 / 3 / 2 + 0.5)
    assert run.seconds_a_pair(warmup_steps=0) == pytest.approx(17 / 8 + 0.5)
    assert run.reference_share(warmup_steps=0) == pytest.approx(4 / 21)


def test_fewer_pairs_than_a_step_has_are_one_step_of_the_sweep(tiny: Setting, tmp_path: Path) -> None:
    plan = plan_of(tiny, tmp_path, sweep_pairs=1, microbatches=[1], fewest_steps=1)
    assert (plan.of_sweep.num_pairs, plan.of_sweep.pairs_per_step) == (1, 1)
    with pytest.raises(SystemExit, match="1 timed steps are too few to rank by"):
        plan_of(tiny, tmp_path, sweep_pairs=1, microbatches=[1])
    with pytest.raises(SystemExit, match="--microbatches: 2 does not divide"):
        plan_of(tiny, tmp_path, sweep_pairs=1, microbatches=[2], fewest_steps=1)


def test_bf16_on_a_cpu_is_in_the_recipe_and_in_the_peak(tiny: Setting, tmp_path: Path) -> None:
    for autocast, dtype in ((False, "float32"), (True, "bfloat16")):
        setting = replace(tiny, autocast=autocast)
        recipe = make_recipe(ours(1024), setting, tmp_path)
        assert (recipe.model.autocast == "bfloat16") is autocast and recipe.model.dtype == "float32"
        assert plan_of(setting, tmp_path).compute_dtype == dtype


# ---- Work, agreement, results


def test_agents_pairs_begin_alike_and_the_least_work_has_that_once_in_a_step(tmp_path: Path) -> None:
    workload = make_workload("agents", tmp_path, num_pairs=4, vocabulary=512, hh_pairs=None)
    rows, lengths, shape = workload.rows(4), workload.lengths(4), flops_shape("tiny")
    beginnings = {tuple(row["prompt_ids"][:AGENTS_COMMON]) for row in rows}
    assert len(beginnings) == 1 and np.asarray(lengths.common).tolist() == [AGENTS_COMMON] * 4
    turns = lengths.prompt - AGENTS_COMMON
    for drawn, (least, most) in (
        (turns, AGENTS_TURN), (lengths.chosen, AGENTS_ANSWER), (lengths.rejected, AGENTS_ANSWER)
    ):  # fmt: skip
        assert least <= drawn.min() < drawn.max() <= most
    # By hand: layers for new tokens, the head at scored ones, attention from each token to all before it; the
    # last feed-forward block where a token of an answer is predicted.
    ends = np.stack((lengths.prompt + lengths.chosen, lengths.prompt + lengths.rejected))
    own = int((ends.sum(axis=0) - lengths.shared).sum()) - 4 * AGENTS_COMMON
    scored = int((lengths.chosen + lengths.rejected).sum())
    (kind,), tokens = shape.attention, own + AGENTS_COMMON
    area = (causal_area(ends, None).sum() - causal_area(lengths.shared, None).sum()) - 3 * causal_area(
        np.array([AGENTS_COMMON]), None
    )[0]
    predicting = scored - 4 - int((lengths.shared - lengths.prompt).sum())
    flops = 2 * shape.token_weights * tokens + 2 * shape.head_weights * scored
    flops += 2 * kind.num_layers * kind.width * area
    flops -= 2 * shape.last_block_weights * (tokens - predicting)
    work = work_of(shape, lengths, pairs_per_step=4, lora=False)
    assert work.least_tokens == tokens / 4
    assert work.shared_tokens == own / 4 + AGENTS_COMMON
    assert work.reference_flops == pytest.approx(flops / 4)
    assert work.training_flops == pytest.approx(3 * flops / 4)
    assert sum(forward_parts(shape, lengths, [np.arange(4)]).values()) == pytest.approx(flops)
    # Two steps have it twice, the reference still once.
    halves = work_of(shape, lengths, pairs_per_step=2, lora=False)
    assert halves.least_tokens == (tokens + AGENTS_COMMON) / 4
    assert halves.reference_flops == work.reference_flops < halves.training_flops / 3


def test_hh_as_messages_of_a_chat_template_ends_turns_and_scores_the_last_answer(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer(chat_template=True)
    tokenizer.save_pretrained(tmp_path / "model")
    dialogue = "\n\nHuman: what is it\n\nAssistant:"
    rows = [{"chosen": f"{dialogue} good {word}", "rejected": f"{dialogue} bad"} for word in ("a", "the")]
    rows.insert(1, {"chosen": "no dialogue", "rejected": "no dialogue"})
    path = tmp_path / "hh.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    workload = make_workload(
        "hh-chat", tmp_path / "pairs", num_pairs=2, vocabulary=512, hh_pairs=path,
        tokenizer=str(tmp_path / "model"),
    )  # fmt: skip
    messages = [{"role": "user", "content": "what is it"}]
    answer = [*messages, {"role": "assistant", "content": "good a"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    whole = tokenizer.apply_chat_template(answer, return_dict=False)
    first, _ = workload.rows(2)
    assert first["prompt_ids"] == prompt and first["prompt_ids"] + first["chosen_ids"] == whole
    assert workload.name in HH_WORKLOADS and "chat template" in workload.origin


@pytest.mark.parametrize(("name", "millions"), [("7m", 7.3), ("0.5b", 494), ("8b", 8030)])
def test_shapes_have_the_weights_that_their_names_say(name: str, millions: float) -> None:
    shape, is_tied = flops_shape(name), SHAPES[name].get("tie_word_embeddings", False)
    weights = shape.token_weights + shape.head_weights * (1 if is_tied else 2)
    assert weights / 1e6 == pytest.approx(millions, rel=0.02)


def steps(losses: Sequence[float], *, norm: float = 1.0, logp: float = -50.0) -> Measurement:
    """A measurement of steps with these losses."""
    count = len(losses)
    return Measurement(
        contender="x",
        losses=list(losses),
        grad_norms=[norm] * count,
        chosen_logps=[logp] * count,
        rejected_logps=[-60.0] * count,
    )


def test_the_same_work_is_told_from_other_work() -> None:
    base, fp32 = steps([0.69, 0.68]), TOLERANCES["fp32"]
    assert other_work(largest_differences(base, steps([0.69, 0.680001])), fp32, who="x") == []
    for name, other in {
        "loss": steps([0.69, 0.6802]),
        "grad_norm": steps([0.69, 0.68], norm=1.001),
        "logps": steps([0.69, 0.68], logp=-50.001),
    }.items():
        (line,) = other_work(largest_differences(base, other), fp32, who="x")
        assert line.startswith(f"x does not do the same work: {name} differs by")
    lost = largest_differences(base, steps([0.69, float("nan")]))
    assert "loss differs by nan" in other_work(lost, fp32, who="x")[0]


def test_results_go_on_where_they_were_and_only_for_the_same_setting(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "out.json"
    Results.open(path, {"model": "7m"}).put("run/0/x", {"a": 1})
    again = Results.open(path, {"model": "7m"})
    assert again.entries == {"run/0/x": {"a": 1}}
    with pytest.raises(SystemExit, match=r"another setting \(model differ\)"):
        Results.open(path, {"model": "25m"})
    path.write_text('{"command": "of an earlier version"}')
    with pytest.raises(SystemExit, match=r"another setting \(model differ\)"):
        Results.open(path, {"model": "7m"})


def plan_of(tiny: Setting, tmp_path: Path, **changes: Any) -> Plan:
    fields: dict[str, Any] = {
        "setting": tiny,
        "workload": workload_of(tiny),
        "results": Results.open(tmp_path / "out.json", {}),
        "repeats": 1,
        "sweep_pairs": 8,
        "token_budgets": [1024],
        "microbatches": [2],
        "reference_batches": [2],
        "with_ablations": False,
        "also": [],
    }
    return Plan(**{**fields, **changes})


def test_grouped_pairs_are_compared_where_one_step_has_them_all(tiny: Setting, tmp_path: Path) -> None:
    contenders = [ours(1024), trl(2, grouped=True)]
    runs: dict[str, Sequence[Measurement]] = {one.name: [steps([0.69])] for one in contenders}
    for (run,) in runs.values():
        run.pairs = tiny.num_pairs
    for pairs_per_step, names in ((8, [contenders[1].name]), (4, [])):
        setting = replace(tiny, pairs_per_step=pairs_per_step)
        differences, disagreements = compare_work(
            plan_of(setting, tmp_path, fewest_steps=1), contenders, runs
        )
        assert list(differences) == names and disagreements == []


# ---- The page


def run_of(name: str, seconds: float, *, reference: float = 0.0) -> Measurement:
    return Measurement(
        contender=name,
        pairs=64,
        step_seconds=[seconds / 2, seconds / 2],
        reference_seconds=reference,
        startup_seconds=3.0,
        computed_tokens=6400,
        peak_memory_bytes=2**31,
    )


def test_the_page_has_medians_spread_paired_ratios_and_mfu() -> None:
    trl_name = "TRL, micro-batch 1, live reference"
    slower, grouped = "TRL, micro-batch 4, live reference", "TRL, micro-batch 2, grouped by length"
    report = Report(
        title="hh, 7m model, cpu",
        command="python scripts/benchmark.py",
        date="2026-01-01",
        machine={
            "git_commit": "abc", "processor": "p", "versions": {"torch": "2"}, "devices": [{"name": "cpu"}],
        },
        setting={
            "num_pairs": 64, "pairs_per_step": 32, "lora": False, "parameters": "float32", "device": "cpu",
            "autocast": False, "warmup_steps": 0,
        },
        origin="made up",
        work=Work(
            least_tokens=50.0, shared_tokens=50.0, unshared_tokens=80.0, scored_tokens=30.0,
            training_flops=3e9, reference_flops=1e9,
        ),
        peaks=[{"best": 1e11}, {"best": 1.2e11}, {"best": 1e11}],
        sweep_pairs=64,
        sweep=[run_of(trl_name, 16.0), Measurement(contender="TRL, micro-batch 8", failure="out of memory")],
        runs={
            "dpo-pack": [run_of("dpo-pack", seconds, reference=1.0) for seconds in (3.0, 1.0, 7.0)],
            slower: [run_of(slower, seconds) for seconds in (17.0, 1.0, 17.0)],
            grouped: [run_of(grouped, seconds) for seconds in (17.0, 17.0, 17.0)],
            trl_name: [run_of(trl_name, seconds) for seconds in (16.0, 8.0, 16.0)],
        },
        finalists=[slower, grouped, trl_name],
        differences={slower: {"loss": 1e-6}, trl_name: {"loss": 1e-6}},
        disagreements=[],
        profile=Profile(num_steps=2, seconds=7.0, flops={"layers": 1e11, "head": 4e10}, table="aten::mm 3"),
        missing=[],
        is_quick=False,
        prediction="Twice as fast,\n\nat least.",
        beside={"dpo-pack": steps([0.6931, 0.68]), grouped: steps([0.5, 0.4])},
    )  # fmt: skip
    text = markdown(report)
    for run, seconds in zip(
        (*report.runs["dpo-pack"], *report.runs[trl_name]), (2, 4, 5, 8, 8, 20), strict=True
    ):
        run.cpu_seconds = seconds
    by_cpu = markdown(report)
    assert "- dpo-pack: 16.00, 32.00, 8.00; 2, 4, 5 CPU s\n" in by_cpu
    assert f"- {trl_name}: 4.00, 8.00, 4.00; 8, 8, 20 CPU s, 4.00 times those of dpo-pack\n" in by_cpu
    assert NOT_COMPARABLE not in text
    # 64 pairs in 4, 2 and 8 s; 4 GFLOPs a pair against 100 GFLOP/s
    assert "| dpo-pack | 16.00 | 8.00 to 32.00 | 4.00x (2.00 to 4.00) | 800 | 1,600 | 64.0% |" in text
    assert "| 64.0% | 64.0% | 25% | 2.00 | 3.0 |" in text
    assert "| 4.00 | 4.00 to 8.00 | 1.00x (1.00 to 1.00) | 200 | 400 | 16.0% |  | in the steps |" in text
    assert report.best_trl == trl_name  # by the median of the turns, neither the best turn nor the sweep
    assert f"- {grouped}: not compared" in text and f"- {trl_name}: not compared" not in text
    assert "loss, nats: 1.0e-06" in text and "- TRL, micro-batch 8: out of memory" in text
    assert "would take 700 ms (layers 500, head 200), so these steps have an MFU of 20.0%" in text
    assert "- dpo-pack: 16.00, 32.00, 8.00\n" in text  # every turn, in its order
    assert "> Twice as fast,\n>\n> at least.\n" in text
    # In fp32; grouped by length the steps hold other pairs.
    assert "- dpo-pack, fp32: 0.6931, 0.6800\n" in text and f"- {grouped}, fp32" not in text


@pytest.mark.parametrize("same_ids", [True, False])
def test_other_work_is_told_by_the_page_and_by_the_exit_status_when_all_is_measured(
    same_ids: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(contenders: Sequence[Contender], *_: Any, **__: Any) -> Iterator[Measurement]:
        for contender in contenders:
            is_ours = contender.name == "dpo-pack"
            run = steps([0.69, 0.68] if is_ours else [0.69, 0.5])
            run.contender, run.pairs, run.step_seconds = contender.name, 8, [1.0, 1.0]
            run.digest = "ids" if is_ours or same_ids else "other ids"
            yield run

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(benchmark, "save_model", lambda *_, **__: None)
    monkeypatch.setattr(benchmark, "measure_peak", lambda *_: {"best": 1e11})
    monkeypatch.setattr(benchmark, "measure", measure)
    difference = "does not do the same work: loss differs" if same_ids else "did not train on the same"
    told = f"dpo-pack, optim.lr=1.0 {difference}"
    for _ in range(2):  # again: nothing is left to be measured, and the page is the same
        with pytest.raises(SystemExit, match=told):
            benchmark.main(
                tmp_path / "out", model="tiny", num_pairs=8, pairs_per_step=2, sweep_pairs=8, repeats=1,
                microbatches="", warmup_steps=0, with_ablations=False, also=["optim.lr=1.0"],
                with_profile=False,
            )  # fmt: skip
        monkeypatch.setattr(benchmark, "measure", lambda *_, **__: pytest.fail("everything was measured"))
    page = (tmp_path / "out.md").read_text()
    assert NOT_COMPARABLE in page and f"- {told}" in page and page.count("| 4.00 |") == 2


# ---- End to end


@pytest.mark.slow  # it imports TRL
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning")
def test_bf16_on_a_cpu_is_trls_too(tiny: Setting, tmp_path: Path) -> None:
    pytest.importorskip("trl")
    for autocast in (False, True):
        assert trl_config(trl(1), replace(tiny, autocast=autocast), tmp_path).bf16 is autocast


@pytest.mark.slow
def test_both_trainers_do_the_same_steps_and_an_interrupted_benchmark_goes_on(
    tiny: Setting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("trl")
    monkeypatch.delitem(MALLOCS, "glibc keeps freed memory")  # one setting of malloc is enough here,
    of_one = lambda fastest, *rest, **options: trl_variants(fastest[:1], *rest, **options)  # noqa: E731
    monkeypatch.setattr(benchmark, "trl_variants", of_one)  # as are the variants of one setting
    also = ["packing.token_budget=512"]
    changes: dict[str, Any] = {"also": also}
    report = run_plan(plan_of(tiny, tmp_path, **changes), "tiny", with_profile=True)
    assert report.best_trl is not None and "micro-batch 2" in report.best_trl
    assert set(report.runs) == {"dpo-pack", *report.finalists, "dpo-pack, packing.token_budget=512"}
    assert len(report.finalists) == 2 and report.best_trl in report.finalists
    assert not any(run.failure for run in report.sweep)
    tried = {run.contender for run in report.sweep}
    assert any("eager" in name for name in tried) and any("malloc" in name for name in tried)
    assert all(seconds > 0 for runs in report.runs.values() for seconds in runs[0].step_seconds)
    assert all(runs[0].cpu_seconds > 0 for runs in report.runs.values())
    assert "against TRL's best" in markdown(report)

    monkeypatch.setattr("benchmark.measure", lambda *_, **__: pytest.fail("everything was measured"))
    again = run_plan(plan_of(tiny, tmp_path, **changes), "tiny", with_profile=True)
    assert again.runs == report.runs and again.profile == report.profile
