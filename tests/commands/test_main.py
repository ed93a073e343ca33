"""The commands as a user runs them: exit statuses, what they print, what they leave behind."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import typer.main
import yaml
from rich.console import Console
from safetensors.torch import load_file, save_file
from support.dpopack import Dpopack, Outcome
from support.processor import slowness
from support.tiny_models import tiny_model
from support.tiny_run import NUM_PAIRS

import dpo_pack
import dpo_pack.trainer as training
from dpo_pack.commands.main import _own_command, app
from dpo_pack.model.building import load_model
from dpo_pack.recipe.load import load_recipe
from dpo_pack.reports import pages
from dpo_pack.run.export import export_model
from dpo_pack.system.endings import ending_of
from dpo_pack.system.errors import CacheError
from dpo_pack.trainer import train


@pytest.fixture(scope="session")
def finished(assets: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run that is finished; tests work on copies."""
    job = Path(shutil.copytree(assets, tmp_path_factory.mktemp("finished") / "job"))
    train(load_recipe(job / "recipe.yaml"), Console(quiet=True))
    return job


@pytest.fixture
def trained(finished: Path, tmp_path: Path) -> Path:
    """A recipe whose run is finished."""
    return Path(shutil.copytree(finished, tmp_path / "job")) / "recipe.yaml"


@pytest.fixture
def trained_in_place(recipe: Path, dpopack: Dpopack) -> Path:
    """A recipe whose run is finished, and was where it is now."""
    assert dpopack("train", recipe).status == 0
    return recipe


def snapshot(directory: Path) -> dict[Path, tuple[int, bytes]]:
    """Modification time and content of every file."""
    files = (path for path in directory.rglob("*") if path.is_file())
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


def assert_refused(outcome: Outcome, pattern: str) -> None:
    """Exit status 2 and one line, which matches."""
    assert outcome.status == 2, outcome
    assert re.fullmatch(r"error: [^\n]+\n", outcome.err), outcome.err
    assert re.search(pattern, outcome.err), outcome.err
    assert "Traceback" not in outcome.out + outcome.err


# ------------------------------------------------------------------------------------------------- bad input


Spoil = Callable[[Path], Sequence[str]]  # spoils a good job and returns overrides


def _with(*overrides: str) -> Spoil:
    return lambda job: overrides


def _with_file(name: str, content: bytes, *overrides: str) -> Spoil:
    def spoil(job: Path) -> Sequence[str]:
        (job / name).write_bytes(content)
        return [override.replace("JOB", str(job)) for override in overrides]

    return spoil


def _without(name: str) -> Spoil:
    def spoil(job: Path) -> Sequence[str]:
        (job / name).unlink()
        return ()

    return spoil


def _with_config(**changes: Any) -> Spoil:
    def spoil(job: Path) -> Sequence[str]:
        config = job / "model" / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | changes))
        return ()

    return spoil


def _with_second_row(line: bytes) -> Spoil:
    good = b'{"prompt": "a", "chosen": "b", "rejected": "c"}\n'
    return _with_file("pairs.jsonl", good + line + b"\n" + good)


def _without_a_tensor(job: Path) -> Sequence[str]:
    tensors = load_file(job / "model" / "model.safetensors")
    del tensors["model.layers.1.mlp.down_proj.weight"]
    save_file(tensors, job / "model" / "model.safetensors", metadata={"format": "pt"})
    return ()


def _with_few_embeddings(job: Path) -> Sequence[str]:
    tiny_model("llama", vocab_size=300).save_pretrained(job / "model")  # the tokenizer's ids go up to 383
    return ()


IDS = b'{"prompt_ids": [1, 5], "chosen_ids": [6, 2], "rejected_ids": [384, 2]}\n'

