"""The pass that fills the reference cache: rows without gradients, the costliest first.

Legend: G groups of the work, S sequences of a row.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from dpo_pack.data.lengths import FloatArray, IntArray
from dpo_pack.errors import ModelError
from dpo_pack.host_copies import HostCopies
from dpo_pack.layout import Group, Row, layout_row, packed_row, padded_row
from dpo_pack.model_shape import model_shape
from dpo_pack.models import CompletionLogps, RowLogps
from dpo_pack.reference_cache import ReferenceCache
from dpo_pack.reference_parts import SequenceLogps, TokenLogps
from dpo_pack.reference_work import ReferenceWork, plan_rows, split_row


@dataclass(frozen=True, slots=True, kw_only=True)
class PassSettings:
    """How rows are made and how often they are written."""

    token_budget: int
    share_prompt: bool
    pad_token_id: int
    device: torch.device
    per_token: bool = False  # keep per-token values too, for a loss that weighs single tokens
    rank: int = 0
    num_ranks: int = 1
    in_lockstep: bool = False  # the model is sharded: every row takes a row of all ranks
    write_every_seconds: float = 20.0
    metadata: Mapping[str, str] = field(default_factory=dict)  # kept with each part, for people


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """Part of a pass: one row, or all of them."""

    num_sequences: int
    num_pairs: int  # pairs with a sequence to compute
    num_tokens: int  # computed, prompts once where they are shared
    flops: float  # estimated


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PassPlan:
    """This rank's rows, and what they cost."""

    work: ReferenceWork
    rows: Sequence[IntArray]  # groups of each
    idle_rows: Sequence[IntArray]  # computed last and thrown away, because other ranks still have a row
    row_tokens: IntArray  # [G] as the budget counts them
    tokens: IntArray  # [G] that a forward computes, padding not counted
    flops: FloatArray  # [G]

    def amount(self, groups: IntArray) -> Amount:
        return Amount(
            num_sequences=int(self.work.missing[groups].sum()),
            num_pairs=len(groups),
            num_tokens=int(self.tokens[groups].sum()),
            flops=float(self.flops[groups].sum()),
        )

    @property
    def total(self) -> Amount:
        return self.amount(np.concatenate([np.zeros(0, dtype=np.int64), *self.rows]))


def plan_pass(work: ReferenceWork, scorer: CompletionLogps, settings: PassSettings) -> PassPlan:
    """What this rank has to do of the work."""
    is_packed = scorer.backend is not None
    shares = settings.share_prompt and is_packed
    # Its code, remote or not, has been run to load it.
    shape = model_shape(scorer.model.config, trust_remote_code=True)
    if not is_packed:
        shape = replace(shape, last_block_weights=0.0)
    rows, idle_rows = plan_rows(
        work.lengths,
        work.sides,
        work.missing,
        token_budget=settings.token_budget,
        is_packed=is_packed,
        share_prompt=shares,
        shape=shape,
        rank=settings.rank,
        num_ranks=settings.num_ranks,
        in_lockstep=settings.in_lockstep,
    )
    tokens = work.lengths.row_tokens(work.missing, share_prompt=shares)
    return PassPlan(
        work=work,
        rows=rows,
        idle_rows=idle_rows,
        row_tokens=tokens if is_packed else work.lengths.padded_tokens(work.missing),
        tokens=tokens,
        flops=work.lengths.flops(work.missing, share_prompt=shares, shape=shape),
    )


@torch.no_grad()
def compute_missing(
    cache: ReferenceCache,
    plan: PassPlan,
    scorer: CompletionLogps,
    settings: PassSettings,
    *,
    progress: Callable[[Amount], None] = lambda row: None,
) -> int:
    """Compute the plan's rows into the cache; returns the token budget that fitted in memory.

    A row that does not fit is split in two and so is the budget for all that follow, unless ranks compute in
    lockstep. `progress` is told of each finished row. A killed pass loses what was computed since the last
    part was written, an interrupted one at most the row whose results are on their way from the device.
    Raises CacheError when the disk refuses, ModelError when a log-prob is not finite or what cannot be split
    does not fit in memory.
    """
    budget = settings.token_budget
    rows = deque(plan.rows)
    computed: deque[tuple[IntArray, HostCopies]] = deque()  # groups of a row, and their results
    finished: list[SequenceLogps] = []
    written = time.monotonic()

    def finish_row() -> None:
        nonlocal finished, written
        members, results = computed.popleft()
        # One operation: a signal cannot come between a row's keys and its values.
        finished.append(_finished_row(plan.work, members, results))
        progress(plan.amount(members))
        if time.monotonic() - written > settings.write_every_seconds:
            _write(cache, finished, settings)
            finished, written = [], time.monotonic()

    try:
        while rows:
            members = rows.popleft()
            result = _try_row(plan.work, members, scorer, settings)
            if result is None:
                budget = _halved(budget, members, plan)
                if settings.in_lockstep:
                    raise _cannot_split(budget)
                rows = deque(
                    part for row in (members, *rows) for part in split_row(row, plan.row_tokens, budget)
                )
                continue
            computed.append((members, _copies(result, settings)))
            if len(computed) > _num_rows_behind(settings.device):
                finish_row()
        while computed:
            finish_row()
        for members in plan.idle_rows:
            if _try_row(plan.work, members, scorer, settings) is None:
                raise _cannot_split(_halved(budget, members, plan))
    finally:
        if finished:
            _write(cache, finished, settings)
    return budget


