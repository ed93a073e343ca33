"""Checkpoints: a bitwise round trip, pruning, and what is refused."""

from __future__ import annotations

import resource
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import tiny_model
from torch import Tensor

from dpo_pack.checkpoint import TrainState, checkpoints, load_checkpoint, save_checkpoint, seed_everything
from dpo_pack.errors import CacheError, DpoPackError, RunError
from dpo_pack.health import Health
from dpo_pack.models import CompletionLogps
from dpo_pack.optim import adamw, learning_rate_schedule
from dpo_pack.sources import GlobalBatch

IDENTITY = {"data": "d", "plan": "p", "reference": "r"}


@dataclass(slots=True, kw_only=True)
class EmptySource:
    """A source whose only content is how far it has got."""

    next_step: int = 0
    num_steps: int = 10
    steps_fingerprint: str = "none"

    def __iter__(self) -> Iterator[GlobalBatch]:
        return iter(())

    def state_dict(self) -> dict[str, Any]:
        return {"next_step": self.next_step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next_step = state["next_step"]


def new_state(*, seed: int = 0) -> TrainState:
    policy = CompletionLogps(
        tiny_model("llama", seed=seed, num_hidden_layers=1), backend=None, autocast=None
    ).train()
    optimizer = adamw(policy, lr=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)
    scheduler = learning_rate_schedule(optimizer, "cosine", num_steps=10, warmup_steps=2, min_lr_ratio=0.0)
    return TrainState(policy=policy, optimizer=optimizer, scheduler=scheduler, source=EmptySource())


def take_step(state: TrainState) -> None:
    """A step whose gradients come from torch's own generator, which a checkpoint must bring back."""
    for parameter in state.policy.parameters():
        parameter.grad = torch.randn_like(parameter)
    state.optimizer.step()
    state.scheduler.step()
    state.step += 1
    state.num_pairs += 4
    state.num_tokens += 100
    state.num_flops += 1e9
    state.train_seconds += 0.1
    state.evaluation = {"held_out": {"loss": 0.1 * state.step}}
    state.health = Health(num_lines=state.step, fast={"kl/chosen": -0.1}, said=("accuracy_stuck",))
    state.source.load_state_dict({"next_step": state.step})


def state_at(step: int) -> TrainState:
    seed_everything(0)
    state = new_state()
    for _ in range(step):
        take_step(state)
    return state


def save(directory: Path, state: TrainState, *, keep: int = 2, metrics_offset: int = 0) -> Path:
    return save_checkpoint(directory, state, metrics_offset=metrics_offset, identity=IDENTITY, keep=keep)


def tensors(state: TrainState) -> dict[str, Tensor]:
    """Every tensor that the next steps depend on."""
    moments = {
        f"{number} {name}": value
        for number, values in state.optimizer.state_dict()["state"].items()
        for name, value in values.items()
    }
    return {**state.policy.state_dict(), **moments}


def assert_same(one: TrainState, other: TrainState) -> None:
    ours, theirs = tensors(one), tensors(other)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert one.scheduler.get_last_lr() == other.scheduler.get_last_lr()
    for name in ("step", "num_pairs", "num_tokens", "num_flops", "train_seconds", "evaluation", "health"):
        assert getattr(one, name) == getattr(other, name), name
    assert one.source.state_dict() == other.source.state_dict()


def one_line(function: Callable[[], object], kind: type[DpoPackError] = RunError) -> str:
    with pytest.raises(kind) as caught:
        function()
    assert str(caught.value).isprintable()
    return str(caught.value)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_a_loaded_state_is_bitwise_the_saved_one_and_goes_on_bitwise_the_same(tmp_path: Path) -> None:
    straight = state_at(3)
    path = save(tmp_path, straight, metrics_offset=321)
    assert path == tmp_path / "step-000003"
    resumed = new_state(seed=1)
    assert not torch.equal(
        tensors(resumed)["model.lm_head.weight"], tensors(straight)["model.lm_head.weight"]
    )
    torch.manual_seed(99)
    assert load_checkpoint(path, resumed, identity=IDENTITY) == 321
    assert_same(resumed, straight)
    for _ in range(3):
        take_step(resumed)
    assert_same(resumed, state_at(6))


def test_only_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    state = state_at(0)
    for _ in range(4):
        take_step(state)
        save(tmp_path, state, keep=2)
    assert names(tmp_path) == ["step-000003", "step-000004"]
    assert checkpoints(tmp_path) == [tmp_path / "step-000003", tmp_path / "step-000004"]
    assert names(tmp_path / "step-000004") == ["checkpoint.json", "state.pt"]


def test_a_checkpoint_of_the_same_step_replaces_the_earlier_one(tmp_path: Path) -> None:
    state = state_at(2)
    save(tmp_path, state, metrics_offset=1)
    save(tmp_path, state, metrics_offset=2)
    assert names(tmp_path) == ["step-000002"]
    assert load_checkpoint(tmp_path / "step-000002", new_state(), identity=IDENTITY) == 2


def test_the_one_just_written_stays_where_a_run_went_on_from_an_earlier_step(tmp_path: Path) -> None:
    later = state_at(5)
    save(tmp_path, later)
    take_step(later)
    save(tmp_path, later)
    path = save(tmp_path, state_at(2), keep=2)
    assert path in checkpoints(tmp_path)


def test_checkpoints_are_in_the_order_of_steps_beyond_a_million(tmp_path: Path) -> None:
    state = state_at(1)
    for state.step in (999_999, 1_000_000, 1_000_001):
        save(tmp_path, state)
    assert [path.name for path in checkpoints(tmp_path)] == ["step-1000000", "step-1000001"]


def test_what_is_written_or_removed_half_way_is_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = state_at(1)
    save(tmp_path, state, keep=1)
    take_step(state)

    def half_saved(content: object, file: Path) -> None:
        file.write_bytes(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", half_saved)
        with pytest.raises(KeyboardInterrupt):
            save(tmp_path, state)
    assert names(tmp_path) == ["step-000001"]

    def half_removed(path: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", half_removed)
        with pytest.raises(KeyboardInterrupt):
            save(tmp_path, state, keep=1)
    assert names(tmp_path) == ["step-000001", "step-000002"]
    assert checkpoints(tmp_path) == [tmp_path / "step-000002"]
    assert checkpoints(tmp_path / "nowhere") == []


def test_a_full_disk_is_a_cache_error_and_keeps_the_earlier_checkpoint(tmp_path: Path) -> None:
    state = state_at(1)
    save(tmp_path, state, keep=1)
    take_step(state)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, limits[1]))  # of one file, in bytes
    try:
        message = one_line(lambda: save(tmp_path, state, keep=1), CacheError)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert str(tmp_path / "step-000002") in message and "free space" in message
    assert names(tmp_path) == ["step-000001"]
    load_checkpoint(tmp_path / "step-000001", state, identity=IDENTITY)
    assert_same(state, state_at(1))


@pytest.mark.parametrize("name", list(IDENTITY))
def test_another_data_plan_or_reference_is_refused_before_anything_changes(name: str, tmp_path: Path) -> None:
    path = save(tmp_path, state_at(2))
    state = new_state()
    message = one_line(lambda: load_checkpoint(path, state, identity={**IDENTITY, name: "another"}))
    assert f"another {name}," in message and "output_dir" in message and "--overwrite" in message
    assert_same(state, new_state())


def test_every_changed_part_of_the_identity_is_named(tmp_path: Path) -> None:
    path = save(tmp_path, state_at(1))
    changed = dict.fromkeys(IDENTITY, "another")
    message = one_line(lambda: load_checkpoint(path, new_state(), identity=changed))
    assert "another data and another plan and another reference" in message


def test_a_directory_without_its_counters_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path, state_at(1))
    for damage in (b"", b'{"step": 1, "identi', None):
        if damage is None:
            (path / "checkpoint.json").unlink()
        else:
            (path / "checkpoint.json").write_bytes(damage)
        message = one_line(lambda: load_checkpoint(path, new_state(), identity=IDENTITY))
        assert str(path) in message and "checkpoint.resume" in message