# What is wrong: (how to spoil a good job, what the one line names)
BAD_INPUT: dict[str, tuple[Spoil, str]] = {
    "unknown key": (_with("optim.lrr=1"), r"optim\.lrr: .* optim\.lr\?"),
    "recipe is no YAML": (_with_file("recipe.yaml", b"output_dir: [unclosed"), r"recipe\.yaml"),
    "no data file": (_with("data.train=absent.jsonl"), r"data\.train\.0\.path: .*absent\.jsonl"),
    "empty completion": (
        _with_second_row(b'{"prompt": "a", "chosen": "b", "rejected": ""}'),
        r"pairs\.jsonl line 2: .*empty_completion: 1 of 3 rows.*data\.on_bad_row: skip",
    ),
    "invalid JSON": (_with_second_row(b'{"prompt": '), r"pairs\.jsonl line 2: invalid JSON"),
    "no weights": (_without("model/model.safetensors"), r"model\.path: .*/model has no weights"),
    "a wrong type in config.json": (_with_config(num_hidden_layers="2"), r"model\.path: .*num_hidden_layers"),
    "a template that is no text": (
        _with_file("template.jinja", b"\xff\xfe", "tokenizer.chat_template=JOB/template.jinja"),
        r"tokenizer\.chat_template: .*template\.jinja",
    ),
    "damaged weights": (
        _with_file("model/model.safetensors", b"\x08"),
        r"cannot read the weights in .*/model\.safetensors",
    ),
    "a tensor missing": (_without_a_tensor, r"model\.path: .* lack 1 of .*layers\.1\.mlp\.down_proj"),
    "no tokenizer": (_without("model/tokenizer.json"), r"model\.path: .*tokenizer"),
    "ids beyond the tokenizer's": (_with_file("pairs.jsonl", IDS), r"line 1: rejected_ids .* 384; .* 383"),
    "ids beyond the model's": (_with_few_embeddings, r"model\.path: .* 3\d\d, .*/model embeds 300"),
    "too few positions": (_with_config(max_position_embeddings=16), r"data\.max_length: .* 16 positions"),
    "a checkpoint that is none": (_with("checkpoint.resume=/nowhere"), r"checkpoint\.resume: .*/nowhere"),
}


@pytest.mark.parametrize("what", BAD_INPUT)
def test_bad_input_is_one_line_and_leaves_nothing(what: str, recipe: Path, dpopack: Dpopack) -> None:
    job = recipe.parent
    spoil, pattern = BAD_INPUT[what]
    assert_refused(dpopack("train", recipe, *spoil(job)), pattern)
    assert not (job / "run").exists()
    assert not [path for path in job.rglob("*") if path.name.endswith(".tmp")]


def test_another_run_in_output_dir_stays_with_ways_out(trained_in_place: Path, dpopack: Dpopack) -> None:
    before = snapshot(trained_in_place.parent)
    again = dpopack("train", trained_in_place)
    assert again.status == 0 and "finished" in again.out and "nothing to do" in again.out
    changed = dpopack("train", trained_in_place, "optim.lr=0.5")
    assert_refused(changed, r"output_dir: .*/run .* optim\.lr[ ;].*another output_dir, .*--overwrite, .*dpop")
    anew = dpopack("train", trained_in_place, "checkpoint.resume=never")
    assert_refused(anew, r"output_dir: .*another output_dir.* --overwrite")
    assert snapshot(trained_in_place.parent) == before


def steps_of(run: Path) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if record["split"] == "train"]


