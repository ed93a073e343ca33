"""Checkpoints: a bitwise round trip, in the background too, pruning, damage, and what is refused."""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import signal
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.limits import no_file_beyond
from support.refusals import refusal
from support.tiny_models import tiny_model
from support.two_ranks import run_on_ranks
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, BytesStorageMetadata, MetadataIndex
from torch.optim.lr_scheduler import LambdaLR

import dpo_pack.run.checkpoint_files as checkpoint_files
from dpo_pack.model.scorer import CompletionLogps
from dpo_pack.run.checkpoint import checkpoint_content, load_checkpoint
from dpo_pack.run.checkpoint_files import CheckpointContent, CheckpointWriter, checkpoints, damage_of
from dpo_pack.run.state import Evaluations, Identity, ResumePoint, TrainState
from dpo_pack.system.errors import CacheError, RunError
from dpo_pack.system.interrupts import Interrupted
from dpo_pack.system.ranks import seed_step
from dpo_pack.training.health import Health
from dpo_pack.training.optim import build_optimizer, rate_factor
from dpo_pack.training.split_adamw import SplitAdamW

IDENTITY = Identity(
    fingerprints={"data": "d", "plan": "p", "reference": "r"},
    versions={"torch": "2.0", "transformers": "5.0"},
    ranks="one process",
    judged_by="loss of held_out, 0",
)


def new_state(
    *, seed: int = 0, dtype: torch.dtype = torch.float32, name: str = "adamw", device: str = "cpu",
    tied: bool = False,
) -> TrainState:  # fmt: skip
    model = tiny_model("llama", seed=seed, num_hidden_layers=1, tie_word_embeddings=tied)
    policy = CompletionLogps(model, backend=None, autocast=None).to(device=device, dtype=dtype).train()
    settings: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
    if name == "adafactor":
        optimizer = build_optimizer("adafactor", policy, **settings)
    elif dtype == torch.float32:
        optimizer = build_optimizer("adamw", policy, **settings)
    else:
        optimizer = SplitAdamW(policy.parameters(), **settings)
    falling = partial(rate_factor, name="cosine", num_steps=10, warmup_steps=2, min_lr_ratio=0.0)
    scheduler = LambdaLR(optimizer, falling)
    source: Any = SimpleNamespace(next_step=0)  # its only content is how far it has got
    source.state_dict = lambda: {"next_step": source.next_step}
    source.load_state_dict = lambda state: setattr(source, "next_step", state["next_step"])
    return TrainState(scorer=policy, optimizer=optimizer, scheduler=scheduler, source=source)


def take_step(state: TrainState) -> None:
    """A step whose gradients are drawn."""
    seed_step(7, step=state.step, rank=0)
    for parameter in state.scorer.parameters():
        parameter.grad = torch.randn_like(parameter)
    state.optimizer.step()
    state.scheduler.step()
    state.step += 1
    state.num_pairs += 4
    state.num_tokens += 100
    state.num_flops += 1e9
    state.train_seconds += 0.1
    state.evaluation = {"held_out": {"loss": 0.1 * state.step}}
    state.owes_evaluation = state.step % 2 == 1
    state.standing = Evaluations(
        best=((1, 0.1), (state.step, 0.2)), bar=0.1, num_since_improvement=state.step
    )
    state.health = Health(num_lines=state.step, fast={"kl/chosen": -0.1}, warned=("accuracy_stuck",))
    state.source.load_state_dict({"next_step": state.step})


def state_at(step: int, **settings: Any) -> TrainState:
    state = new_state(**settings)
    for _ in range(step):
        take_step(state)
    return state


def content(
    state: TrainState, *, keep: int = 2, num_best: int = 0, metrics_offset: int = 0
) -> CheckpointContent:
    place = ResumePoint(step=state.step, metrics_offset=metrics_offset, source=state.source.state_dict())
    return checkpoint_content(state, place, IDENTITY, keep=keep, num_best=num_best)


def save(directory: Path, state: TrainState, **settings: int) -> Path:
    with CheckpointWriter(directory=directory, in_background=False) as writer:
        return writer.write(content(state, **settings))


def load(path: Path, state: TrainState, **identity: Any) -> int:
    return load_checkpoint(path, state, identity=replace(IDENTITY, **identity))[0]


