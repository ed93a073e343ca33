"""Completions from vLLM in this process, which has its own copy of the policy's weights.

Legend: L tokens of a completion.
"""

import contextlib
import copy
import os
import random
import re
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.core_model_loading import revert_weight_conversion

from dpo_pack.data.store import TokenIds
from dpo_pack.model.lora import plain_name
from dpo_pack.model.scorer import CompletionLogps, RowLogps
from dpo_pack.online.interface import Completion, Draw, Failure, SamplingSettings
from dpo_pack.online.transformers_generator import completion_of, end_tokens
from dpo_pack.packing.lengths import Group
from dpo_pack.proofs import proof_row
from dpo_pack.system.errors import ModelError
from dpo_pack.system.machine import release_memory

KEY = "online.generator.type"
OTHERS = "use transformers, or http with a vLLM server"
_MOST_SHOWN = 200  # characters of vLLM's own message


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmEngine:
    """A vLLM that runs in this process."""

    llm: Any  # vllm.LLM
    version: str
    device: torch.device

    def take_weights(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        """Loads weights, named as in a checkpoint, and empties the cache that older weights have filled."""
        try:
            self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": tensors})
            if self.device.type == "cpu":
                self.llm.apply_model(_pack_heads)
        except Exception as error:  # about names, shapes or memory
            raise _refusal("vLLM cannot take the policy's weights", error) from error
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not empty its prefix cache, although it has no request")

    def answer(self, prompts: Sequence[TokenIds], options: Sequence[dict[str, Any]]) -> list[Any]:
        """Returns vLLM's CompletionOutput for each prompt. options: arguments of SamplingParams."""
        from vllm import SamplingParams

        outputs = self.llm.generate(
            [{"prompt_token_ids": ids.tolist()} for ids in prompts],
            [SamplingParams(n=1, **each) for each in options],
            use_tqdm=False,
        )
        assert [list(o.prompt_token_ids) for o in outputs] == [ids.tolist() for ids in prompts]
        return [output.outputs[0] for output in outputs]


def start_engine(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_tokens: int,
    gpu_memory_utilization: float,
    trust_remote_code: bool,
) -> VllmEngine:
    """Starts vLLM with the architecture of `model`, without weights. Raises ModelError. max_tokens: of the
    longest prompt plus its completion. gpu_memory_utilization: a part of the memory."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine runs in this process
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")  # else vLLM reports its use over the network
    release_memory()  # vLLM takes a part of the memory that is free now
    with _unchanged_process(), tempfile.TemporaryDirectory(prefix="dpo-pack-vllm-") as directory:
        config = copy.deepcopy(model.config)
        config.architectures = [type(model).__name__]  # a checkpoint may name a class around the text model
        config.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
        try:
            from vllm import LLM, __version__

            llm = LLM(
                model=directory,
                trust_remote_code=trust_remote_code,
                dtype=str(dtype).removeprefix("torch."),
                max_model_len=max_tokens,
                gpu_memory_utilization=gpu_memory_utilization,
                load_format="dummy",  # random weights; `take_weights` loads the policy's
                model_impl="vllm",  # otherwise vLLM rewrites transformers' classes, which the policy uses
                generation_config="vllm",  # not the model's config: the recipe sets the sampling
                enforce_eager=device.type == "cpu",
                disable_log_stats=True,
            )
        except Exception as error:  # about families, sizes, memory or libraries
            raise _refusal("vLLM cannot run this policy", error) from error
        if any(".transformers" in kind.__module__ for kind in llm.apply_model(type)):
            # For some architectures vLLM uses transformers' class although `model_impl` is vllm.
            name = type(model).__name__
            raise _refusal(f"vLLM has no code of its own for {name}, and would rewrite transformers' class")
    return VllmEngine(llm=llm, version=__version__, device=device)


def _pack_heads(model: nn.Module) -> None:
    """Renews the copy of the output head in vLLM's CPU build, which is not loaded if it is the embedding."""
    for module in model.modules():
        if type(module).__name__ == "ParallelLMHead":
            head: Any = module
            head.quant_method.process_weights_after_loading(head)


@contextlib.contextmanager
def _unchanged_process() -> Iterator[None]:
    """Restores settings that the start of vLLM changes: random states and, on CPUs, torch's threads."""
    python, numpy, set_num_threads = random.getstate(), np.random.get_state(), torch.set_num_threads
    num_threads = torch.get_num_threads()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with torch.random.fork_rng():
                yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_num_threads = set_num_threads
        torch.set_num_threads(num_threads)


def _refusal(reason: str, error: Exception | None = None) -> ModelError:
    """With vLLM's own message in one line, without pydantic's frame and the list of known models."""
    if error is not None:
        text = " ".join(str(error).split()) or type(error).__name__
        text = text.rpartition("Value error, ")[2].partition(" [type=")[0]
        text = text.partition(". Supported architectures")[0][:_MOST_SHOWN]
        reason = f"{reason}: {text.rstrip('.')}"
    return ModelError(f"{KEY}: {reason}; {OTHERS}")


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmGenerator:
    """Draws n completions for each prompt from the current policy, each by a request with its own seed."""

    engine: VllmEngine
    scorer: CompletionLogps
    tokenizer: PreTrainedTokenizerBase
    sampling: SamplingSettings
    seed: int

    def generate(self, draws: Sequence[Draw]) -> list[tuple[Completion, ...] | Failure]:
        if not draws:
            return []
        self.engine.take_weights(
            checkpoint_tensors(self.scorer.model, has_adapter=self.scorer.adapter is not None)
        )
        sampling, n = self.sampling, self.sampling.completions_per_prompt
        ends = end_tokens(self.scorer.model, self.tokenizer)
        options = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or 0,
            "min_p": sampling.min_p,
            "max_tokens": sampling.max_new_tokens,
            "stop": list(sampling.stop),
            "stop_token_ids": sorted(ends),  # with EOS, which `ignore_eos` turns off
            "ignore_eos": True,
            "detokenize": bool(sampling.stop),
        }
        sequences = [(draw, number) for draw in draws for number in range(n)]
        outputs = self.engine.answer(
            [draw.prompt.ids for draw, _ in sequences],
            [{**options, "seed": completion_seed(self.seed, d.number, number)} for d, number in sequences],
        )
        completions: list[Completion] = []
        failures: dict[int, Failure] = {}  # by the place of the draw
        for place, output in enumerate(outputs):
            if output.finish_reason not in ("stop", "length"):
                reason = f"vLLM ended a completion with {output.finish_reason!r}"
                failures.setdefault(place // n, Failure(reason=reason))
            ids = np.array(output.token_ids, dtype=np.int32)
            stop_end = len(ids) if isinstance(output.stop_reason, str) else None  # int: id of an end token
            completions.append(
                completion_of(ids, self.tokenizer, ends=ends, stop=sampling.stop, stop_end=stop_end)
            )
        return [
            failures.get(place) or tuple(completions[place * n : (place + 1) * n])
            for place in range(len(draws))
        ]

    def weights_step(self, step: int) -> int:
        return step


def completion_seed(seed: int, draw_number: int, completion: int) -> int:
    """Returns a seed in [0, 2^63) for an engine with its own random numbers; a function of the arguments."""
    state = np.random.SeedSequence(seed, spawn_key=(2, draw_number, completion)).generate_state(1, np.uint64)
    return int(state[0] >> np.uint64(1))


# The largest mean difference in nats a token. Rounding gives less (docs/online.md), wrong weights more.
TOLERANCES = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}


