"""scripts/benchmark.py: the same work for every contender, what is counted, and what its page says."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import benchmark
import numpy as np
import pytest
import torch
from benchmark import Plan, run_plan
from benchmarking import peak, process, run_dpo_pack
from benchmarking.contenders import (
    MALLOCS,
    SERIES_LEARNING_RATES,
    Contender,
    Measurement,
    Setting,
    ours,
    trl,
    trl_variants,
)
from benchmarking.memory import peak_memory_bytes
from benchmarking.profiling import profile_steps
from benchmarking.report import NOT_COMPARABLE, NOT_WHOLE, PADDED, TRL_BEST, Profile, Report, markdown
from benchmarking.results import TOLERANCES, Results, largest_differences, other_work
from benchmarking.shapes import SHAPES, flops_shape, save_model
from benchmarking.work import Work, forward_parts
from benchmarking.workloads import (
    EOS_ID,
    FIRST_ORDINARY_ID,
    MIXES,
    Workload,
    digest_of,
    hh_token_ids,
    make_workload,
    synthetic_token_ids,
)
from support.rows import write_rows
from support.tiny_tokenizer import tiny_tokenizer

from dpo_pack.packing.lengths import AttentionKind, ModelShape, PairLengths


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


# ---- Workloads


def test_synthetic_pairs_have_their_lengths_and_end_with_eos() -> None:
    lengths = MIXES["hh-like"].draw(5, seed=3)
    pairs = list(synthetic_token_ids(lengths, 100, seed=3))
    assert [len(prompt) for prompt, _, _ in pairs] == lengths.prompt.tolist()
    assert [len(chosen) for _, chosen, _ in pairs] == lengths.chosen.tolist()
    for prompt, chosen, rejected in pairs:
        assert chosen[-1] == rejected[-1] == EOS_ID
        assert all(FIRST_ORDINARY_ID <= token < 100 for token in [*prompt, *chosen[:-1], *rejected[:-1]])
    assert digest_of(pairs) == digest_of(synthetic_token_ids(lengths, 100, seed=3))


def test_hh_rows_are_tokenised_and_too_few_are_refused(tmp_path: Path) -> None:
    dialogue = "\n\nHuman: what is red\n\nAssistant:"
    rows = [{"chosen": f"{dialogue} a colour {n}", "rejected": f"{dialogue} no {n}"} for n in range(3)]
    rows.insert(1, {"chosen": "no dialogue", "rejected": "at all"})
    path = tmp_path / "hh.jsonl"
    write_rows(path, rows)
    pairs = hh_token_ids(path, 3)
    assert len(pairs) == 3 and len({tuple(prompt) for prompt, _, _ in pairs}) == 1
    assert all(chosen[-1] == EOS_ID and len(chosen) > 1 for _, chosen, _ in pairs)
    with pytest.raises(SystemExit, match=r"--pairs: .* has 3 usable rows, not 4"):
        hh_token_ids(path, 4)
    tiny_tokenizer().save_pretrained(tmp_path / "tokenizer")
    (first, *_) = hh_token_ids(path, 3, str(tmp_path / "tokenizer"))
    assert tiny_tokenizer().decode(list(first[0])) == dialogue
    assert tiny_tokenizer().decode(list(first[1])) == " a colour 0</s>"


# ---- Contenders and measurements


def test_where_memory_ran_out_checkpointing_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dpo_pack.model.attention.flash.flash_attn_obstacle", lambda: None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    best = trl(4, precompute=True)
    out_of_memory = [trl(16), trl(16, gradient_checkpointing=True)]
    expected = [
        trl(16, gradient_checkpointing=True),
        trl(4, precompute=True, attention="flash_attention_2"),
    ]
    assert list(trl_variants([best], out_of_memory, device="cuda", compiled=False)) == expected


def test_time_a_pair_has_the_reference_in_it_and_warm_up_steps_are_left_out() -> None:
    run = Measurement(contender="x", pairs=8, step_seconds=[9.0, 2.0, 2.0, 4.0], reference_seconds=4.0)
    # 8/3 s a step of 2 pairs, and half a second of reference a pair
    assert run.seconds_a_pair(warmup_steps=1) == pytest.approx(8 / 3 / 2 + 0.5)
    assert run.seconds_a_pair(warmup_steps=0) == pytest.approx(17 / 8 + 0.5)
    assert run.reference_share(warmup_steps=0) == pytest.approx(4 / 21)


def test_a_step_of_long_pairs_that_is_not_timed_counts_by_its_tokens() -> None:
    grouped = Measurement(contender="x", pairs=8, step_seconds=[9.0, 2.0, 2.0], step_tokens=[60, 20, 20])
    assert grouped.train_seconds(warmup_steps=1) == pytest.approx(4.0 * 100 / 40)


@pytest.mark.parametrize(
    ("error", "failure"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), process.OUT_OF_MEMORY),
        (NotImplementedError("no kernel\nfor this"), "NotImplementedError: no kernel"),
    ],
)
def test_what_cannot_run_here_is_recorded(
    error: Exception, failure: str, monkeypatch: pytest.MonkeyPatch, tiny: Setting, tmp_path: Path
) -> None:
    def fails(*_: Any) -> Measurement:
        raise error

    monkeypatch.setattr(run_dpo_pack, "run_dpo_pack", fails)
    measurement = process._measure_here(ours(64), tiny, tmp_path, None)
    assert measurement.failure == failure and measurement.contender == "dpo-pack"


def test_what_compiles_without_end_is_ended_and_costs_the_others_nothing(tiny: Setting) -> None:
    (run,) = process.measure([trl(1, compiled=True)], tiny, compiled_seconds=0.2)
    assert run.failure == "ended after 0 seconds"


def test_a_measurement_ends_when_the_time_is_up_and_is_no_failure(tiny: Setting) -> None:
    begun = time.monotonic()
    measured = process.measure([trl(1), trl(2)], tiny, stop_at=begun + 0.2)
    with pytest.raises(SystemExit, match="--minutes: time is up; the same command goes on"):
        next(measured)
    assert time.monotonic() - begun < 5
    with pytest.raises(process.TimeIsUp):
        process.profile(ours(64), tiny, stop_at=time.monotonic() + 0.2)


def test_after_a_failure_the_others_have_a_new_process(
    monkeypatch: pytest.MonkeyPatch, tiny: Setting
) -> None:
    """A process ends itself after a failure, but not for lack of memory; one that dies is tried once more."""
    jobs: list[list[str]] = []

    def run(job: dict[str, Any], *_: Any, **__: Any) -> Iterator[dict[str, Any]]:
        jobs.append(names := [contender["name"] for contender in job["contenders"]])
        for name in names:
            if name == "spoils":
                yield Measurement(contender=name, failure="CUDA error").to_json()
                return
            if name == "dies" or (name == "suffers" and len(jobs) == 2):
                raise process.ProcessDied("its process died of SIGSEGV")
            yield Measurement(contender=name).to_json()

    monkeypatch.setattr(process, "_run", run)
    names = ["well", "spoils", "fine", "suffers", "dies", "last"]
    runs = list(process.measure([ours(64, name=name) for name in names], tiny))
    assert jobs == [names, names[2:], names[3:], names[4:], names[5:]]
    assert [run.contender for run in runs] == names
    died = "its process died of SIGSEGV"
    assert [run.failure for run in runs] == [None, "CUDA error", None, None, died, None]


@pytest.mark.parametrize(("signal", "told"), [("KILL", process.OUT_OF_MEMORY), ("SEGV", "died of SIGSEGV")])
def test_a_process_that_is_killed_is_told_from_one_that_fails(
    signal: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/usr/bin/env bash\nkill -{signal} $$\n")
    python.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(python))
    with pytest.raises(process.ProcessDied, match=told):
        list(process._run({"kind": "measure"}, "cpu"))
    python.write_text("#!/usr/bin/env bash\nexit 1\n")
    with pytest.raises(SystemExit, match="a measurement failed"):
        list(process._run({"kind": "measure"}, "cpu"))


@pytest.mark.parametrize(
    ("device", "given", "seen"),
    [("cuda", None, "0"), ("cuda", "2,3", "2"), ("cuda", "GPU-a,GPU-b", "GPU-a"), ("cpu", "2,3", "")],
)
def test_a_measurement_sees_one_gpu(
    device: str, given: str | None, seen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if given is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    assert process.visible_devices(device) == seen


def test_our_side_trains_on_the_workload_s_ids(tiny: Setting, tmp_path: Path) -> None:
    run = run_dpo_pack.run_dpo_pack(ours(1024), tiny, tmp_path, spawned_at=0.0)
    workload = workload_of(tiny)
    assert run.digest == workload.digest
    assert run.pairs == 8 and len(run.step_seconds) == len(run.losses) == len(run.grad_norms) == 4
    assert run.losses[0] == pytest.approx(np.log(2)) and run.losses[1] != run.losses[0]
    assert run.reference_seconds > 0 and all(seconds > 0 for seconds in run.step_seconds)
    assert 0 < run.cpu_seconds < time.process_time()
    assert run.startup_seconds is not None and run.startup_seconds > 1e9  # since 1970
    assert run.computed_tokens == int(workload.lengths().row_tokens(share_prompt=True).sum())
    assert sum(run.step_tokens) == int(workload.lengths().row_tokens(share_prompt=False).sum())
    assert not (tmp_path / "run" / "model").exists()


@pytest.mark.slow
def test_steps_are_profiled_after_the_first(tiny: Setting, tmp_path: Path) -> None:
    found = profile_steps(ours(1024), tiny, tmp_path)
    assert (found["first"], found["end"]) == (1, 4) and found["seconds"] > 0
    (head,) = (line for line in found["table"].splitlines() if line.split()[:1] == ["_ChunkedLogps"])
    assert head.split()[-1] == "3"  # calls: one row a step


def test_memory_and_the_peak_of_products_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(peak.SECONDS, "cpu", 0.1)
    monkeypatch.setitem(peak.SIZES, "cpu", (256, 512))
    assert peak_memory_bytes("cpu") > 100 * 2**20
    rates = peak.matrix_product_peak("cpu", "float32")
    assert rates["best"] >= rates["median"] > 1e9


# ---- Work, agreement, results


def test_parts_of_a_forward_pass_add_up_to_its_flops() -> None:
    lengths = PairLengths(
        prompt=np.array([10]), chosen=np.array([4]), rejected=np.array([6]), shared=np.array([10])
    )
    attention = (AttentionKind(num_layers=1, width=10, window=None),)
    shape = ModelShape(token_weights=1000.0, head_weights=500, attention=attention, last_block_weights=100.0)
    area = 14 * 15 / 2 + 16 * 17 / 2 - 10 * 11 / 2
    unread = 9  # the prompt's last token predicts a token of both completions
    assert forward_parts(shape, lengths) == {
        "layers": 2 * 1000 * 20 - 2 * 100 * (unread + 2),
        "head": 2 * 500 * 10,
        "attention": 2 * 10 * area,
    }


@pytest.mark.parametrize(
    ("name", "millions"), [("7m", 7.3), ("qwen3_5-7m", 7.5), ("lfm2-7m", 7.3), ("0.5b", 494), ("8b", 8030)]
)
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
    assert "run/0/x" in again and again["run/0/x"] == {"a": 1} and again.get("profile") is None
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
        "finalists": 2,
        "with_ablations": False,
        "also": [],
    }
    return Plan(**{**fields, **changes})


@pytest.mark.parametrize(
    ("warmup_steps", "changes", "told"),
    [
        (0, {"sweep_pairs": 9}, "--sweep-pairs: 9 is no multiple of 2"),
        (0, {"microbatches": [3]}, "--microbatches: 3 does not divide 2"),
        (0, {"sweep_pairs": 6}, "3 timed steps are too few"),
        (1, {}, "3 timed steps are too few to rank by; at least 10 pairs make 4"),
    ],
)
def test_counts_that_do_not_fit_are_refused(
    warmup_steps: int, changes: dict[str, Any], told: str, tiny: Setting, tmp_path: Path
) -> None:
    with pytest.raises(SystemExit, match=told):
        plan_of(replace(tiny, warmup_steps=warmup_steps), tmp_path, **changes)


def test_another_prediction_or_count_is_another_benchmark(tiny: Setting, tmp_path: Path) -> None:
    plan = plan_of(tiny, tmp_path, prediction="ours is faster", series=2)
    identity = benchmark._identity(plan, "tiny")
    Results.open(tmp_path / "kept.json", identity).put("peak/0", {})
    for changes in ({"prediction": "ours is slower"}, {"repeats": 5}, {"targets": {PADDED: 1.0}}):
        (name,) = changes
        with pytest.raises(SystemExit, match=rf"another setting \({name} differ\)"):
            Results.open(tmp_path / "kept.json", benchmark._identity(replace(plan, **changes), "tiny"))


class StandIns:
    """In place of measuring: each contender takes a second a pair, and time is up where `stops_at` says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, stops_at: str = "nothing") -> None:
        self.stops_at = stops_at
        profile = {"first": 1, "end": 3, "seconds": 1.0, "table": "aten::mm"}
        monkeypatch.setattr(benchmark, "measure_peak", lambda *_: {"best": 1e11})
        monkeypatch.setattr(benchmark, "measure", self.measure)
        monkeypatch.setattr(benchmark, "profile", lambda *_, **__: profile)

    def measure(self, contenders: Sequence[Contender], *_: Any, **__: Any) -> Iterator[Measurement]:
        for contender in contenders:
            if self.stops_at in contender.name:
                raise process.TimeIsUp
            run = steps([0.69] * 4)
            run.contender, run.pairs, run.step_seconds, run.digest = contender.name, 8, [2.0] * 4, "ids"
            yield run


