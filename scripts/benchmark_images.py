"""Measure what images in prompts cost, beside TRL: docs/benchmarks/cpu-images.md.

    python scripts/benchmark_images.py --output docs/benchmarks/cpu-images.md

A small Qwen2.5-VL with random weights and the real processor reads pairs with a picture each. Every
measurement is a process of its own with one thread, and contenders take turns. Counted are CPU seconds: of
ours reading the data (each picture is decoded once), the reference pass and the steps; of TRL `train`. Its
collator has pictures processed for both sequences of a pair, and its reference runs in each step. The tower
is frozen in both. Needs `pip install -e '.[images,benchmark]'`.
"""

from __future__ import annotations

import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import patch

import numpy as np
import typer
from benchmarking.contenders import BETA, LEARNING_RATE, MALLOCS, Setting, trl
from benchmarking.memory import peak_memory_bytes
from benchmarking.results import TOLERANCES, hardware, machine

CHILD = "--measure-in-this-process"
FIRST, CACHED = "dpo-pack, first run", "dpo-pack, cached reference"
SIZES = {"640x480": (640, 480), "1024x768": (1024, 768)}
LARGEST = "1024x768"
MAX_LENGTH = 4096
TEXT = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4, "num_attention_heads": 4}
TOWER = {"hidden_size": 96, "intermediate_size": 256, "depth": 2, "num_heads": 2, "out_hidden_size": 256}


def main(
    output: Annotated[Path, typer.Option(help="Writes this page.")],
    num_pairs: Annotated[int, typer.Option(help="Pairs of each measurement.")] = 16,
    pairs_per_step: Annotated[int, typer.Option()] = 8,
    memory_pairs: Annotated[int, typer.Option(help="Pairs of the step whose memory is measured.")] = 64,
    repeats: Annotated[int, typer.Option(help="Turns.")] = 3,
    sizes: Annotated[str, typer.Option(help="Pictures of the training runs.")] = ",".join(SIZES),
    prediction: Annotated[Path | None, typer.Option(help="A text for the page, committed before.")] = None,
) -> None:
    """Run all measurements and write the page; prints as it goes."""
    contenders = [FIRST, CACHED, *(trl(size).name for size in (1, 2))]
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    with tempfile.TemporaryDirectory(prefix="dpo-pack-benchmark-") as directory:
        make_assets(Path(directory), max(num_pairs, memory_pairs))
        for size in SIZES:
            found[size] = {what: [] for what in ("pixels", *(contenders if size in sizes.split(",") else ()))}
            for turn in range(repeats):
                for what, measured in found[size].items():
                    measured.append(in_new_process(directory, what, size, turn, num_pairs, pairs_per_step))
        job = (FIRST, LARGEST, repeats, memory_pairs, memory_pairs)
        peak = in_new_process(directory, *job)["peak_gb"]
    text = [] if prediction is None else ["## Expected", "", prediction.read_text().strip(), ""]
    output.write_text("\n".join([*page_of(found), *of_memory(peak, memory_pairs), *text]))


def in_new_process(directory: str, *job: str | int) -> dict[str, Any]:
    environment = {**os.environ, **MALLOCS["glibc keeps freed memory"], "OMP_NUM_THREADS": "1"}
    environment |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "TQDM_DISABLE": "1"}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "HF_DATASETS_CACHE": f"{directory}/datasets"}
    command = [sys.executable, __file__, CHILD, directory, json.dumps(job)]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if ended.returncode != 0:
        sys.exit(f"{job} failed:\n{ended.stderr[-4000:]}")
    measured: dict[str, Any] = json.loads(ended.stdout.strip().splitlines()[-1])
    print(job, measured, flush=True)
    return measured


# ---- What is measured


