"""A model's namespace changes with what changes its log-probs, and with nothing else."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.utils import filter_repo_objects  # type: ignore[attr-defined]
from safetensors.torch import load_file, save_file
from support.loading import facts_of
from support.tiny_models import tiny_config, tiny_model
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, dynamic_module_utils

from dpo_pack.model import fingerprint
from dpo_pack.model.facts import without_weights
from dpo_pack.model.fingerprint import files_fingerprint, weight_files
from dpo_pack.model.scorer import Precision
from dpo_pack.reference.cache import namespace_digest
from dpo_pack.system.errors import ModelError

FP32 = Precision(parameters=torch.float32, autocast=None)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    tiny_model("llama").save_pretrained(directory)
    return directory


def digest(directory: Path, *, precision: Precision = FP32, adapter: Path | None = None) -> str:
    namespace = facts_of(directory, precision=precision, adapter=adapter).namespace
    assert namespace == json.loads(json.dumps(namespace))  # it is written beside the values as JSON
    return namespace_digest(namespace)


def change_weights(directory: Path, **changes: Tensor) -> None:
    file = directory / "model.safetensors"
    save_file({**load_file(file), **changes}, file, metadata={"format": "pt"})


def change_config(directory: Path, **changes: Any) -> None:
    file = directory / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def test_a_changed_element_and_weights_that_changed_places_are_other_models(model: Path) -> None:
    digests = {digest(model)}
    names = [f"model.layers.{layer}.self_attn.k_proj.weight" for layer in (0, 1)]
    weights = [load_file(model / "model.safetensors")[name] for name in names]
    change_weights(model, **dict(zip(names, reversed(weights), strict=True)))
    digests.add(digest(model))
    weights[0][-1, -1] = torch.nextafter(weights[0][-1, -1], torch.tensor(0.0))
    change_weights(model, **dict(zip(names, weights, strict=True)))
    digests.add(digest(model))
    assert len(digests) == 3


def test_the_same_values_or_bytes_in_another_type_or_shape_are_another_model(model: Path) -> None:
    name = "model.norm.weight"
    digests = [digest(model)]
    ones = torch.ones(32, dtype=torch.bfloat16)
    for weight in (ones.float(), ones, ones.view(torch.float16), ones.view(4, 8)):
        change_weights(model, **{name: weight})
        digests.append(digest(model))
    assert len(set(digests)) == 5


def test_the_types_of_parameters_autocast_and_gathered_shards_are_part_of_the_namespace(model: Path) -> None:
    precisions = [
        Precision(parameters=parameters, autocast=autocast)
        for parameters in (torch.float32, torch.bfloat16)
        for autocast in (None, torch.bfloat16, torch.float16)
    ]
    precisions.append(Precision(parameters=torch.float32, autocast=None, gathered=torch.bfloat16))
    assert len({digest(model, precision=precision) for precision in precisions}) == 7
    assert "gathered" not in facts_of(model, precision=precisions[0]).namespace  # as before it was there


@pytest.mark.parametrize(
    ("change", "counts"),
    [
        ({"rms_norm_eps": 1e-5}, True),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}, True),
        ({"a_field_of_the_future": True}, True),
        ({"attention_dropout": 0.1, "use_cache": False, "pad_token_id": 3, "dtype": "float16"}, False),
        ({"transformers_version": "4.0.0", "architectures": ["B"], "_name_or_path": "elsewhere"}, False),
    ],
    ids=lambda change: next(iter(change)) if isinstance(change, dict) else "",
)
def test_config_that_may_change_outputs_counts(change: dict[str, Any], counts: bool, model: Path) -> None:
    before = digest(model)
    change_config(model, **change)
    assert (digest(model) != before) == counts


def mend_upstream(module_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules[module_name]
    assert module.__file__ is not None
    changed = tmp_path / Path(module.__file__).name
    changed.write_bytes(Path(module.__file__).read_bytes() + b"# a fix upstream\n")
    monkeypatch.setattr(module, "__file__", str(changed))


def test_the_modelling_source_is_part_of_the_namespace_wherever_it_lies(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, name = digest(model), "transformers.models.llama.modeling_llama"
    copied = shutil.copy(str(sys.modules[name].__file__), tmp_path)
    monkeypatch.setattr(sys.modules[name], "__file__", copied)
    assert digest(model) == before
    mend_upstream(name, tmp_path, monkeypatch)
    assert digest(model) != before


PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
YARN = PLAIN | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


@pytest.mark.parametrize(
    ("family", "rope", "module", "counts"),
    [
        ("llama", None, "activations", True),  # a part of the model
        ("llama", None, "masking_utils", True),
        ("llama", None, "integrations.hub_kernels", True),  # norms and rotary functions may be exchanged
        ("llama", None, "integrations.sdpa_attention", True),  # the attention of padded rows
        ("llama", None, "integrations.moe", False),
        ("mixtral", None, "integrations.moe", True),
        ("gpt2", None, "modeling_rope_utils", False),
        ("llama", PLAIN, "modeling_rope_utils", False),
        ("llama", YARN, "modeling_rope_utils", True),
        ("gemma3_text", {"full_attention": YARN, "sliding_attention": PLAIN}, "modeling_rope_utils", True),
        ("gemma3_text", {"full_attention": PLAIN, "sliding_attention": PLAIN}, "modeling_rope_utils", False),
    ],
)
def test_modules_of_transformers_count_where_the_model_calls_them(
    family: str,
    rope: dict[str, Any] | None,
    module: str,
    counts: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    built = without_weights(tiny_config(family, **({} if rope is None else {"rope_parameters": rope})))
    before = fingerprint.modelling_source(built)
    mend_upstream(f"transformers.{module}", tmp_path, monkeypatch)
    assert (fingerprint.modelling_source(built) != before) == counts


REMOTE = {
    "modeling_own.py": """
