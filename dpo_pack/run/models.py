"""The models of a recipe: finds the facts of each model, loads a model and proves that its rows are exact.

Also chooses how the ranks hold the model: each rank a copy (ddp) or a shard (fsdp2).
"""

from __future__ import annotations

import functools
import gc
import hashlib
import importlib.util
import os
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from accelerate import Accelerator
from rich.console import Console
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import PretrainedConfig, PreTrainedTokenizerBase

import dpo_pack
from dpo_pack.data.images import ImageProcessor
from dpo_pack.data.sources import Data
from dpo_pack.data.store import PairTable
from dpo_pack.losses.preference import Objective
from dpo_pack.model.building import load_model
from dpo_pack.model.config import check_packs, routes_tokens
from dpo_pack.model.facts import ModelFacts
from dpo_pack.model.fast_layers import compiler_obstacle
from dpo_pack.model.fingerprint import meta_tensors, weight_files
from dpo_pack.model.loading import load_config, load_processor
from dpo_pack.model.lora import read_adapter, require_peft
from dpo_pack.model.parallel import ALONE, Strategy
from dpo_pack.model.scorer import LoadedModel, resolve_precision
from dpo_pack.model.vision import vision_family
from dpo_pack.proofs import Proof, ProofOutcome
from dpo_pack.proofs.layers import take_kernels
from dpo_pack.proofs.start_up import compiling_obstacle, prove
from dpo_pack.recipe.load import Recipe, is_adapter
from dpo_pack.recipe.schema import why_not_sharded
from dpo_pack.reference.cache import default_cache_directory, namespace_digest
from dpo_pack.system import ranks
from dpo_pack.system.console import format_count
from dpo_pack.system.errors import ModelError, RecipeError
from dpo_pack.system.files import add_to_json, read_json
from dpo_pack.system.machine import AvailableMemory, cpu_name, host_memory, install_command, package_versions
from dpo_pack.system.process import is_set

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A recipe with all that is known before the weights of a model are loaded. `prepare` creates it."""

    recipe: Recipe
    console: Console
    objective: Objective
    accelerator: Accelerator
    device: torch.device
    policy_facts: ModelFacts  # facts of the starting policy
    reference_facts: ModelFacts  # the same object as `policy_facts`, unless the recipe names another model
    tokenizer: PreTrainedTokenizerBase
    data: Data
    strategy: Strategy
    token_budget: int = 0  # the most tokens of a row in training; `prepare` decides it, and the next one
    reference_token_budget: int = 0  # the most tokens of a row without gradients

    @property
    def tables(self) -> list[PairTable]:
        """The training pairs, then those of each held-out set."""
        return [self.data.train, *self.data.eval.values()]


def resolve_model(
    recipe: Recipe,
    device: torch.device,
    path: str | None = None,
    *,
    recipe_key: str = "model.path",
    gathers: bool = True,
) -> ModelFacts:
    """Returns the facts of a model; without a `path`, of the starting policy. Only that has the revision, the
    new adapter, the load-balancing loss and the processor of the recipe. `gathers` is false for a command
    without shards, to which `distributed.gather_dtype` means nothing. Raises ModelError."""
    settings, adapter, is_policy = recipe.model, None, recipe_key == "model.path"
    path = path or settings.path
    revision, lora = (settings.revision, settings.lora) if is_policy else (None, None)
    if is_adapter(path):
        saved = read_adapter(Path(path), recipe_key)
        recipe_key = f"{recipe_key} (the base of {path})"
        path, revision, adapter = saved.base, saved.base_revision, saved.directory
    quantize = None if adapter is None and lora is None else settings.quantize
    own = {"path": path, "revision": revision, "lora": lora, "quantize": quantize}
    files: dict[str, Any] = {"revision": revision, "trust_remote_code": settings.trust_remote_code}
    files["recipe_key"] = recipe_key
    processor = ImageProcessor(load_processor(path, **files)) if settings.images and is_policy else None
    return ModelFacts(
        settings=settings.model_copy(update=own),
        recipe_key=recipe_key,
        adapter=adapter,
        config=load_config(path, **files),
        precision=resolve_precision(
            settings.dtype,
            settings.autocast,
            device,
            gather_dtype=recipe.distributed.gather_dtype if gathers else None,
            trains_adapter=settings.lora is not None or adapter is not None,
        ),
        is_packed=recipe.packing.mode == "packed",
        cache_dir=recipe.reference.cache_dir or default_cache_directory(),
        router_aux_coef=recipe.loss.router_aux_coef if is_policy else 0.0,
        processor=processor,
        keeps_squares=recipe.loss.weighting == "wpo",
        seed=recipe.seed,
    )


def check_model(model: ModelFacts, device: torch.device, *, is_trained: bool = False) -> None:
    """Raises ModelError or RecipeError if this machine cannot load, run or (`is_trained`) train the model."""
    if model.adapter is not None:
        require_peft(model.recipe_key)
    if Path(model.settings.path).is_dir():
        try:
            weight_files(Path(model.settings.path))
        except ModelError as error:
            raise ModelError(f"{model.recipe_key}: {error}") from error
    if model.quantization is not None:
        _check_quantised(model, is_trained=is_trained)
    if is_trained and model.router_aux_coef:
        model.balance  # noqa: B018  # raises if the model has no such loss
    if model.settings.compile is True and (obstacle := compiler_obstacle(device)):
        raise RecipeError(f"model.compile: {obstacle}; install what is missing, or set model.compile: false")
    if model.is_packed:
        check_packs(model.config)
    if model.processor is not None:
        vision_family(model.config)


def _check_quantised(model: ModelFacts, *, is_trained: bool) -> None:
    settings = model.settings
    what = check_quantised_files(model.config, settings.path, settings.revision, model.recipe_key)
    if what and settings.quantize is not None:
        raise ModelError(f"{what} already; leave model.quantize out, or use the unquantised model")
    if what and is_trained and model.adapter is None and settings.lora is None:
        raise ModelError(f"{what}, and quantised weights cannot be trained; set model.lora")
    if settings.quantize is not None and routes_tokens(model.config):
        raise ModelError(
            "model.quantize: bitsandbytes quantises linear layers, and most weights of "
            f"{model.config.model_type} are in experts; leave model.quantize out"
        )
    if settings.compile is True:
        raise ModelError("model.compile: layers with quantised weights are not compiled; leave the key out")


def check_quantised_files(config: PretrainedConfig, path: str, revision: str | None, recipe_key: str) -> str:
    """Returns the beginning of a message if the weights are quantised, else "". Raises ModelError."""
    stored = config.to_dict().get("quantization_config")
    if stored is None:
        return ""
    method = stored.get("quant_method", "an unknown method")
    what = f"{recipe_key}: the weights of {path} are quantised ({method})"
    if method != "bitsandbytes":
        raise ModelError(f"{what}, and only bitsandbytes is supported; use the unquantised model")
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ModelError(f"{what}, but bitsandbytes is not installed; {install_command('bitsandbytes')}")
    tensors = meta_tensors(path, revision, recipe_key)
    if isinstance(tensors, dict) and not any("absmax" in name or "SCB" in name for name in tensors):
        raise ModelError(
            f"{what} by its config.json, but not in its files; remove quantization_config from it"
        )
    return what


def load_and_prove(
    model: ModelFacts,
    *,
    device: torch.device,
    strategy: Strategy = ALONE,
    adds_adapter: bool = False,
    again: bool = False,
) -> tuple[LoadedModel, ProofOutcome]:
    """Loads the model and proves, by a test, that it computes rows exactly; the caller checks the outcome.
    That of the same model, settings, device and code is read from the cache, unless `again` is set. With
    `model.compile: auto` a model that torch cannot compile is loaded once more, uncompiled."""
    model.namespace  # noqa: B018  # hashed before the weights are read: `check_start` hashes once more
    loaded = load_model(model, device=device, strategy=strategy, adds_adapter=adds_adapter)
    if device.type == "cuda":
        loaded.kernels.extend(take_kernels(loaded.scorer, device))
    if model.settings.compile == "auto" and loaded.scorer.is_compiled:
        obstacles = ranks.every_rank_says(compiling_obstacle(loaded.scorer, device))
        if any(obstacles):
            del loaded
            gc.collect()  # compiled layers are in reference cycles, so only this frees their memory
            plain = replace(model, settings=model.settings.model_copy(update={"compile": False}))
            loaded, outcome = load_and_prove(
                plain, device=device, strategy=strategy, adds_adapter=adds_adapter, again=again
            )
            return replace(loaded, not_compiled=next(filter(None, obstacles))), outcome
    begun = time.monotonic()
    memo_path = model.cache_dir / "proofs.json"
    key = _proof_key(model, loaded, device, strategy, adds_adapter)
    shape = dict[str, tuple[Proof, ...]]
    remembered = None if again else ranks.first_says((read_json(memo_path, shape) or {}).get(key))
    proofs = remembered or tuple(prove(loaded.scorer, device))
    if remembered is None and all(proof.passed for proof in proofs):
        ranks.only_first_does(lambda: add_to_json(memo_path, shape, {key: proofs}))
    return loaded, ProofOutcome(
        what="padded batches" if loaded.scorer.backend is None else "packed rows",
        dtype=str(model.precision.activations).removeprefix("torch."),
        proofs=proofs,
        seconds=time.monotonic() - begun,
        is_remembered=remembered is not None,
    )


def _proof_key(
    model: ModelFacts, loaded: LoadedModel, device: torch.device, strategy: Strategy, adds_adapter: bool
) -> str:
    on_cpu = f"{cpu_name()}, {torch.backends.cpu.get_cpu_capability()}"
    setting = {
        "model": model.namespace,
        "lora": [str(model.settings.lora), model.seed] if adds_adapter and model.settings.lora else None,
        "attention": loaded.attention.name,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else on_cpu,
        "code": own_code(),
        "layers": "compiled" if loaded.scorer.is_compiled else "eager",
        "recurrent kernels": sorted(loaded.scorer.recurrent_kernels),
        "versions": package_versions(),
        "shards": strategy.shards,  # the proof includes the code that gathers them
        "images": None if model.processor is None else model.processor.fingerprint,
    }
    return namespace_digest(setting)


@functools.cache
def own_code() -> str:
    """Returns the sha256 of this package's code, because a proof is valid only for the code that it ran."""
    files = sorted(Path(dpo_pack.__file__).parent.rglob("*.py"))
    digests = [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]
    return hashlib.sha256("".join(digests).encode()).hexdigest()


