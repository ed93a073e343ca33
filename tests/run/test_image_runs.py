"""Runs whose prompts have images take the steps of TRL, on one process and on two; the cache is by pixels."""

from __future__ import annotations

import functools
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from rich.console import Console
from safetensors.torch import load_file, save_file
from support.image_runs import answer_of, assert_steps_of_trl, image_run, run, trained, verified_job
from support.loading import load_usual
from support.marks import slow
from support.run_files import assert_same_metrics, timeless
from support.tiny_pictures import picture, picture_processor, user
from support.two_ranks import run_on_ranks
from transformers import AutoProcessor

from dpo_pack.model.saving import save_model
from dpo_pack.recipe.load import load_recipe
from dpo_pack.recipe.schema import LoraRecipe
from dpo_pack.run.memory_estimate import memory_facts
from dpo_pack.run.pairs import offline_source
from dpo_pack.run.samples import sample_models
from dpo_pack.run.setup import check_recipe, prepare
from dpo_pack.run.show import show_recipe
from dpo_pack.system.errors import RecipeError


@pytest.fixture(scope="module")
def recipe_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return image_run(tmp_path_factory.mktemp("images"), "idefics3", picture_processor().processor)


@pytest.fixture(scope="module")
def alone(recipe_file: Path) -> Path:
    recipe = run(recipe_file, "alone", "packing.token_budget=1024")
    text = trained(recipe)
    assert "Proof: packed rows are exact" in text and f"sample {recipe.output_dir} --prompt TEXT" in text
    return recipe.output_dir


def test_the_estimate_of_memory_counts_the_tower(recipe_file: Path) -> None:
    recipe = run(recipe_file, "never", "packing.token_budget=1024")
    setup = prepare(recipe, Console(quiet=True))
    plan = offline_source(setup).first_plan
    assert memory_facts(setup, plan)[0].tower_parameters == setup.policy_facts.tower_parameters > 0


def test_a_run_takes_the_steps_of_trl_s_padded_computation(recipe_file: Path, alone: Path) -> None:
    processor = AutoProcessor.from_pretrained(recipe_file.parent / "model")
    assert_steps_of_trl(recipe_file.parent, processor, alone)


def test_the_export_has_the_processor_and_its_card_says_what_it_reads(alone: Path) -> None:
    processor = AutoProcessor.from_pretrained(alone / "model")
    assert type(processor).__name__ == "Idefics3Processor"
    card = (alone / "model" / "README.md").read_text()
    assert "pipeline_tag: image-text-to-text" in card and "AutoModelForImageTextToText" in card


VARIANTS: dict[str, tuple[str, ...]] = {
    "padded": ("packing.mode=padded",),
    "unshared": ("packing.share_prompt=false",),
    "recomputed activations": ("model.gradient_checkpointing=true",),
    "inputs on the host, blocks in tiles": (
        "model.gradient_checkpointing=true",
        "model.activation_offload=true",
        "model.mlp_tile_tokens=16",
    ),
}


LORA = ("model.lora={r: 3, alpha: 6}", "optim.lr=1e-2")
LORA_SETTINGS = LoraRecipe(r=2, alpha=4.0)


@pytest.mark.parametrize("variant", slow(*VARIANTS))
def test_other_rows_take_the_same_steps(variant: str, recipe_file: Path, alone: Path) -> None:
    recipe = run(recipe_file, variant, "packing.token_budget=1024", *VARIANTS[variant])
    trained(recipe)
    assert_same_metrics(
        [{**line, "tokens": 0} for line in timeless(recipe.output_dir)],
        [{**line, "tokens": 0} for line in timeless(alone)],
        ("none", variant, ()),
    )


@pytest.mark.multiprocess
@pytest.mark.parametrize("kind", slow("full", "lora"))
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_two_ranks_one_of_them_without_an_image_take_the_steps_of_one(
    strategy: str, kind: str, recipe_file: Path
) -> None:
    settings = [f"distributed.strategy={strategy}", *(LORA if kind == "lora" else ())]
    one, two = (run(recipe_file, f"{strategy}-{kind}-{number}", *settings) for number in (1, 2))
    trained(one)
    run_on_ranks(functools.partial(trained, two))
    assert_same_metrics(timeless(two.output_dir), timeless(one.output_dir), (strategy, "images", ()))
    if kind == "lora":
        adapter = json.loads((two.output_dir / "model" / "adapter_config.json").read_text())
        assert "vision_model" in adapter["exclude_modules"] and "connector" in adapter["exclude_modules"]


@pytest.mark.slow
def test_cached_log_probs_are_found_by_pixels_and_not_by_files(recipe_file: Path, alone: Path) -> None:
    directory = recipe_file.parent
    Image.open(directory / "0.png").save(directory / "0.bmp")
    rows = (directory / "pairs.jsonl").read_text().splitlines()
    other = directory / "other.jsonl"
    other.write_text("\n".join([*rows[1:], rows[0].replace("0.png", "0.bmp")]) + "\n")
    # Pairs 0 and 4 have the same rejected answer, question and image.
    assert "11 of 11 different sequences cached" in trained(run(recipe_file, "other", f"data.train={other}"))
    picture(99, 50, 50).save(directory / "10.png")
    text = trained(run(recipe_file, "replaced"))
    assert "9 of 11 different sequences cached, 2 to compute" in text


def test_what_a_run_with_images_does_not_do_is_refused_in_one_line(recipe_file: Path, alone: Path) -> None:
    with pytest.raises(RecipeError, match="prompts with images are not answered yet"):
        sample_models([str(alone)], Console(file=io.StringIO()), texts=(), num=None)


