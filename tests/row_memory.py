"""What a training step keeps, beside the estimate; also a script for test_memory.py.

`python row_memory.py KIND MODEL` prints how many bytes two rows on a model's directory grow a process of its
own, from before the model is loaded to the peak, and the estimate without overhead. `SETTINGS` has the kinds.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from logps_memory import peak_resident_bytes

from dpo_pack.layout import Group, Row, layout_row, packed_row
from dpo_pack.loading import load_model
from dpo_pack.lora import LoraSettings
from dpo_pack.memory import MemorySetting, RowSize, estimate_memory
from dpo_pack.memory_shape import memory_shape
from dpo_pack.model_shape import without_weights
from dpo_pack.models import LoadedModel, Precision
from dpo_pack.optim import build_optimizer

CPU = torch.device("cpu")
RANK = 8


class Setting(NamedTuple):
    parameters: torch.dtype
    autocast: torch.dtype | None = None
    checkpoints: bool = False
    adapts: bool = False


SETTINGS = {
    "fp32": Setting(torch.float32),
    "autocast": Setting(torch.float32, torch.bfloat16),
    "bfloat16": Setting(torch.bfloat16),
    "checkpointed": Setting(torch.float32, checkpoints=True),
    "lora fp32": Setting(torch.float32, adapts=True),
    "lora bfloat16": Setting(torch.bfloat16, adapts=True),
}


def load(kind: str, directory: Path) -> LoadedModel:
    setting = SETTINGS[kind]
    adapter = LoraSettings(r=RANK, alpha=16.0, dropout=0.0, target_modules="all-linear", seed=0)
    return load_model(
        str(directory),
        revision=None,
        trust_remote_code=False,
        precision=Precision(parameters=setting.parameters, autocast=setting.autocast),
        attention="auto",
        packed=True,
        gradient_checkpointing=setting.checkpoints,
        device=CPU,
        recipe_key="model.path",
        adapter=adapter if setting.adapts else None,
    )


def build_row(vocabulary: int, *, num_pairs: int, length: int) -> Row:
    """Pairs whose prompt and completions have `length` tokens each, 3 x `num_pairs` x `length` in all."""
    random = np.random.default_rng(0)

    def ids() -> Any:
        return random.integers(0, vocabulary, length)

    groups = [Group(context=ids(), completions=(ids(), ids())) for _ in range(num_pairs)]
    return packed_row(layout_row(groups, share_prompt=True), CPU)


def memory_setting(kind: str, loaded: LoadedModel, row: Row) -> MemorySetting:
    setting = SETTINGS[kind]
    shape = memory_shape(without_weights(loaded.model.config, trust_remote_code=False))
    trained = [parameter for parameter in loaded.scorer.parameters() if parameter.requires_grad]
    assert row.segments is not None
    return MemorySetting(
        shape=shape,
        num_trained=sum(parameter.numel() for parameter in trained),
        num_frozen=shape.num_parameters if setting.adapts else 0,
        trained_bytes=trained[0].element_size(),
        frozen_bytes=setting.parameters.itemsize,
        activation_bytes=(setting.autocast or setting.parameters).itemsize,
        autocasts=setting.autocast is not None,
        lora_rank=RANK if setting.adapts else None,
        trains_head=not setting.adapts,
        optimizer="adamw",
        checkpoints_activations=setting.checkpoints,
        shares_key_heads=False,
        device="cpu",
        row=RowSize(tokens=row.num_tokens, keys=sum(row.segments.key_lengths), scored=len(row.targets)),
        reference_row=None,
    )


def take_steps(loaded: LoadedModel, row: Row) -> None:
    """Two rows, the second of which meets gradients and optimizer state, as in all steps but the first."""
    optimizer = build_optimizer(
        "adamw", loaded.scorer, lr=1e-6, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0
    )
    for _ in range(2):
        loaded.scorer(row).sums.sum().backward()
        optimizer.step()


def resident_bytes() -> int:
    found = re.search(r"VmRSS:\s*(\d+) kB", Path("/proc/self/status").read_text(encoding="utf-8"))
    assert found is not None
    return 1024 * int(found[1])


def main(kind: str, directory: Path) -> None:
    torch.set_num_threads(1)
    # What libraries take when they are first used is the process's, not the run's.
    warm = load(kind, directory / "small")
    take_steps(warm, build_row(96, num_pairs=2, length=5))
    begun = resident_bytes()
    loaded = load(kind, directory / "large")
    row = build_row(loaded.model.config.vocab_size, num_pairs=5, length=120)
    take_steps(loaded, row)
    estimate = estimate_memory(memory_setting(kind, loaded, row))
    print(peak_resident_bytes() - begun, round(estimate.step - estimate.overhead))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
