"""Runs with each family's own processor have its tokens and pixels, and log-probs of the model's forward."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from rich.console import Console
from support.image_runs import answer_of, assert_steps_of_trl, image_run, run, trained, verified_job
from support.marks import slow
from support.real_processors import FAMILIES, real_processor
from support.run_files import records
from transformers import AutoModelForImageTextToText, AutoProcessor

from dpo_pack.data.images import ImageProcessor
from dpo_pack.run.pairs import prepare_reference
from dpo_pack.run.setup import prepare
from dpo_pack.system.errors import ModelError

# GLM-4V's processor makes numpy arrays of tensors.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
_HAS_TORCHVISION = importlib.util.find_spec("torchvision") is not None
_NO_TORCHVISION = pytest.mark.skipif(not _HAS_TORCHVISION, reason="needs torchvision")
OWN = [
    pytest.param(family, marks=[pytest.mark.slow, *([_NO_TORCHVISION] if family == "lfm2_vl" else [])])
    for family in FAMILIES
]


def real_run(family: str, directory: Path, patch: pytest.MonkeyPatch) -> tuple[Path, Any]:
    """Returns a recipe, and the processor that its runs use."""
    processor = real_processor(family, patch)
    patch.setattr("dpo_pack.run.models.load_processor", lambda *_, **__: processor)
    return image_run(directory, family, processor), processor


@pytest.mark.parametrize("family", OWN)
def test_a_run_has_the_tokens_pixels_and_log_probs_of_the_family_s_own_processor(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, processor = real_run(family, tmp_path, monkeypatch)
    recipe = run(file, "run", "packing.token_budget=1024", "export.verify=full")
    job = verified_job(recipe)
    with monkeypatch.context() as patch:
        patch.setattr(AutoProcessor, "from_pretrained", lambda *_, **__: processor)
        found = answer_of(job, patch, capsys)
    with_pictures = [pictures for _, _, pictures in job["sequences"] if pictures]
    assert (len(with_pictures), len(job["sequences"])) == (4, 6)
    assert found["failure"] is None and found["error"] < 1e-5, found
    assert len(records(recipe.output_dir, "train")) == 3
    setup = prepare(recipe, Console(quiet=True))
    pairs = setup.data.train
    sums = prepare_reference(setup, None).values.of(pairs)  # of the run, cached
    model: Any = AutoModelForImageTextToText.from_pretrained(tmp_path / "model", attn_implementation="eager")
    for pair, line in enumerate((tmp_path / "pairs.jsonl").read_text().splitlines()):
        row, group = json.loads(line), pairs.group(pair)
        images = [{"type": "image", "image": Image.open(tmp_path / name)} for name in row["images"]]
        text = {"type": "text", "text": row["prompt"][0]["content"]}
        prompt = [{"role": "user", "content": [*images, text]}]
        for side, answered in enumerate(("chosen", "rejected")):
            called = processor.apply_chat_template(
                [*prompt, *row[answered]], tokenize=True, return_dict=True, return_tensors="pt"
            )
            ids, begin = called["input_ids"][0], len(group.context)
            assert ids.tolist() == [*group.context, *group.completions[side]]
            if images:
                pixels = ImageProcessor(processor).pixel_inputs([read() for read in group.images])
                assert "pixel_values" in pixels
                assert all(value.equal(called[name]) for name, value in pixels.items())
            with torch.no_grad():
                logits = model.eval()(**called, use_cache=False).logits[0, begin - 1 : -1]
            expected = logits.log_softmax(-1).gather(1, ids[begin:, None]).double().sum()
            assert float(expected) == pytest.approx(sums[pair, side], abs=1e-5 * len(logits))


@pytest.mark.parametrize("family", slow("qwen2_5_vl", "qwen3_5"))
def test_families_with_positions_on_axes_take_the_steps_of_trl(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, processor = real_run(family, tmp_path, monkeypatch)
    # Of the gradients of gates, in Qwen3.5, some are as small as AdamW's usual eps, so rounding would decide.
    recipe = run(file, "run", "packing.token_budget=1024", "optim.eps=1e-4")
    trained(recipe)
    assert_steps_of_trl(tmp_path, processor, recipe.output_dir, eps=1e-4)


@pytest.mark.parametrize("family", OWN)
def test_a_processor_that_writes_a_wrong_number_of_tokens_is_found(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, processor = real_run(family, tmp_path, monkeypatch)
    right = type(processor).replace_image_token

    def one_more(self: Any, *arguments: Any, **options: Any) -> str:
        return str(right(self, *arguments, **options) + self.image_token)

    monkeypatch.setattr(type(processor), "replace_image_token", one_more)
    with pytest.raises(ModelError, match=r"writes \d+ tokens for a row's images, .* has \d+ features"):
        trained(run(file, "run"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "max_pixels", "limit"),
    [
        ("qwen2_5_vl", 28 * 28 * 6, 28 * 28 * 6),
        ("qwen3_vl", 1, 28 * 28 * 4),  # its least size
        ("glm4v", 28 * 28 * 5, 2 * 28 * 28 * 5),  # of two frames
        ("qwen2_vl", 10**6, None),  # above its limit
        ("llava", 28 * 28, None),  # has no such setting
    ],
)
def test_the_exported_processor_scales_images_as_the_training_did(
    family: str,
    max_pixels: int,
    limit: int | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file, processor = real_run(family, tmp_path, monkeypatch)
    own = dict(processor.image_processor.size)
    recipe = run(
        file, "run", "packing.token_budget=1024", "export.verify=full", f"data.max_pixels={max_pixels}"
    )
    job = verified_job(recipe)
    written = json.loads((recipe.output_dir / "model" / "processor_config.json").read_text())[
        "image_processor"
    ]
    assert written["size"] == ({**own, "longest_edge": limit} if limit else own)
    told = f"images of more than {max_pixels:,} pixels were scaled down"
    assert (told in (recipe.output_dir / "model" / "README.md").read_text()) == (family != "qwen2_vl")
    with monkeypatch.context() as patch:
        patch.setattr(AutoProcessor, "from_pretrained", lambda *_, **__: processor)
        if limit is not None:
            assert "its processor has size" in answer_of(job, patch, capsys)["failure"]
        processor.image_processor.size = written["size"]
        found = answer_of(job, patch, capsys)
    assert found["failure"] is None and found["error"] < 1e-5, found
