"""Makes tests/fixtures/conformance: pairs, two tiny Llamas, and what TRL logs when it trains on them.

    pip install -e '.[dev,benchmark]'
    python scripts/make_conformance_set.py

`expected.json` gets TRL's per-step numbers for each of SETTINGS, and for COARSE_CASES also the numbers of a
plain loop in float64. It also says which versions made them. This takes two minutes. On another CPU or with
other versions the models differ in their last bits, and so do the numbers: all files belong together.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    logging,
)

ROOT = Path(__file__).resolve().parent.parent
sys.path += [str(ROOT), str(ROOT / "tests")]  # the tokenizer and the plain loop are in tests/

from support.conformance import (  # noqa: E402
    COARSE_CASES,
    SETTINGS,
    TokenIds,
    conformance_recipe,
    steps_in_float64,
)
from support.oracle import completion_logps_one_by_one  # noqa: E402
from support.tiny_tokenizer import VOCABULARY_SIZE, tiny_tokenizer  # noqa: E402

DIRECTORY = ROOT / "tests" / "fixtures" / "conformance"
NUM_PAIRS, PAIRS_PER_STEP = 96, 16
LEARNING_RATE = 5e-4

METRICS = (
    "loss",
    "grad_norm",
    "learning_rate",
    "entropy",
    "mean_token_accuracy",
    "rewards/chosen",
    "rewards/rejected",
    "rewards/accuracies",
    "rewards/margins",
    "logps/chosen",
    "logps/rejected",
)
FLOAT64_METRICS = ("loss", "grad_norm", "rewards/chosen", "rewards/rejected", "rewards/margins")

ITEMS = ("bread", "a kite", "green tea", "the old clock", "a boat", "a garden", "the robot", "a café table")
QUESTIONS = ("How do I look after {}?", "What should I know about {}?", "Please write a story about {}.")
WORDS = """
    first then slowly with warm clean water sky blue light air help small friend story answer better salt rise
    please short robot other home mix and or while you the a it is naïve 12 3.5 😀
