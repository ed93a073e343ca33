"""What a model is, by content: the namespace of its cached log-probs.

Two directories with the same weights are the same model, whatever their names and however the weights are
split over files; one changed element makes another.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import pickle
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig

from dpo_pack.errors import CacheError, ModelError
from dpo_pack.files import read_json, write_json_atomically
from dpo_pack.loading import load_errors
from dpo_pack.models import Precision

# Raised whenever a fix of ours changes the log-probs computed for the same model and tokens.
NUMERICS_VERSION = 1

# Config fields that no log-prob depends on; every other field, known to us or not, is part of a namespace.
_IRRELEVANT_CONFIG = frozenset(
    {
        "_name_or_path",
        "architectures",
        "bos_token_id",
        "dtype",
        "eos_token_id",
        "id2label",
        "initializer_range",
        "label2id",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "problem_type",
        "return_dict",
        "tokenizer_class",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)
# Fields of a PEFT adapter's config that say where it comes from and how it was trained, not what it does.
_IRRELEVANT_ADAPTER_CONFIG = frozenset(
    {"auto_mapping", "base_model_name_or_path", "inference_mode", "lora_dropout", "peft_version", "revision"}
)
# Fields of it that peft writes from sets, in the order of hashes, which every process has its own of.
_UNORDERED_ADAPTER_CONFIG = frozenset({"exclude_modules", "modules_to_save", "target_modules"})
# Stem and suffix of weights, in the order in which transformers looks for them.
_WEIGHTS = (("model", "safetensors"), ("pytorch_model", "bin"))
# Functions of transformers' that models call beside their own: padded rows' masks, scaled rotary frequencies.
_MASKS, _ROTARY = "transformers.masking_utils", "transformers.modeling_rope_utils"


def reference_namespace(
    path: str,
    config: PretrainedConfig,
    *,
    revision: str | None,
    trust_remote_code: bool,
    precision: Precision,
    memo_path: Path,
    adapter: Path | None = None,
) -> dict[str, Any]:
    """Everything a reference log-prob depends on besides the token ids, as a JSON object.

    `memo_path` remembers tensor hashes by file, so that an unchanged model is not read again. `adapter` is
    the directory of a PEFT adapter that is part of the reference; a model without one has the namespace it
    always had. Raises ModelError when there are no weights, or not all of them, or they cannot be read.
    """
    namespace = {
        "numerics_version": NUMERICS_VERSION,
        "weights": weights_fingerprint(model_directory(path, revision), memo_path),
        "config": _relevant_config(config),
        "parameters": str(precision.parameters).removeprefix("torch."),
        "autocast": None if precision.autocast is None else str(precision.autocast).removeprefix("torch."),
        "modelling_source": _modelling_source(config, trust_remote_code),
    }
    if precision.gathered is not None:  # an entry of shards in another dtype only: other namespaces stay
        namespace["gathered"] = str(precision.gathered).removeprefix("torch.")
    if adapter is not None:
        namespace["adapter"] = adapter_fingerprint(adapter, memo_path)
    return namespace


def model_directory(path: str, revision: str | None) -> Path:
    """A local model directory: `path` itself, or the hub's snapshot of it in the local cache.

    Raises ModelError where the snapshot lacks weights and cannot be completed.
    """
    directory = Path(path)
    if directory.is_dir():
        return directory
    for stem, suffix in _WEIGHTS:  # repositories often have the weights in several kinds of files
        wanted = [f"{stem}.{suffix}", f"{stem}-*.{suffix}", f"{stem}.{suffix}.index.json"]
        with load_errors(path, "model"):
            found = snapshot_download(path, revision=revision, allow_patterns=wanted, ignore_patterns=["*/*"])
        directory = Path(found)
        if any(directory.glob(f"{stem}*.{suffix}")):
            break
    return directory


def weights_fingerprint(directory: Path, memo_path: Path) -> str:
    """sha256 over (name, dtype, shape, bytes) of every tensor, in order of name."""
    return _files_fingerprint(weight_files(directory), memo_path)


def adapter_fingerprint(directory: Path, memo_path: Path) -> str:
    """sha256 over a PEFT adapter's tensors and what its config says of them. Raises ModelError."""
    files = [directory / f"adapter_model.{suffix}" for suffix in ("safetensors", "bin")]
    present = [file for file in files if file.is_file()]
    config = read_json(directory / "adapter_config.json")
    if not present or config is None:
        raise ModelError(
            f"{directory} is no PEFT adapter: it needs adapter_config.json and adapter_model.safetensors or "
            ".bin; save the adapter again"
        )
    relevant = {
        key: sorted(value) if key in _UNORDERED_ADAPTER_CONFIG and isinstance(value, list) else value
        for key, value in config.items()
        if key not in _IRRELEVANT_ADAPTER_CONFIG
    }
    content = [_files_fingerprint(present[:1], memo_path), relevant]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _files_fingerprint(files: Sequence[Path], memo_path: Path) -> str:
    memo = read_json(memo_path) or {}
    digests: dict[str, str] = {}
    learnt = {}
    for file in files:
        stat = file.stat()
        # ctime moves with every change of content, also where mtime was set back (cp -p, rsync -t).
        identity = f"{file.resolve()}:{stat.st_ino}:{stat.st_size}:{stat.st_ctime_ns}"
        if identity not in memo:
            learnt[identity] = _tensor_digests(file)
        digests.update(memo.get(identity) or learnt[identity])
    if learnt:
        with contextlib.suppress(CacheError):  # a cache that may only be read serves as well
            write_json_atomically(memo_path, {**(read_json(memo_path) or {}), **learnt})
    return hashlib.sha256(json.dumps(sorted(digests.items())).encode()).hexdigest()