from transformers import LlamaForCausalLM
from .layers import scaled
from .configuration_own import OwnConfig
class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
    def forward(self, *arguments, **options):
        from .late import unchanged
        return unchanged(scaled(super().forward(*arguments, **options)))
""",
    "configuration_own.py": """
from transformers import LlamaConfig
class OwnConfig(LlamaConfig):
    model_type = "own"
""",
    "layers.py": "from .numbers_of_layers import SCALE\ndef scaled(x): return SCALE * x\n",
    "numbers_of_layers.py": "SCALE = 1\n",
    "late.py": "def unchanged(x): return x\n",
    "tokenization_own.py": "# not imported by the model\n",
}


def forget_remote_code() -> None:
    for name in [name for name in sys.modules if name.startswith("transformers_modules")]:
        del sys.modules[name]
    AutoModelForCausalLM._model_mapping._extra_content.clear()


@pytest.fixture
def remote(model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A model whose code, in several files, comes with it."""
    modules = str(model.parent / "modules")
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", modules)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name, code in REMOTE.items():
        (model / name).write_text(code)
    classes = {
        "AutoConfig": "configuration_own.OwnConfig",
        "AutoModelForCausalLM": "modeling_own.OwnForCausalLM",
    }
    change_config(model, model_type="own", auto_map=classes)
    yield model
    forget_remote_code()


def remote_source(directory: Path) -> str:
    """The hash of a model's code, as another process computes it."""
    forget_remote_code()
    config = AutoConfig.from_pretrained(directory, trust_remote_code=True)
    return fingerprint.modelling_source(without_weights(config, trust_remote_code=True))


@pytest.mark.parametrize("name", REMOTE)
def test_every_file_that_remote_code_imports_is_part_of_the_namespace(name: str, remote: Path) -> None:
    before = remote_source(remote)
    assert remote_source(remote) == before
    (remote / name).write_text(REMOTE[name] + "# a fix upstream\n")
    assert (remote_source(remote) != before) == (name != "tokenization_own.py")


def test_remote_code_is_the_same_elsewhere_and_beside_other_files(remote: Path, tmp_path: Path) -> None:
    before = remote_source(remote)
    (package,) = {file.parent for file in tmp_path.glob("modules/**/numbers_of_layers.py")}
    (package / "tokenization_own.py").write_text("# transformers has loaded the tokenizer since\n")
    assert remote_source(remote) == before
    assert remote_source(remote.rename(tmp_path / "renamed")) == before