# ---- Exports


@functools.cache
def job_of(recipe_file: Path, kind: str) -> dict[str, Any]:
    settings = LORA if kind == "lora" else ()
    return verified_job(run(recipe_file, f"verified-{kind}", "export.verify=full", *settings))


def scale(part: str) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        tensors = load_file(directory / "model.safetensors")
        name = next(name for name in tensors if part in name and tensors[name].ndim == 2)
        tensors[name] = tensors[name] * 1.5
        save_file(tensors, directory / "model.safetensors", {"format": "pt"})

    return change


def shift_colours(directory: Path) -> None:
    settings = json.loads((directory / "processor_config.json").read_text())
    settings["image_processor"]["image_mean"] = [0.1, 0.9, 0.1]
    (directory / "processor_config.json").write_text(json.dumps(settings))


OF_FILES = "log-probs differ .* its processor"


@pytest.mark.parametrize(
    ("kind", "plant", "failure"),
    [
        ("full", scale("vision_model"), "vision_model.* is not the trained tensor"),
        ("full", shift_colours, OF_FILES),
        *slow(
            ("full", scale("connector"), "connector.* is not the trained tensor"),
            ("lora", shift_colours, OF_FILES),
        ),
    ],
)
def test_exports_are_read_back_with_images(
    kind: str,
    plant: Callable[[Path], None],
    failure: str,
    recipe_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    job = job_of(recipe_file, kind)
    saved = shutil.copytree(job["directory"], tmp_path / "model")
    job = {**job, "directory": str(saved)}
    assert [len(pictures) for _, _, pictures in job["sequences"]] == [1, 1, 2, 2, 0, 0]
    right = answer_of(job, monkeypatch, capsys)
    assert right["failure"] is None and right["error"] < 1e-5, right
    plant(saved)
    for digests, expected in ((job["digests"], failure), ({}, OF_FILES)):  # without hashes log-probs tell
        with pytest.raises(AssertionError, match=expected):
            raise AssertionError(answer_of({**job, "digests": digests}, monkeypatch, capsys)["failure"])


# ---- Chat templates

OTHER = """\
{%- for message in messages %}{{ '<s>' + message.role + '!\n' }}
{%- if message.content is string %}{{ message.content }}
{%- else %}{% for part in message.content %}{{ '<image>' if part.type == 'image' else part.text }}{% endfor %}
{%- endif %}{{ '</s>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<s>assistant!\n' }}{% endif %}"""


def with_templates(recipe_file: Path, directory: Path, tokenizer: str | None, processor: str) -> Path:
    """Copies the run's files; the model's processor and its tokenizer have these templates."""
    for name in ("model", *(path.name for path in recipe_file.parent.glob("*.*"))):
        copy = shutil.copytree if name == "model" else shutil.copyfile
        copy(recipe_file.parent / name, directory / name)
    (directory / "model" / "chat_template.jinja").unlink()
    legacy = json.dumps({"chat_template": processor})
    (directory / "model" / "chat_template.json").write_text(legacy)
    if tokenizer is not None:
        settings = directory / "model" / "tokenizer_config.json"
        settings.write_text(json.dumps(json.loads(settings.read_text()) | {"chat_template": tokenizer}))
    return directory / recipe_file.name


@pytest.mark.parametrize("owner", ["processor", "both", "recipe"])
def test_the_processor_s_chat_template_is_used_and_exports_have_the_one_that_was_used(
    owner: str, recipe_file: Path, tmp_path: Path
) -> None:
    own, is_named = picture_processor().processor.tokenizer.chat_template, owner == "recipe"
    file = with_templates(recipe_file, tmp_path, None if owner == "processor" else own, OTHER)
    (tmp_path / "own.jinja").write_text(own)
    recipe = load_recipe(file, [f"tokenizer.chat_template={tmp_path}/own.jinja"] if is_named else [])
    console = Console(file=io.StringIO(), width=200)
    setup = prepare(recipe, console)
    asked: Any = user({"type": "image"}, {"type": "text", "text": "What is it?"})
    processor, images = AutoProcessor.from_pretrained(tmp_path / "model"), setup.policy_facts.processor
    options: dict[str, Any] = {"add_generation_prompt": True, "tokenize": False}
    expected = processor.apply_chat_template(asked, chat_template=own if is_named else None, **options)
    assert ("assistant!" in expected) is not is_named and images is not None
    assert setup.tokenizer.apply_chat_template(asked, **options) == expected
    expanded = images.expand(expected, [(40, 50)])
    assert setup.data.train.group(0).context.tolist() == processor.tokenizer(expanded)["input_ids"]
    assert isinstance(console.file, io.StringIO)
    told = console.file.getvalue(), *show_recipe(recipe, Console(quiet=True)).report["settings"]
    assert [("the processor" in text) for text in told[:2]] == [not is_named] * 2
    assert any("the processor's" in line for line in check_recipe(recipe)[0]) is not is_named
    for kind, adapter in (("whole", None), ("adapter", LORA_SETTINGS)):
        loaded = load_usual(tmp_path / "model", adapter=adapter)
        save_model(loaded, setup.tokenizer, tmp_path / kind)
        exported = AutoProcessor.from_pretrained(tmp_path / kind)
        assert exported.apply_chat_template(asked, **options) == expected
    continued = load_recipe(file, [f"model.path={tmp_path}/adapter"])
    assert any("data.train.0" in line for line in check_recipe(continued)[0])
