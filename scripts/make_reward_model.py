"""Train the tiny reward model of configs/online_reward_model.yaml on the quickstart's pairs, on a CPU.

A classifier with one output on the quickstart's architecture learns to score chosen above rejected (Bradley
and Terry 1952): the loss is -log sigmoid(score of chosen - score of rejected).
"""

import argparse
import json
import random
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import logsigmoid
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerBase,
    logging,
)

NUM_STEPS = 200
PAIRS_PER_STEP = 16


def make_reward_model(assets: Path, *, num_steps: int = NUM_STEPS) -> float:
    """Writes `assets`/reward_model; returns the part of held-out pairs that it orders as they are."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(assets / "model")
    config = AutoConfig.from_pretrained(assets / "model", num_labels=1)
    model: Any = AutoModelForSequenceClassification.from_config(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    rows = read_rows(assets / "train.jsonl")
    rng = random.Random(0)
    for _ in range(num_steps):
        margins = score_margins(model, tokenizer, rng.sample(rows, PAIRS_PER_STEP))
        optimizer.zero_grad()
        (-logsigmoid(margins).mean()).backward()
        optimizer.step()
    model.save_pretrained(assets / "reward_model")
    tokenizer.save_pretrained(assets / "reward_model")
    with torch.no_grad():
        held_out = score_margins(model.eval(), tokenizer, read_rows(assets / "heldout_tone.jsonl"))
    return float((held_out > 0).float().mean())


def score_margins(model: Any, tokenizer: PreTrainedTokenizerBase, rows: list[dict[str, Any]]) -> torch.Tensor:
    """[P] score of chosen - score of rejected."""
    texts = [
        tokenizer.apply_chat_template(row["prompt"] + row[side], tokenize=False)
        for side in ("chosen", "rejected")
        for row in rows
    ]
    batch = tokenizer(texts, add_special_tokens=False, padding=True, return_tensors="pt")
    chosen, rejected = model(**batch).logits.squeeze(-1).chunk(2)
    margins: torch.Tensor = chosen - rejected
    return margins


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


if __name__ == "__main__":
    logging.disable_progress_bar()
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("assets", type=Path, nargs="?", default=Path("runs/quickstart/assets"))
    accuracy = make_reward_model(parser.parse_args().assets)
    print(f"Orders {accuracy:.1%} of the held-out pairs as they are")