# ------------------------------------------------------------- how the ranks hold the model

# `auto` chooses ddp only if weights, gradients and optimizer state take at most this part of the memory.
STATE_SHARE = 0.6
# Bytes of an optimizer's moments for each trained parameter. bitsandbytes keeps 8-bit moments and a scale for
# each 256 moments. Adafactor keeps only sums of rows and columns.
OPTIMIZER_BYTES = {"adamw": 8.0, "adamw_8bit": 2.03, "adafactor": 0.02}
LOW_BITS_BYTES = 2.0  # the low halves of AdamW's fp32 master weights, if parameters are bfloat16


def choose_strategy(recipe: Recipe, facts: ModelFacts, device: torch.device) -> Strategy:
    """Returns how the ranks hold the model. Every rank must call it. Raises RecipeError."""
    settings, num_ranks = recipe.distributed, ranks.num_ranks()
    if any(name.startswith(("ACCELERATE_", "FSDP_")) for name in os.environ):
        check_accelerate_config(facts, settings.cpu_offload)
    if settings.num_processes not in ("auto", num_ranks):
        raise RecipeError(
            f"distributed.num_processes: {settings.num_processes} are asked for, this run has {num_ranks}; "
            "the dpopack command starts the processes itself; start a program of your own with torchrun"
        )
    if num_ranks > 1:
        return _strategy_of_ranks(recipe, facts, device)
    for key in ("gather_dtype", "cpu_offload"):
        if settings.is_changed(key):
            raise RecipeError(f"distributed.{key}: this run has one process, so no shards; leave it out")
    return ALONE


