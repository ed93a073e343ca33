"""The content of a checkpoint. A run can resume from it on any number of ranks and with any strategy.

    step-000100/tensors/         weights, optimizer state, a reference that changes; written by all ranks
    step-000100/host.pt          state of the schedule, the source of batches and the optimizer's groups
    step-000100/checkpoint.json  counters, identity of the run, checksums of the other files
    step-000100/model/           the model for from_pretrained, if checkpoint.export is set

torch.distributed.checkpoint stores each tensor under a name that is the same on any number of ranks. It
stores the position of each shard in the whole tensor, so shards load into whole tensors and other shards.
A checkpoint has no state of random generators: a step's random numbers depend on (seed, step, rank), see
system/seeding.py.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from dpo_pack.model.scorer import CompletionLogps
from dpo_pack.run.checkpoint.directory import read_counters
from dpo_pack.run.checkpoint.writer import HOST_STATE, TENSORS, CheckpointContent
from dpo_pack.run.selection import Standing
from dpo_pack.system import ranks
from dpo_pack.system.errors import RunError
from dpo_pack.training.batches import BatchSource
from dpo_pack.training.health import Health

_COUNTERS = ("step", "num_pairs", "num_tokens", "num_flops", "train_seconds", "evaluation", "owes_evaluation")


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """The content of checkpoint.json: all plain values (no tensors) of TrainState, Place and Identity."""

    step: int
    num_pairs: int
    num_tokens: int
    num_flops: float
    train_seconds: float
    evaluation: dict[str, dict[str, Any]]
    owes_evaluation: bool
    standing: Standing
    health: Health
    metrics_offset: int
    metrics_crc32: int
    identity: dict[str, str]
    words: dict[str, str]
    versions: dict[str, str]
    ranks: str
    judged_by: str


@dataclass(slots=True, kw_only=True)
class TrainState:
    """All values that change during training. A checkpoint holds them."""

    policy: CompletionLogps
    optimizer: Optimizer
    scheduler: LRScheduler
    source: BatchSource
    reference: CompletionLogps | None = None  # a reference that follows the policy, else None
    step: int = 0  # optimizer steps taken
    num_pairs: int = 0  # pairs trained on so far; copies of a pair count
    num_tokens: int = 0  # tokens that the policy has computed so far
    num_flops: float = 0.0  # FLOPs of training on this rank's rows, see packing/flops.py
    train_seconds: float = 0.0  # seconds in steps, without start-up, evaluation, checkpoints
    evaluation: dict[str, dict[str, Any]] = field(default_factory=dict)  # latest metrics, by held-out set
    owes_evaluation: bool = True  # the evaluation after `step` steps is due and not finished
    standing: Standing = field(default_factory=Standing)
    health: Health = field(default_factory=Health)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A point from which the run can resume. A run that resumes there must repeat all later work."""

    step: int  # the place is after this step
    metrics_offset: int  # length of metrics.jsonl, bytes
    metrics_crc32: int = 0  # of these bytes
    source: dict[str, Any]  # state of the source of batches


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Identifies a run. `fingerprints` must not change when the run resumes; other changes are reported."""

    fingerprints: dict[str, str]  # of data, plan, reference, ...
    words: dict[str, str]  # the same facts in words, for messages
    versions: dict[str, str]  # versions of packages that may change the last bits of results
    ranks: str  # "2 processes (ddp)"
    judged_by: str  # the metric and held-out set that compare evaluations


def checkpoint_content(
    state: TrainState, place: Place, identity: Identity, *, keep: int, num_best: int
) -> CheckpointContent:
    """Returns the content to write for `state` at `place`: the state's tensors, and copies of the rest."""
    optimizer = state.optimizer
    moments: Any = {}
    if optimizer.state:  # if it is empty, torch would call optimizer.step() to fill it
        moments = get_optimizer_state_dict(state.policy, optimizer)["state"]
    return CheckpointContent(
        step=state.step,
        tensors={**_weights(state), "optimizer": moments},
        host=copy.deepcopy(
            {
                "optimizer_groups": [
                    {key: value for key, value in group.items() if key != "params"}
                    for group in optimizer.param_groups
                ],
                "scheduler": state.scheduler.state_dict(),
                "source": place.source,
            }
        ),
        counters=copy.deepcopy({name: getattr(state, name) for name in _COUNTERS})
        | {
            "standing": asdict(state.standing),
            "health": asdict(state.health),
            "metrics_offset": place.metrics_offset,
            "metrics_crc32": place.metrics_crc32,
            "identity": identity.fingerprints,
            "words": identity.words,
            "versions": identity.versions,
            "ranks": identity.ranks,
            "judged_by": identity.judged_by,
        },
        keep=keep,
        keep_steps=state.standing.best_steps[:num_best],
    )