def prove_agreement(
    engine: VllmEngine, scorer: CompletionLogps, prompt: TokenIds, *, max_new_tokens: int, dtype: torch.dtype
) -> float:
    """Proves that vLLM computes the policy's log-probs: only this finds a tensor that vLLM did not load.
    Returns the mean difference in nats. Raises ModelError if rounding in `dtype`, that of activations, cannot
    explain it."""
    start, num_tokens = prompt[:64], min(max_new_tokens, 32)
    options = {"max_tokens": num_tokens, "seed": 0, "logprobs": 0, "ignore_eos": True}
    try:
        (output,) = engine.answer([start], [options])
    except Exception as error:  # vLLM chooses some kernels only now, and these kernels may raise
        raise _refusal("vLLM cannot run this policy", error) from error
    written = np.array(output.token_ids, dtype=np.int32)
    steps = zip(written.tolist(), output.logprobs, strict=True)
    theirs = torch.tensor([logprobs[token].logprob for token, logprobs in steps], dtype=torch.float64)  # [L]
    row = proof_row(scorer, [Group(context=start, completions=(written,))], engine.device)
    with torch.no_grad():
        logps_of_row: RowLogps = scorer(row)
    ours = logps_of_row.token_logps.double().cpu()  # [L] computed as in training
    difference = float((ours - theirs).abs().mean())
    if not difference <= TOLERANCES[dtype]:  # `not <=` is true for NaN, too
        raise _refusal(
            f"vLLM's log-probs differ from the policy's by {difference:.2g} nats a token; rounding explains "
            f"only {TOLERANCES[dtype]:g}, so vLLM does not compute this model as training does"
        )
    return difference


