"""scripts/benchmark.py: the same work for every contender, what is counted, and what its page says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import benchmark
import pytest
from benchmark import Plan, run_plan
from benchmarking.contenders import MALLOCS, Contender, Measurement, Setting, trl_variants
from benchmarking.report import NOT_COMPARABLE, Profile, Report, markdown
from benchmarking.results import TOLERANCES, Results, largest_differences, other_work
from benchmarking.shapes import SHAPES, Work, flops_shape, save_model
from benchmarking.workloads import Workload, make_workload


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


# ---- Work, agreement, results


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
            "warmup_steps": 0,
        },
        origin="made up",
        work=Work(
            shared_tokens=50.0, unshared_tokens=80.0, scored_tokens=30.0,
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
