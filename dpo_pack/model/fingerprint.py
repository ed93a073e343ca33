"""Identifies a model by its content: the result, a *namespace*, is the key of its log-probs in the cache.

Names of directories and the division of the weights into files do not matter; one other element of a tensor
makes another model.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import re
import zipfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import get_safetensors_metadata, snapshot_download, try_to_load_from_cache
from safetensors import safe_open
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.dynamic_module_utils import get_relative_import_files

from dpo_pack.model.config import rotary_kinds
from dpo_pack.model.loading import load_errors
from dpo_pack.recipe.load import is_adapter
from dpo_pack.system.errors import ModelError, first_line
from dpo_pack.system.files import add_to_json, read_json

# We add 1 when a change of our code changes log-probs, so that log-probs in caches are not used any more.
NUMERICS_VERSION = 1

# Config fields that no log-prob depends on. Every other field, known to us or not, is part of a namespace.
_IRRELEVANT_CONFIG = (
    *("_name_or_path", "architectures", "bos_token_id", "dtype", "eos_token_id", "id2label"),
    *("initializer_range", "label2id", "output_attentions", "output_hidden_states", "pad_token_id"),
    *("problem_type", "return_dict", "tokenizer_class", "torch_dtype", "transformers_version", "use_cache"),
)
# Fields of a PEFT adapter's config about the adapter's origin and training, not about its computation.
_IRRELEVANT_ADAPTER_CONFIG = (
    *("auto_mapping", "base_model_name_or_path", "inference_mode", "lora_dropout", "peft_version"),
    "revision",
)
# Lists that peft writes from sets, so that their order differs from process to process.
_UNORDERED_ADAPTER_CONFIG = ("exclude_modules", "modules_to_save", "target_modules")
# Stem and suffix of weight files, in the order in which transformers looks for them.
_WEIGHTS = (("model", "safetensors"), ("pytorch_model", "bin"))

_Memo = dict[str, dict[str, str]]  # path, inode, size and ctime of a file -> name of a tensor -> its sha256


def meta_tensors(path: str, revision: str | None, recipe_key: str) -> dict[str, Tensor] | str:
    """Returns a checkpoint's tensors on the meta device, from the headers of its files, or why there are none
    to read. Of a hub id not in the cache only the headers are downloaded. Raises ModelError."""
    directory = Path(path)
    for name in () if directory.is_dir() else ("model.safetensors", "model.safetensors.index.json"):
        cached = try_to_load_from_cache(path, name, revision=revision)
        directory = Path(cached).parent if isinstance(cached, str) else directory
    if directory.is_dir():
        with load_errors(path, recipe_key):
            files = weight_files(directory)
            return {name: tensor for file in files for name, tensor in _tensors(file, "meta")}
    try:
        parts = get_safetensors_metadata(path, revision=revision).files_metadata.values()
    except Exception as error:  # the class of the error depends on the client's HTTP library
        return first_line(error)
    shapes = {name: tensor.shape for part in parts for name, tensor in part.tensors.items()}
    return {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}


def _tensors(file: Path, device: str) -> Iterator[tuple[str, Tensor]]:
    """Yields a weight file's tensors by name. On the meta device, no values are read."""
    if file.suffix == ".safetensors":
        with safe_open(file, framework="pt") as opened:
            yield from ((name, opened.get_tensor(name).to(device)) for name in opened.keys())  # noqa: SIM118
    else:
        mapped = zipfile.is_zipfile(file)  # files of torch before 1.6 cannot be memory-mapped
        yield from torch.load(file, map_location=device, mmap=mapped, weights_only=True).items()


def adapter_fingerprint(directory: Path, memo_path: Path) -> str:
    """Returns the sha256 over an adapter's tensors and config. Raises ModelError if one is missing."""
    files = (directory / f"adapter_model.{suffix}" for suffix in ("safetensors", "bin"))
    present = [file for file in files if file.is_file()]
    config = read_json(directory / "adapter_config.json")
    if not present or config is None:
        raise ModelError(
            f"{directory} is not a PEFT adapter: it needs adapter_config.json and adapter_model.safetensors "
            "or .bin; save the adapter again"
        )
    relevant = {
        key: sorted(value, key=str) if key in _UNORDERED_ADAPTER_CONFIG and isinstance(value, list) else value
        for key, value in config.items()
        if key not in _IRRELEVANT_ADAPTER_CONFIG
    }
    return _digest([files_fingerprint(present[:1], memo_path), relevant])


def weights_fingerprint(path: str, revision: str | None, memo_path: Path) -> str:
    """Returns the fingerprint of the weights of a hub id, a model's directory or an adapter's. The file
    `memo_path` keeps hashes of tensors, so that unchanged files are not read again. Raises ModelError."""
    if is_adapter(path):
        return adapter_fingerprint(Path(path), memo_path)
    return files_fingerprint(weight_files(path, revision), memo_path)


