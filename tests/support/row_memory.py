"""What a training step keeps, beside the estimate; also a script for tests/run/test_memory_estimate.py.

`python row_memory.py KIND MODEL` prints how many bytes two rows on a model's directory grow a process of its
own, from before the model is loaded to the peak, and the estimate without overhead. `SETTINGS` has the kinds.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from dpo_pack.model.facts import model_shape, without_weights
from dpo_pack.model.layout import Row
from dpo_pack.model.scorer import LoadedModel, Precision
from dpo_pack.recipe.schema import LoraRecipe, ModelRecipe
from dpo_pack.run.memory_estimate import MemoryFacts, estimate_memory, memory_shape
from dpo_pack.training.optim import build_optimizer
from support.groups import CPU, make_row, random_groups
from support.limits import resident_bytes
from support.loading import load_usual

RANK = 8


FLOAT32 = Precision(parameters=torch.float32, autocast=None)
AUTOCAST = Precision(parameters=torch.float32, autocast=torch.bfloat16)
BFLOAT16 = Precision(parameters=torch.bfloat16, autocast=None)
# By the names of kinds.
SETTINGS = {
    "fp32": FLOAT32,
    "autocast": AUTOCAST,
    "bfloat16": BFLOAT16,
    "checkpointed": FLOAT32,
    "lora fp32": FLOAT32,
    "lora bfloat16": BFLOAT16,
}


def load(kind: str, directory: Path) -> LoadedModel:
    adapter = LoraRecipe(r=RANK, alpha=16.0)
    return load_usual(
        directory,
        precision=SETTINGS[kind],
        gradient_checkpointing=kind == "checkpointed",
        adapter=adapter if kind.startswith("lora") else None,
    )


def build_row(vocabulary: int, *, num_pairs: int, length: int) -> Row:
    """Pairs whose prompt and completions have `length` tokens each, 3 x `num_pairs` x `length` in all."""
    return make_row(random_groups(*[(length,) * 3] * num_pairs, vocabulary=vocabulary))


def memory_facts(kind: str, loaded: LoadedModel, row: Row) -> MemoryFacts:
    config = loaded.model.config
    assert row.segments is not None
    model = without_weights(config)
    return MemoryFacts(
        shape=memory_shape(config, model_shape(model), model.num_parameters()),
        row_tokens=row.num_tokens,
        row_keys=sum(row.segments.key_lengths),
        backend="cpu",
        row_scored=len(row.targets),
        device=CPU,
        precision=SETTINGS[kind],
        model=ModelRecipe(path="-", gradient_checkpointing=kind == "checkpointed"),
        lora_rank=RANK if kind.startswith("lora") else None,
    )


def take_steps(loaded: LoadedModel, row: Row) -> None:
    """Two rows, the second of which meets gradients and optimizer state, as in all steps but the first."""
    optimizer = build_optimizer(
        "adamw", loaded.scorer, lr=1e-6, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0
    )
    for _ in range(2):
        loaded.scorer(row).sums.sum().backward()
        optimizer.step()


def main(kind: str, directory: Path) -> None:
    torch.set_num_threads(1)
    # What libraries take when they are first used is the process's, not the run's.
    warm = load(kind, directory / "small")
    take_steps(warm, build_row(96, num_pairs=2, length=5))
    begun = resident_bytes()
    loaded = load(kind, directory / "large")
    row = build_row(loaded.model.config.vocab_size, num_pairs=5, length=120)
    take_steps(loaded, row)
    estimate = estimate_memory(memory_facts(kind, loaded, row))
    print(resident_bytes("VmHWM") - begun, round(sum(estimate.values()) - estimate["overhead"]))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