def _strategy_of_ranks(recipe: Recipe, facts: ModelFacts, device: torch.device) -> Strategy:
    settings, needs_copies = recipe.distributed, why_not_sharded(recipe)
    name, reason = settings.strategy, "distributed.strategy"
    if is_set("ACCELERATE_USE_FSDP"):
        if name == "ddp" or needs_copies is not None or facts.quantization is not None:
            raise RecipeError(
                "distributed.strategy: accelerate's configuration asks for FSDP2, but this run needs a whole "
                "model in each process; set distributed_type: MULTI_GPU in accelerate's configuration"
            )
        name, reason = "fsdp2", "accelerate's configuration"
    if name == "auto" and needs_copies is not None:
        name, reason = "ddp", needs_copies
    elif name == "auto":
        memory = min(ranks.every_rank_says(available_memory(device).total))
        has_second = recipe.reference.sync is not None
        name, reason = by_size(facts, memory, optimizer=recipe.optim.name, has_second=has_second)
    if name == "ddp":
        return Strategy(name="ddp", reason=reason)
    if recipe.optim.name != "adamw":
        raise RecipeError(
            f"optim.name: {recipe.optim.name} updates whole weights only, but with fsdp2 ({reason}) each "
            "process has a part of the weights; set optim.name: adamw or distributed.strategy: ddp"
        )
    if recipe.data.eval and recipe.train.eval_precision == "float32":
        raise RecipeError("train.eval_precision: shards are not evaluated in float32; set it to training")
    if settings.cpu_offload and device.type != "cuda":
        raise RecipeError(f"distributed.cpu_offload: the device is a {device.type}; leave the key out")
    return Strategy(
        name="fsdp2",
        reason=reason,
        mesh=_mesh(device, is_hybrid=settings.hybrid),
        cpu_offload=settings.cpu_offload,
        accumulate_unsharded=settings.accumulate_unsharded,
    )