def files_fingerprint(files: Sequence[Path], memo_path: Path) -> str:
    """Returns the sha256 over (name, dtype, shape, bytes) of every tensor in files, in order of name."""
    memo = read_json(memo_path, _Memo) or {}
    digests: dict[str, str] = {}
    learnt = {}
    for file in files:
        stat = file.stat()
        # Every change of content changes ctime, also if a tool sets mtime back (cp -p, rsync -t).
        identity = f"{file.resolve()}:{stat.st_ino}:{stat.st_size}:{stat.st_ctime_ns}"
        if identity not in memo:
            try:
                learnt[identity] = {name: tensor_digest(tensor) for name, tensor in _tensors(file, "cpu")}
            except Exception as error:  # torch.load raises any class if a file is damaged or has no tensors
                raise ModelError(
                    f"cannot read the weights in {file} ({first_line(error)}); download the model again, or "
                    "save it as safetensors"
                ) from error
        digests.update(memo.get(identity) or learnt[identity])
    if learnt:
        add_to_json(memo_path, _Memo, learnt)
    return _digest(sorted(digests.items()))


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def weight_files(path: str | Path, revision: str | None = None) -> list[Path]:
    """Returns the weight files of a model's directory, or of a hub id in the local cache; if possible
    safetensors. Raises ModelError if there are none, and none can be downloaded."""
    directory, is_local = Path(path), Path(path).is_dir()
    for stem, suffix in _WEIGHTS:
        named = f"{stem}.{suffix}"
        if not is_local:  # many repositories have both formats; we need one
            wanted, others = [named, f"{stem}-*.{suffix}", f"{named}.index.json"], ["*/*"]
            with load_errors(str(path), "model"):
                found = snapshot_download(
                    str(path), revision=revision, allow_patterns=wanted, ignore_patterns=others
                )
            directory = Path(found)
        # As transformers does, we prefer one whole file: an index of shards can be from an older save.
        if (directory / named).is_file():
            return [directory / named]
        index_file = directory / f"{named}.index.json"
        if not index_file.is_file():
            continue
        of_tensors = (read_json(index_file) or {}).get("weight_map")
        names = map(str, of_tensors.values()) if isinstance(of_tensors, dict) else ()
        parts = [directory / name for name in sorted(set(names))]
        missing = next((part for part in parts if not part.is_file()), None if parts else index_file)
        if missing is not None:
            raise ModelError(f"{missing}, a part of the weights, cannot be read; download the model again")
        return parts
    raise ModelError(
        f"{directory} has no weights: neither model.safetensors nor pytorch_model.bin, whole or sharded; "
        "give a complete model directory"
    )


def stored_dtype(path: str, revision: str | None) -> torch.dtype:
    """Returns the type of most of a model's weights, from the headers of their files."""
    sizes: Counter[torch.dtype] = Counter()
    for file in weight_files(path, revision):
        for _, tensor in _tensors(file, "meta"):
            sizes[tensor.dtype] += tensor.numel()
    # float32 if it is none of the types in which a model can be exported
    return max((torch.float32, torch.bfloat16, torch.float16), key=lambda dtype: sizes[dtype])


def tensor_digest(tensor: Tensor) -> str:
    digest = hashlib.sha256(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    digest.update(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def relevant_config(config: PretrainedConfig | dict[Any, Any], *, whole: bool = False) -> dict[Any, Any]:
    """Returns the fields of a config on which log-probs depend; without dropout, which is off in training.
    `whole`: with those of the towers."""
    if not isinstance(config, dict):
        config = (config if whole else config.get_text_config()).to_dict()
    return {
        key: relevant_config(value, whole=True) if whole and isinstance(value, dict) else value
        for key, value in config.items()
        if not (key in _IRRELEVANT_CONFIG or str(key).startswith("_attn") or "dropout" in str(key))
    }


def modelling_source(model: PreTrainedModel) -> str:
    """Returns the sha256 over names and contents of the source files that compute the model's outputs: those
    of its classes, what remote code imports from its own package, and of transformers the masks, the
    integrations and other models' functions that the model calls."""
    names = {type(part).__module__ for part in model.modules()}
    # Models use these without an import of their own, the last one only to scale rotary frequencies.
    names |= {"transformers.masking_utils", "transformers.integrations.sdpa_attention"}
    if any(kind.get("rope_type", "default") != "default" for kind in rotary_kinds(model.config)):
        names.add("transformers.modeling_rope_utils")
    modules = [importlib.import_module(name) for name in names if name.partition(".")[0] != "torch"]
    called = {str(getattr(value, "__module__", "")) for module in modules for value in vars(module).values()}
    ours = re.compile(r"transformers\.(integrations\.|models\..*\.modeling_).*")
    modules += [importlib.import_module(name) for name in called if ours.fullmatch(name)]
    files = {Path(module.__file__) for module in modules if module.__file__}
    for module in modules:
        # Not all files of the directory: transformers copies remote code there beside files of other use.
        if module.__name__.startswith("transformers_modules."):
            files |= {Path(file) for file in get_relative_import_files(str(module.__file__))}
    # Names of directories do not count, because remote code lies in directories named after the model.
    return _digest(sorted((file.name, hashlib.sha256(file.read_bytes()).hexdigest()) for file in files))
