"""The models of a recipe: finds the facts of each model, loads a model and proves that its rows are exact."""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
import importlib.util
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import PretrainedConfig, PreTrainedModel

import dpo_pack
from dpo_pack.model.compiling import check_compiler, compile_layers, compiles
from dpo_pack.model.config import check_packs
from dpo_pack.model.fingerprint import reference_namespace, weight_files
from dpo_pack.model.liger import check_kernels
from dpo_pack.model.loading import load_config, load_errors, load_model
from dpo_pack.model.logps import WantedStatistics, compile_head
from dpo_pack.model.lora import LoraSettings, is_adapter, read_adapter, require_peft
from dpo_pack.model.parallel import ALONE, Strategy, shard_model
from dpo_pack.model.quantize import Quantization, check_quantizable, quantization_settings
from dpo_pack.model.routing import RouterBalance, router_balance
from dpo_pack.model.scorer import LoadedModel, Precision, resolve_precision
from dpo_pack.model.shape import model_shape, num_parameters, without_weights
from dpo_pack.packing.lengths import ModelShape
from dpo_pack.proofs.recurrence import take_kernels
from dpo_pack.proofs.rows import Proof, ProofOutcome
from dpo_pack.proofs.start_up import compiling_obstacle, prove
from dpo_pack.recipe.load import Recipe
from dpo_pack.reference.cache import default_cache_directory, namespace_digest
from dpo_pack.system import ranks
from dpo_pack.system.errors import ModelError
from dpo_pack.system.files import add_to_json, read_json
from dpo_pack.system.machine import cpu_name, install_command, package_versions


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelFacts:
    """What is known about a model without loading its weights into memory.

    The cached properties take time to compute, so they are computed only if a command reads them.
    """

    path: str  # a hub id or a directory: of the base model, if `adapter` is given
    revision: str | None
    recipe_key: str  # the recipe key that error messages name
    adapter: Path | None  # the directory of a saved LoRA adapter; None also for a new adapter
    config: PretrainedConfig
    trust_remote_code: bool
    precision: Precision
    is_packed: bool
    cache_dir: Path
    router_aux_coef: float | None = 0.0  # of the recipe, for the policy; see `balance`
    quantize: Quantization | None = None  # how the weights are quantised while they are loaded
    new_adapter: LoraSettings | None = None  # the adapter that the policy gets for its training
    # Settings of the recipe for loading the model:
    attention: str = "auto"
    kernels: str = "none"
    compile: bool | Literal["auto"] = False
    gradient_checkpointing: bool | Literal["selective"] = False
    keeps_squares: bool = False  # the scorer also gives what `loss.weighting: wpo` needs

    @property
    def label(self) -> str:
        """The hub id or path by which the user named the model."""
        return self.path if self.adapter is None else str(self.adapter)

    @property
    def quantization(self) -> dict[str, Any] | None:
        """How the weights are quantised, in the files or while they are loaded; None: not at all."""
        settings: dict[str, Any] | None = self.config.to_dict().get("quantization_config")
        if settings is None and self.quantize is not None:
            return quantization_settings(self.quantize).to_dict()
        return settings

    @functools.cached_property
    def architecture(self) -> PreTrainedModel:
        """The model on the meta device, without weights and adapters. Raises ModelError."""
        with load_errors(self.path, self.recipe_key):
            return without_weights(self.config, trust_remote_code=self.trust_remote_code)

    @functools.cached_property
    def num_parameters(self) -> int:
        """The number of parameters of the model. Tied embeddings count once."""
        return num_parameters(self.architecture)

    @functools.cached_property
    def shape(self) -> ModelShape:
        """The sizes of the model that are needed to compute the FLOPs of rows."""
        shape = model_shape(self.architecture)
        trims_last_block = self.is_packed and self.balance is None
        return shape if trims_last_block else replace(shape, last_block_weights=0.0)

    @functools.cached_property
    def balance(self) -> RouterBalance | None:
        """The load-balancing loss of the policy's training; None: there is none. Raises RecipeError."""
        if self.router_aux_coef == 0:
            return None
        return router_balance(self.architecture, self.router_aux_coef)

    @functools.cached_property
    def namespace(self) -> dict[str, Any]:
        """All facts besides token ids that the model's log-probs depend on, see model/fingerprint.py.

        All ranks must read this property together. Rank 0 hashes all weights and stores the hashes in a file
        for the other ranks.
        """
        with ranks.first_goes_first():
            return reference_namespace(
                self.path,
                self.config,
                architecture=self.architecture,
                revision=self.revision,
                precision=self.precision,
                memo_path=self.cache_dir / "model_hashes.json",
                adapter=self.adapter,
                quantize=self.quantize,
            )


