"""What a checkpoint holds, and going on from one, on any number of processes and with any strategy.

    step-000100/tensors/         the policy, its optimizer's state, a reference that moves: state_tensors.py
    step-000100/host.pt          what else optimizer, schedule and source keep
    step-000100/checkpoint.json  counters, what the run is, checksums of all files
    step-000100/model/           with checkpoint.export: the model for from_pretrained

No state of random generators: a step draws from (seed, step, rank), see seeding.py.
"""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from dpo_pack import ranks
from dpo_pack.checkpoint_dir import read_counters
from dpo_pack.checkpoint_writer import HOST_STATE, TENSORS, CheckpointContent
from dpo_pack.errors import RunError
from dpo_pack.health import Health
from dpo_pack.models import CompletionLogps
from dpo_pack.selection import Standing
from dpo_pack.sources import BatchSource
from dpo_pack.state_tensors import (
    optimizer_slots,
    optimizer_tensors,
    optimizer_values,
    policy_tensors,
    reference_tensors,
    set_optimizer,
)

_COUNTERS = ("step", "num_pairs", "num_tokens", "num_flops", "train_seconds", "evaluation", "owes_evaluation")


@dataclass(slots=True, kw_only=True)
class TrainState:
    """Everything that changes while training, and so everything a checkpoint holds."""

    policy: CompletionLogps
    optimizer: Optimizer
    scheduler: LRScheduler
    source: BatchSource
    reference: CompletionLogps | None = None  # one that follows the policy; a frozen one never changes
    step: int = 0  # optimizer steps taken
    num_pairs: int = 0  # trained on so far, copies counted
    num_tokens: int = 0  # computed so far by the policy
    num_flops: float = 0.0  # of training on this rank's rows, see data/flops.py
    train_seconds: float = 0.0  # in steps: without start-up, evaluation and checkpoints
    evaluation: dict[str, dict[str, Any]] = field(default_factory=dict)  # last metrics by held-out set
    owes_evaluation: bool = True  # the one after this step (0: before the first) is due and not finished
    standing: Standing = field(default_factory=Standing)
    health: Health = field(default_factory=Health)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a run can go on: what comes after it does not count before the next place is reached."""

    step: int  # after which it is
    metrics_offset: int  # length of metrics.jsonl, bytes
    source: dict[str, Any]  # state of the source of batches


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What a run is: what must be the same where it goes on, and what only has to be told."""

    fingerprints: dict[str, str]  # of data, plan, reference, ...: must be the same
    words: dict[str, str]  # what people call them
    versions: dict[str, str]  # of packages whose releases may change the last bits
    ranks: str  # "2 processes (ddp)"
    judged_by: str  # metric and held-out set that evaluations are compared by


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumption:
    """What going on from a checkpoint takes besides its state."""

    metrics_offset: int
    notes: tuple[str, ...]  # to be printed: what is not as it was, and may be


def checkpoint_content(
    state: TrainState, place: Place, identity: Identity, *, keep: int, num_best: int
) -> CheckpointContent:
    """What to write for `state` at `place`. Tensors are the state's own, the rest is copied."""
    counters = {name: getattr(state, name) for name in _COUNTERS}
    return CheckpointContent(
        step=state.step,
        tensors={
            **policy_tensors(state.policy),
            **reference_tensors(state.reference),
            **optimizer_tensors(state.policy, state.optimizer),
        },
        host=copy.deepcopy(
            {
                "optimizer": optimizer_values(state.policy, state.optimizer),
                "scheduler": state.scheduler.state_dict(),
                "source": place.source,
            }
        ),
        counters=copy.deepcopy(counters)
        | {
            "standing": state.standing.state_dict(),
            "health": state.health.state_dict(),
            "metrics_offset": place.metrics_offset,
            "identity": identity.fingerprints,
            "words": identity.words,
            "versions": identity.versions,
            "ranks": identity.ranks,
            "judged_by": identity.judged_by,
        },
        keep=keep,
        keep_steps=state.standing.best_steps[:num_best],
    )


