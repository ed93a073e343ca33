"""Record what eight tiny runs compute, to prove that a change of the code changes none of it.

    python tests/record_runs.py OUT.json [--only NAME ...] [--package DIRECTORY]
    python tests/record_runs.py --compare A.json B.json

Each recipe trains a few steps with `python -m dpo_pack train`, a cache of its own and one thread, with
held-out evaluations and checkpoints. Recorded are all lines of metrics.jsonl without times and speeds, a
sha256 of each final tensor, pairs.parquet, and the reference log-probs under the names that the cache gives
them. Two recordings of the same code on one machine are equal to the last bit. `--package` is the directory
that holds the `dpo_pack` to record: by default, the repository of this script.

Nothing here imports dpo_pack or the tests' helpers, so that both may be changed freely.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

VOCABULARY_SIZE = 384
SPECIAL_TOKENS = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
TEMPLATE = (
    "{% for message in messages %}<s>{{ message.role }}: {{ message.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)
WORDS = ("red", "green", "blue", "one", "two", "three", "sun", "moon", "bread", "water", "robot", "story")
JUDGE = '''"""Prefers the letter e, and short answers."""


def score(*, prompts, completions):
    return [text.count("e") - 0.01 * len(text) for text in completions]
'''
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.16,  # so wide that attention is far from uniform
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    "qwen3_5_text": {
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
}
RECIPE = """\
output_dir: run
model: {path: model}
data: {train: pairs.jsonl, eval: heldout.jsonl, max_length: 128}
packing: {token_budget: 192, pairs_per_step: 8}
optim: {lr: 0.001}
train: {max_steps: 5, eval_every_steps: 2}
checkpoint: {every_steps: 2}
logging: {samples: null}
"""
# By name: the model, and overrides of the recipe.
RECIPES: dict[str, tuple[str, tuple[str, ...]]] = {
    "quickstart": (
        "llama",
        (
            "data.train=conversations.jsonl",
            "data.eval=[{name: talk, path: talk.jsonl}, {name: plain, path: heldout.jsonl}]",
            "logging.samples={num: 2, max_new_tokens: 12}",
        ),
    ),
    "lora": (
        "llama",
        (*("model.lora={r: 4, alpha: 8}", "model.autocast=bfloat16"), "loss.type=sigmoid_norm"),
    ),
    "online": (
        "llama",
        (
            *("optim.schedule=constant", "packing.pairs_per_step=4"),
            "online.judges=[{type: function, function: recorded_judge:score}]",
            *("online.completions_per_prompt=3", "online.max_new_tokens=12", "online.rollouts_per_update=6"),
        ),
    ),
    "ddp": (
        "llama",
        (
            *("distributed.num_processes=2", "distributed.strategy=ddp"),
            "loss.type=[{type: ipo}, {type: sft, weight: 0.5}]",
        ),
    ),
    "fsdp2": (
        "llama",
        (*("distributed.num_processes=2", "distributed.strategy=fsdp2"), "loss.weighting=wpo"),
    ),
    "moe": ("qwen3_moe", ("loss.router_aux_coef=0.02",)),
    "recomputed": ("llama", ("model.gradient_checkpointing=true",)),
    "hybrid": ("qwen3_5_text", ()),
}
TIMES = ("second", "mfu")
ENVIRONMENT = {
    **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS"), "1"),
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "COLUMNS": "160",
}


def record(names: list[str], package: Path) -> dict[str, dict[str, Any]]:
    """Runs the recipes; returns what each computed, by name and key. Ends the process if a run fails."""
    recorded = {}
    with tempfile.TemporaryDirectory() as base:
        for name in names:
            directory = Path(base) / name
            family, overrides = RECIPES[name]
            make_assets(directory, family)
            epochs = [] if name == "online" else ["train.epochs=2"]
            start = time.monotonic()
            environment = {
                **os.environ,
                **ENVIRONMENT,
                "DPO_PACK_CACHE": str(directory / "cache"),
                "PYTHONPATH": os.pathsep.join(
                    filter(None, [str(package), str(directory), os.environ.get("PYTHONPATH")])
                ),
            }
            run = subprocess.run(
                [sys.executable, "-m", "dpo_pack", "train", "recipe.yaml", *epochs, *overrides],
                cwd=directory,
                env=environment,
                capture_output=True,
                text=True,
            )
            if run.returncode != 0:
                raise SystemExit(f"{name} ended with {run.returncode}:\n{run.stdout}{run.stderr}")
            recorded[name] = result_of(directory)
            seconds = time.monotonic() - start
            print(f"{name}: {len(recorded[name])} values, {seconds:.0f} seconds", flush=True)
    return recorded


def result_of(directory: Path) -> dict[str, Any]:
    """What a run computed, by keys that say what it is."""
    import pyarrow.parquet as pq
    import torch
    from safetensors.torch import load_file

    run = directory / "run"
    result: dict[str, Any] = {}
    for kind in ("metrics", "samples"):
        if (run / f"{kind}.jsonl").exists():
            for number, line in enumerate((run / f"{kind}.jsonl").read_text().splitlines()):
                result |= _flat(f"{kind} {number:03}", json.loads(line))
    for kind in ("pairs", "rollouts"):
        if (run / f"{kind}.parquet").exists():
            for number, row in enumerate(pq.read_table(run / f"{kind}.parquet").to_pylist()):
                result |= _flat(f"{kind} {number:03}", row)
    for path in sorted((run / "model").glob("*.safetensors")):
        for name, tensor in load_file(path).items():
            content = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
            digest = hashlib.sha256(content).hexdigest()
            result[f"weights {name}"] = f"{tensor.dtype} {list(tensor.shape)} {digest}"
    for path in sorted((directory / "cache" / "reference").glob("*/*.parquet")):
        for row in pq.read_table(path).to_pylist():
            result |= _flat(f"reference {path.parent.name} {row.pop('key').hex()}", row)
    kinds = {key.split()[0] for key in result}
    # An online run keeps no cache: its reference log-probs are in pairs.parquet.
    last = "rollouts" if "rollouts" in kinds else "reference"
    if missing := {"metrics", "weights", "pairs", last} - kinds:
        raise SystemExit(f"{directory.name}: the run left no {', '.join(sorted(missing))}")
    return dict(sorted(result.items()))


def _flat(start: str, value: Any) -> dict[str, Any]:
    """The numbers in a tree of dictionaries, without times, by the names that lead to them."""
    if not isinstance(value, dict):
        return {start: value}
    return {
        key: number
        for name, part in value.items()
        if not any(word in name for word in TIMES)
        for key, number in _flat(f"{start} {name}", part).items()
    }


def make_assets(directory: Path, family: str) -> None:
    """Writes model/, pairs, recipe.yaml and a judge's module; always the same bytes."""
    import torch
    from transformers import AutoModelForCausalLM, logging
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    logging.disable_progress_bar()
    directory.mkdir(parents=True)
    _tokenizer().save_pretrained(directory / "model")
    torch.manual_seed(0)
    config = CONFIG_MAPPING[family](**{**SIZES, **MODELS[family]})
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(directory / "model")
    pairs = _pairs(random.Random(0), 30)
    _write(directory / "pairs.jsonl", pairs[:24])
    _write(directory / "heldout.jsonl", pairs[24:])
    talks = [_as_conversation(pair, number) for number, pair in enumerate(_pairs(random.Random(1), 30))]
    _write(directory / "conversations.jsonl", talks[:24])
    _write(directory / "talk.jsonl", talks[24:])
    (directory / "recorded_judge.py").write_text(JUDGE)
    (directory / "recipe.yaml").write_text(RECIPE)


