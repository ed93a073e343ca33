"""The commands as a user runs them: exit statuses, what they print, what they leave behind."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import resource
import runpy
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from rich.console import Console
from safetensors.torch import load_file, save_file
from support.processor import slowness
from support.tiny_models import tiny_model
from support.tiny_run import NUM_PAIRS, tiny_run, write_rows

import dpo_pack
import dpo_pack.recipe.load as machine
import dpo_pack.train as training
from dpo_pack.commands.main import let_segments_grow, main
from dpo_pack.recipe.load import load_recipe
from dpo_pack.reports import pages
from dpo_pack.run.export import export_model
from dpo_pack.system.errors import CacheError
from dpo_pack.train import train


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a command did."""

    status: int
    out: str
    err: str


Dpopack = Callable[..., Outcome]


@pytest.fixture
def dpopack(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Dpopack:
    """Runs a command in this process; what C code and other libraries print is captured as well."""

    def run(*arguments: str | Path) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["dpopack", *map(str, arguments)])
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capfd.readouterr()
        assert isinstance(ended.value.code, int)
        return Outcome(status=ended.value.code, out=out, err=err)

    return run


@pytest.fixture(scope="session")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run that nothing has touched; tests work on copies."""
    return tiny_run(tmp_path_factory.mktemp("pristine")).parent


@pytest.fixture
def recipe(pristine: Path, tmp_path: Path) -> Path:
    """A recipe with everything it needs, to be spoilt."""
    return Path(shutil.copytree(pristine, tmp_path / "job")) / "recipe.yaml"


@pytest.fixture(scope="session")
def finished(pristine: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run that is finished; tests work on copies."""
    job = Path(shutil.copytree(pristine, tmp_path_factory.mktemp("finished") / "job"))
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


def _edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def _with_second_line(line: bytes) -> Callable[[Path], Sequence[str]]:
    """Spoils the second row of the training pairs."""

    def spoil(job: Path) -> Sequence[str]:
        lines = (job / "pairs.jsonl").read_bytes().splitlines()
        (job / "pairs.jsonl").write_bytes(b"\n".join([lines[0], line, *lines[2:], b""]))
        return ()

    return spoil


def _with_rows(*rows: dict[str, Any]) -> Callable[[Path], Sequence[str]]:
    def spoil(job: Path) -> Sequence[str]:
        write_rows(job / "pairs.jsonl", list(rows))
        return ()

    return spoil


def _without(name: str) -> Callable[[Path], Sequence[str]]:
    def spoil(job: Path) -> Sequence[str]:
        (job / name).unlink()
        return ()

    return spoil


def _with(*overrides: str) -> Callable[[Path], Sequence[str]]:
    return lambda job: overrides


def _without_a_tensor(job: Path) -> Sequence[str]:
    tensors = load_file(job / "model" / "model.safetensors")
    del tensors["model.layers.1.mlp.down_proj.weight"]
    save_file(tensors, job / "model" / "model.safetensors", metadata={"format": "pt"})
    return ()


def _with_damaged_weights(job: Path) -> Sequence[str]:
    weights = job / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    return ()


def _without_eos(job: Path) -> Sequence[str]:
    _edit_json(job / "model" / "tokenizer_config.json", eos_token=None)
    return ()


def _with_few_embeddings(job: Path) -> Sequence[str]:
    tiny_model("llama", vocab_size=300).save_pretrained(job / "model")  # the tokenizer's ids go up to 383
    return ()


def _with_few_positions(job: Path) -> Sequence[str]:
    _edit_json(job / "model" / "config.json", max_position_embeddings=16)
    return ()


def _with_text_for_a_number(job: Path) -> Sequence[str]:
    _edit_json(job / "model" / "config.json", num_hidden_layers="2")
    return ()


def _without_layers(job: Path) -> Sequence[str]:
    _edit_json(job / "model" / "config.json", num_hidden_layers=0)
    return ()


def _with_binary_template(job: Path) -> Sequence[str]:
    (job / "template.jinja").write_bytes(b"\xff\xfe")
    return (f"tokenizer.chat_template={job}/template.jinja",)


def _with_text_recipe(job: Path) -> Sequence[str]:
    (job / "recipe.yaml").write_text("output_dir: [unclosed")
    return ()


def _below_a_file(job: Path) -> Sequence[str]:
    (job / "file").touch()
    return (f"output_dir={job}/file/run",)


_CHAT = {
    "prompt": [{"role": "user", "content": "ask"}],
    "chosen": [{"role": "assistant", "content": "yes"}],
    "rejected": [{"role": "assistant", "content": "no"}],
}