def test_with_little_time_ours_and_its_profile_come_first_and_each_result_is_on_the_page(
    tiny: Setting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    StandIns(monkeypatch)
    pages: list[str] = []
    plan = plan_of(tiny, tmp_path, quick=True, also=["model.compile=true"])
    report = run_plan(plan, "tiny", with_profile=True, show=lambda report: pages.append(markdown(report)))
    keys = list(plan.results.content["entries"])
    assert keys[:4] == ["peak/0", "run/0/dpo-pack", "run/0/dpo-pack, model.compile=true", "profile"]
    assert all(key.startswith("sweep/TRL") for key in keys[4:-2]) and "grouped by length" in keys[4]
    assert all(key.startswith("run/0/TRL") for key in keys[-2:])
    # The first page is that of the first run, and the last one has everything.
    assert len(pages) == len(keys) - 1 and "| dpo-pack | 1.00 |" in pages[0]
    assert (
        f"{NOT_WHOLE} Missing:\n\n- dpo-pack, model.compile=true, turn 1\n- the profile\n- TRL\n" in pages[0]
    )
    assert "aten::mm" not in pages[1] and "aten::mm" in pages[2]
    assert not report.missing and NOT_WHOLE not in pages[-1]
    assert all("dpo-pack was measured before TRL's sweep" in page for page in pages)


def test_when_little_time_is_up_the_page_says_what_is_missing(
    tiny: Setting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_ins = StandIns(monkeypatch, stops_at="live")
    plan = plan_of(tiny, tmp_path, quick=True)
    report = run_plan(plan, "tiny", with_profile=True)
    first = "TRL, micro-batch 2, precomputed reference, in batches of 2, grouped by length"
    assert report.finalists[0] == first
    assert "TRL, micro-batch 2, live reference, in the sweep" in report.missing
    with pytest.raises(process.TimeIsUp):
        stand_ins.stops_at = "dpo-pack"
        run_plan(plan_of(tiny, tmp_path / "other", quick=True), "tiny", with_profile=True)
    stand_ins.stops_at = "nothing"  # the same command goes on
    again = run_plan(plan, "tiny", with_profile=True)
    assert not again.missing and len(again.finalists) == 2


# ---- The page


def series_of(name: str, first: float, other: float) -> list[Measurement]:
    return [run_of(name, seconds) for seconds in (first, *[other] * (len(SERIES_LEARNING_RATES) - 1))]


def run_of(name: str, seconds: float, *, reference: float = 0.0) -> Measurement:
    return Measurement(
        contender=name,
        pairs=64,
        step_seconds=[seconds / 2, seconds / 2],
        reference_seconds=reference,
        startup_seconds=3.0,
        computed_tokens=6400,
        peak_memory_bytes=2**31,
        phases={"forward": seconds / 4, "backward": seconds / 2},
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
        series={
            "dpo-pack": [series_of("dpo-pack", 2.0, 1.0), series_of("dpo-pack", 4.0, 1.0)],
            trl_name: [series_of(trl_name, 8.0, 5.0), series_of(trl_name, 12.0, 5.0)],
            slower: [series_of(slower, 8.0, 5.0)[:3], series_of(slower, 8.0, 5.0)],
        },
        targets={TRL_BEST: 4.5, PADDED: 1.3, slower: 1.5},
        prediction="Ours: 5x.",
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
    assert "reference 21.4%; forward 19.6%; backward 39.3%" in text  # of 14 seconds
    assert "- dpo-pack: 16.00, 32.00, 8.00\n" in text  # every turn, in its order
    assert "- at least 4.5x TRL's best: 4.00x: **missed**" in text
    assert "- at least 1.3x dpo-pack, padded: **not measured**" in text
    assert f"- at least 1.5x {slower}: 2.12x: met" in text
    assert "| dpo-pack | 2.0, 4.0 | 1.0, 1.0 | 5.0, 7.0 | 1.00x; 1.00x; 1.00x |" in text
    assert f"| {trl_name} | 8.0, 12.0 | 5.0, 5.0 | 23.0, 27.0 | 3.50x; 5.00x; 4.23x |" in text
    assert f"| {slower} | a run failed |" in text


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


def test_a_model_on_disk_is_measured_on_hh_s_texts_as_its_tokenizer_writes_them(
    tiny: Setting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(contenders: Sequence[Contender], setting: Setting, **_: Any) -> Iterator[Measurement]:
        assert setting.model == tiny.model
        digest = digest_of(hh_token_ids(rows, 4, tiny.model))
        yield replace(steps([0.69, 0.68]), pairs=4, step_seconds=[1.0, 1.0], digest=digest)

    dialogue = "\n\nHuman: what is red\n\nAssistant:"
    pairs = [{"chosen": f"{dialogue} a colour {n}", "rejected": f"{dialogue} no {n}"} for n in range(4)]
    rows = tmp_path / "hh.jsonl"
    write_rows(rows, pairs)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(benchmark, "measure_peak", lambda *_: {"best": 1e11})
    monkeypatch.setattr(benchmark, "measure", measure)
    options: dict[str, Any] = {"workload": "hh", "pairs": rows, "model": tiny.model, "num_pairs": 4}
    options |= {"pairs_per_step": 2, "sweep_pairs": 4, "repeats": 1, "microbatches": "", "warmup_steps": 0}
    with pytest.raises(SystemExit, match="2 timed steps are too few"):
        benchmark.main(tmp_path / "out", **options)
    benchmark.main(
        tmp_path / "out", **options, fewest_steps=2, with_ablations=False, with_profile=False,
    )  # fmt: skip
    assert "# hh, model model, cpu" in (tmp_path / "out.md").read_text()


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
    changes: dict[str, Any] = {"also": also, "series": 1, "targets": {PADDED: 1e6}}
    report = run_plan(plan_of(tiny, tmp_path, **changes), "tiny", with_profile=True)
    assert report.best_trl is not None and "micro-batch 2" in report.best_trl
    assert set(report.runs) == {"dpo-pack", *report.finalists, "dpo-pack, packing.token_budget=512"}
    assert len(report.finalists) == 2 and report.best_trl in report.finalists
    assert not any(run.failure for run in report.sweep)
    tried = {run.contender for run in report.sweep}
    assert any("eager" in name for name in tried) and any("malloc" in name for name in tried)
    (own, *_), (peer, *_) = report.series.values()
    for first, *others in (own, peer):
        assert all(run.digest == first.digest and run.losses[-1] != first.losses[-1] for run in others)
    assert own[0].reference_seconds > 0 == own[1].reference_seconds  # the cache has all of the second run
    assert all(seconds > 0 for runs in report.runs.values() for seconds in runs[0].step_seconds)
    assert all(runs[0].cpu_seconds > 0 for runs in report.runs.values())
    assert "against TRL's best" in markdown(report)

    monkeypatch.setattr("benchmark.measure", lambda *_, **__: pytest.fail("everything was measured"))
    monkeypatch.setattr("benchmark.measure_series", lambda *_: pytest.fail("everything was measured"))
    again = run_plan(plan_of(tiny, tmp_path, **changes), "tiny", with_profile=True)
    assert again.runs == report.runs and again.profile == report.profile and again.series == report.series
