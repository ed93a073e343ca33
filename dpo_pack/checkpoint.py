"""Save and resume the full state of a run. A checkpoint directory is whole or absent."""

from __future__ import annotations

import pickle
import random
import shutil
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from dpo_pack.errors import RunError
from dpo_pack.files import read_json, write_json_atomically, written_aside
from dpo_pack.health import Health
from dpo_pack.models import CompletionLogps
from dpo_pack.sources import BatchSource

# What reading a file with wrong bytes in it has been seen to raise.
_DAMAGE = (
    OSError,
    RuntimeError,
    EOFError,
    ValueError,
    LookupError,
    zipfile.BadZipFile,
    pickle.UnpicklingError,
)


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
    health: Health = field(default_factory=Health)


def save_checkpoint(
    directory: Path, state: TrainState, *, metrics_offset: int, identity: dict[str, str], keep: int
) -> Path:
    """Write `directory`/step-000100 and remove all but the newest `keep` checkpoints.

    `metrics_offset` is the length of metrics.jsonl in bytes; `identity` names the data, plan and reference
    the state belongs to. Raises CacheError when the disk refuses.
    """
    path = directory / f"step-{state.step:06d}"
    with written_aside(path) as temporary:
        temporary.mkdir()
        _write_state(
            temporary / "state.pt",
            {
                "policy": _policy_state(state.policy.model),
                "reference": None if state.reference is None else state.reference.model.state_dict(),
                "optimizer": state.optimizer.state_dict(),
                "scheduler": state.scheduler.state_dict(),
                "source": state.source.state_dict(),
                "random": _random_state(),
            },
        )
        counters = {
            "step": state.step,
            "num_pairs": state.num_pairs,
            "num_tokens": state.num_tokens,
            "num_flops": state.num_flops,
            "train_seconds": state.train_seconds,
            "evaluation": state.evaluation,
            "health": state.health.state_dict(),
            "metrics_offset": metrics_offset,
            "identity": identity,
        }
        write_json_atomically(temporary / "checkpoint.json", counters)
    for old in checkpoints(directory)[:-keep]:
        if old != path:  # after going on from an earlier checkpoint, it may not be among the newest
            _remove(old)
    return path


def _remove(path: Path) -> None:
    # First the file that makes it count as whole: what is killed half-way must not look like one.
    (path / "checkpoint.json").unlink()
    shutil.rmtree(path)


def checkpoints(directory: Path) -> list[Path]:
    """Whole checkpoints of a run, oldest first."""
    found = (path.parent for path in directory.glob("step-*/checkpoint.json"))
    return sorted(found, key=lambda path: (len(path.name), path.name))  # from step 1,000,000 on, 7 digits


def drop_later_checkpoints(directory: Path, step: int) -> None:
    """Remove checkpoints after `step`: a run that goes on from there takes those steps anew."""
    for path in checkpoints(directory):
        if int(path.name.removeprefix("step-")) > step:
            _remove(path)


def load_checkpoint(path: Path, state: TrainState, *, identity: dict[str, str]) -> int:
    """Bring `state` to where the checkpoint was taken; returns the length of metrics.jsonl then, in bytes.

    Raises RunError when the checkpoint is damaged or belongs to other data, plan or reference.
    """
    counters = read_json(path / "checkpoint.json")
    if counters is None:
        raise RunError(
            f"{path} is not a checkpoint (no readable checkpoint.json); set checkpoint.resume: auto or never"
        )
    changed = [name for name, value in identity.items() if counters["identity"].get(name) != value]
    if changed:
        raise RunError(
            f"{path} was taken with another {' and another '.join(changed)}, so going on would train "
            "something else; use another output_dir, or start again with checkpoint.resume=never and "
            "--overwrite"
        )
    saved = _read_state(path / "state.pt")
    _load_policy_state(state.policy.model, saved["policy"], path)
    if state.reference is not None:
        state.reference.model.load_state_dict(saved["reference"])
    state.optimizer.load_state_dict(saved["optimizer"])
    state.scheduler.load_state_dict(saved["scheduler"])
    state.source.load_state_dict(saved["source"])
    _set_random_state(saved["random"])
    for name in ("step", "num_pairs", "num_tokens", "num_flops", "train_seconds", "evaluation"):
        setattr(state, name, counters[name])
    state.health = Health.load(counters.get("health", {}))
    return int(counters["metrics_offset"])


def _policy_state(model: nn.Module) -> dict[str, Tensor]:
    """All of the model's tensors; where some are frozen, as under an adapter, those that are trained."""
    tensors: dict[str, Tensor] = model.state_dict()
    parameters = dict(model.named_parameters(remove_duplicate=False))
    if all(parameter.requires_grad for parameter in parameters.values()):
        return tensors
    return {name: tensors[name] for name, parameter in parameters.items() if parameter.requires_grad}


def _load_policy_state(model: nn.Module, saved: dict[str, Tensor], path: Path) -> None:
    if saved.keys() != _policy_state(model).keys():
        raise RunError(f"{path} holds other parameters than this policy trains; delete it and run again")
    model.load_state_dict(saved, strict=False)


def _write_state(file: Path, state: dict[str, Any]) -> None:
    try:
        torch.save(state, file)
    except RuntimeError as error:
        if "inline_container" not in str(error):
            raise
        # How torch's archive writer says that the disk took only part of it.
        raise OSError("it could not be written in full") from error


def _read_state(file: Path) -> dict[str, Any]:
    try:
        with zipfile.ZipFile(file) as archive:
            if archive.testzip() is not None:  # torch writes checksums and does not look at them
                raise zipfile.BadZipFile
        state: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
    except _DAMAGE as error:
        raise RunError(f"{file} is missing or damaged; delete {file.parent} and run again") from error
    return state


def _random_state() -> dict[str, Any]:
    """torch's generators. Batches draw nothing at run time, so Python's and numpy's have no say."""
    cuda: list[Tensor] = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {"torch": torch.get_rng_state(), "cuda": cuda}


def _set_random_state(saved: dict[str, Any]) -> None:
    torch.set_rng_state(saved["torch"])
    if torch.cuda.is_available() and len(saved["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(saved["cuda"])


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