""".split()  # noqa: SIM905


def main() -> None:
    """Makes all files anew."""
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    DIRECTORY.mkdir(parents=True, exist_ok=True)
    rows = make_pairs()
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    (DIRECTORY / "pairs.jsonl").write_text("".join(lines), encoding="utf-8")
    tokenizer = tiny_tokenizer()
    token_ids = tokenize(rows, tokenizer)
    model = make_reference(token_ids)
    for name in ("reference", "policy"):
        tokenizer.save_pretrained(DIRECTORY / name)
        model.save_pretrained(DIRECTORY / name)
        add_noise(model)
    cases: dict[str, Any] = {}
    for case, settings in SETTINGS.items():
        cases[case] = {"settings": settings, "steps": trl_steps(rows, settings)}
        if case in COARSE_CASES:
            recipe = conformance_recipe(DIRECTORY, DIRECTORY, case, "shared, budget 8192")
            cases[case]["float64"] = [
                {name: step[name] for name in FLOAT64_METRICS} for step in steps_in_float64(recipe, token_ids)
            ]
        print(case, cases[case]["steps"][-1], flush=True)
    write_expected(cases)


def make_pairs() -> list[dict[str, str]]:
    """Pairs of many lengths; some have the same prompt, in some both completions begin alike."""
    rng = random.Random(0)

    def words(least: int, most: int) -> str:
        return "".join(f" {rng.choice(WORDS)}" for _ in range(rng.randint(least, most)))

    rows: list[dict[str, str]] = []
    while len(rows) < NUM_PAIRS:
        question = rng.choice(QUESTIONS).format(rng.choice(ITEMS))
        prompt = f"Question: {question}{words(0, rng.choice((2, 30)))}\nAnswer:"
        for _ in range(rng.choice((1, 1, 1, 3))):
            common = words(1, 6) if rng.random() < 0.3 else ""
            long, short = (common + words(1, most) for most in (40, 12))
            chosen, rejected = (long, short) if rng.random() < 0.5 else (short, long)
            if chosen != rejected:
                rows.append({"prompt": prompt, "chosen": chosen, "rejected": rejected})
    return rows[:NUM_PAIRS]


def make_reference(pairs: Sequence[TokenIds]) -> LlamaForCausalLM:
    """A Llama of 50,000 parameters that has read all completions once or more: it predicts half of them."""
    config = LlamaConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=32,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for step in range(200):
        prompt, *completions = pairs[step % len(pairs)]
        sequences = [(prompt, completion) for completion in completions]
        (-completion_logps_one_by_one(model, sequences).sum()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model


@torch.no_grad()
def add_noise(model: LlamaForCausalLM) -> None:
    """Changes each weight by about a hundredth, so that the policy is another model than its reference."""
    for parameter in model.parameters():
        parameter.add_(0.01 * torch.randn_like(parameter))


def tokenize(rows: Sequence[dict[str, str]], tokenizer: PreTrainedTokenizerFast) -> list[TokenIds]:
    """Token ids of prompt, chosen and rejected; no token reaches over the end of a prompt."""
    pairs = []
    for row in rows:
        prompt = tokenizer(row["prompt"])["input_ids"]
        whole = [
            tokenizer(row["prompt"] + row[name] + "</s>")["input_ids"] for name in ("chosen", "rejected")
        ]
        assert all(ids[: len(prompt)] == prompt for ids in whole)
        chosen, rejected = (ids[len(prompt) :] for ids in whole)
        pairs.append((prompt, chosen, rejected))
    return pairs


def trl_steps(rows: Sequence[dict[str, str]], settings: dict[str, Any]) -> list[dict[str, float]]:
    """What TRL's DPOTrainer logs at each step: padded batches, live reference, float32, eager attention."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    with TemporaryDirectory() as scratch:
        config = DPOConfig(
            output_dir=scratch,
            per_device_train_batch_size=PAIRS_PER_STEP,
            train_sampling_strategy="sequential",
            num_train_epochs=1,
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant",
            weight_decay=0.0,
            max_grad_norm=1.0,
            max_length=512,
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            **settings,
        )
        policy, reference = (
            AutoModelForCausalLM.from_pretrained(
                DIRECTORY / name, dtype=torch.float32, attn_implementation="eager"
            )
            for name in ("policy", "reference")
        )
        trainer = DPOTrainer(
            model=policy,
            ref_model=reference,
            args=config,
            train_dataset=Dataset.from_list(list(rows)),
            processing_class=AutoTokenizer.from_pretrained(DIRECTORY / "policy"),
        )
        trainer.train()
    logged = [line for line in trainer.state.log_history if "loss" in line]
    assert len(logged) == NUM_PAIRS // PAIRS_PER_STEP
    return [{name: line[name] for name in METRICS} for line in logged]


def write_expected(cases: dict[str, Any]) -> None:
    """Writes expected.json with one step on a line."""
    facts = {
        "made_with": {name: version(name) for name in ("trl", "torch", "transformers")},
        "pairs_per_step": PAIRS_PER_STEP,
        "learning_rate": LEARNING_RATE,
        "schedule": "constant",
        "optimizer": "AdamW, betas 0.9/0.999, eps 1e-8, weight decay 0",
        "max_grad_norm": 1.0,
        "dtype": "float32",
        "order": "file order, no shuffling, one epoch",
    }
    blocks = []
    for case, entry in cases.items():
        parts = [f'  "settings": {json.dumps(entry["settings"])}']
        for name in ("steps", "float64"):
            if name in entry:
                lines = ",\n".join(f"   {json.dumps(step)}" for step in entry[name])
                parts.append(f'  "{name}": [\n{lines}\n  ]')
        blocks.append(f' "{case}": {{\n' + ",\n".join(parts) + "\n }")
    head = json.dumps(facts, indent=1)[:-2]
    text = head + ',\n "cases": {\n' + ",\n".join(blocks) + "\n }\n}\n"
    assert json.loads(text)["cases"] == cases
    (DIRECTORY / "expected.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