def tensors(state: TrainState) -> dict[str, Tensor]:
    """Every tensor that the next steps depend on."""
    moments = {
        f"{number} {name}": torch.as_tensor(value)  # Adafactor counts steps in an int
        for number, values in state.optimizer.state_dict()["state"].items()
        for name, value in values.items()
    }
    return {**state.scorer.state_dict(), **moments}


def assert_same(one: TrainState, other: TrainState) -> None:
    ours, theirs = tensors(one), tensors(other)
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert ours[name].dtype == theirs[name].dtype and torch.equal(ours[name], theirs[name]), name
    assert one.scheduler.get_last_lr() == other.scheduler.get_last_lr()
    for name in ("step", "num_pairs", "num_tokens", "num_flops", "train_seconds", "evaluation",
                 "owes_evaluation", "standing", "health"):  # fmt: skip
        assert getattr(one, name) == getattr(other, name), name
    assert one.source.state_dict() == other.source.state_dict()


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.parametrize(
    "settings",
    [{}, {"name": "adafactor"}, {"dtype": torch.bfloat16}, {"tied": True}],
    ids=["adamw", "adafactor", "bfloat16", "tied"],
)
def test_a_loaded_state_is_bitwise_the_saved_one_and_goes_on_bitwise_the_same(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    straight = state_at(3, **settings)
    path = save(tmp_path, straight, metrics_offset=321)
    assert path == tmp_path / "step-000003" and damage_of(path) is None
    resumed = new_state(seed=1, **settings)
    assert not torch.equal(
        tensors(resumed)["model.lm_head.weight"], tensors(straight)["model.lm_head.weight"]
    )
    assert load(path, resumed) == 321
    assert_same(resumed, straight)
    for _ in range(3):
        take_step(resumed)
    assert_same(resumed, state_at(6, **settings))


@pytest.mark.parametrize("settings", [{}, {"name": "adafactor"}], ids=["adamw", "adafactor"])
def test_parameters_that_never_had_a_gradient_have_no_optimizer_state_before_or_after(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    """Not even a checkpoint before the first update changes what the optimizer keeps."""
    never_updated, partly_updated = state_at(0, **settings), state_at(0, **settings)
    for parameter in list(partly_updated.scorer.parameters())[2:]:
        parameter.grad = torch.ones_like(parameter)
    partly_updated.optimizer.step()
    for state, name in ((never_updated, "never"), (partly_updated, "partly")):
        before = len(state.optimizer.state)
        path = save(tmp_path / name, state)
        assert len(state.optimizer.state) == before < len(list(state.scorer.parameters()))
        resumed = new_state(seed=1, **settings)
        load(path, resumed)
        assert_same(resumed, state)
        take_step(resumed)
        take_step(state)
        assert_same(resumed, state)


class EightBitSGD(torch.optim.Optimizer):
    """Keeps what bitsandbytes' optimizers keep: codes in uint8, scales by block, a number of steps."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            kept = self.state[parameter]
            if not kept:
                kept |= {"step": 0, "state1": torch.zeros_like(parameter, dtype=torch.uint8)}
                kept |= {"absmax1": torch.zeros(3, dtype=torch.float32)}
            kept["step"] += 1
            kept["state1"] += (parameter.grad * 10).to(torch.uint8)
            kept["absmax1"] += parameter.grad.abs().max()
            parameter -= self.param_groups[0]["lr"] * kept["state1"] * kept["absmax1"][0]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As bitsandbytes': torch's would cast codes to the parameter's type."""
        saved = state_dict["param_groups"][0]["params"]
        self.state.clear()
        for name, parameter in zip(saved, self.param_groups[0]["params"], strict=True):
            self.state[parameter] = dict(state_dict["state"][name])


def test_an_8_bit_optimizer_s_codes_scales_and_numbers_are_what_they_were(tmp_path: Path) -> None:
    straight, resumed = new_state(), new_state(seed=1)
    for state in (straight, resumed):
        state.optimizer = EightBitSGD(state.scorer.parameters())
        state.scheduler = LambdaLR(state.optimizer, lambda step: 1.0)
    for _ in range(3):
        take_step(straight)
    load(save(tmp_path, straight), resumed)
    take_step(straight)
    take_step(resumed)
    assert_same(resumed, straight)
    assert {kept["state1"].dtype for kept in resumed.optimizer.state.values()} == {torch.uint8}


def test_what_is_written_in_the_background_is_the_state_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write = threading.Event()
    write = checkpoint_files._write

    def write_later(*arguments: Any) -> None:
        assert threading.current_thread() is not threading.main_thread() and may_write.wait(30)
        write(*arguments)

    monkeypatch.setattr(checkpoint_files, "_write", write_later)
    state = state_at(2)
    with CheckpointWriter(directory=tmp_path, in_background=True) as writer:
        writer.write(content(state))
        take_step(state)
        state.evaluation["held_out"]["loss"] = 9.0
        assert checkpoints(tmp_path) == []
        may_write.set()
        writer.write(content(state))  # waits for the first one, whose memory it takes
    assert checkpoints(tmp_path) == [tmp_path / "step-000002", tmp_path / "step-000003"]
    resumed = new_state(seed=1)
    load(tmp_path / "step-000002", resumed)
    assert_same(resumed, state_at(2))
    load(tmp_path / "step-000003", resumed)
    assert_same(resumed, state)


def test_what_fails_in_the_background_is_told_at_the_next_occasion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_space(*arguments: Any, **settings: Any) -> None:
        raise OSError(28, "No space left on device")

    state = state_at(1)
    monkeypatch.setattr(checkpoint_files, "save", no_space)
    with CheckpointWriter(directory=tmp_path, in_background=True) as writer:
        writer.write(content(state))
        message = refusal(lambda: writer.write(content(state)), CacheError)
        assert f"cannot write {tmp_path / 'step-000001'}: No space left on device; free space" in message
        writer.wait()  # it is told once

    def leave_by(error: BaseException | None) -> None:
        with CheckpointWriter(directory=tmp_path, in_background=True) as writer:
            writer.write(content(state))
            if error is not None:
                raise error

    refusal(lambda: leave_by(None), CacheError)
    assert names(tmp_path) == []
    # A run that is asked to stop says that it goes on from what is saved: nothing is.
    refusal(lambda: leave_by(Interrupted(signal.SIGTERM)), CacheError)
    with pytest.raises(ZeroDivisionError):  # of two errors the first is the cause
        leave_by(ZeroDivisionError())


def test_the_model_in_a_checkpoint_is_checked_with_the_rest_and_part_of_one_that_fails_is_removed(
    tmp_path: Path,
) -> None:
    def export(directory: Path) -> None:
        (directory / "part").mkdir(parents=True)
        (directory / "part" / "model.safetensors").write_bytes(b"weights")

    def export_half(directory: Path) -> None:
        export(directory)
        raise OSError(errno.ENOSPC, "No space left on device")

    with CheckpointWriter(directory=tmp_path, in_background=False) as writer:
        path = writer.write(content(state_at(1)), export=export)
        message = refusal(lambda: writer.write(content(state_at(2)), export=export_half), CacheError)
    assert "No space left" in message and names(tmp_path) == ["step-000001"]
    assert names(path) == ["checkpoint.json", "host.pt", "model", "tensors"] and damage_of(path) is None
    (path / "model" / "part" / "model.safetensors").write_bytes(b"weighty")
    assert damage_of(path) == "model/part/model.safetensors has other content than was written"


@pytest.mark.gpu
def test_what_is_on_a_gpu_is_written_in_the_background_while_it_changes(tmp_path: Path) -> None:
    state = state_at(2, device="cuda")
    with CheckpointWriter(directory=tmp_path, in_background="auto") as writer:
        for _ in range(3):
            writer.write(content(state, keep=9))
            assert writer.in_background
            take_step(state)
    for step in (2, 3, 4):
        resumed = new_state(seed=1, device="cuda")
        load(tmp_path / f"step-{step:06d}", resumed)
        assert_same(resumed, state_at(step, device="cuda"))


def test_the_newest_and_the_best_checkpoints_are_kept_and_the_one_just_written(tmp_path: Path) -> None:
    state = state_at(0)
    for best in [(1,), (1, 2), (1, 2), (1, 4), (5, 1)]:
        take_step(state)
        state.standing = Evaluations(best=tuple((step, 0.5) for step in best))
        save(tmp_path, state, keep=1, num_best=2)
    assert names(tmp_path) == ["step-000001", "step-000005"]
    save(tmp_path, state, keep=2, metrics_offset=7)  # of the same step again
    assert names(tmp_path) == ["step-000001", "step-000005"] and load(tmp_path / "step-000005", state) == 7
    for state.step in (2, 999_999, 1_000_000, 1_000_001):  # 2: a run went on from an earlier step
        assert save(tmp_path, state, keep=2) in checkpoints(tmp_path)
    assert [path.name for path in checkpoints(tmp_path)] == ["step-1000000", "step-1000001"]


@pytest.mark.parametrize("what", ["tensors", "host state"])
def test_a_full_disk_is_a_cache_error_and_keeps_the_earlier_checkpoint(what: str, tmp_path: Path) -> None:
    """torch.save with a path raises RuntimeError where the disk is full, of which nothing can be told."""
    state = state_at(1)
    save(tmp_path, state, keep=1)
    take_step(state)

    def fill_disk(model: Path) -> None:
        model.parent.mkdir()
        (model.parent / "host.pt").symlink_to("/dev/full")

    def save_again() -> None:
        with CheckpointWriter(directory=tmp_path, in_background=what == "tensors") as writer:
            writer.write(content(state, keep=1), export=fill_disk if what == "host state" else None)

    with no_file_beyond(30_000) if what == "tensors" else contextlib.nullcontext():
        assert str(tmp_path / "step-000002") in refusal(save_again, CacheError)
    assert names(tmp_path) == ["step-000001"]
    load(tmp_path / "step-000001", state)
    assert_same(state, state_at(1))


def test_another_run_or_other_parameters_are_refused_before_anything_changes(tmp_path: Path) -> None:
    path, state = save(tmp_path, state_at(2)), new_state()
    changed = {**IDENTITY.fingerprints, "plan": "another"}
    message = refusal(lambda: load(path, state, fingerprints=changed), RunError)
    assert "another plan;" in message and "another data" not in message and "--overwrite" in message
    assert_same(state, new_state())
    state.scorer.model.register_parameter("more", nn.Parameter(torch.zeros(1)))
    assert "model.more" in refusal(lambda: load(path, state), RunError)


def test_changes_that_are_allowed_are_told(tmp_path: Path) -> None:
    """And what was best by another measure is forgotten."""
    state = state_at(1)
    state.standing = Evaluations(best=((1, 0.5),), bar=0.5)
    path = save(tmp_path / "checkpoints", state)
    assert load_checkpoint(path, new_state(), identity=IDENTITY)[1] == []
    now = replace(IDENTITY, versions={"torch": "2.1", "transformers": "5.0"}, ranks="2 processes (ddp)")
    resumed = new_state()
    _, (line,) = load_checkpoint(path, resumed, identity=now)
    assert line.startswith("Warning: ") and "torch 2.0 then, 2.1 now" in line and "2 processes (ddp)" in line
    assert resumed.standing == state.standing
    rows = {"plan of rows, version": "5"}  # a checkpoint from before there were beginnings has no number
    _, (line,) = load_checkpoint(path, resumed, identity=replace(IDENTITY, versions=IDENTITY.versions | rows))
    assert "plan of rows, version 4 then, 5 now" in line
    budget = {"packing.token_budget": "2,048"}  # then only the run's recipe had it
    recipe = "{output_dir: r, model: {path: m}, data: {train: {path: d}}, packing: {token_budget: 8192}}"
    (tmp_path / "recipe.yaml").write_text(recipe)
    now = replace(IDENTITY, versions=IDENTITY.versions | budget)
    _, (line,) = load_checkpoint(path, resumed, identity=now)
    assert "packing.token_budget 8,192 then, 2,048 now" in line
    (tmp_path / "recipe.yaml").write_text(recipe.replace("8192", "2048"))
    assert load_checkpoint(path, resumed, identity=now)[1] == []
    (tmp_path / "recipe.yaml").unlink()
    _, (line,) = load_checkpoint(path, resumed, identity=replace(IDENTITY, judged_by="loss of other, 1"))
    assert resumed.standing == Evaluations() and "another metric" in line


def test_a_file_that_is_gone_cut_short_or_has_any_other_byte_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_files, "_CHUNK_BYTES", 500)  # real files have many chunks
    path = save(tmp_path, state_at(1))
    files = [file for file in path.rglob("*") if file.is_file()]
    assert {".metadata", "__0_0.distcp", "host.pt", "checkpoint.json"} == {file.name for file in files}
    generator = torch.Generator().manual_seed(0)
    for file in files:
        content, name = file.read_bytes(), file.relative_to(path).as_posix()
        changes: list[Any] = [bytearray(content) for _ in range(20)]
        for changed in changes:
            changed[int(torch.randint(len(content), (), generator=generator))] ^= 0x41
        for damaged in (*changes, b"", content[: len(content) // 2], content[:-2]):
            file.write_bytes(damaged)
            assert name in (damage_of(path) or "")
        file.unlink()
        assert f"{name} is missing" in (damage_of(path) or "")
        if name == "checkpoint.json":
            assert "checkpoint.resume" in refusal(lambda: load(path, new_state()), RunError)
        file.write_bytes(content)
    assert damage_of(path) is None


@pytest.mark.multiprocess
def test_ranks_look_at_a_part_of_the_files_each_and_all_learn_of_the_damage(tmp_path: Path) -> None:
    path = save(tmp_path, state_at(1))
    (path / "tensors" / ".metadata").unlink()  # the second of three files
    assert run_on_ranks(lambda: damage_of(path)) == ["tensors/.metadata is missing"] * 2


def test_a_checkpoint_of_an_early_python_3_11_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """3.11.0 to 3.11.3 pickle an enum's member so."""

    def pickled(member: Any, protocol: int) -> Any:
        return getattr, (type(member), member.name)

    monkeypatch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", pickled)
    path = save(tmp_path, state_at(1))
    monkeypatch.undo()
    assert b"getattr" in (path / "tensors" / ".metadata").read_bytes()
    load(path, resumed := new_state(seed=1))
    assert_same(resumed, state_at(1))


class Attack:
    def __reduce__(self) -> Any:
        return os.mkdir, ("attacked",)


@pytest.mark.parametrize("attack", ["metadata", "value", "outside", "pipe", "names", "getattr"])
def test_a_stranger_s_checkpoint_runs_no_code(
    attack: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = save(tmp_path, state_at(1))
    file = path / "tensors" / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    place, info = next(
        (index, info) for index, info in metadata.storage_data.items() if "policy" in index.fqn
    )
    if attack == "metadata":
        metadata.planner_data = Attack()
    elif attack == "value":  # torch's own planner unpickles it
        torch.save(Attack(), (path / "tensors" / "value"))
        length = (path / "tensors" / "value").stat().st_size
        metadata.state_dict_metadata[place.fqn] = BytesStorageMetadata()
        metadata.storage_data[MetadataIndex(place.fqn)] = replace(
            info, relative_path="value", offset=0, length=length
        )
    elif attack == "outside":
        metadata.storage_data[place] = replace(info, relative_path="../host.pt")
    else:
        (path / "tensors" / "__0_0.distcp").unlink()
        os.mkfifo(path / "tensors" / "__0_0.distcp")
    content = pickle.dumps(metadata)
    if attack == "names":  # dots lead from an allowed class to others
        content = b"\x80\x04\x8c\x05torch\x8c\x0eos.path.exists\x93."
    elif attack == "getattr":
        content = b"cbuiltins\ngetattr\n(ctorch\nSize\nVmro\ntR."
    file.write_bytes(content)
    message = refusal(lambda: load(path, new_state()), RunError)
    assert "cannot be read" in message and not (tmp_path / "attacked").exists()
    assert "the Python and torch that wrote it, or from another checkpoint" in message
    assert {"metadata": "posix.mkdir", "getattr": "getattr on <class 't"}.get(attack, "") in message


def test_a_disk_that_does_not_answer_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path, state_at(1))

    def fail(file: Path) -> int:
        raise OSError(errno.EIO, "Input/output error", str(file))

    with monkeypatch.context() as patched:
        patched.setattr(checkpoint_files, "_crc32", fail)
        assert "Input/output error" in refusal(lambda: damage_of(path), RunError)
    assert damage_of(path) is None


def test_a_step_draws_the_same_whatever_was_drawn_before_and_ranks_draw_their_own() -> None:
    drawn = {}
    for seed, step, rank in ((0, 1, 0), (0, 1, 1), (0, 2, 0), (2**32 - 1, 1, 0)):
        seed_step(seed, step=step, rank=rank)
        drawn[seed, step, rank] = torch.randn(4).tolist()
    assert len({tuple(values) for values in drawn.values()}) == 4
    seed_step(0, step=1, rank=1)
    assert torch.randn(4).tolist() == drawn[0, 1, 1]