def make_assets(directory: Path, num_pairs: int) -> None:
    """Writes the model with its processor, and for each size a file of pairs with their pictures."""
    import torch
    from make_pictures import TEMPLATE, tokenizer
    from transformers import (
        AutoConfig,
        AutoModelForImageTextToText,
        Qwen2_5_VLProcessor,
        Qwen2VLImageProcessor,
        Qwen2VLVideoProcessor,
    )

    words = tokenizer()
    special = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")
    words.add_special_tokens({"extra_special_tokens": special}, replace_extra_special_tokens=False)
    words.chat_template = TEMPLATE.replace("<image>", "".join(special[:3]))
    parts = (Qwen2VLImageProcessor(), words, Qwen2VLVideoProcessor())
    Qwen2_5_VLProcessor(*parts, chat_template=words.chat_template).save_pretrained(directory / "model")
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [8, 12, 12]}
    ids = {token: words.convert_tokens_to_ids(token) for token in special}
    config = AutoConfig.for_model(
        "qwen2_5_vl",
        text_config={
            **TEXT, "vocab_size": 8192, "num_key_value_heads": 2, "max_position_embeddings": 8192,
            "rope_parameters": rope, "pad_token_id": 0, "bos_token_id": None,
            "eos_token_id": words.eos_token_id,
        },
        vision_config={**TOWER, "fullatt_block_indexes": [1]},
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForImageTextToText.from_config(config).save_pretrained(directory / "model")
    rng = np.random.default_rng(0)
    for size, (width, height) in SIZES.items():
        rows = []
        for number in range(num_pairs):
            name = f"{size}-{number}.jpg"
            write_picture(directory / name, rng, width, height)
            texts = (" ".join(rng.choice(["the", "red", "shape", "is", "blue"], n)) for n in (40, 90, 70))
            roles = (("prompt", "user"), ("chosen", "assistant"), ("rejected", "assistant"))
            row: dict[str, Any] = {
                column: [{"role": role, "content": text}]
                for (column, role), text in zip(roles, texts, strict=True)
            }
            rows.append(json.dumps({**row, "images": [name]}) + "\n")
        (directory / f"{size}.jsonl").write_text("".join(rows))


def write_picture(path: Path, rng: np.random.Generator, width: int, height: int) -> None:
    """A JPEG of noise at several scales, about as large as a photograph's."""
    from PIL import Image

    values = np.full((height, width, 3), 127.0)
    for scale, strength in ((64, 90), (16, 40), (4, 18), (1, 6)):
        low = rng.integers(0, 255, (height // scale + 2, width // scale + 2, 3), dtype=np.uint8)
        scaled = Image.fromarray(low).resize((width, height), Image.Resampling.BICUBIC)
        values += (np.asarray(scaled, dtype=float) - 127) / 127 * strength
    Image.fromarray(values.clip(0, 255).astype(np.uint8)).save(path, quality=90)


# ---- In a process of its own


def measure(
    directory: Path, what: str, size: str, turn: int, num_pairs: int, pairs_per_step: int
) -> dict[str, Any]:
    """Returns CPU seconds a pair; of a training run the losses of its steps and the peak of memory, too."""
    from dpo_pack.recipe.load import parse_recipe

    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        tree = {
            "output_dir": f"{scratch}/run",
            "model": {"path": f"{directory}/model", "images": True, "compile": False},
            "reference": {"cache_dir": f"{directory}/cache-{size}-{turn}"},  # that of CACHED is of FIRST
            "data": {
                "train": {"path": f"{directory}/{size}.jsonl", "max_pairs": num_pairs},
                "max_length": MAX_LENGTH, "shuffle": False,
            },
            "packing": {"pairs_per_step": pairs_per_step},
            "loss": {"beta": BETA},
            "optim": {"lr": LEARNING_RATE, "schedule": "constant"},
            "logging": {"samples": None},
        }  # fmt: skip
        if what == "pixels":
            tree["reference"] = {"cache_dir": f"{scratch}/cache"}
            return measure_pixels(parse_recipe(tree, ()), directory, size, num_pairs)
        if what in (FIRST, CACHED):
            seconds, losses = train_ours(parse_recipe(tree, ()))
        else:
            seconds, losses = train_trl(directory, scratch, what, size, num_pairs, pairs_per_step)
    return {
        "seconds_a_pair": seconds / num_pairs,
        "losses": losses,
        "peak_gb": peak_memory_bytes("cpu") / 1e9,
    }


def train_ours(recipe: Any) -> tuple[float, list[float]]:
    from benchmarking.run_dpo_pack import train_without_export

    import dpo_pack.run.setup

    seconds: list[float] = []
    prepare_data = dpo_pack.run.setup.prepare_data

    def counted(*arguments: Any, **options: Any) -> Any:
        begun = time.process_time()
        data = prepare_data(*arguments, **options)
        seconds.append(time.process_time() - begun)
        return data

    with patch.object(dpo_pack.run.setup, "prepare_data", counted):
        trainer = train_without_export(recipe, cpu_seconds=seconds)
    lines = [json.loads(line) for line in trainer.run.metrics.read_text().splitlines()]
    return sum(seconds), [line["loss"] for line in lines if line["split"] == "train"]


def read_dataset(directory: Path, size: str, num_pairs: int) -> Any:
    """The pairs as TRL takes them: a picture is decoded when its row is read."""
    from datasets import Dataset, Image, List

    rows = [json.loads(line) for line in (directory / f"{size}.jsonl").read_text().splitlines()[:num_pairs]]
    for row in rows:
        row["images"] = [str(directory / name) for name in row["images"]]
    return Dataset.from_list(rows).cast_column("images", List(Image()))


def train_trl(
    directory: Path, scratch: str, what: str, size: str, num_pairs: int, pairs_per_step: int
) -> tuple[float, list[float]]:
    import torch
    from benchmarking.run_trl import trl_config
    from transformers import AutoModelForImageTextToText, AutoProcessor, TrainerCallback
    from trl import DPOTrainer

    contender = next(one for one in map(trl, (1, 2)) if one.name == what)
    setting = Setting(
        workload="", model=str(directory / "model"), num_pairs=num_pairs, pairs_per_step=pairs_per_step,
        max_length=MAX_LENGTH, device="cpu", parameters="float32", lora=False, gradient_checkpointing=False,
        warmup_steps=0,
    )  # fmt: skip
    model: Any = AutoModelForImageTextToText.from_pretrained(setting.model, dtype=torch.float32)
    model.model.visual.requires_grad_(False)
    times: list[float] = []

    class Times(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            times.append(time.process_time())

        on_train_end = on_train_begin

    trainer = DPOTrainer(
        model=model,
        args=trl_config(contender, setting, Path(scratch)),
        train_dataset=read_dataset(directory, size, num_pairs),
        processing_class=AutoProcessor.from_pretrained(setting.model),
        callbacks=[Times()],
    )
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    return times[1] - times[0], losses


def measure_pixels(recipe: Any, directory: Path, size: str, num_pairs: int) -> dict[str, Any]:
    """CPU seconds: ours as a row's forward begins, and TRL's collator, a pair at a time in turns."""
    from transformers import AutoProcessor
    from trl.trainer.dpo_trainer import DataCollatorForVisionPreference

    from dpo_pack.run.setup import prepare
    from dpo_pack.system.console import make_console

    setup = prepare(recipe, make_console(quiet=True))
    processor, rows = setup.policy_facts.processor, read_dataset(directory, size, num_pairs)
    assert processor is not None
    collate = DataCollatorForVisionPreference(AutoProcessor.from_pretrained(directory / "model"))
    seconds: dict[str, list[float]] = {"dpo-pack": [], "TRL": []}
    for pair in range(num_pairs):
        group = setup.data.train.group(pair)
        begun = time.process_time()
        processor.pixel_inputs([read() for read in group.images])
        between = time.process_time()
        batch = collate([rows[pair]])
        seconds["dpo-pack"].append(between - begun)
        seconds["TRL"].append(time.process_time() - between)
        assert batch["input_ids"][0].tolist() == [*group.context, *group.completions[0]]  # the longer one
    tokens = [len(part) for part in (group.context, *group.completions)]
    medians = {name: 1e3 * statistics.median(values) for name, values in seconds.items()}
    return {"milliseconds": medians, "tokens": tokens}


# ---- The page


def page_of(found: dict[str, Any]) -> list[str]:
    about = machine()
    about["versions"] |= {name: version(name) for name in ("trl", "pillow", "torchvision")}
    versions = ", ".join(f"{name} {number}" for name, number in about["versions"].items())
    lines = [
        "# Images: dpo-pack and TRL on a CPU",
        "",
        f"`{' '.join(['python', *sys.argv])}`, {datetime.date.today().isoformat()}, commit "
        f"{about['git_commit']}, {hardware(about)}, one thread; {versions}.",
        "",
        "A Qwen2.5-VL with random weights (tower of 2 layers, width 96; language model of 4 layers, width",
        "256; fp32; the tower is frozen) and its real processor; a JPEG in each prompt, no picture twice.",
        "Every turn is a process of its own. CPU seconds of dpo-pack are those of reading the data, of the",
        "reference pass and of the steps; of TRL those of `train`, with a live reference.",
    ]
    for size, measured in found.items():
        lines += ["", f"## {size}", "", *of_size(measured)]
    return lines


def of_memory(peak: float, num_pairs: int) -> list[str]:
    what = (
        f"A process of dpo-pack that takes a step of {num_pairs} pairs with pictures of {LARGEST} has at most"
    )
    return ["", "## Memory", "", what, f"{peak:.2f} GB resident.", ""]


def of_size(measured: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Medians, spreads and ratios turn by turn, for pictures of one size."""
    pixels = measured["pixels"]
    tokens = pixels[0]["tokens"]
    milliseconds = {name: [turn["milliseconds"][name] for turn in pixels] for name in ("dpo-pack", "TRL")}
    lines = [
        f"The last pair has {tokens[0]:,} tokens in its prompt, {tokens[1]} and {tokens[2]} in its answers.",
        "",
        "| decoding and processing, CPU milliseconds a pair | median | spread | TRL's / this, turn by turn |",
        "|---|---|---|---|",
        *(row(name, values, milliseconds["TRL"], values) for name, values in milliseconds.items()),
    ]
    rates = {
        name: [1 / turn["seconds_a_pair"] for turn in turns]
        for name, turns in measured.items()
        if name != "pixels"
    }
    if not rates:
        return lines
    best = max((name for name in rates if name.startswith("TRL")), key=lambda name: sum(rates[name]))
    losses = (measured[name][0]["losses"] for name in (FIRST, best))
    apart = max(abs(ours - theirs) for ours, theirs in zip(*losses, strict=True))
    if apart > TOLERANCES["fp32"].loss:
        sys.exit(f"dpo-pack and TRL do not do the same work: losses differ by {apart:.1e}")
    return [
        *lines,
        "",
        "| pairs a CPU second | median | spread | times TRL's best, turn by turn |",
        "|---|---|---|---|",
        *(row(name, values, values, rates[best]) for name, values in rates.items()),
        "",
        f"Losses of the steps differ by at most {apart:.0e}.",
    ]


def row(name: str, values: list[float], above: list[float], below: list[float]) -> str:
    """A line of a table: its last column has the ratios of two contenders, turn by turn."""
    ratios = [one / other for one, other in zip(above, below, strict=True)]
    spread = f"{min(values):.3g} to {max(values):.3g}"
    ratio = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    return f"| {name} | {statistics.median(values):.3g} | {spread} | {ratio} |"


if __name__ == "__main__":
    if sys.argv[1:2] == [CHILD]:
        print(json.dumps(measure(Path(sys.argv[2]), *json.loads(sys.argv[3]))))
    else:
        typer.run(main)
