"""Who is measured, on what, and what a measurement says."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

BETA = 0.1
LEARNING_RATE = 1e-4  # high, so that a difference in any update shows in the next step
LORA_RANK, LORA_ALPHA = 16, 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """One way of doing the work; each trainer reads its own fields."""

    name: str
    trainer: str  # "dpo-pack" or "trl"
    settings: tuple[str, ...] = ()  # dpo-pack: recipe overrides
    microbatch_pairs: int = 0  # the following: TRL's
    precompute: bool = False
    grouped: bool = False  # pairs of about equal length together: less padding, other steps
    gradient_checkpointing: bool = False
    attention: str = "sdpa"
    liger: bool = False
    compiled: bool = False

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Contender:
        return cls(**{**fields, "settings": tuple(fields["settings"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What all contenders of a benchmark have in common."""

    workload: str  # directory
    model: str  # directory
    num_pairs: int
    pairs_per_step: int
    max_length: int
    device: str  # "cpu" or "cuda"
    parameters: str  # dtype
    lora: bool
    gradient_checkpointing: bool  # of dpo-pack; TRL's is its contender's
    warmup_steps: int  # left out of the times: they compile kernels and grow memory pools

    @property
    def model_path(self) -> Path:
        return Path(self.model)


@dataclass(slots=True, kw_only=True)
class Measurement:
    """One run of one contender. `failure` says why there are no numbers."""

    contender: str
    failure: str | None = None
    digest: str = ""  # of the token ids trained on, in their order
    pairs: int = 0
    step_seconds: list[float] = field(default_factory=list)
    reference_seconds: float = 0.0  # of a pass over all pairs; 0 where the reference runs in each step
    startup_seconds: float | None = (
        None  # from the start of the process to the first step, reference left out
    )
    computed_tokens: int = 0  # of the training forwards, padding included
    peak_memory_bytes: int = 0  # on CUDA allocated there, else the process's
    losses: list[float] = field(default_factory=list)  # [steps], as are the following
    grad_norms: list[float] = field(default_factory=list)
    chosen_logps: list[float] = field(default_factory=list)  # means, nats
    rejected_logps: list[float] = field(default_factory=list)
    phases: dict[str, float] = field(default_factory=dict)  # seconds of all steps

    def seconds_a_pair(self, *, warmup_steps: int) -> float:
        """Of the reference and of training, warm-up steps left out. Steps have equally many pairs."""
        timed = self.step_seconds[warmup_steps:]
        train = sum(timed) / len(timed) * len(self.step_seconds) / self.pairs
        return train + self.reference_seconds / self.pairs

    def reference_share(self, *, warmup_steps: int) -> float:
        """Part of the time that a reference pass of its own takes."""
        return self.reference_seconds / self.pairs / self.seconds_a_pair(warmup_steps=warmup_steps)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def ours(token_budget: int, *settings: str, name: str = "dpo-pack") -> Contender:
    """dpo-pack with a row of so many tokens."""
    return Contender(
        name=name, trainer="dpo-pack", settings=(f"packing.token_budget={token_budget}", *settings)
    )


def ablations(token_budget: int) -> Iterator[Contender]:
    """What is left without sharing, and without packing as well; padded rows under the same budget."""
    yield ours(token_budget, "packing.share_prompt=false", name="dpo-pack, prompts not shared")
    yield ours(token_budget, "packing.mode=padded", name="dpo-pack, padded")


def trl(microbatch_pairs: int, **options: Any) -> Contender:
    """TRL; its name says every setting it was tried with."""
    contender = Contender(name="", trainer="trl", microbatch_pairs=microbatch_pairs, **options)
    parts = [f"TRL, micro-batch {microbatch_pairs}"]
    parts += ["precomputed reference" if contender.precompute else "live reference"]
    parts += ["grouped by length"] if contender.grouped else []
    parts += ["gradient checkpointing"] if contender.gradient_checkpointing else []
    parts += [contender.attention] if contender.attention != "sdpa" else []
    parts += ["liger kernels"] if contender.liger else []
    parts += ["torch.compile"] if contender.compiled else []
    return replace(contender, name=", ".join(parts))


def trl_sweep(microbatches: Sequence[int], *, gradient_checkpointing: bool) -> Iterator[Contender]:
    """Micro-batch sizes with live and precomputed reference, in the given order and grouped by length."""
    for grouped in (False, True):
        for precompute in (False, True):
            for microbatch in microbatches:
                if grouped and microbatch == 1:
                    continue  # one pair a batch has the same padding in any order
                yield trl(
                    microbatch,
                    precompute=precompute,
                    grouped=grouped,
                    gradient_checkpointing=gradient_checkpointing,
                )


def trl_variants(
    fastest: Sequence[Contender], out_of_memory: Sequence[Contender], *, compiled: bool
) -> Iterator[Contender]:
    """What else could be its best: kernels that are installed here, checkpointing where memory ran out.

    Compiled too, if asked for: compiling takes it minutes.
    """
    for contender in out_of_memory:
        if not contender.gradient_checkpointing:
            yield trl(
                contender.microbatch_pairs,
                precompute=contender.precompute,
                grouped=contender.grouped,
                gradient_checkpointing=True,
            )
    for contender in fastest:
        options = asdict(contender)
        for name in ("name", "trainer", "settings", "microbatch_pairs"):
            del options[name]
        if importlib.util.find_spec("flash_attn") is not None:
            yield trl(contender.microbatch_pairs, **{**options, "attention": "flash_attention_2"})
        if importlib.util.find_spec("liger_kernel") is not None:
            yield trl(contender.microbatch_pairs, **{**options, "liger": True})
        if compiled:
            yield trl(contender.microbatch_pairs, **{**options, "compiled": True})