@pytest.mark.parametrize("command", ["train", "precompute-ref", "evaluate", "doctor"])
def test_an_environment_of_other_processes_than_the_recipe_s_is_refused(
    command: str, recipe: Path, dpopack: Dpopack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    outcome = dpopack(command, recipe, "distributed.num_processes=2")
    assert_refused(outcome, r"distributed\.num_processes: .*asks for 2, .* 1;")


def test_only_training_is_tracked(recipe: Path, dpopack: Dpopack, monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "wandb" else find_spec(name)
    )
    wandb = "logging.trackers=[wandb]"
    for command in (["train"], ["recipe", "--check"]):
        assert_refused(dpopack(*command, recipe, wandb), r"logging\.trackers: .*wandb")
    assert dpopack("show", recipe, wandb).status == 0
    recipe.write_text(recipe.read_text().replace("samples: null", "samples: null\n  trackers: [wandb]"))
    asked = dpopack("sample", recipe.parent / "model", recipe, "--num", "1")
    assert (asked.status, asked.err) == (0, "") and "heldout: ask" in asked.out


FILE = "JOB/file"  # is a file, so nothing can be written below it
REFUSED: list[tuple[str, str]] = [
    ("inspect-packing RECIPE --ranks 1,x", r"--ranks '1,x'"),
    ("inspect-packing RECIPE --budgets 0", r"--budgets '0'"),
    ("inspect-packing RECIPE --memory 80", r"--memory: '80'"),
    (f"inspect-packing RECIPE --json {FILE}/out", r"cannot write .*file/out"),
    ("recipe", r"--defaults"),
    ("recipe --all --schema", r"--all .* --defaults"),
    ("show RECIPE --pair 17", r"--pair 17: no such line was read of pairs"),
    ("show RECIPE --pair 0", r"--pair '0': not positive whole numbers"),
    ("show RECIPE --pair 3 8", r"--pair takes one word; write --pair 3,8$"),
    ("show --pair 3 8 RECIPE", r"--pair takes one word; write --pair 3,8$"),
    ("show RECIPE --pair x", r"--pair 'x': not positive whole numbers"),
    ("show RECIPE 3", r"'3': write it as key=value"),
    ("show RECIPE data.train=absent.jsonl", r"data\.train\.0\.path: no such file"),
    (f"show RECIPE --json {FILE}/out", r"cannot write .*file/out"),
    (f"show RECIPE --html {FILE}/out", r"cannot write .*file/out"),
    ("precompute-ref RECIPE loss.type=simpo", r"error: loss\.type: "),
    ("precompute-ref RECIPE reference.sync.mixup=0.5", r"error: reference\.sync: "),
    ("evaluate RECIPE", r"/run: .*--model"),
    ("evaluate RECIPE data.eval=[]", r"no held-out data"),
    ("evaluate RECIPE --model a --compare a b", r"--model or --compare"),
    ("evaluate RECIPE --compare JOB/model JOB/missing", r"missing: no trained model"),
    ("sample RECIPE --max-new-tokens 0", r"^error: --max-new-tokens: .*\b1$"),
    ("sample runs/absent --prompt ask", r"runs/absent: .*; there is no such directory; if it is a hub id: "),
    ("report JOB", r"job: no run"),
    ("report JOB/absent", r"absent: no run"),
]


@pytest.mark.parametrize(("command", "pattern"), REFUSED)
def test_a_command_that_makes_no_sense_is_refused_in_one_line_and_writes_nothing(
    command: str, pattern: str, recipe: Path, dpopack: Dpopack
) -> None:
    (recipe.parent / "file").touch()
    before = {path for path in recipe.parent.rglob("*") if "cache" not in path.parts}
    words = command.replace("RECIPE", str(recipe)).replace("JOB", str(recipe.parent)).split()
    assert_refused(dpopack(*words), pattern)
    assert {path for path in recipe.parent.rglob("*") if "cache" not in path.parts} == before


def test_a_mistyped_command_line_is_answered_with_its_usage(dpopack: Dpopack) -> None:
    for arguments in (("train",), ("train", "r.yaml", "--nonsense"), ("nonsense",)):
        outcome = dpopack(*arguments)
        assert outcome.status == 2 and outcome.err.startswith("Usage: dpopack") and "Error: " in outcome.err


# --------------------------------------------------------------------------------- bugs, memory, interruption


def _raise_in_training(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, where: str = "Trainer.accumulate_gradients"
) -> None:
    def fail(*arguments: Any, **settings: Any) -> None:
        raise error

    monkeypatch.setattr(f"dpo_pack.trainer.{where}", fail)


def test_running_out_of_device_memory_names_the_keys_that_need_less(
    recipe: Path, dpopack: Dpopack, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As torch 2.13 words it.
    message = (
        "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 23.68 GiB of which "
        "14.00 MiB is free. Including non-PyTorch memory, this process has 23.66 GiB memory in use."
    )
    _raise_in_training(monkeypatch, torch.OutOfMemoryError(message))
    outcome = dpopack("train", recipe)
    assert_refused(outcome, r"20\.00 MiB\..*14\.00 MiB is free; lower packing\.token_budget")
    assert "reference.token_budget" in outcome.err and "model.gradient_checkpointing" in outcome.err
    assert json.loads((recipe.parent / "run" / "run.json").read_text())["status"] == "failed"


def test_a_lack_of_memory_has_many_words_and_each_gets_one_line_and_the_remedy() -> None:
    for message in (
        "CUDA error: out of memory\nCUDA kernel errors might be\nasynchronous",
        "HIP out of memory. Tried to allocate 2.00 GiB",
        "Triton Error [CUDA]: out of memory",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
        "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried",
    ):
        ending = ending_of(RuntimeError(message))
        assert ending.exit_status == 2 and ending.message is not None and "\n" not in ending.message
        assert message[:20] in ending.message and "packing.token_budget" in ending.message


def test_a_bug_ends_with_status_1_and_a_traceback() -> None:
    code = (
        "import sys, dpo_pack.commands.main, dpo_pack.recipe.load\n"
        "dpo_pack.recipe.load.recipe_defaults = lambda: 1 / 0\n"
        "sys.argv = ['dpopack', 'recipe', '--defaults', '--all']\n"
        "dpo_pack.commands.main.main()"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1 and ended.stdout == ""
    assert "Traceback" in ended.stderr and "ZeroDivisionError" in ended.stderr


@pytest.mark.parametrize(
    ("command", "signum", "status"), [("train", signal.SIGTERM, 143), ("inspect-packing", signal.SIGINT, 130)]
)
def test_a_signal_ends_a_command_with_the_shell_s_status(
    command: str, signum: signal.Signals, status: int,
    recipe: Path, dpopack: Dpopack, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """While pairs are read; what happens to one in the middle of training, tests/test_train.py says."""
    monkeypatch.setattr("dpo_pack.run.setup.load_data", lambda *a, **k: signal.raise_signal(signum))
    outcome = dpopack(command, recipe)
    assert outcome.status == status
    assert re.fullmatch(rf"stopped by {signum.name}; .*\n", outcome.err)
    assert not (recipe.parent / "run").exists()


def test_signals_wait_for_the_export(recipe: Path, dpopack: Dpopack, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: Any, **settings: Any) -> None:
        signal.raise_signal(signal.SIGTERM)
        export_model(*arguments, **settings)

    monkeypatch.setattr("dpo_pack.run.checkpoint.export_model", interrupted)
    assert dpopack("train", recipe).status == 0
    assert (recipe.parent / "run" / "model" / "model.safetensors").is_file()


# ---------------------------------------------------------------------------------------------- what works


def test_help_is_light_and_fast() -> None:
    code = (
        "import sys, dpo_pack.commands.main\n"
        "sys.argv = ['dpopack', '--help']\n"
        "try:\n"
        "    dpo_pack.commands.main.main()\n"
        "finally:\n"
        "    heavy = {'torch', 'transformers', 'datasets', 'accelerate', 'numpy', 'pyarrow', 'pydantic'}\n"
        "    print(sorted(heavy & set(sys.modules)), file=sys.stderr)"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert (ended.returncode, ended.stderr) == (0, "[]\n")
    cpu_seconds = (after.ru_utime + after.ru_stime) - (before.ru_utime + before.ru_stime)
    assert cpu_seconds < 0.5 * slowness()
    group: Any = typer.main.get_command(app)
    for command in group.commands:
        assert f"  {command} " in ended.stdout
    assert "..." not in ended.stdout.replace("[ARGS]...", ""), "a command's summary is cut off"


def test_the_ranks_get_the_command_line_and_find_the_same_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/bin/dpopack", "train", "recipe.yaml", "optim.lr=1e-6"])
    module = ["-m", "dpo_pack", "train", "recipe.yaml", "optim.lr=1e-6"]
    monkeypatch.setattr(sys, "path", ["/bin", *sys.path])
    assert _own_command() == [sys.executable, "-P", *module]
    monkeypatch.setattr(sys, "path", [os.getcwd(), *sys.path])
    assert _own_command() == [sys.executable, *module]


def test_train_prints_plain_lines_and_nothing_of_other_libraries(recipe: Path, dpopack: Dpopack) -> None:
    outcome = dpopack("train", recipe, "train.epochs=2", "packing.token_budget=256")
    assert (outcome.status, outcome.err) == (0, "")
    assert "\r" not in outcome.out and "\x1b" not in outcome.out
    run = recipe.parent / "run"
    resolved = yaml.safe_load((run / "recipe.yaml").read_text())
    assert (resolved["train"]["epochs"], resolved["packing"]["token_budget"]) == (2, 256)
    assert len(steps_of(run)) == 2 * NUM_PAIRS // 8
    for told in ("16 pairs to train on", "44 to compute", "step 4/4", "reward accuracy", f"{run / 'model'}"):
        assert told in outcome.out


def test_doctor_proves_and_estimates_and_leaves_output_dir_alone(recipe: Path, dpopack: Dpopack) -> None:
    pairs = recipe.parent / "pairs.jsonl"
    pairs.write_text(pairs.read_text().replace("{", '{"kind": "a", '))
    outcome = dpopack("doctor", recipe, "model.autocast=bfloat16")
    assert (outcome.status, outcome.err) == (0, "")
    assert "exact" in outcome.out and "Reference log-probs" not in outcome.out
    assert "2 steps of 8 pairs" in outcome.out and "Memory on one cpu device" in outcome.out
    assert "  pairs: columns that are not read: kind\n" in outcome.out
    memory = json.loads(dpopack("doctor", recipe, "--json").out)["memory"]
    assert memory["fits"] and memory["num_devices"] == 1 and memory["step"] > memory["parts"]["optimizer"] > 0
    assert not (recipe.parent / "run").exists()


@pytest.mark.slow
def test_doctor_of_several_processes_prints_one_report(recipe: Path) -> None:
    command = ["-m", "dpo_pack", "doctor", str(recipe), "distributed.num_processes=2", "--json"]
    ended = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=300)
    report = json.loads(ended.stdout)
    assert ended.returncode == 0 and report["memory"]["num_devices"] == 2 and report["error"] is None


def test_inspect_packing_says_whether_a_run_fits_absent_gpus(recipe: Path, dpopack: Dpopack) -> None:
    outcome = dpopack("inspect-packing", recipe, "--memory", "80GiB", "--devices", "8")
    assert (outcome.status, outcome.err) == (0, "")
    assert "Memory on each of 8 cuda devices" in outcome.out and "It fits: 80.00 GiB" in outcome.out
    assert "Proof" not in outcome.out
    little = ("--memory", "1600MB", "--json", "-", "packing.token_budget=999")
    memory = json.loads(dpopack("inspect-packing", recipe, *little).out)["memory"]
    assert not memory["fits"] and memory["num_devices"] == 1 and memory["row_tokens"] > 100
    weighted = dpopack("inspect-packing", recipe, "data.train.0.weight=1.5").out
    assert "24 pairs in 3 steps" in weighted
    assert not (recipe.parent / "run").exists()


def test_train_computes_no_reference_that_precompute_ref_has_left(recipe: Path, dpopack: Dpopack) -> None:
    first = dpopack("precompute-ref", recipe)
    assert (first.status, first.err) == (0, "")
    assert "Reference log-probs of 22 pairs: 0 of 44 different sequences cached, 44 to compute" in first.out
    assert "\nCache: " in first.out and not (recipe.parent / "run").exists()
    again = dpopack("precompute-ref", recipe, "optim.lr=1e-6")
    assert "44 of 44 different sequences cached" in again.out
    assert dpopack("train", recipe).status == 0
    totals = json.loads((recipe.parent / "run" / "run.json").read_text())["totals"]
    assert totals["reference_sequences_computed"] == 0 and totals["reference_sequences_cached"] == 44


def test_evaluate_gives_the_metrics_that_training_ended_with(trained: Path, dpopack: Dpopack) -> None:
    ended_with = json.loads((trained.parent / "run" / "run.json").read_text())["evaluation"]
    before = snapshot(trained.parent / "run")
    printed = dpopack("evaluate", trained, "--json", "-")
    assert (printed.status, printed.err) == (0, "")
    metrics = json.loads(printed.out)
    assert list(metrics) == ["heldout"] and metrics["heldout"]["pairs"] == 6
    for name in ("rewards/accuracies", "rewards/margins", "loss", "kl/chosen", "kl/rejected"):
        assert metrics["heldout"][name] == pytest.approx(ended_with["heldout"][name], abs=1e-5)
    in_words = dpopack("evaluate", trained.parent / "run", "--json", trained.parent / "metrics.json").out
    assert "Reference log-probs of 6 pairs: " in in_words
    assert json.loads((trained.parent / "metrics.json").read_text()) == metrics
    assert snapshot(trained.parent / "run") == before
    assert sum(part["pairs"] for part in metrics["heldout"]["by_length"].values()) == 6
    assert f"{metrics['heldout']['rewards/accuracies']:.3f}" in in_words
    table = [line for line in in_words.split("Proof of ")[1].splitlines()[1:] if line.startswith(" ")]
    assert len(table) > 3 and max(map(len, table)) <= 80


def test_evaluate_compares_two_models_pair_by_pair(trained: Path, dpopack: Dpopack) -> None:
    models = (trained.parent / "model", trained.parent / "run" / "model")
    printed = dpopack("evaluate", trained, "--compare", *models, "--json", "-")
    assert (printed.status, printed.err) == (0, "")
    compared = json.loads(printed.out)["heldout"]
    assert [Path(compared[side]["model"]) for side in ("a", "b")] == list(models)
    assert compared["a"]["rewards/margins"] == pytest.approx(0, abs=1e-5), "the reference itself"
    difference = compared["difference"]
    for name in ("rewards/accuracies", "rewards/margins", "loss"):
        assert difference[name] == pytest.approx(compared["b"][name] - compared["a"][name], abs=1e-9)
    low, high = difference["intervals"]["rewards/margins"]
    assert 0 < low < difference["rewards/margins"] < high  # training has raised them
    in_words = dpopack("evaluate", trained, "--compare", *models).out
    assert f"{difference['rewards/margins']:.3f}" in in_words and f"B: {models[1]}" in in_words


def test_evaluate_refuses_a_model_that_does_not_embed_the_tokens(recipe: Path, dpopack: Dpopack) -> None:
    tiny_model("llama", vocab_size=300).save_pretrained(recipe.parent / "small")
    outcome = dpopack("evaluate", recipe, "--model", recipe.parent / "small")
    assert_refused(outcome, r"--model: .* 3\d\d, .*/small")


def test_inspect_packing_gives_the_report_a_run_leaves(trained_in_place: Path, dpopack: Dpopack) -> None:
    job = trained_in_place.parent
    (job / "model" / "model.safetensors").unlink()
    printed = dpopack("inspect-packing", trained_in_place, "--json", "-")
    assert (printed.status, printed.err) == (0, "")
    assert json.loads(printed.out) == json.loads((job / "run" / "packing_report.json").read_text())
    files = ("--json", job / "report.json", "--html", job / "report.html")
    shown = dpopack("inspect-packing", trained_in_place, "--ranks", "1,2,4", "--budgets", "64,256", *files)
    assert (shown.status, shown.err) == (0, "") and " best" in shown.out
    assert (trained_in_place.parent / "report.html").read_text().startswith("<!doctype html>")
    sweep = json.loads((trained_in_place.parent / "report.json").read_text())["sweep"]
    assert [outcome["token_budget"] for outcome in sweep] == [64, 128, 256]
    balance = json.loads((trained_in_place.parent / "report.json").read_text())["balance"]
    assert [entry["num_ranks"] for entry in balance] == [1, 2, 4]


def test_show_needs_no_weights_and_writes_json_and_a_page(recipe: Path, dpopack: Dpopack) -> None:
    (recipe.parent / "model" / "model.safetensors").unlink()
    before = sorted(recipe.parent.rglob("*"))
    shown = dpopack("show", recipe)
    assert (shown.status, shown.err) == (0, "") and "16 of 16 rows tokenised, 16 kept" in shown.out
    assert sorted(recipe.parent.rglob("*")) == before
    files = ("--json", recipe.parent / "pairs.json", "--html", recipe.parent / "pairs.html")
    assert dpopack("show", recipe, *files).status == 0
    assert (recipe.parent / "pairs.html").read_text().startswith("<!doctype html>")
    rows = [pair["row"] for pair in json.loads((recipe.parent / "pairs.json").read_text())["pairs"]]
    assert rows == [1, 2, 1]  # the last one is a held-out pair
    for asked in (["--pair", "3,8"], ["--pair", "3", "--pair", "8"]):
        printed = dpopack("show", recipe, *asked, "--json", "-")
        assert (printed.status, printed.err) == (0, "")
        found = [(pair["source"], pair["row"]) for pair in json.loads(printed.out)["pairs"]]
        assert found == [("pairs", 3), ("pairs", 8), ("heldout (held out)", 3)]


def test_recipe_prints_defaults_that_it_accepts(recipe: Path, dpopack: Dpopack) -> None:
    defaults = dpopack("recipe", "--defaults")
    assert (defaults.status, defaults.err) == (0, "")
    own = recipe.parent / "own.yaml"
    own.write_text(defaults.out)
    here = (f"data.train={recipe.parent}/pairs.jsonl", f"model.path={recipe.parent}/model")
    checked = dpopack("recipe", "--check", own, *here)
    assert (checked.status, checked.out.splitlines()[-1]) == (0, f"{own} is in order")
    for command in (["recipe", "--check"], ["inspect-packing"]):
        lora = dpopack(*command, own, *here, "model.lora={r: 4, alpha: 8, dropout: 0.1}")
        assert lora.status == 0 and "model.lora.dropout: 0 shares them" in " ".join(lora.out.split())
    (own.parent / "trl.yaml").write_text("learnig_rate: 1.0e-6\nbeta: -1\n")
    told = dpopack("recipe", "--from", "trl", own.parent / "trl.yaml").err
    assert "did you mean learning_rate?" in told and "beta - loss.beta: must be a number > 0" in told
    assert_refused(dpopack("recipe", "--check", own, *here, "seed=-1"), r"seed: ")
    assert_refused(dpopack("recipe", "--check", own, here[0], "model.path=./no"), r"model\.path: .*/no")


def test_recipe_check_reads_what_a_run_would_read_first_and_writes_nothing(
    recipe: Path, dpopack: Dpopack, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_weights(*arguments: Any, **options: Any) -> Any:
        assert options["tensors"] is not None, "the weights would be read"
        return load_model(*arguments, **options)

    monkeypatch.setattr("dpo_pack.run.setup.load_model", without_weights)
    directory, before = recipe.parent, sorted(recipe.parent.rglob("*"))
    checked = dpopack("recipe", "--check", recipe)
    assert (checked.status, checked.err) == (0, "")
    keys = ("Checking", r"model\.path", "tokenizer", r"data\.train\.0", r"data\.eval\.0", "output_dir")
    assert re.match(": .*\n".join(keys).replace(":", "", 1), checked.out, re.DOTALL)
    assert re.search(r"model\.path: .*, llama; its [1-9]\d* tensors are there\n", checked.out)
    assert checked.out.endswith(f"{recipe} is in order\n")
    assert sorted(directory.rglob("*")) == before


def test_recipe_check_has_a_line_for_each_error(recipe: Path, dpopack: Dpopack, tmp_path: Path) -> None:
    for unready in (
        ["optim.lrr=1", "data.max_len=2"],
        ["model.path=./no", f"data.train={tmp_path}/no.jsonl"],
    ):
        refused = dpopack("recipe", "--check", recipe, *unready)
        keys = [re.sub(r"error: ([\w.]+): .*", r"\1", line) for line in refused.err.splitlines()]
        expected = [re.sub("train$", "train.0.path", word.split("=")[0]) for word in unready]
        assert (refused.status, sorted(keys)) == (2, sorted(expected))
    cut = tmp_path / "cut.jsonl"
    cut.write_text('{"prompt": "ask", "chosen": "yes", "rejected": "no"}\n{"prompt": "as')
    empty = tmp_path / "model"
    shutil.copytree(recipe.parent / "model", empty)
    (empty / "model.safetensors").unlink()
    checked = dpopack(
        "recipe", "--check", recipe, f"data.train=[{cut}, {recipe.parent}/pairs.jsonl]",
        f"model.path={empty}",
        "data.eval.0.columns={prompt: question}", "checkpoint.eval_set=nowhere", "checkpoint.keep_best=1",
        "train.eval_every_steps=1",
    )  # fmt: skip
    assert checked.status == 2 and "in order" not in checked.out and "data.train.1: " in checked.out
    for line, told in zip(
        checked.err.splitlines(),
        (r"checkpoint\.eval_set: .*'nowhere'", r"model\.path: .*weights", r"cut\.jsonl line 2: ", "question"),
        strict=True,
    ):
        assert re.match(f"error: .*{told}", line), line


def test_recipe_check_says_what_keys_choose_of_the_first_rows_and_reads_their_file(
    recipe: Path, dpopack: Dpopack, tmp_path: Path
) -> None:
    checked = dpopack("recipe", "--check", recipe, "data.train.0.max_length_gap=0")
    told = r"  \d of 16 pairs are chosen to train on; left out by max_length_gap \d+\n"
    assert checked.status == 0 and re.search(told, checked.out)
    file = tmp_path / "names.parquet"
    keep = f"data.train.0.keep={{from: {file}}}"
    assert_refused(dpopack("recipe", "--check", recipe, keep), r"keep\.from: no such file")
    pq.write_table(pa.table({"name": ["a"]}), file)
    assert_refused(dpopack("recipe", "--check", recipe, keep), r'keep\.from: .*"pair" does not exist')


def test_recipe_check_reads_only_the_first_rows_of_a_long_file(recipe: Path, dpopack: Dpopack) -> None:
    row = (recipe.parent / "pairs.jsonl").read_text().splitlines()[0] + "\n"
    assert re.search(r"data.train.0: .* all \d+ rows have", dpopack("recipe", "--check", recipe).out)
    long = recipe.parent / "long.jsonl"
    long.write_text(row * 300 + "no JSON")
    checked = dpopack("recipe", "--check", recipe, f"data.train={long}")
    assert checked.status == 0 and "the first 200 rows (no others were read) have 200 pairs" in checked.out

    long.write_text(row * 50 + '{"prompt": "a question"}\n' + row * 200)
    checked = dpopack("recipe", "--check", recipe, f"data.train={long}")
    assert checked.status == 2 and "missing_column: 1 of the first 200 rows" in checked.err
    skipped = dpopack("recipe", "--check", recipe, f"data.train={long}", "data.on_bad_row=skip")
    assert "the first 200 rows (no others were read) have 199 pairs\n" in skipped.out
    assert "  1 of 200 rows are left out: 1 missing_column\n" in skipped.out


def test_doctor_names_versions_devices_and_backends(dpopack: Dpopack) -> None:
    outcome = dpopack("doctor", "--json")
    assert (outcome.status, outcome.err) == (0, "")
    environment = json.loads(outcome.out)
    assert environment["versions"]["torch"] == importlib.metadata.version("torch")
    (device,) = environment["devices"]
    assert device["memory_bytes"] > 2**28 and "bf16" in device["name"]
    assert set(environment["attention"]) == {"flash_attn", "torch_varlen", "flex", "sdpa"}
    assert environment["attention"][environment["auto"]] is None
    assert all(1e-3 < environment["cpu_gflops"][dtype] < 1e6 for dtype in ("float32", "bfloat16"))
    in_words = dpopack("doctor")
    assert re.search(r"^CPU products: .* GFLOP/s in fp32, .* in bf16", in_words.out, re.MULTILINE)
    assert in_words.status == 0 and "\x1b" not in in_words.out and dpo_pack.__version__ in in_words.out


# ---- The page of a run


def test_a_run_leaves_its_page_and_report_writes_it_again(recipe: Path, dpopack: Dpopack) -> None:
    root = recipe.parent / "run"
    assert f"report: {root / 'report.html'}\n" in dpopack("train", recipe).out
    page = (root / "report.html").read_text(encoding="utf-8")
    assert "margin" in page and "<b>chosen</b>" in page  # of a pair with a low margin
    (root / "report.html").unlink()
    outcome = dpopack("report", root)
    assert (outcome.status, outcome.out) == (0, f"Page: {root / 'report.html'}\n")
    assert (root / "report.html").read_text(encoding="utf-8") == page
    outcome = dpopack("report", root, root, "--output", recipe.parent / "both.html")
    assert outcome.status == 0 and "2 runs" in (recipe.parent / "both.html").read_text(encoding="utf-8")


def test_a_page_that_cannot_be_written_is_one_line_and_ends_no_finished_run(
    recipe: Path, dpopack: Dpopack, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(paths: Sequence[Path], target: Path) -> None:
        raise CacheError(f"cannot write {target}: No space left on device")

    monkeypatch.setattr(pages, "write_run_page", refuse)
    monkeypatch.setattr(training, "write_run_page", refuse)
    outcome = dpopack("train", recipe)
    root = recipe.parent / "run"
    assert outcome.status == 0 and f"the run has no page (cannot write {root / 'report.html'}" in outcome.out
    assert "; report:" not in outcome.out
    assert json.loads((root / "run.json").read_text())["status"] == "finished"
    outcome = dpopack("report", root)
    assert outcome.status == 2 and outcome.err.count("\n") == 1 and "No space left" in outcome.err


def test_recipe_translates_and_names_what_has_no_counterpart(dpopack: Dpopack, tmp_path: Path) -> None:
    known = "learning_rate: 3e-7\nmodel_name_or_path: a/b\ndataset_name: c/d\n"
    for text, is_told in ((known, False), (known + "use_dora: true\n", True)):
        (tmp_path / "dpo.yaml").write_text(text)
        translated = dpopack("recipe", "--from", "trl", tmp_path / "dpo.yaml")
        assert translated.status == 0 and yaml.safe_load(translated.out)["optim"]["lr"] == 3e-7
        assert ("no counterpart" in translated.err) == bool(translated.err) == is_told
    assert {"model", "data", "output_dir"} <= set(json.loads(dpopack("recipe", "--schema").out)["required"])


@pytest.mark.parametrize(
    ("command", "option", "told"),
    [
        ("train", "--config", r"--config: .*dpopack train recipe\.yaml"),
        ("train", "--max_length", r"data\.max_length=VALUE"),
        ("train", "--set", r"optim\.lr=1e-6"),
        ("train", "--nonsense", r"No such option: --nonsense"),
        ("train", "--dry-run", r"dpopack doctor"),
        ("train", "--memory", r"dpopack inspect-packing RECIPE --memory"),
        ("recipe", "--template", r"configs/.*recipe --defaults"),
    ],
)
def test_an_option_that_went_or_is_a_key_is_answered_with_what_to_use(
    command: str, option: str, told: str, dpopack: Dpopack
) -> None:
    outcome = dpopack(command, "recipe.yaml", option, "1")
    assert outcome.status == 2 and re.search(told, outcome.err)


@pytest.mark.parametrize(("words", "expected"), [("train recipe.yaml optim.l", "optim.lr=")])
def test_shells_complete_recipe_keys(words: str, expected: str) -> None:
    environment = {"_DPOPACK_COMPLETE": "complete_bash", "COMP_WORDS": f"dpopack {words}", "COMP_CWORD": "3"}
    code = "import sys; sys.argv = ['dpopack']; from dpo_pack.commands.main import main; main()"
    env = {**os.environ, **environment}
    ended = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert expected in ended.stdout.split(), ended