def load_checkpoint(path: Path, state: TrainState, *, identity: Identity) -> Resumption:
    """Bring `state` to where the checkpoint was taken; every rank calls. Its files are whole, `find_damage`.

    Raises RunError when it belongs to other data, plan, reference or parameters.
    """
    counters = _counters(path)
    _refuse_another_run(path, counters, identity)
    host = _read_host_state(path / HOST_STATE)
    saved = _saved_tensors(path)
    tensors = {**policy_tensors(state.policy), **reference_tensors(state.reference)}
    if tensors.keys() != {name for name in saved if not name.startswith("optimizer.")}:
        raise RunError(f"{path} holds other parameters than this policy trains; delete it and run again")
    optimizer = optimizer_slots(state.policy, state.optimizer, saved)
    _read_tensors(path, {**tensors, **optimizer})
    set_optimizer(state.policy, state.optimizer, optimizer, host["optimizer"])
    state.scheduler.load_state_dict(host["scheduler"])
    state.source.load_state_dict(host["source"])
    for name in _COUNTERS:
        setattr(state, name, counters[name])
    if counters.get("judged_by") == identity.judged_by:  # else its values compare with none to come
        state.standing = Standing.load(counters["standing"])
    state.health = Health.load(counters["health"])
    return Resumption(
        metrics_offset=counters["metrics_offset"], notes=tuple(_allowed_changes(counters, identity))
    )


def load_policy(path: Path, policy: nn.Module) -> dict[str, Any]:
    """Give `policy` a checkpoint's weights; returns its last evaluation. Every rank calls."""
    counters = _counters(path)
    _read_tensors(path, policy_tensors(policy))
    evaluation: dict[str, Any] = counters["evaluation"]
    return evaluation


def _counters(path: Path) -> dict[str, Any]:
    counters = read_counters(path)
    if counters is None:
        raise RunError(
            f"{path} is not a checkpoint (no readable checkpoint.json); set checkpoint.resume: auto or never"
        )
    return counters


def _refuse_another_run(path: Path, counters: Mapping[str, Any], identity: Identity) -> None:
    then = counters["identity"]
    changed = [
        f"{name}{_then_and_now(counters['words'].get(name), identity.words.get(name))}"
        for name in {**identity.fingerprints, **then}
        if then.get(name) != identity.fingerprints.get(name)
    ]
    if changed:
        raise RunError(
            f"{path} was taken with another {' and another '.join(changed)}, so going on would train "
            "something else; use another output_dir, or start again with checkpoint.resume=never and "
            "--overwrite"
        )


def _then_and_now(then: str | None, now: str | None) -> str:
    return "" if then == now or then is None or now is None else f" ({then} then, {now} now)"


def _allowed_changes(counters: Mapping[str, Any], identity: Identity) -> Iterator[str]:
    if counters.get("judged_by") != identity.judged_by and counters["standing"]["best"]:
        yield "Note: evaluations were compared by another metric or held-out set; from here on they are anew"
    if counters["ranks"] != identity.ranks:
        yield f"Note: the checkpoint was taken on {counters['ranks']}, and this is {identity.ranks}"
    versions = [
        f"{package} {then} then, {identity.versions.get(package, 'none')} now"
        for package, then in counters["versions"].items()
        if then != identity.versions.get(package)
    ]
    if versions:
        yield f"Warning: versions have changed, and with them perhaps last bits: {'; '.join(versions)}"


def _saved_tensors(path: Path) -> dict[str, Any]:
    """Size and type of each saved tensor by name."""
    return dict(FileSystemReader(path / TENSORS).read_metadata().state_dict_metadata)


def _read_tensors(path: Path, into: dict[str, Tensor]) -> None:
    is_alone = ranks.num_ranks() == 1
    # That one process loads alone is what we want.
    warnings.filterwarnings("ignore", message="torch.distributed is disabled", module="torch")
    try:
        load(
            into,
            storage_reader=FileSystemReader(path / TENSORS),
            process_group=None if is_alone else ranks.host_group(),
            no_dist=is_alone,
        )
    except CheckpointException as error:
        (cause, _), *_ = error.failures.values()
        raise RunError(f"{path} cannot be read ({cause}); delete it and run again") from error


def _read_host_state(file: Path) -> dict[str, Any]:
    try:
        state: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, pickle.UnpicklingError) as error:
        raise RunError(f"{file} is missing or damaged; delete {file.parent} and run again") from error
    return state