def recipe_precision(recipe: Recipe, device: torch.device) -> Precision:
    """Returns the types of numbers in which a run of the recipe computes on the device."""
    model, gather_dtype = recipe.model, recipe.distributed.gather_dtype
    return resolve_precision(model.dtype, model.autocast, device, gather_dtype=gather_dtype)


def resolve_policy(recipe: Recipe, precision: Precision) -> ModelFacts:
    """Returns the facts of the starting policy. Raises ModelError."""
    return resolve_model(recipe, precision, recipe.model.path, recipe_key="model.path")


def resolve_model(recipe: Recipe, precision: Precision, path: str, *, recipe_key: str) -> ModelFacts:
    """Returns the facts of a model. `path` is a hub id, or the directory of a model or a saved LoRA adapter.

    Only the policy (`recipe_key` "model.path") has the revision, the new adapter and the load-balancing loss
    of the recipe. Raises ModelError.
    """
    adapter, is_policy = None, recipe_key == "model.path"
    revision = recipe.model.revision if is_policy else None
    if is_adapter(path):
        saved = read_adapter(Path(path), recipe_key)
        recipe_key = f"{recipe_key} (the base of {path})"
        path, revision, adapter = saved.base, saved.base_revision, saved.directory
    settings, lora = recipe.model, recipe.model.lora if is_policy else None
    trusts = settings.trust_remote_code
    return ModelFacts(
        path=path,
        revision=revision,
        recipe_key=recipe_key,
        adapter=adapter,
        config=load_config(path, revision=revision, trust_remote_code=trusts, recipe_key=recipe_key),
        trust_remote_code=trusts,
        precision=precision,
        is_packed=recipe.packing.mode == "packed",
        cache_dir=recipe.reference.cache_dir or default_cache_directory(),
        router_aux_coef=recipe.loss.router_aux_coef if is_policy else 0.0,
        quantize=None if adapter is None and lora is None else settings.quantize,
        new_adapter=None if lora is None else LoraSettings(**lora.model_dump(), seed=recipe.seed),
        attention=settings.attention,
        kernels=settings.kernels,
        compile=settings.compile,
        gradient_checkpointing=settings.gradient_checkpointing,
        keeps_squares=recipe.loss.weighting == "wpo",
    )


def check_model(model: ModelFacts, device: torch.device, *, is_trained: bool = False) -> None:
    """Checks, before loading, that this machine can load the model, run it and (if `is_trained`) train it.

    Raises ModelError, RecipeError, UnsupportedModelError.
    """
    if model.adapter is not None:
        require_peft(model.recipe_key)
    if Path(model.path).is_dir():
        try:
            weight_files(Path(model.path))
        except ModelError as error:
            raise ModelError(f"{model.recipe_key}: {error}") from error
    is_whole = model.adapter is None and model.new_adapter is None
    _check_quantised(model, is_trained=is_trained and is_whole)
    if is_trained and model.router_aux_coef:
        model.balance  # noqa: B018  # raises if the model has no such loss
    check_kernels(model.kernels, model.config, device)
    if model.quantize is not None:
        check_quantizable(model.architecture)
    if model.compile is True:
        if model.quantization is not None:
            raise ModelError(
                "model.compile: layers with quantised weights are not compiled; leave the key out"
            )
        check_compiler(device)
    if model.is_packed:
        check_packs(model.config)


def _check_quantised(model: ModelFacts, *, is_trained: bool) -> None:
    """Raises ModelError if the weights are quantised in the files and cannot be used here, or be trained."""
    settings = model.config.to_dict().get("quantization_config")
    if settings is None:
        return
    method = settings.get("quant_method", "an unknown method")
    what = f"{model.recipe_key}: the weights of {model.path} are quantised ({method})"
    if model.quantize is not None:
        raise ModelError(f"{what} already; leave model.quantize out, or use the unquantised model")
    if method != "bitsandbytes":
        raise ModelError(f"{what}, and only bitsandbytes is supported; use the unquantised model")
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ModelError(f"{what}, but bitsandbytes is not installed; {install_command('bitsandbytes')}")
    if is_trained:
        raise ModelError(f"{what}, and quantised weights cannot be trained; set model.lora")


