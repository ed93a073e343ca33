"""What to change in a recipe whose run does not fit in memory, cheapest first, and what that comes to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from dpo_pack.memory import MemorySetting, RowSize, estimate_memory

LORA_RANK = 16
_MOST_PROCESSES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A change of the recipe, as it is written on the command line, and the setting it makes."""

    override: str
    setting: MemorySetting

    @property
    def total_bytes(self) -> float:
        return estimate_memory(self.setting).total


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a run has to fit in, and how short its rows can be."""

    available_bytes: float
    longest_pair: int  # tokens; a pair is never cut, and a longer one has a row of its own

    def fit(self, setting: MemorySetting) -> bool:
        return estimate_memory(setting).total <= self.available_bytes


def advice(setting: MemorySetting, limits: Limits) -> list[Change]:
    """Every single change that makes the run fit; where none does, the cheapest of the smallest sets of them.

    Empty where all together do not.
    """
    for count in range(1, len(_CHANGES) + 1):
        made = (_make(setting, limits, steps) for steps in combinations(_CHANGES, count))
        fitting = [change for change in made if change is not None and limits.fit(change.setting)]
        if fitting:
            return fitting if count == 1 else fitting[:1]
    return []


def _make(setting: MemorySetting, limits: Limits, steps: Sequence[_ChangeOf]) -> Change | None:
    """All of `steps` one after another; None where one of them changes nothing, or the recipe is refused."""
    overrides = []
    for step in steps:
        change = step(setting, limits)
        if change is None:
            return None
        overrides.append(change.override)
        setting = change.setting
    return None if _rounds_updates(setting) else Change(override=" ".join(overrides), setting=setting)


def _rounds_updates(setting: MemorySetting) -> bool:
    """Whether bfloat16 would lose most of the updates, which recipe_checks refuses."""
    if setting.frozen_bytes != 2:
        return False
    is_full, mixup = setting.lora_rank is None, setting.reference_mixup
    return (is_full and setting.optimizer != "adamw") or (mixup is not None and (mixup < 1 or not is_full))


def _recompute(setting: MemorySetting, limits: Limits) -> Change | None:
    if setting.checkpoints_activations:
        return None
    return Change(
        override="model.gradient_checkpointing=true", setting=replace(setting, checkpoints_activations=True)
    )


def _shorten_rows(setting: MemorySetting, limits: Limits) -> Change | None:
    """Rows halved until the run fits, or they are as short as the longest pair."""
    tokens = setting.row.tokens
    if limits.longest_pair >= tokens:
        return None
    while tokens > limits.longest_pair:
        tokens = max(tokens // 2, limits.longest_pair)
        shorter = replace(setting, row=scaled_row(setting.row, tokens))
        if limits.fit(shorter):
            break
    override = f"packing.token_budget={tokens}"
    if setting.rows_per_step is not None:  # rows are nearly full: a step keeps about as many pairs
        override += f" packing.rows_per_step={round(setting.rows_per_step * setting.row.tokens / tokens)}"
    return Change(override=override, setting=shorter)


def scaled_row(row: RowSize, tokens: int) -> RowSize:
    """A row of `tokens` of which the same parts are shared and scored."""
    part = tokens / row.tokens
    return RowSize(tokens=tokens, keys=round(part * row.keys), scored=round(part * row.scored))


def _use_bfloat16(setting: MemorySetting, limits: Limits) -> Change | None:
    is_full = setting.lora_rank is None
    is_fp32 = (setting.trained_bytes if is_full else setting.frozen_bytes) == 4
    if not is_fp32:
        return None
    return Change(
        override="model.dtype=bfloat16",
        setting=replace(
            setting,
            trained_bytes=2 if is_full else setting.trained_bytes,
            frozen_bytes=2,
            activation_bytes=2,
            autocasts=False,
        ),
    )


def _shard(setting: MemorySetting, limits: Limits) -> Change | None:
    """The fewest devices, by doubling, in whose shards the run fits; on the CPU they share one memory."""
    if setting.device == "cpu" or not setting.can_shard or setting.optimizer != "adamw":
        return None
    num_shards = 2 * setting.num_shards
    while num_shards < _MOST_PROCESSES and not limits.fit(replace(setting, num_shards=num_shards)):
        num_shards *= 2
    return Change(
        override=f"distributed.num_processes={num_shards} distributed.strategy=fsdp2",
        setting=replace(setting, num_shards=num_shards),
    )


def _adapt(setting: MemorySetting, limits: Limits) -> Change | None:
    if setting.lora_rank is not None or not setting.can_adapt:
        return None
    return Change(
        override=f"'model.lora={{r: {LORA_RANK}}}'",
        setting=replace(
            setting,
            num_trained=setting.shape.num_adapter_parameters(LORA_RANK),
            num_frozen=setting.num_trained + setting.num_frozen,
            trained_bytes=4,
            frozen_bytes=setting.trained_bytes,
            lora_rank=LORA_RANK,
            trains_head=False,
        ),
    )


_ChangeOf = Callable[[MemorySetting, Limits], Change | None]
# Those that cost time come first, then what changes numerics, needs devices, or trains something else.
_CHANGES: tuple[_ChangeOf, ...] = (_recompute, _shorten_rows, _use_bfloat16, _shard, _adapt)