def weight_files(directory: Path) -> list[Path]:
    """The files of a model's weights, safetensors before PyTorch's own. Raises ModelError without any."""
    for stem, suffix in _WEIGHTS:
        whole = directory / f"{stem}.{suffix}"
        # As transformers does, whole before sharded: saving a model anew can leave an index of before.
        if whole.is_file():
            return [whole]
        index = read_json(directory / f"{stem}.{suffix}.index.json")
        if index is not None:
            shards = [directory / name for name in sorted(set(index["weight_map"].values()))]
            for shard in shards:
                if not shard.is_file():
                    raise ModelError(f"{shard} is missing, a part of the weights; download the model again")
            return shards
    raise ModelError(
        f"{directory} has no weights: neither model.safetensors nor pytorch_model.bin, whole or sharded; "
        "point at a complete model directory"
    )


def _tensors(file: Path) -> Iterator[tuple[str, Tensor]]:
    if file.suffix == ".safetensors":
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (safe_open is no mapping)
                yield name, opened.get_tensor(name)
    else:
        # Files of torch before 1.6 are no zip archives, and those cannot be mapped.
        mapped = zipfile.is_zipfile(file)
        yield from torch.load(file, map_location="cpu", mmap=mapped, weights_only=True).items()


def _tensor_digests(file: Path) -> dict[str, str]:
    try:
        return {name: _tensor_digest(tensor) for name, tensor in _tensors(file)}
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError, SafetensorError) as error:
        reason = str(error).partition("\n")[0]
        raise ModelError(
            f"cannot read the weights in {file} ({reason}); download or save the model again"
        ) from error


def _tensor_digest(tensor: Tensor) -> str:
    digest = hashlib.sha256(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _relevant_config(config: PretrainedConfig) -> dict[str, Any]:
    values = config.get_text_config().to_dict()
    return {
        key: value
        for key, value in values.items()
        if key not in _IRRELEVANT_CONFIG and not key.startswith("_attn") and "dropout" not in key
    }


def _modelling_source(config: PretrainedConfig, trust_remote_code: bool) -> str:
    """sha256 over the files that define the classes of the model's parts, remote code included, and masks.

    The model is built without memory for weights. torch's own classes are left out: its versions differ by
    rounding only. Masks count for packed rows, which have none, as well: both modes share their log-probs.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    modules = {_MASKS, *(type(part).__module__ for part in model.modules())}
    if _scales_rotary(config):
        modules.add(_ROTARY)
    parts = [importlib.import_module(name) for name in modules if name.partition(".")[0] != "torch"]
    files = [part.__file__ for part in parts]
    # By content: where a file is, and so the name of a remote module, does not matter.
    digests = sorted(
        hashlib.sha256(Path(file).read_bytes()).hexdigest() for file in files if file is not None
    )
    return hashlib.sha256(json.dumps(digests).encode()).hexdigest()


def _scales_rotary(config: PretrainedConfig) -> bool:
    """Whether a layer's rotary frequencies are not the plain ones, which the model's own file computes."""
    rope = config.get_text_config().to_dict().get("rope_parameters") or {}
    kinds = (rope, *(part for part in rope.values() if isinstance(part, dict)))  # Gemma 3: by layer type
    return any(kind.get("rope_type", "default") != "default" for kind in kinds)