# What is wrong: (how to spoil a good job, giving overrides; what the one line must say)
BAD_INPUT: dict[str, tuple[Callable[[Path], Sequence[str]], str]] = {
    "unknown key": (_with("optim.lrr=1"), r"optim\.lrr: unknown key; did you mean optim\.lr\?"),
    "wrong type": (_with("optim.lr=fast"), r"optim\.lr: must be a number.*, not 'fast'"),
    "out of range": (_with("loss.beta=-1"), r"loss\.beta: must be .*> 0.*, not -1"),
    "override without a value": (_with("optim.lr"), r"'optim\.lr': write it as key=value"),
    "no recipe": (_without("recipe.yaml"), r"recipe\.yaml: no such recipe; .*--defaults"),
    "recipe is no YAML": (_with_text_recipe, r"recipe\.yaml"),
    "no data file": (_with("data.train=absent.jsonl"), r"data\.train\.0\.path: no such file.*absent\.jsonl"),
    "no column": (_with_rows({"prompt": "a", "chosen": "b"}), r"line 1: .*'?rejected'?.*columns"),
    "empty file": (_with_rows(), r"pairs\.jsonl has no rows; correct or remove data\.train\.0"),
    "empty completion": (
        _with_second_line(b'{"prompt": "a", "chosen": "b", "rejected": ""}'),
        r"pairs\.jsonl line 2: the rejected completion is empty; empty_completion: 1 of .* rows; "
        r"mend the rows, or set data.on_bad_row: skip",
    ),
    "identical completions": (
        _with_second_line(b'{"prompt": "a", "chosen": "b", "rejected": "b"}'),
        r"pairs\.jsonl line 2: .*(identical|the same).*on_bad_row: skip",
    ),
    "invalid JSON": (_with_second_line(b'{"prompt": '), r"pairs\.jsonl line 2: invalid JSON.*mend the row"),
    "not UTF-8": (_with_second_line(b'{"prompt": "\xff"}'), r"pairs\.jsonl line 2: not UTF-8"),
    "no weights": (_without("model/model.safetensors"), r"model\.path: .*/model has no weights: neither"),
    "no config": (_without("model/config.json"), r"model\.path: directory .*/model' has no config\.json"),
    "a wrong type in config.json": (
        _with_text_for_a_number,
        r"model\.path: cannot load .*/model: .*num_hidden_layers",
    ),
    "no layers": (_without_layers, r"model\.path: .*/model has num_hidden_layers: 0.*correct it"),
    "a template that is no text": (
        _with_binary_template,
        r"tokenizer\.chat_template: cannot read .*template\.jinja: it is not UTF-8",
    ),
    "damaged weights": (_with_damaged_weights, r"model\.path: cannot load .*/model"),
    "a tensor missing": (
        _without_a_tensor,
        r"model\.path: the weights in .*/model lack 1 of .*layers\.1\.mlp\.down_proj",
    ),
    "no tokenizer": (_without("model/tokenizer.json"), r"model\.path: .*tokenizer"),
    "no EOS": (_without_eos, r"no EOS token.*set tokenizer\.path"),
    "chats without a template": (_with_rows(_CHAT), r"no chat template.*tokenizer\.chat_template"),
    "ids beyond the tokenizer's": (
        _with_rows({"prompt_ids": [1, 5], "chosen_ids": [6, 2], "rejected_ids": [384, 2]}),
        r"pairs\.jsonl line 1: rejected_ids has the token id 384; the tokenizer's ids are 0 to 383",
    ),
    "ids beyond the model's": (
        _with_few_embeddings,
        r"model\.path: the data has token id 3\d\d, but .*/model embeds 300 tokens only",
    ),
    "too few positions": (
        _with_few_positions,
        r"data\.max_length: the longest sequence has \d+ tokens.* 16 positions.*set data\.max_length: 16",
    ),
    "output_dir below a file": (_below_a_file, r"output_dir: .*/file' is in the way: it is not a directory"),
    "a loss of one's own that is nowhere": (
        _with("loss.type=no_such_losses:mine"),
        r"loss\.type: cannot import no_such_losses: ModuleNotFoundError",
    ),
    "a checkpoint that is none": (_with("checkpoint.resume=/nowhere"), r"checkpoint\.resume: .*/nowhere"),
}


@pytest.mark.parametrize("what", BAD_INPUT)
def test_bad_input_is_refused_in_one_line_and_nothing_is_half_written(
    what: str, recipe: Path, dpopack: Dpopack
) -> None:
    job = recipe.parent
    spoil, pattern = BAD_INPUT[what]
    assert_refused(dpopack("train", recipe, *spoil(job)), pattern)
    assert not (job / "run").exists()
    assert not [path for path in job.rglob("*") if path.name.endswith(".tmp")]


def test_another_run_in_output_dir_is_left_alone_and_both_ways_out_are_named(
    trained_in_place: Path, dpopack: Dpopack
) -> None:
    before = snapshot(trained_in_place.parent)
    again = dpopack("train", trained_in_place)
    assert again.status == 0 and "finished" in again.out and "nothing to do" in again.out
    ways_out = "; start again with --overwrite, or use another output_dir"
    changed = dpopack("train", trained_in_place, "optim.lr=0.5")
    assert_refused(
        changed,
        rf"output_dir: .*/run holds a run with another optim\.lr \(0\.001 then, 0\.5 now\){ways_out}",
    )
    assert_refused(
        dpopack("train", trained_in_place, "checkpoint.resume=never"), rf".*\(finished\){ways_out}"
    )
    assert snapshot(trained_in_place.parent) == before


def test_both_ways_out_work(trained: Path, dpopack: Dpopack) -> None:
    elsewhere = f"output_dir={trained.parent / 'elsewhere'}"
    for arguments in (("--overwrite",), ("checkpoint.resume=never", "--overwrite"), (elsewhere,)):
        outcome = dpopack("train", trained, "optim.lr=0.5", "train.max_steps=1", *arguments)
        assert outcome.status == 0, outcome
    for run in ("run", "elsewhere"):
        assert yaml.safe_load((trained.parent / run / "recipe.yaml").read_text())["optim"]["lr"] == 0.5
        assert len(steps_of(trained.parent / run)) == 1