def test_code_of_another_family_that_remote_code_imports_counts(
    remote: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = remote / "modeling_own.py"
    file.write_text(f"from transformers.models.gemma.modeling_gemma import GemmaRMSNorm\n{file.read_text()}")
    before = remote_source(remote)
    mend_upstream("transformers.models.gemma.modeling_gemma", tmp_path, monkeypatch)
    assert remote_source(remote) != before


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    directory = tmp_path / "adapter"
    directory.mkdir()
    weights = {"lora_A": torch.ones(2, 3), "lora_B": torch.zeros(3, 2)}
    save_file(weights, directory / "adapter_model.safetensors")
    config = {"r": 2, "lora_alpha": 4, "lora_dropout": 0.1, "base_model_name_or_path": "somewhere"}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


def test_an_adapter_counts_in_the_namespace_by_content(model: Path, adapter: Path, tmp_path: Path) -> None:
    without, before = digest(model), digest(model, adapter=adapter)
    assert without != before
    config = json.loads((adapter / "adapter_config.json").read_text())
    change = {"base_model_name_or_path": "elsewhere"}
    (adapter / "adapter_config.json").write_text(json.dumps(config | change))
    renamed = adapter.rename(tmp_path / "renamed")
    assert digest(model, adapter=renamed) == before
    (renamed / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": 8}))
    assert digest(model, adapter=renamed) != before
    (renamed / "adapter_config.json").write_text(json.dumps(config))
    weights = load_file(renamed / "adapter_model.safetensors")
    weights["lora_B"][0, 0] = 1e-30
    save_file(weights, renamed / "adapter_model.safetensors")
    assert digest(model, adapter=renamed) not in (without, before)
    (renamed / "adapter_model.safetensors").unlink()
    with pytest.raises(ModelError, match="is not a PEFT adapter"):
        digest(model, adapter=renamed)


def test_a_renamed_touched_or_resharded_directory_is_the_same_model(model: Path, tmp_path: Path) -> None:
    before = digest(model)
    renamed = model.rename(tmp_path / "renamed")
    for file in renamed.iterdir():
        os.utime(file, (0, 0))
    (renamed / "README.md").write_text("new")
    assert digest(renamed) == before
    tiny_model("llama").save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    assert len(list((tmp_path / "sharded").glob("model-*.safetensors"))) > 2
    assert digest(tmp_path / "sharded") == before
    # transformers removes the old shards, not their index, and loads model.safetensors.
    tiny_model("llama").save_pretrained(tmp_path / "sharded")
    assert (tmp_path / "sharded" / "model.safetensors.index.json").is_file()
    assert digest(tmp_path / "sharded") == before


def test_weights_of_torch_s_own_format_count_too(model: Path, tmp_path: Path) -> None:
    weights = load_file(model / "model.safetensors")
    by_file = files_fingerprint(weight_files(model), tmp_path / "model_hashes.json")
    for is_zip in (True, False):  # False: as torch before 1.6 wrote them
        directory = tmp_path / f"zip {is_zip}"
        directory.mkdir()
        file = directory / "pytorch_model.bin"
        torch.save(weights, file, _use_new_zipfile_serialization=is_zip)
        assert files_fingerprint(weight_files(directory), tmp_path / "model_hashes.json") == by_file


@pytest.mark.parametrize(
    ("weights", "num_asked"),
    [
        (["model-00001-of-00001.safetensors", "model.safetensors.index.json"], 2),
        (["pytorch_model-00001-of-00001.bin", "pytorch_model.bin.index.json"], 2),
        (["model.safetensors", "pytorch_model.bin"], 1),
    ],
)
def test_of_a_repository_only_the_weights_that_are_loaded_are_asked_for(
    weights: list[str], num_asked: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What else is there need not be: a cluster without a network has what `from_pretrained` fetched."""
    others = ["original/model.safetensors", "consolidated.safetensors", "config.json", "training_args.bin"]
    asked: list[str] = []

    def snapshot(path: str, *, revision: None, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        for name in filter_repo_objects(
            [*weights, *others], allow_patterns=allow_patterns, ignore_patterns=ignore_patterns
        ):
            asked.append(name)
            is_index = name.endswith(".index.json")
            (tmp_path / name).write_text(json.dumps({"weight_map": {"a": weights[0]}}) if is_index else "")
        return str(tmp_path)

    monkeypatch.setattr(fingerprint, "snapshot_download", snapshot)
    assert weight_files("org/model") == [tmp_path / weights[0]]
    assert asked == weights[:num_asked]


def test_a_model_that_was_hashed_is_not_hashed_again(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[tuple[int, ...]] = []
    tensor_digest = fingerprint.tensor_digest

    def spy(tensor: Tensor) -> str:
        hashed.append(tuple(tensor.shape))
        return tensor_digest(tensor)

    monkeypatch.setattr(fingerprint, "tensor_digest", spy)
    before = digest(model)
    num_tensors = len(load_file(model / "model.safetensors"))
    assert len(hashed) == num_tensors
    assert digest(model) == before and len(hashed) == num_tensors
    # Other content in the same file, of the same size and with the time of before, is seen all the same.
    file = model / "model.safetensors"
    stat, content = file.stat(), bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert digest(model) != before and len(hashed) == 2 * num_tensors


def refusal(directory: Path) -> str:
    with pytest.raises(ModelError) as caught:
        files_fingerprint(weight_files(directory), directory.parent / "model_hashes.json")
    return str(caught.value)


def test_weights_that_are_absent_incomplete_or_damaged_are_one_line(model: Path, tmp_path: Path) -> None:
    content = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(content[: len(content) // 2])
    assert f"{model}/model.safetensors" in refusal(model)
    (model / "model.safetensors").unlink()
    assert "no weights" in refusal(model)
    (model / "pytorch_model.bin").write_bytes(b"not a model")
    assert f"{model}/pytorch_model.bin" in refusal(model)
    sharded = tmp_path / "sharded"
    tiny_model("llama").save_pretrained(sharded, max_shard_size="20KB")
    next(sharded.glob("model-00002-*")).unlink()
    assert f"{sharded}/model-00002-of-" in refusal(sharded)
    assert not (tmp_path / "model_hashes.json").exists()
