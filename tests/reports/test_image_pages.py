"""`dpopack show` names each image; its page draws what the tower gets, with the grid of tokens."""

from __future__ import annotations

import base64
import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image
from support.rows import write_rows
from support.tiny_pictures import encoded, picture, picture_processor, trl_row, user
from support.tiny_vision import vision_config

import dpo_pack.run.show as show
from dpo_pack.data.formats import BadRow
from dpo_pack.data.images import ImageProcessor
from dpo_pack.data.view import ShownRecipe
from dpo_pack.recipe.load import load_recipe
from dpo_pack.reports.pages import pairs_page
from dpo_pack.reports.pair_views import render_pairs, to_json
from dpo_pack.run.setup import check_recipe
from dpo_pack.run.show import _content, show_recipe
from dpo_pack.system.console import _Console
from dpo_pack.system.errors import DataError, ModelError

PROCESSOR = picture_processor()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two pairs with a picture of 40x30, one with another of 200x100, and one that is too long."""
    root = tmp_path_factory.mktemp("shown")
    PROCESSOR.processor.save_pretrained(root / "model")
    vision_config("idefics3").save_pretrained(root / "model")
    picture(1).save(root / "a.png")
    picture(2, 200, 100).save(root / "b.png")
    rows = [
        trl_row(["a.png"]),
        trl_row(["a.png"], "Which colour?"),
        trl_row(["b.png"]),
        trl_row([], "x" * 500),
    ]
    data = {"train": write_rows(root / "pairs.jsonl", rows), "max_length": 250, "max_pixels": 12000}
    model = {"path": str(root / "model"), "images": True}
    recipe = {"output_dir": str(root / "run"), "model": model, "data": data}
    (root / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return root


def show_in(root: Path, *, draws: bool = True) -> ShownRecipe:
    console = _Console(verbose=False, file=io.StringIO(), width=80, force_terminal=False)
    return show_recipe(load_recipe(root / "recipe.yaml"), console, asked_rows=[1, 2, 3], draws=draws)


@pytest.fixture(scope="module")
def shown(root: Path) -> ShownRecipe:
    return show_in(root)


def test_a_picture_that_changes_while_it_is_shown_is_one_line(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, view_source = root / "a.png", show._view_source

    def view_and_change(*arguments: Any, **options: Any) -> Any:
        viewed = view_source(*arguments, **options)
        picture(3).save(file)
        return viewed

    monkeypatch.setattr(show, "_view_source", view_and_change)
    with pytest.raises(DataError, match=rf"{file} has changed .* run the same command again"):
        show_in(root)
    picture(1).save(file)


def test_lines_and_json_make_no_pictures(
    root: Path, shown: ShownRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ImageProcessor, "views", None)
    assert to_json(show_in(root, draws=False)) == to_json(shown)


def test_a_processor_that_does_not_load_is_the_only_error_of_show_and_check(tmp_path: Path) -> None:
    PROCESSOR.processor.tokenizer.save_pretrained(tmp_path / "model")
    vision_config("idefics3").save_pretrained(tmp_path / "model")
    data = {"train": write_rows(tmp_path / "pairs.jsonl", [trl_row(["a.png"])])}
    model = {"path": str(tmp_path / "model"), "images": True}
    recipe = {"output_dir": str(tmp_path / "run"), "model": model, "data": data}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    loaded = load_recipe(tmp_path / "recipe.yaml")
    with pytest.raises(ModelError, match="model.path") as error:
        show_recipe(loaded, _Console(verbose=False, file=io.StringIO(), width=80, force_terminal=False))
    assert check_recipe(loaded)[1] == [str(error.value)]


def test_content_has_the_beginnings_of_images_only(tmp_path: Path) -> None:
    raw = encoded(picture(1, 400, 300))
    url = "data:image/png;base64," + base64.b64encode(raw).decode()
    part = {"type": "image_url", "image_url": {"url": url}}
    row = {**trl_row([]), "prompt": user(part, {"type": "text", "text": "data: " + "y" * 200})}
    bad = BadRow("media", "", {"pixels": raw})
    for content in (_content(row, row), _content(bad, ())):
        assert len(str(content)) < 600 < len(raw)
    assert "y" * 200 in str(_content(row, row))


def test_the_first_token_of_an_image_describes_it_and_the_file_has_all_tokens(shown: ShownRecipe) -> None:
    file = io.StringIO()
    render_pairs(shown, _Console(verbose=False, file=file, width=80, force_terminal=False))
    text = " ".join(file.getvalue().split())
    ids = PROCESSOR.image_ids(40, 30)
    block = ids[ids.index(PROCESSOR.token_id) : len(ids) - ids[::-1].index(PROCESSOR.token_id)]
    assert text.count(f"[image 40x30, {len(block)} tokens]") >= 2
    assert "[image 154x77, " in text
    assert "1 of 3 images are scaled down to data.max_pixels" in text
    assert "1 rows are too long; an image is often hundreds of tokens" in text
    assert "||" not in text
    pair = json.loads(to_json(shown))["pairs"][0]
    placeholders = [token for token in pair["chosen"] if token["id"] == PROCESSOR.token_id]
    assert len(placeholders) == PROCESSOR.num_tokens((40, 30))
    assert [bool(token["text"]) for token in placeholders] == [True] + [False] * (len(placeholders) - 1)
    assert "base64" not in to_json(shown)


def test_the_page_draws_each_image_once_with_a_cell_for_each_token(shown: ShownRecipe) -> None:
    page = pairs_page(shown)
    figures = re.findall(r"<figure>.*?</figure>", page, re.DOTALL)
    assert len(figures) == 2
    assert "pairs.jsonl line 1, pairs.jsonl line 2</figcaption>" in figures[0]
    for figure, image, size in (
        (figures[0], picture(1), (40, 30)),
        (figures[1], picture(2, 200, 100), (154, 77)),
    ):
        urls = re.findall(r'src="data:image/png;base64,([^"]+)"', figure)
        grids = re.findall(r"background-size: ([\d.]+)% ([\d.]+)%", figure)
        cells = [round(100 / float(width)) * round(100 / float(height)) for width, height in grids]
        assert len(urls) == len(cells) and sum(cells) == PROCESSOR.num_tokens(size)
        whole = np.asarray(Image.open(io.BytesIO(base64.b64decode(urls[-1]))))  # after the tiles
        expected = np.asarray(image.resize(whole.shape[1::-1], Image.Resampling.LANCZOS))
        assert np.abs(whole.astype(int) - expected).mean() < 12


def test_views_of_patches_are_the_scaled_image() -> None:
    """As Qwen's and LFM2-VL's processors lay patches out, which need torchvision."""
    from types import SimpleNamespace

    pixels = np.asarray(picture(3, 28, 56)).astype(np.float32) / 255
    square = pixels.reshape(2, 2, 14, 1, 2, 14, 3)  # rows of blocks, in a block, in a patch; then columns
    of_qwen = square.transpose(0, 3, 1, 4, 6, 2, 5)[:, :, :, :, :, None].repeat(2, axis=5)
    of_lfm = pixels.reshape(4, 14, 2, 14, 3).swapaxes(1, 2).reshape(1, 8, -1)
    settings = SimpleNamespace(merge_size=2, patch_size=14, image_mean=[0.0] * 3, image_std=[1.0] * 3)
    for inputs in (
        {"pixel_values": of_qwen.reshape(8, -1), "image_grid_thw": np.array([[1, 4, 2]])},
        {"pixel_values": of_lfm, "spatial_shapes": np.array([[4, 2]])},
    ):
        processor = picture_processor()
        processor.processor = SimpleNamespace(image_processor=settings)
        processor.pixel_inputs = lambda images, inputs=inputs: inputs  # type: ignore[method-assign, misc]
        (view,) = processor.views(np.zeros((1, 1, 3), dtype=np.uint8))
        np.testing.assert_array_equal(view, np.asarray(picture(3, 28, 56)))
