"""Who is measured, on what, and what a measurement says."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

BETA = 0.1
LEARNING_RATE = 1e-4  # high, so that a difference in any update shows in the next step
LORA_RANK, LORA_ALPHA = 16, 32

# Settings of malloc, by name: environment variables. dpo-pack sets the second itself at its start.
MALLOCS: dict[str, dict[str, str]] = {
    "": {},
    "glibc keeps freed memory": {
        "MALLOC_MMAP_THRESHOLD_": str(32 * 2**20),
        "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1),
        "MALLOC_TOP_PAD_": str(64 * 2**20),
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """One way of doing the work; each trainer reads its own fields."""

    name: str
    trainer: str  # "dpo-pack" or "trl"
    settings: tuple[str, ...] = ()  # dpo-pack: recipe overrides
    microbatch_pairs: int = 0  # this and the next fields: only for TRL
    precompute: bool = False
    grouped: bool = False  # pairs of about equal length together: less padding, other steps
    gradient_checkpointing: bool = False
    attention: str = "sdpa"
    liger: bool = False
    compiled: bool = False
    reference_batch: int = 0  # pairs in a batch of the precomputed reference
    reference_only: bool = False  # the reference pass only, without steps
    malloc: str = ""  # a name in MALLOCS; for both trainers

    @property
    def environment(self) -> dict[str, str]:
        """Variables that its process starts with."""
        return MALLOCS[self.malloc]

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
    autocast: bool  # products in bf16; on CUDA they always are
    lora: bool
    gradient_checkpointing: bool  # only dpo-pack's; TRL's is in its contender
    warmup_steps: int  # left out of the times: they compile kernels and grow memory pools


@dataclass(slots=True, kw_only=True)
class Measurement:
    """One run of one contender. `failure` says why there are no numbers."""

    contender: str
    failure: str | None = None
    digest: str = ""  # hash of the token ids that were trained on, in their order
    pairs: int = 0
    step_seconds: list[float] = field(default_factory=list)
    step_tokens: list[int] = field(default_factory=list)  # [steps], both sequences whole, without padding
    reference_seconds: float = 0.0  # a pass over all pairs; 0 if the reference runs in each step
    startup_seconds: float | None = (
        None  # from the start of the process to the first step, reference left out
    )
    computed_tokens: int = 0  # in the training forwards, padding included
    cpu_seconds: float = 0.0  # of all threads, in the reference pass and all steps
    peak_memory_bytes: int = 0  # on CUDA: allocated on the device, else: of the process
    losses: list[float] = field(default_factory=list)  # [steps], like the next fields
    grad_norms: list[float] = field(default_factory=list)
    chosen_logps: list[float] = field(default_factory=list)  # means, nats
    rejected_logps: list[float] = field(default_factory=list)
    step_graphs: list[int] = field(default_factory=list)  # [steps] graphs that torch compiled in each step

    def train_seconds(self, *, warmup_steps: int) -> float:
        """Of all steps, those that are not timed taken to be as fast, token by token, as the timed ones.

        Grouped by length, steps at the start hold longer pairs than others, so steps cannot stand for steps.
        """
        if not self.step_seconds:
            return 0.0
        tokens = self.step_tokens or [1] * len(self.step_seconds)
        return sum(self.step_seconds[warmup_steps:]) * sum(tokens) / sum(tokens[warmup_steps:])

    def seconds_a_pair(self, *, warmup_steps: int) -> float:
        """Of the reference and of training."""
        return (self.train_seconds(warmup_steps=warmup_steps) + self.reference_seconds) / self.pairs

    def reference_share(self, *, warmup_steps: int) -> float:
        """Part of the time that a reference pass of its own takes."""
        return self.reference_seconds / self.pairs / self.seconds_a_pair(warmup_steps=warmup_steps)


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
    batch = contender.reference_batch
    parts = [f"TRL, reference alone, batch {batch}"]
    if not contender.reference_only:
        parts = [f"TRL, micro-batch {microbatch_pairs}"]
        parts += ["precomputed reference" if contender.precompute else "live reference"]
        parts += [f"in batches of {batch}"] if batch and contender.precompute else []
    parts += ["grouped by length"] if contender.grouped else []
    parts += ["gradient checkpointing"] if contender.gradient_checkpointing else []
    parts += [contender.attention] if contender.attention != "sdpa" else []
    parts += ["liger kernels"] if contender.liger else []
    parts += ["torch.compile"] if contender.compiled else []
    parts += [contender.malloc] if contender.malloc else []
    return replace(contender, name=", ".join(parts))


def changed(contender: Contender, **options: Any) -> Contender:
    """One of TRL's with other settings, and the name that says so."""
    fields = {**asdict(contender), **options}
    return trl(
        **{name: value for name, value in fields.items() if name not in ("name", "trainer", "settings")}
    )


def trl_references(batches: Sequence[int]) -> Iterator[Contender]:
    """The precomputed reference alone: its batch size is a setting of its own."""
    for batch in batches:
        yield trl(batch, precompute=True, reference_batch=batch, reference_only=True)


def trl_sweep(
    microbatches: Sequence[int], *, reference_batch: int, gradient_checkpointing: bool
) -> Iterator[Contender]:
    """Micro-batch sizes with live and precomputed reference, in the given order and grouped by length."""
    for grouped in (False, True):
        for precompute in (False, True):
            for microbatch in microbatches:
                if grouped and microbatch == 1:
                    continue  # one pair a batch has the same padding in any order
                yield trl(
                    microbatch,
                    precompute=precompute,
                    reference_batch=reference_batch if precompute else 0,
                    grouped=grouped,
                    gradient_checkpointing=gradient_checkpointing,
                )


def trl_variants(
    fastest: Sequence[Contender], out_of_memory: Sequence[Contender], *, device: str, compiled: bool
) -> Iterator[Contender]:
    """What else could be its best: checkpointing where memory ran out; the fastest settings with other
    attention, compiled, with kernels that are installed here, with other settings of malloc.
    """
    from dpo_pack.model.attention.cuda import flash_attn_obstacle

    for contender in out_of_memory:
        if not contender.gradient_checkpointing:
            yield changed(contender, gradient_checkpointing=True)
    for contender in fastest:
        if device == "cpu":  # on a GPU it takes memory and time that grow with the square of the length
            yield changed(contender, attention="eager")
        if flash_attn_obstacle() is None:
            yield changed(contender, attention="flash_attention_2")
        if importlib.util.find_spec("liger_kernel") is not None:
            yield changed(contender, liger=True)
        if compiled:
            yield changed(contender, compiled=True)
        if device == "cpu":
            yield from (changed(contender, malloc=malloc) for malloc in MALLOCS if malloc)
