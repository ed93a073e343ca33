"""Tiny runs whose prompts have images, and TRL's steps to compare with."""

from __future__ import annotations

import copy
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from PIL import Image
from rich.console import Console
from transformers import AutoModelForImageTextToText

from dpo_pack import trainer
from dpo_pack.proofs import read_back
from dpo_pack.recipe.load import Recipe, load_recipe
from dpo_pack.trainer import train
from support.rows import write_rows
from support.run_files import records
from support.tiny_pictures import answer, picture, user
from support.tiny_vision import vision_config

# In steps of two pairs, one row each, a rank has no image in the second step.
NUM_IMAGES = (1, 1, 2, 0, 1, 1)


def image_run(directory: Path, family: str, processor: Any) -> Path:
    """Writes a tiny model with its processor, pairs with images, and a recipe."""
    processor.save_pretrained(directory / "model")
    config = vision_config(family)
    config.text_config.vocab_size = len(processor.tokenizer)
    config.image_token_id = processor.image_token_id
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                parameter.mul_(20.0 if "embed_tokens" in name else 4.0)
    model.save_pretrained(directory / "model")
    rows = []
    for number, num_images in enumerate(NUM_IMAGES):
        images = [
            f"{0 if number == 4 else 10 * number + k}.png" for k in range(num_images)
        ]  # 4 has that of 0
        for name in images:
            seed = int(Path(name).stem)
            picture(seed, 40 + seed, 50).save(directory / name)
        question = ["What is it?", "What is it?", "Which two?"][number % 3]
        row = {"prompt": user(question), "chosen": answer(f"a cat {number}"), "rejected": answer("a dog")}
        rows.append({**row, "images": images})
    write_rows(directory / "pairs.jsonl", rows)
    recipe = {
        "output_dir": "${recipe_dir}/run",
        "model": {"path": "${recipe_dir}/model", "images": True},
        "reference": {"cache_dir": "${recipe_dir}/cache"},
        "data": {"train": "${recipe_dir}/pairs.jsonl", "max_length": 512, "shuffle": False},
        "packing": {"pairs_per_step": 2, "token_budget": 32},
        "optim": {"lr": 1e-3, "warmup_ratio": 0.0, "schedule": "constant"},
        "logging": {"samples": None},
        "export": {"verify": "none"},
    }
    (directory / "recipe.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))
    return directory / "recipe.yaml"


def run(file: Path, name: str, *overrides: str) -> Recipe:
    return load_recipe(file, (f"output_dir={file.parent / name}", *overrides))


def trained(recipe: Recipe) -> str:
    console = Console(file=io.StringIO(), width=200)
    train(recipe, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def verified_job(recipe: Recipe) -> dict[str, Any]:
    """Trains with export.verify: full; returns what the process that reads the export gets."""
    found: list[dict[str, Any]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "verify_model", lambda run, console, job: found.append(job))
        trained(recipe)
    return found[0]


def answer_of(
    job: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Any:
    """Returns what that process says, without a process."""
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(job)))
    capsys.readouterr()
    read_back.main()
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def assert_steps_of_trl(directory: Path, processor: Any, output_dir: Path, eps: float = 1e-8) -> None:
    """The run's steps are those of TRL's collator, padded computation and AdamW; its tower stays."""
    from trl.trainer.dpo_trainer import DataCollatorForVisionPreference

    model = directory / "model"
    policy: Any = AutoModelForImageTextToText.from_pretrained(model, attn_implementation="eager").eval()
    reference = copy.deepcopy(policy).requires_grad_(False)
    text = {*policy.get_decoder().parameters(), *policy.get_output_embeddings().parameters()}
    for parameter in policy.parameters():
        parameter.requires_grad_(parameter in text)
    rows = [json.loads(line) for line in (directory / "pairs.jsonl").read_text().splitlines()]
    for row in rows:
        row["images"] = [Image.open(directory / name).convert("RGB") for name in row["images"]]
    collate = DataCollatorForVisionPreference(processor)
    optimizer = torch.optim.AdamW(text, lr=1e-3, weight_decay=0.0, eps=eps)

    def logps(model: Any, batch: dict[str, Any]) -> Any:
        inputs = {name: value for name, value in batch.items() if name != "completion_mask"}
        logits = model(**inputs, use_cache=False).logits[:, :-1]
        chosen = logits.log_softmax(-1).gather(2, batch["input_ids"][:, 1:, None])[..., 0]
        return (chosen * batch["completion_mask"][:, 1:]).sum(1).chunk(2)

    ours = records(output_dir, "train")
    assert len(ours) == 3
    for step, line in enumerate(ours):
        batch = collate(copy.deepcopy(rows[2 * step : 2 * step + 2]))
        chosen, rejected = logps(policy, batch)
        with torch.no_grad():
            of_reference = logps(reference, batch)
        margin = (chosen - of_reference[0]) - (rejected - of_reference[1])
        loss = -torch.nn.functional.logsigmoid(0.1 * margin).mean()
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_([p for p in policy.parameters() if p.requires_grad], 1.0)
        optimizer.step()
        assert line["loss"] == pytest.approx(float(loss.detach()), abs=2e-6)
        assert line["grad_norm"] == pytest.approx(float(norm), rel=1e-5)
    exported = AutoModelForImageTextToText.from_pretrained(output_dir / "model")
    start = AutoModelForImageTextToText.from_pretrained(model)
    for (name, mine), theirs, first in zip(
        exported.named_parameters(), policy.parameters(), start.parameters(), strict=True
    ):
        assert (mine - theirs).abs().max() < 1e-5, name
        assert torch.equal(mine, first) == (theirs not in text), name