def load_weights(
    model: ModelFacts,
    *,
    device: torch.device,
    strategy: Strategy = ALONE,
    adapter: LoraSettings | None = None,
) -> LoadedModel:
    """Loads the model on the device with the recipe's settings, and with a new `adapter` if given.

    If the strategy shards, all ranks must call it: rank 0 reads the weights and sends each rank its shards.
    Raises ModelError, UnsupportedModelError.
    """
    weights_on = device
    if strategy.shards:
        if model.quantization is not None:
            raise ModelError(
                f"{model.recipe_key}: the weights of {model.path} are quantised, and quantised weights "
                "cannot be in shards; set distributed.strategy: ddp"
            )
        weights_on = ranks.of_first(torch.device("cpu")) or torch.device("meta")
    with ranks.first_goes_first() if strategy.shards else contextlib.nullcontext():
        loaded = load_model(
            model.path,
            config=model.config,
            revision=model.revision,
            trust_remote_code=model.trust_remote_code,
            precision=model.precision,
            attention=model.attention,
            packed=model.is_packed,
            gradient_checkpointing=model.gradient_checkpointing,
            device=device,
            recipe_key=model.recipe_key,
            adapter=adapter or model.adapter,
            weights_on=weights_on,
            wanted=WantedStatistics(squares=model.keeps_squares),
            kernels=model.kernels,
            quantize=model.quantize,
        )
        # Selective checkpointing has to see each product.
        is_selective = model.gradient_checkpointing == "selective"
        is_plain = not is_selective and model.quantization is None
        if is_plain and compiles(model.compile, loaded.model, device):
            falls_back = model.compile == "auto"
            compile_layers(loaded.model, falls_back=falls_back)
            loaded.scorer.head_passes = compile_head(falls_back=falls_back)
            loaded.scorer.is_compiled = True
    if strategy.shards:
        shard_model(loaded.scorer, strategy, device)
    return loaded


def load_and_prove(
    model: ModelFacts,
    *,
    device: torch.device,
    strategy: Strategy = ALONE,
    adapter: LoraSettings | None = None,
    again: bool = False,
) -> tuple[LoadedModel, ProofOutcome]:
    """Loads the model and proves, by a test, that it computes rows exactly; the caller checks the outcome.

    If the proof has passed before with the same model, settings, device and code, its result is read from the
    cache, unless `again` is set. Either all ranks run the proof, or all use the result that rank 0 has read.

    With `model.compile: auto` a model that torch cannot compile is loaded once more, uncompiled.
    """

    def load(model: ModelFacts) -> LoadedModel:
        loaded = load_weights(model, device=device, strategy=strategy, adapter=adapter)
        if device.type == "cuda":
            loaded.kernels.extend(take_kernels(loaded.scorer, device))
        return loaded

    loaded = load(model)
    if model.compile == "auto":
        obstacles = ranks.every_rank_says(compiling_obstacle(loaded.scorer, device))
        if any(obstacles):
            del loaded
            gc.collect()  # compiled layers are in reference cycles, so only this frees their memory
            loaded = load(replace(model, compile=False))
            loaded = replace(loaded, not_compiled=next(filter(None, obstacles)))
    begun = time.monotonic()
    setting: dict[str, Any] = {
        "model": model.namespace,
        "lora": None if adapter is None else asdict(adapter),
        "attention": loaded.attention.name,
        "device": torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"{cpu_name()}, {torch.backends.cpu.get_cpu_capability()}",
        "code": own_code(),
        "layers": [model.kernels, "compiled" if loaded.scorer.is_compiled else "eager"],
        "recurrent kernels": sorted(loaded.scorer.recurrent_kernels),
        "versions": package_versions(),
    }
    if strategy.shards:
        setting["shards"] = True  # the proof includes the code that gathers them
    what = "padded batches" if loaded.scorer.backend is None else "packed rows"
    memo_path, key = model.cache_dir / "proofs.json", namespace_digest(setting)
    shape = dict[str, tuple[Proof, ...]]
    remembered = ranks.first_says((read_json(memo_path, shape) or {}).get(key))
    if remembered is not None and not again:
        return loaded, ProofOutcome(what=what, proofs=remembered, seconds=0.0, is_remembered=True)
    proofs = tuple(prove(loaded.scorer, device))
    if all(proof.passed for proof in proofs):
        ranks.only_first(lambda: add_to_json(memo_path, shape, {key: proofs}))
    seconds = time.monotonic() - begun
    return loaded, ProofOutcome(what=what, proofs=proofs, seconds=seconds, is_remembered=False)


@functools.cache
def own_code() -> str:
    """Returns the sha256 of this package's code, because a proof is valid only for the code that it ran."""
    files = sorted(Path(dpo_pack.__file__).parent.rglob("*.py"))
    digests = [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]
    return hashlib.sha256("".join(digests).encode()).hexdigest()