def probe_row(plan: PassPlan, scorer: CompletionLogps, settings: PassSettings, token_budget: int) -> bool:
    """Whether a row of `token_budget` tokens of the plan's costliest groups fits in memory; keeps nothing."""
    groups = np.concatenate(plan.rows)
    row = split_row(groups, plan.row_tokens, token_budget)[0]
    with torch.no_grad():
        return _try_row(plan.work, row, scorer, settings) is not None


def release_memory() -> None:
    """Give the memory of dropped models and tensors back to the device and to the operating system."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    with contextlib.suppress(OSError, AttributeError):  # other C libraries give back by themselves
        # glibc keeps freed blocks of up to 32 MiB, which is most weights of a model.
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def _try_row(
    work: ReferenceWork, members: IntArray, scorer: CompletionLogps, settings: PassSettings
) -> RowLogps | None:
    """What the model says of the groups' missing sequences; None when they do not fit in memory."""
    groups = [work.group(int(member)) for member in members]
    try:
        result: RowLogps = scorer(_row(groups, scorer.backend is not None, settings))
        return result
    except RuntimeError as error:
        if not _is_out_of_memory(error):
            raise
    # Here the error, whose traceback held on to the row's activations, is gone.
    release_memory()
    return None


def _is_out_of_memory(error: RuntimeError) -> bool:
    # torch has a class for accelerators, and for the CPU no more than a text.
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def _halved(budget: int, members: IntArray, plan: PassPlan) -> int:
    """The budget to go on with when this row did not fit."""
    tokens = int(plan.row_tokens[members].sum())
    if len(members) == 1:
        raise ModelError(
            f"the reference pass ran out of memory on row {plan.work.row_number(int(members[0]))} of its "
            f"source alone ({tokens:,} tokens); lower data.max_length, or free memory"
        )
    return max(1, min(budget, tokens) // 2)


def _cannot_split(budget: int) -> ModelError:
    """Of a sharded model: a row in two would be a row more than the other ranks compute."""
    return ModelError(
        "reference.token_budget: the reference pass ran out of memory, and rows of a sharded model are not "
        f"split while it runs; set reference.token_budget: {budget}"
    )


def _num_rows_behind(device: torch.device) -> int:
    """Rows that a row is read after it was queued, so that the device has the next one to go on with."""
    return 1 if device.type == "cuda" else 0


def _copies(result: RowLogps, settings: PassSettings) -> HostCopies:
    tensors = [result.sums, result.num_tokens]
    return HostCopies.begin([*tensors, result.token_logps.float()] if settings.per_token else tensors)


def _finished_row(work: ReferenceWork, members: IntArray, results: HostCopies) -> SequenceLogps:
    keys = [work.keys(int(member)) for member in members]
    sums, num_tokens, *token_logps = results.read()
    wrong = np.flatnonzero(~np.isfinite(sums))
    if len(wrong):
        group = int(np.repeat(members, [len(of_group) for of_group in keys])[wrong[0]])
        raise ModelError(
            f"the reference model gives row {work.row_number(group)} of its source a log-prob of "
            f"{sums[wrong[0]]}; check its weights, or give it more range with model.dtype: float32"
        )
    tokens = TokenLogps.of_lengths(token_logps[0], num_tokens) if token_logps else None
    return SequenceLogps(keys=np.concatenate(keys), sums=sums, num_tokens=num_tokens, tokens=tokens)


def _write(cache: ReferenceCache, finished: Sequence[SequenceLogps], settings: PassSettings) -> None:
    cache.append_all(SequenceLogps.join(finished), settings.metadata)


def _row(groups: Sequence[Group], is_packed: bool, settings: PassSettings) -> Row:
    if is_packed:
        return packed_row(layout_row(groups, share_prompt=settings.share_prompt), settings.device)
    return padded_row(groups, pad_token_id=settings.pad_token_id, device=settings.device)