def steps_of(run: Path) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if record["split"] == "train"]


@pytest.mark.parametrize("command", ["train", "precompute-ref", "evaluate"])
def test_half_an_environment_of_several_processes_is_refused(
    command: str, recipe: Path, dpopack: Dpopack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert_refused(
        dpopack(command, recipe),
        r"several processes, but RANK is not set; start the processes with dpopack",
    )


@pytest.mark.parametrize("command", ["train", "precompute-ref", "evaluate"])
def test_one_process_where_the_launcher_was_asked_for_two_is_refused(
    command: str, recipe: Path, dpopack: Dpopack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    problem = r"num_processes: the recipe asks for 2, but the launcher has started 1 "
    assert_refused(dpopack(command, recipe, "distributed.num_processes=2"), problem)


def test_evaluate_needs_held_out_pairs_and_a_trained_model(recipe: Path, dpopack: Dpopack) -> None:
    assert_refused(
        dpopack("evaluate", recipe), r"run/model: there is no trained model; finish the run.*--model"
    )
    assert_refused(dpopack("evaluate", recipe, "data.eval=[]"), r"no held-out data; name a source")


def test_commands_that_do_not_train_need_no_tracker(
    recipe: Path, dpopack: Dpopack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "_tracker_problems", lambda recipe: [("logging.trackers", "not installed")])
    assert_refused(dpopack("train", recipe), r"logging\.trackers: not installed")
    assert_refused(dpopack("recipe", "--check", recipe), r"logging\.trackers: not installed")
    assert dpopack("show", recipe).status == 0
    asked = dpopack("sample", recipe.parent / "model", recipe, "--num", "1")
    assert (asked.status, asked.err) == (0, "") and "heldout: ask" in asked.out


def test_a_report_of_no_run_or_to_a_place_that_cannot_be_written_is_refused(
    trained_in_place: Path, dpopack: Dpopack, tmp_path: Path
) -> None:
    run = trained_in_place.parent / "run"
    assert_refused(dpopack("report", tmp_path), r"no run \(no readable run\.json\); give the output_dir")
    assert_refused(dpopack("report", tmp_path / "absent"), r"absent: no run")
    assert_refused(dpopack("report", run, tmp_path), r"no run")
    (tmp_path / "file").touch()
    for target in (tmp_path / "file" / "page.html", tmp_path):
        assert_refused(dpopack("report", run, "--output", target), rf"cannot write {target}: .* choose a wri")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "job"]


def test_what_cannot_be_sampled_from_is_refused(dpopack: Dpopack, recipe: Path) -> None:
    model = recipe.parent / "model"
    assert_refused(dpopack("sample", model), r"no prompts; give --prompt TEXT or a recipe")
    assert_refused(dpopack("sample", recipe), r"give one or several runs or models")
    assert_refused(dpopack("sample", model / "absent", "--prompt", "ask"), r"absent")
    (model / "model.safetensors").unlink()
    assert_refused(dpopack("sample", model, "--prompt", "ask"), r"weight")


def test_flags_that_make_no_sense_are_refused(recipe: Path, dpopack: Dpopack) -> None:
    ranks, budgets = ("--ranks", "1,x"), ("--budgets", "0")
    assert_refused(dpopack("inspect-packing", recipe, *ranks), r"--ranks '1,x': not positive whole numbers")
    assert_refused(dpopack("inspect-packing", recipe, *budgets), r"--budgets '0': not positive whole numbers")
    assert_refused(dpopack("recipe"), r"give one of --defaults, --template NAME, --from PEER FILE")
    (recipe.parent / "file").touch()
    below_a_file = ("--json", recipe.parent / "file" / "report.json")
    assert_refused(dpopack("inspect-packing", recipe, *below_a_file), r"cannot write .*file/report\.json")


@pytest.mark.parametrize("arguments", [("train",), ("train", "r.yaml", "--nonsense"), ("nonsense",)])
def test_a_mistyped_command_line_is_answered_with_its_usage(
    arguments: tuple[str, ...], dpopack: Dpopack
) -> None:
    outcome = dpopack(*arguments)
    assert outcome.status == 2 and outcome.err.startswith("Usage: dpopack") and "Error: " in outcome.err


EVIL = "x\x1b[2J\r\x07y"


def test_control_characters_in_names_never_reach_the_terminal(
    recipe: Path, dpopack: Dpopack, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    home = recipe.parent
    pairs = [json.loads(line) for line in (home / "pairs.jsonl").read_text().splitlines()]
    (home / f"{EVIL}.jsonl").write_text((home / "pairs.jsonl").read_text())
    (home / f"bad{EVIL}.jsonl").write_text("{" + EVIL)
    write_rows(home / "columns.jsonl", [{**pairs[0], EVIL: "z"}, {EVIL: "z"}])
    (home / EVIL).mkdir()
    (home / EVIL / "config.json").write_text(json.dumps({"model_type": EVIL}))
    for arguments in (
        ["inspect-packing", recipe, f"data.train={home}/{EVIL}.jsonl"],
        ["inspect-packing", recipe, f"data.train={home}/bad{EVIL}.jsonl"],
        ["inspect-packing", recipe, f"data.train={home}/absent{EVIL}.jsonl"],
        ["inspect-packing", recipe, f"data.train={home}/columns.jsonl"],
        ["inspect-packing", recipe, f"model.path={home / EVIL}"],
        ["inspect-packing", recipe, f"model.{EVIL}=1"],
        ["inspect-packing", f"absent{EVIL}.yaml"],
        ["recipe", "--check", recipe, f"logging.run_name={EVIL}"],
        ["cache", "verify", "--cache-dir", home / EVIL],
        ["evaluate", recipe, "--nonsense" + EVIL],
        [EVIL],
    ):
        outcome = dpopack(*arguments)
        told = (outcome.out + outcome.err).replace("\n", "")
        assert outcome.status in (0, 2) and told and told.isprintable(), arguments
    _raise_in_training(monkeypatch, ZeroDivisionError(EVIL))
    with pytest.raises(ZeroDivisionError) as bug:
        dpopack("train", recipe)
    sys.__excepthook__(bug.type, bug.value, bug.tb)  # what Python does at the end of the process
    assert capfd.readouterr().err.endswith(r"ZeroDivisionError: x\x1b[2J" + "\r\\x07y\n")


# --------------------------------------------------------------------------------- bugs, memory, interruption


def _raise_in_training(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, where: str = "accumulate_gradients"
) -> None:
    def fail(*arguments: Any, **settings: Any) -> None:
        raise error

    monkeypatch.setattr(f"dpo_pack.train.{where}", fail)


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
    assert "reference.token_budget" in outcome.err
    assert "model.gradient_checkpointing=true" in outcome.err and "Including" not in outcome.err
    assert json.loads((recipe.parent / "run" / "run.json").read_text())["status"] == "failed"


@pytest.mark.parametrize(
    "message",
    [
        "CUDA error: out of memory\nCUDA kernel errors might be\nasynchronous",
        "HIP out of memory. Tried to allocate 2.00 GiB",
        "Triton Error [CUDA]: out of memory",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
        "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried",
    ],
)
def test_a_lack_of_memory_has_many_words_and_each_gets_one_line_and_the_remedy(
    message: str, recipe: Path, dpopack: Dpopack, monkeypatch: pytest.MonkeyPatch
) -> None:
    _raise_in_training(monkeypatch, RuntimeError(message), where="train")
    first_words = re.escape(message.splitlines()[0][:20])
    assert_refused(dpopack("train", recipe), rf"error: {first_words}.*; lower packing\.token_budget")


def test_an_error_of_ours_is_not_hidden(
    recipe: Path, dpopack: Dpopack, monkeypatch: pytest.MonkeyPatch
) -> None:
    for bug in (ZeroDivisionError("a bug"), RuntimeError("mat1 and mat2 shapes cannot be multiplied")):
        _raise_in_training(monkeypatch, bug, where="train")
        with pytest.raises(type(bug)):
            dpopack("train", recipe)


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


@pytest.mark.parametrize(("signum", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("command", ["train", "precompute-ref", "inspect-packing"])
def test_a_signal_ends_a_command_with_the_shell_s_status(
    signum: signal.Signals,
    status: int,
    command: str,
    recipe: Path,
    dpopack: Dpopack,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While pairs are read; what happens to one in the middle of training, tests/test_train.py says."""

    def interrupt(*arguments: Any, **settings: Any) -> None:
        signal.raise_signal(signum)

    monkeypatch.setattr("dpo_pack.run.prepare.load_data", interrupt)
    outcome = dpopack(command, recipe)
    assert outcome.status == status
    assert outcome.err == f"stopped by {signum.name}; run the same command again; it uses what was saved\n"
    assert not (recipe.parent / "run").exists()


def test_a_signal_is_not_taken_for_a_failure_of_the_library_it_interrupts(
    recipe: Path, dpopack: Dpopack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datasets.load_dataset", lambda *a, **k: signal.raise_signal(signal.SIGTERM))
    outcome = dpopack("train", recipe, "data.train=org/pairs")
    assert outcome.status == 143 and "SIGTERM" in outcome.err and "error" not in outcome.err


def test_a_signal_while_the_model_is_exported_waits_for_it(
    recipe: Path, dpopack: Dpopack, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: Any, **settings: Any) -> None:
        signal.raise_signal(signal.SIGTERM)
        export_model(*arguments, **settings)

    monkeypatch.setattr("dpo_pack.run.saving.export_model", interrupted)
    assert dpopack("train", recipe).status == 0
    assert (recipe.parent / "run" / "model" / "model.safetensors").is_file()


# ---------------------------------------------------------------------------------------------- what works


@pytest.mark.parametrize(
    ("before", "online", "after"),
    [
        ({}, "null", "expandable_segments:True"),
        (
            {},
            "{max_new_tokens: 8, judges: [{type: reward_model, path: a}], generator: {type: transformers}}",
            "expandable_segments:True",
        ),
        ({}, "{max_new_tokens: 8, judges: [{type: reward_model, path: a}], generator: {type: vllm}}", None),
        ({"PYTORCH_ALLOC_CONF": "backend:native"}, "null", "backend:native"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}, "null", None),
    ],
)
def test_the_allocator_s_segments_grow_unless_the_user_says_otherwise(
    before: dict[str, str], online: str, after: str | None, recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.setenv(name, "")
        del os.environ[name]  # which the end of this test restores
    os.environ.update(before)
    let_segments_grow(load_recipe(recipe, ["train.max_steps=2", f"online={online}"]))
    assert os.environ.get("PYTORCH_ALLOC_CONF") == after


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
    for command in OPTIONS:
        assert f"  {command} " in ended.stdout
    assert "..." not in ended.stdout.replace("[ARGS]...", ""), "a command's summary is cut off"


OPTIONS: dict[str, tuple[str, ...]] = {
    "train": ("RECIPE", "KEY=VALUE", "--dry-run", "--overwrite"),
    "precompute-ref": ("RECIPE", "KEY=VALUE"),
    "inspect-packing": ("RECIPE", "KEY=VALUE", "--ranks", "--budgets", "--json", "--html"),
    "show": ("RECIPE", "KEY=VALUE", "--pair", "--dropped", "--json", "--html"),
    "evaluate": ("RECIPE", "KEY=VALUE", "--model", "--compare", "--json"),
    "doctor": ("RECIPE", "--json"),
    "recipe": ("KEY=VALUE", "--defaults", "--all", "--template", "--from", "--schema", "--check"),
    "cache": ("list", "verify", "export", "import", "prune"),
}


@pytest.mark.parametrize("command", OPTIONS)
def test_the_help_of_a_command_names_its_options(command: str, dpopack: Dpopack) -> None:
    outcome = dpopack(command, "--help")
    assert outcome.status == 0
    for option in OPTIONS[command]:
        assert option in outcome.out


def test_the_package_runs_as_a_module(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["dpo_pack", "--version"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("dpo_pack", run_name="__main__")  # as `python -m dpo_pack` does
    assert (ended.value.code, *capfd.readouterr()) == (0, f"dpo-pack {dpo_pack.__version__}\n", "")


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


def test_a_dry_run_goes_up_to_the_first_step_and_leaves_output_dir_alone(
    recipe: Path, dpopack: Dpopack
) -> None:
    pairs = recipe.parent / "pairs.jsonl"
    pairs.write_text(pairs.read_text().replace("{", '{"kind": "a", '))
    outcome = dpopack("train", recipe, "--dry-run")
    assert (outcome.status, outcome.err) == (0, "")
    assert "2 steps of 8 pairs" in outcome.out and "Dry run" in outcome.out
    assert "  columns of pairs that are not read: kind\n" in outcome.out
    assert "not read" not in dpopack("inspect-packing", recipe).out
    assert not (recipe.parent / "run").exists()
    assert "44 of 44 different sequences cached" in dpopack("precompute-ref", recipe).out
    promised = " ".join(dpopack("train", "--help").out.split())
    assert "Fills the caches of tokens and reference log-probs; writes nothing into output_dir." in promised


def test_train_computes_no_reference_that_precompute_ref_has_left(recipe: Path, dpopack: Dpopack) -> None:
    first = dpopack("precompute-ref", recipe)
    assert (first.status, first.err) == (0, "")
    assert "Reference log-probs of 22 pairs: 0 of 44 different sequences cached, 44 to compute" in first.out
    assert "0 sequences reused, 44 computed" in first.out and not (recipe.parent / "run").exists()
    assert "44 sequences reused, 0 computed" in dpopack("precompute-ref", recipe, "optim.lr=1e-6").out
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
    in_words = dpopack("evaluate", trained, "--json", trained.parent / "metrics.json")
    assert f"{metrics['heldout']['rewards/accuracies']:.3f}" in in_words.out
    assert json.loads((trained.parent / "metrics.json").read_text()) == metrics
    assert snapshot(trained.parent / "run") == before


def test_evaluate_compares_two_models_pair_by_pair(trained: Path, dpopack: Dpopack) -> None:
    models = (trained.parent / "model", trained.parent / "run" / "model")
    printed = dpopack("evaluate", trained, "--compare", *models, "--json", "-")
    assert (printed.status, printed.err) == (0, "")
    compared = json.loads(printed.out)["heldout"]
    assert [Path(compared[side]["model"]) for side in ("a", "b")] == list(models)
    difference = compared["difference"]
    for name in ("rewards/accuracies", "rewards/margins", "loss"):
        assert difference[name] == pytest.approx(compared["b"][name] - compared["a"][name], abs=1e-9)
    low, high = difference["intervals"]["rewards/margins"]
    assert 0 < low < difference["rewards/margins"] < high  # training has raised them
    in_words = dpopack("evaluate", trained, "--compare", *models)
    line = next(line for line in in_words.out.splitlines() if "reward margin" in line)
    assert line.split()[-4:] == [f"{difference['rewards/margins']:+.3f}", f"{low:+.3f}", "to", f"{high:+.3f}"]
    assert f"A: {models[0]}\nB: {models[1]}" in in_words.out


def test_evaluate_shows_intervals_and_whether_rewards_follow_length(trained: Path, dpopack: Dpopack) -> None:
    outcome = dpopack("evaluate", trained, "--json", trained.parent / "metrics.json")
    metrics = json.loads((trained.parent / "metrics.json").read_text())["heldout"]
    low, high = metrics["intervals"]["rewards/accuracies"]
    line = next(line for line in outcome.out.splitlines() if "reward accuracy" in line)
    assert line.split()[-4:] == [f"{metrics['rewards/accuracies']:.3f}", f"{low:.3f}", "to", f"{high:.3f}"]
    assert "prefer the longer completion in" in outcome.out
    assert sum(part["pairs"] for part in metrics["by_length"].values()) == 6
    by_length = outcome.out.split("by length of chosen, compared with rejected")[1]
    assert "under half" in by_length and "over twice" in by_length  # `chosen_under_half`, `chosen_over_twice`
    assert "KL of chosen" in outcome.out  # `kl/chosen`
    assert max(map(len, outcome.out.split("Proof: ")[1].splitlines()[1:])) <= 80


def test_evaluate_tells_held_out_pairs_of_several_sources_apart(trained: Path, dpopack: Dpopack) -> None:
    sources = f"data.train=[{trained.parent}/pairs.jsonl, {trained.parent}/heldout.jsonl]"
    outcome = dpopack("evaluate", trained, sources, "data.eval={fraction: 0.5}", "--json", "-")
    by_source = json.loads(outcome.out)["held_out"]["by_source"]
    assert list(by_source) == ["pairs", "heldout"]
    assert sum(part["pairs"] for part in by_source.values()) >= 11


def test_held_out_pairs_that_share_prompts_are_counted_with_their_prompts(
    trained: Path, dpopack: Dpopack
) -> None:
    held_out = trained.parent / "heldout.jsonl"
    rows = [json.loads(line) for line in held_out.read_text().splitlines()]
    write_rows(held_out, [row | {"prompt": rows[number % 2]["prompt"]} for number, row in enumerate(rows)])
    outcome = dpopack("evaluate", trained)
    assert ", 6 pairs of 2 prompts held out (heldout); " in outcome.out
    assert "heldout: 6 pairs of 2 prompts\n" in outcome.out and "bootstrap over prompts" in outcome.out


def test_evaluate_takes_one_model_or_two(recipe: Path, dpopack: Dpopack) -> None:
    both = ("--model", "a", "--compare", "a", "b")
    assert_refused(dpopack("evaluate", recipe, *both), r"give --model or --compare, not both")
    tiny_model("llama", vocab_size=300).save_pretrained(recipe.parent / "small")
    small = ("--model", recipe.parent / "small")
    assert_refused(dpopack("evaluate", recipe, *small), r"--model: the data has token id 3\d\d, but .*/small")
    missing = ("--compare", recipe.parent / "model", recipe.parent / "missing")
    assert_refused(dpopack("evaluate", recipe, *missing), r"missing: there is no trained model")


def test_evaluate_of_the_reference_itself_prefers_nothing(recipe: Path, dpopack: Dpopack) -> None:
    outcome = dpopack("evaluate", recipe, "--model", recipe.parent / "model", "--json", "-")
    assert json.loads(outcome.out)["heldout"]["rewards/margins"] == pytest.approx(0, abs=1e-5)


def test_inspect_packing_needs_no_weights_and_gives_the_report_a_run_leaves(
    trained_in_place: Path, dpopack: Dpopack
) -> None:
    (trained_in_place.parent / "model" / "model.safetensors").unlink()
    printed = dpopack("inspect-packing", trained_in_place, "--json", "-")
    assert (printed.status, printed.err) == (0, "")
    report = json.loads(printed.out)
    assert report == json.loads((trained_in_place.parent / "run" / "packing_report.json").read_text())
    files = (
        "--json",
        trained_in_place.parent / "report.json",
        "--html",
        trained_in_place.parent / "report.html",
    )
    shown = dpopack("inspect-packing", trained_in_place, "--ranks", "1,2,4", "--budgets", "64,256", *files)
    assert (shown.status, shown.err) == (0, "") and "Recommended: packing.token_budget=" in shown.out
    assert (trained_in_place.parent / "report.html").read_text().startswith("<!doctype html>")
    sweep = json.loads((trained_in_place.parent / "report.json").read_text())["sweep"]
    assert [outcome["token_budget"] for outcome in sweep] == [64, 128, 256]
    balance = json.loads((trained_in_place.parent / "report.json").read_text())["balance"]
    assert [entry["num_ranks"] for entry in balance] == [1, 2, 4]


def test_show_needs_no_weights_and_writes_what_it_shows_as_json_and_as_a_page(
    recipe: Path, dpopack: Dpopack
) -> None:
    (recipe.parent / "model" / "model.safetensors").unlink()
    before = sorted(recipe.parent.rglob("*"))
    shown = dpopack("show", recipe)
    assert (shown.status, shown.err) == (0, "") and "all 16 rows tokenised, 16 kept" in shown.out
    assert sorted(recipe.parent.rglob("*")) == before
    files = ("--json", recipe.parent / "pairs.json", "--html", recipe.parent / "pairs.html")
    assert dpopack("show", recipe, *files).status == 0
    assert (recipe.parent / "pairs.html").read_text().startswith("<!doctype html>")
    rows = [pair["row"] for pair in json.loads((recipe.parent / "pairs.json").read_text())["pairs"]]
    assert rows == [1, 2, 1]  # the last one is a held-out pair
    for asked in (["--pair", "3,8"], ["--pair", "3", "--pair", "8"], ["--pair", "3", "8"]):
        printed = dpopack("show", recipe, *asked, "--json", "-")
        assert (printed.status, printed.err) == (0, "")
        pairs = json.loads(printed.out)["pairs"]
        assert [(pair["source"], pair["row"]) for pair in pairs] == [
            ("pairs", 3),
            ("pairs", 8),
            ("heldout", 3),
        ]


def test_show_refuses_bad_input_in_one_line_and_writes_nothing(recipe: Path, dpopack: Dpopack) -> None:
    before = sorted(recipe.parent.rglob("*"))
    page = ("--html", recipe.parent / "page.html")
    for arguments, pattern in {
        ("--pair", "17"): r"--pair 17: there is no such line; of pairs\.jsonl, lines 1 to 16 were read",
        ("--pair", "0"): r"--pair '0': not positive whole numbers",
        ("--pair", "x"): r"--pair 'x': not positive whole numbers",
        ("3",): r"'3': write it as key=value",
        ("data.train=absent.jsonl",): r"data\.train\.0\.path: no such file",
        ("data=null",): r"data",
    }.items():
        assert_refused(dpopack("show", recipe, *arguments, *page), pattern)
    assert sorted(recipe.parent.rglob("*")) == before
    (recipe.parent / "file").touch()
    for option in ("--json", "--html"):
        below_a_file = (option, recipe.parent / "file" / "out")
        assert_refused(dpopack("show", recipe, *below_a_file), r"cannot write .*file/out")


def test_show_prints_any_character_on_a_terminal_that_is_ascii(
    recipe: Path, dpopack: Dpopack, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write_rows(recipe.parent / "pairs.jsonl", [{"prompt": "ą 日", "chosen": " 👍", "rejected": " ö"}] * 2)
    with (tmp_path / "out").open("w", encoding="ascii") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        assert dpopack("show", recipe).status == 0
    text = (tmp_path / "out").read_text(encoding="ascii")
    assert "\\u0105" in text and "\\U0001f44d" in text


def test_recipe_prints_defaults_that_it_accepts(recipe: Path, dpopack: Dpopack) -> None:
    defaults = dpopack("recipe", "--defaults")
    assert (defaults.status, defaults.err) == (0, "")
    own = recipe.parent / "own.yaml"
    own.write_text(defaults.out)
    here = (f"data.train={recipe.parent}/pairs.jsonl", f"model.path={recipe.parent}/model")
    checked = dpopack("recipe", "--check", own, *here)
    assert (checked.status, checked.out.splitlines()[-1]) == (0, f"{own} is in order")
    assert_refused(dpopack("recipe", "--check", own, *here, "seed=-1"), r"seed: must be")
    elsewhere = (here[0], "model.path=./no")
    assert_refused(dpopack("recipe", "--check", own, *elsewhere), r"model\.path: no such directory")


def test_recipe_check_reads_what_a_run_would_read_first_and_writes_nothing(
    recipe: Path, dpopack: Dpopack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dpo_pack.run.models.load_model", lambda *rest, **options: 1 / 0)
    directory, before = recipe.parent, sorted(recipe.parent.rglob("*"))
    checked = dpopack("recipe", "--check", recipe)
    assert (checked.status, checked.err) == (0, "")
    assert checked.out.splitlines() == [
        f"output_dir: {directory / 'run'}, a run can use it",
        f"model.path: {directory / 'model'}, llama; its weights are there",
        "tokenizer: 384 tokens",
        f"data.train.0: {directory / 'pairs.jsonl'}, format preference, the first 16 rows have 16 pairs",
        "  columns: prompt, chosen, rejected",  # of both sources
        f"data.eval.0: {directory / 'heldout.jsonl'}, format preference, the first 6 rows have 6 pairs",
        f"{recipe} is in order",
    ]
    assert sorted(recipe.parent.rglob("*")) == before


def test_recipe_check_says_that_pairs_may_be_longer_than_the_model_reads(
    recipe: Path, dpopack: Dpopack
) -> None:
    _edit_json(recipe.parent / "model" / "config.json", max_position_embeddings=80)
    checked = dpopack("recipe", "--check", recipe, "data.max_length=99")
    assert "data.max_length is 99, but this model is exact for 80 positions only" in checked.out
    assert "set data.max_length: 80\n" in checked.out
    assert checked.out.endswith("is in order\n")


def test_recipe_check_refuses_pairs_that_are_longer_than_the_model_reads(
    recipe: Path, dpopack: Dpopack
) -> None:
    _with_few_positions(recipe.parent)
    long = recipe.parent / "long.jsonl"
    write_rows(long, [{"prompt": "a b c", "chosen": "d " * 16, "rejected": "e"}])
    checked = dpopack("recipe", "--check", recipe, f"data.train={long}", "data.max_length=99")
    assert checked.status == 2 and "in order" not in checked.out
    assert re.search(r"error: data\.max_length: the longest sequence has \d+ tokens", checked.err)


def test_recipe_check_has_a_line_for_each_thing_that_would_stop_the_run(
    recipe: Path, dpopack: Dpopack, tmp_path: Path
) -> None:
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


def test_recipe_check_reads_only_the_first_rows_of_a_long_file(recipe: Path, dpopack: Dpopack) -> None:
    row = (recipe.parent / "pairs.jsonl").read_text().splitlines()[0] + "\n"
    long = recipe.parent / "long.jsonl"
    long.write_text(row * 200 + "no JSON")
    checked = dpopack("recipe", "--check", recipe, f"data.train={long}")
    assert checked.status == 0 and "the first 100 rows have 100 pairs" in checked.out

    long.write_text(row * 50 + '{"prompt": "a question"}\n' + row * 200)
    checked = dpopack("recipe", "--check", recipe, f"data.train={long}")
    assert checked.status == 2 and "missing_column: 1 of the first 100 rows" in checked.err
    skipped = dpopack("recipe", "--check", recipe, f"data.train={long}", "data.on_bad_row=skip")
    assert "the first 100 rows have 99 pairs, left out: 1 missing_column\n" in skipped.out


def test_recipe_prints_the_schema(dpopack: Dpopack) -> None:
    outcome = dpopack("recipe", "--schema")
    assert outcome.status == 0
    assert {"model", "data", "output_dir"} <= set(json.loads(outcome.out)["required"])


def test_doctor_names_versions_devices_and_backends(dpopack: Dpopack) -> None:
    outcome = dpopack("doctor", "--json")
    assert (outcome.status, outcome.err) == (0, "")
    environment = json.loads(outcome.out)
    assert environment["versions"]["torch"] == importlib.metadata.version("torch")
    assert environment["devices"][0]["memory_bytes"] > 2**28
    assert set(environment["attention"]) == {"flash_attn", "torch_varlen", "flex", "sdpa"}
    assert environment["attention"][environment["auto"]] is None
    in_words = dpopack("doctor")
    assert in_words.status == 0 and "\x1b" not in in_words.out
    device = environment["devices"][0]["name"].split()  # a long name takes several lines of its column
    for told in (dpo_pack.__version__, *device, "torch_varlen", "auto picks it"):
        assert told in in_words.out


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("loss.type=simpo", r"loss\.type: this loss needs no reference"),
        ("reference.sync={mixup: 0.5}", r"reference\.sync: a reference that follows the policy"),
    ],
)
def test_precompute_ref_says_when_there_is_nothing_to_precompute(
    override: str, message: str, recipe: Path, dpopack: Dpopack
) -> None:
    assert_refused(dpopack("precompute-ref", recipe, override), message)


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


def test_report_refuses_what_is_no_run_in_one_line(trained: Path, dpopack: Dpopack) -> None:
    outcome = dpopack("report", trained.parent / "run", trained.parent, "--output", trained.parent / "x.html")
    assert outcome.status == 2
    assert outcome.err == (
        f"error: {trained.parent}: no run (no readable run.json); give the output_dir of a 'dpopack train'\n"
    )
    assert not (trained.parent / "x.html").exists()


def test_recipe_prints_what_can_be_begun_with(dpopack: Dpopack, tmp_path: Path) -> None:
    short, full = dpopack("recipe", "--defaults"), dpopack("recipe", "--defaults", "--all")
    assert (short.status, full.status) == (0, 0) and len(short.out) < 1200 < len(full.out) / 8
    names = dpopack("recipe", "--template", "list").out.split()
    for name in ("qwen3-0.6b-full-1gpu", "llama3.3-70b-full-4nodes"):
        assert name in names and f"output_dir: runs/{name}" in dpopack("recipe", "--template", name).out
    (tmp_path / "dpo.yaml").write_text("learning_rate: 3e-7\nmodel_name_or_path: a/b\ndataset_name: c/d\n")
    translated = dpopack("recipe", "--from", "trl", tmp_path / "dpo.yaml")
    assert translated.status == 0 and yaml.safe_load(translated.out)["optim"]["lr"] == 3e-7
    assert_refused(dpopack("recipe", "--all", "--schema"), "--all is an option of --defaults")
    assert_refused(dpopack("recipe", "--template", "x"), "no such template; .*qwen3-0.6b-full-1gpu")


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (
            "--config",
            r"no option --config: give the recipe without an option, as in dpopack train recipe\.yaml",
        ),
        ("--learning_rate", r"TRL's learning_rate is optim\.lr here; set keys after the recipe"),
        ("--per-device-train-batch-size", r"is packing\.pairs_per_step here"),
        ("--max_length", r"write data\.max_length=VALUE after the recipe"),
        ("--nonsense", r"No such option: --nonsense"),
    ],
)
def test_an_option_that_is_a_recipe_key_somewhere_is_answered_with_our_key(
    option: str, message: str, dpopack: Dpopack
) -> None:
    outcome = dpopack("train", "recipe.yaml", option, "1")
    assert outcome.status == 2 and re.search(message, outcome.err)


@pytest.mark.parametrize(
    ("words", "expected"),
    [("recipe --template qwen3-8", "qwen3-8b-lora-1gpu"), ("train recipe.yaml optim.l", "optim.lr=")],
)
def test_shells_complete_templates_and_recipe_keys(words: str, expected: str) -> None:
    environment = {"_DPOPACK_COMPLETE": "complete_bash", "COMP_WORDS": f"dpopack {words}", "COMP_CWORD": "3"}
    code = "import sys; sys.argv = ['dpopack']; from dpo_pack.commands.main import main; main()"
    ended = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert expected in ended.stdout.split(), ended