def _pairs(rng: random.Random, number: int) -> list[dict[str, Any]]:
    """Pairs in threes of one prompt; good answers end in "yes"."""

    def text(least: int, most: int) -> str:
        return "".join(f" {rng.choice(WORDS)}" for _ in range(rng.randint(least, most)))

    prompts = ["ask" + text(2, 14) for _ in range(-(-number // 3))]
    return [
        {"prompt": prompts[n // 3], "chosen": text(1, 9) + " yes", "rejected": text(1, 9) + " no"}
        for n in range(number)
    ]


def _as_conversation(pair: dict[str, Any], number: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": pair["prompt"]}]
    if number % 2:
        messages.insert(0, {"role": "system", "content": "be short"})
    answers = {side: [{"role": "assistant", "content": pair[side]}] for side in ("chosen", "rejected")}
    return {"prompt": messages, **answers}


def _tokenizer() -> Any:
    """A byte-level BPE trained on the words above."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=list(SPECIAL_TOKENS.values()),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator([" ".join(["ask", *WORDS, "yes no user: assistant: system"])] * 2, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, **SPECIAL_TOKENS)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def compare(ours: Path, theirs: Path) -> int:
    """Prints the first difference of each recipe that both files have; returns 1 if there is one, else 0."""
    one, other = (json.loads(path.read_text()) for path in (ours, theirs))
    both = [name for name in one if name in other]
    status = 0 if both else 1
    for name in both:
        a, b = one[name], other[name]
        different = [key for key in sorted({*a, *b}) if _shown(a, key) != _shown(b, key)]
        if different:
            status, key = 1, different[0]
            print(f"{name}: {len(different)} of {len({*a, *b})} values differ; first {key!r}:")
            print(f"  {_shown(a, key)}\n  {_shown(b, key)}")
        else:
            print(f"{name}: {len(a)} values, equal")
    if missing := one.keys() ^ other.keys():
        print(f"not compared, only in one file: {', '.join(sorted(missing))}")
    print("DIFFERENT" if status else f"equal: {', '.join(both)}")
    return status


def _shown(values: dict[str, Any], key: str) -> str:
    return json.dumps(values[key]) if key in values else "(not there)"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("output", type=Path, nargs="?")
    parser.add_argument("--only", nargs="+", choices=list(RECIPES), default=list(RECIPES), metavar="NAME")
    parser.add_argument("--package", type=Path, default=Path(__file__).resolve().parents[1])
    parser.add_argument("--compare", type=Path, nargs=2, metavar=("A", "B"))
    asked = parser.parse_args()
    if asked.compare:
        return compare(*asked.compare)
    if asked.output is None:
        parser.error("give the file to write")
    recorded = record(asked.only, asked.package.resolve())
    asked.output.write_text(json.dumps(recorded, indent=0) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