def load_checkpoint(path: Path, state: TrainState, *, identity: Identity) -> tuple[int, list[str]]:
    """Loads a checkpoint into `state`, which must be new. Every rank must call it.

    Returns the length of metrics.jsonl in bytes when the checkpoint was written, and messages about changes
    since then that are allowed. The caller must have checked the files with `find_damage`. Raises RunError if
    the checkpoint belongs to other data, another plan (pairs of each step), another reference or other
    parameters.
    """
    counters = saved_counters(path)
    _refuse_another_run(path, counters, identity)
    host = _read_host_state(path / HOST_STATE)
    weights = _weights(state)
    saved = _names_of_parameters(path)
    if any(weights[part].keys() != saved[part] for part in weights):
        raise RunError(
            f"{path} holds other parameters than this policy trains, or an earlier version of dpo-pack "
            "wrote it; delete it and run again"
        )
    optimizer = _new_optimizer_state(state)
    # A parameter that never had a gradient has no moments in the checkpoint.
    moments = {name: kept for name, kept in optimizer["state"].items() if name in saved["optimizer"]}
    assert moments.keys() == saved["optimizer"]
    _read_tensors(path, {**weights, "optimizer": moments})
    set_optimizer_state_dict(
        state.policy,
        state.optimizer,
        {**optimizer, "state": moments},
        options=StateDictOptions(strict=False),
    )
    for group, settings in zip(state.optimizer.param_groups, host["optimizer_groups"], strict=True):
        group.update(settings)
    state.scheduler.load_state_dict(host["scheduler"])
    state.source.load_state_dict(host["source"])
    for name in _COUNTERS:
        setattr(state, name, getattr(counters, name))
    if counters.judged_by == identity.judged_by:  # else the saved values cannot be compared
        state.standing = counters.standing
    state.health = counters.health
    return counters.metrics_offset, list(_allowed_changes(counters, identity))


def load_policy(path: Path, policy: nn.Module) -> dict[str, Any]:
    """Loads a checkpoint's weights into `policy`; returns its latest evaluation. Every rank must call it."""
    _read_tensors(path, {"policy": _trained_parameters(policy)})
    return saved_counters(path).evaluation


def _weights(state: TrainState) -> dict[str, dict[str, Tensor]]:
    """Returns the parameters that change in training: of the policy, and of a reference that follows it."""
    reference = () if state.reference is None else state.reference.named_parameters()
    return {
        "policy": _trained_parameters(state.policy),
        "reference": {name: parameter.detach() for name, parameter in reference},
    }


def _trained_parameters(policy: nn.Module) -> dict[str, Tensor]:
    """Returns the trained parameters by name, tied weights once. (get_model_state_dict has them twice.)"""
    return {name: p.detach() for name, p in policy.named_parameters() if p.requires_grad}


def _new_optimizer_state(state: TrainState) -> dict[str, Any]:
    """Returns the state of a new optimizer: tensors with the right device and shards, to load into.

    torch creates this state by a step that changes nothing, but only if no parameter has a gradient. DDP's
    parameters have gradients from the start (views of DDP's buffers), so this function removes and restores
    the gradients.
    """
    gradients = [(parameter, parameter.grad) for parameter in state.policy.parameters()]
    state.optimizer.zero_grad(set_to_none=True)
    optimizer_state: dict[str, Any] = get_optimizer_state_dict(state.policy, state.optimizer)
    for parameter, gradient in gradients:
        parameter.grad = gradient
    return optimizer_state


def saved_counters(path: Path) -> Counters:
    """Returns the content of a checkpoint's checkpoint.json. Raises RunError if it cannot be read."""
    counters: Counters | None = read_counters(path, Counters)
    if counters is None:
        raise RunError(
            f"{path} is not a checkpoint of this version of dpo-pack (no readable checkpoint.json); give "
            "another with checkpoint.resume, or set it to never"
        )
    return counters


def _refuse_another_run(path: Path, counters: Counters, identity: Identity) -> None:
    then = counters.identity
    changed = [
        f"{name}{_then_and_now(counters.words.get(name), identity.words.get(name))}"
        for name in {**identity.fingerprints, **then}
        if then.get(name) != identity.fingerprints.get(name)
    ]
    if changed:
        raise RunError(
            f"{path} was saved with another {' and another '.join(changed)}, so going on would train "
            "something else; use another output_dir, or start again with checkpoint.resume=never and "
            "--overwrite"
        )


def _then_and_now(then: str | None, now: str | None) -> str:
    return "" if then == now or then is None or now is None else f" ({then} then, {now} now)"


def _allowed_changes(counters: Counters, identity: Identity) -> Iterator[str]:
    if counters.judged_by != identity.judged_by and counters.standing.best:
        yield (
            "Note: earlier evaluations were compared by another metric or held-out set, so only later ones "
            "can be the best of the run"
        )
    if counters.ranks != identity.ranks:
        yield f"Note: the checkpoint was written on {counters.ranks}, and this run is on {identity.ranks}"
    versions = [
        f"{package} {then} then, {identity.versions.get(package, 'none')} now"
        for package, then in counters.versions.items()
        if then != identity.versions.get(package)
    ]
    if versions:
        changed = "; ".join(versions)
        yield f"Warning: packages have other versions, which may change the last bits of results: {changed}"


def _names_of_parameters(path: Path) -> dict[str, set[str]]:
    """Returns the names of a checkpoint's parameters under `policy`, `reference` and `optimizer`."""
    names: dict[str, set[str]] = {"policy": set(), "reference": set(), "optimizer": set()}
    for part, *name in FileSystemReader(path / TENSORS).read_metadata().planner_data.values():
        names.setdefault(part, set()).update(name[:1])
    return names


def _read_tensors(path: Path, into: dict[str, Any]) -> None:
    is_alone = ranks.num_ranks() == 1
    # torch warns if one process loads alone, but here that is right.
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
        return {name: state[name] for name in ("optimizer_groups", "scheduler", "source")}
    except Exception as error:  # torch.load raises any class for a damaged file
        raise RunError(f"{file} is missing or damaged; delete {file.parent} and run again") from error