def test_a_state_file_that_is_gone_empty_or_cut_short_is_a_one_line_error(tmp_path: Path) -> None:
    path = save(tmp_path, state_at(1))
    content = (path / "state.pt").read_bytes()
    for length in (0, 10, len(content) // 2, len(content) - 1):
        (path / "state.pt").write_bytes(content[:length])
        message = one_line(lambda: load_checkpoint(path, new_state(), identity=IDENTITY))
        assert f"{path}/state.pt is missing or damaged" in message and f"delete {path}" in message
    (path / "state.pt").unlink()
    assert "missing" in one_line(lambda: load_checkpoint(path, new_state(), identity=IDENTITY))


def test_no_flipped_byte_changes_a_state_unnoticed(tmp_path: Path) -> None:
    straight = state_at(1)
    path = save(tmp_path, straight)
    content = (path / "state.pt").read_bytes()
    # Random places in the tensors, and all kinds of places in the archive's index of contents at the end.
    generator = torch.Generator().manual_seed(0)
    positions = torch.randint(len(content), (60,), generator=generator).tolist()
    positions += range(len(content) - 1_500, len(content), 11)
    num_noticed = 0
    for position in positions:
        damaged = bytearray(content)
        damaged[position] ^= 0x41
        (path / "state.pt").write_bytes(damaged)
        state = new_state()
        try:
            load_checkpoint(path, state, identity=IDENTITY)
        except RunError as error:
            num_noticed += 1
            assert str(error).isprintable() and str(path) in str(error)
            assert_same(state, new_state())
        else:
            assert_same(state, straight)
    assert num_noticed > len(positions) / 2


def test_a_seed_decides_all_that_torch_draws() -> None:
    drawn = []
    for seed in (1, 1, 2, 2**32 - 1):
        seed_everything(seed)
        drawn.append(torch.randn(4).tolist())
    assert drawn[0] == drawn[1] != drawn[2] != drawn[3]