def check_accelerate_config(facts: ModelFacts, cpu_offload: bool) -> None:
    """Raises RecipeError if the file of `accelerate config`, which accelerate turns into environment
    variables, asks for what the recipe does not. Devices, processes and FSDP2 are taken from it."""
    settings = facts.settings
    mixed = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    is_mixed = mixed == "no" or (mixed == "bf16" and facts.precision.activations == torch.bfloat16)
    backend = os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no").lower()
    checkpoints = is_set("FSDP_ACTIVATION_CHECKPOINTING")
    for key, asked, is_done in (
        ("model.autocast", f"mixed_precision: {mixed}", is_mixed),
        ("model.compile", f"dynamo_backend: {backend}", backend == "no" or settings.compile is True),
        ("distributed.cpu_offload", "offloading", cpu_offload or not is_set("FSDP_OFFLOAD_PARAMS")),
        ("model.gradient_checkpointing", "it", settings.gradient_checkpointing or not checkpoints),
    ):
        if not is_done:
            raise RecipeError(
                f"{key}: accelerate's configuration asks for {asked}, but the recipe does not; set {key}, or "
                "remove the setting from accelerate's configuration"
            )


def by_size(
    facts: ModelFacts, memory: float, *, optimizer: str, has_second: bool
) -> tuple[Literal["ddp", "fsdp2"], str]:
    """Returns the strategy that `auto` takes with so many bytes of memory on a device, and the reason.
    `has_second`: a reference that follows the policy lies beside it, with frozen weights."""
    if facts.quantization is not None:
        return "ddp", "quantised weights are not sharded"
    num_towers = facts.tower_parameters
    count = facts.num_parameters - num_towers
    is_adapted = facts.settings.lora is not None or facts.adapter is not None
    precision = facts.precision
    state = training_bytes(
        num_trained=0 if is_adapted else count,  # an adapter is too small to matter
        num_frozen=count * is_adapted + num_towers + facts.num_parameters * has_second,
        trained_bytes=precision.parameters.itemsize,
        frozen_bytes=precision.parameters.itemsize,
        optimizer=optimizer,
    )
    needed = sum(state) + state.gradients * (num_gradients(facts.config) - 1)
    if precision.casts_weights and not facts.settings.gradient_checkpointing:
        needed += 2.0 * count
    what = (
        f"{format_count(facts.num_parameters)} parameters with gradients and optimizer state take "
        f"{needed / 1e9:.3g} GB, a device has {memory / 1e9:.3g} GB"
    )
    return ("ddp" if needed <= STATE_SHARE * memory else "fsdp2"), what


class StateBytes(NamedTuple):
    """Bytes on one device of what a run holds all the time; their sum is the whole."""

    parameters: float
    gradients: float
    optimizer: float


def moment_bytes(optimizer: str, trained_bytes: float) -> float:
    """Returns the bytes of an optimizer's state for each trained parameter, which has `trained_bytes`."""
    has_low_bits = optimizer == "adamw" and trained_bytes == 2
    return OPTIMIZER_BYTES[optimizer] + LOW_BITS_BYTES * has_low_bits


def training_bytes(
    *,
    num_trained: int,
    num_frozen: int = 0,
    trained_bytes: float = 4,
    frozen_bytes: float = 4,
    optimizer: str = "adamw",
    num_shards: int = 1,
) -> StateBytes:
    """Returns the bytes of a run's state on a device that has 1/`num_shards` of it."""
    return StateBytes(
        parameters=(num_trained * trained_bytes + num_frozen * frozen_bytes) / num_shards,
        gradients=num_trained * trained_bytes / num_shards,
        optimizer=num_trained * moment_bytes(optimizer, trained_bytes) / num_shards,
    )


def num_gradients(config: PretrainedConfig) -> int:
    """Returns how many copies of the gradient a rank has with ddp: experts' add up outside its buckets."""
    return 2 if routes_tokens(config) else 1


def available_memory(device: torch.device) -> AvailableMemory:
    """Returns the memory that a rank may use. Ranks on CPUs divide the machine's memory equally."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return AvailableMemory(free=free + torch.cuda.memory_reserved(device), total=total)
    machine, num_here = host_memory(), _num_local_ranks()
    return AvailableMemory(free=machine.free // num_here, total=machine.total // num_here)


def _num_local_ranks() -> int:
    """Returns the number of ranks on this machine. If the launcher does not say, all ranks are here."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", ranks.num_ranks()))


def _mesh(device: torch.device, *, is_hybrid: bool) -> DeviceMesh:
    num_ranks = ranks.num_ranks()
    if not is_hybrid:
        return init_device_mesh(device.type, (num_ranks,), mesh_dim_names=("shard",))
    num_here = _num_local_ranks()
    if num_here in (1, num_ranks) or num_ranks % num_here:
        raise RecipeError(
            "distributed.hybrid: each node holds one copy of the model in shards, so the run needs several "
            "nodes, each with the same number of processes (two or more); this node has "
            f"{num_here} of the run's {num_ranks}; leave the key out"
        )
    shape = (num_ranks // num_here, num_here)
    return init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))