# ---------------------------------- the policy's tensors, layer by layer, with an adapter added to its base

_LAYER = re.compile(r"^(?:[^.]+\.)*?\d+(?=\.)")  # a name up to its first number, such as model.layers.3


@torch.no_grad()
def checkpoint_tensors(model: PreTrainedModel, *, has_adapter: bool) -> Iterator[tuple[str, Tensor]]:
    """Yields (name, tensor) of all parameters and persistent buffers; tied tensors come once. A tensor that
    no adapter changes is the model's own, so read it before the next training step."""
    tensors: dict[int, tuple[str, Tensor]] = {}  # by identity: tied tensors have one
    for name, tensor in model.state_dict(keep_vars=True).items():
        tensors.setdefault(id(tensor), (name, tensor))
    adapted: dict[str, Any] = {}
    if has_adapter:
        from peft.tuners.tuners_utils import BaseTunerLayer

        adapted = {name: part for name, part in model.named_modules() if isinstance(part, BaseTunerLayer)}
    for layer, named in groupby(tensors.values(), key=lambda item: _LAYER.findall(item[0])):
        inside = [module for name, module in adapted.items() if _LAYER.findall(f"{name}.") == layer]
        # A variable would keep this result in memory while the next layer is computed.
        yield from _as_in_checkpoints(model, named, inside, has_adapter=has_adapter).items()


def _as_in_checkpoints(
    model: PreTrainedModel, named: Iterable[tuple[str, Tensor]], adapted: Sequence[Any], *, has_adapter: bool
) -> dict[str, Tensor]:
    """Returns a layer's tensors, adapters added, with the names and shapes of checkpoints, but without a
    prefix before the text model: the engine gets the class of this model."""
    own = vars(model).pop("_weight_conversions", None)
    try:
        with _merged(adapted):
            state = {
                plain: tensor.detach()
                for name, tensor in named
                if (plain := plain_name(name) if has_adapter else name) is not None
            }
        reverted: dict[str, Tensor] = revert_weight_conversion(model, state)
    finally:
        if own is not None:
            vars(model)["_weight_conversions"] = own
    return reverted


@contextlib.contextmanager
def _merged(layers: Sequence[Any]) -> Iterator[None]:
    """Adds the adapter to the base weights of `layers`, as peft does; restores the weights afterwards."""
    bases: list[nn.Module] = [layer.get_base_layer() for layer in layers]
    before = [(parameter, parameter.data) for base in bases for parameter in base.parameters(recurse=False)]
    try:
        for layer in layers:
            layer.merge(safe_merge=True)  # peft writes the sum into a new tensor
        yield
    finally:
        for parameter, data in before:
            parameter.data = data
        for layer in layers:
            layer.merged_adapters.clear()
