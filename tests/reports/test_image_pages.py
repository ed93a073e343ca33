"""`dpopack show` names each image; its page draws it."""

from __future__ import annotations

import base64
import io
import json
import re
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image
from support.rows import write_rows
from support.tiny_pictures import picture, picture_processor, trl_row
from support.tiny_vision import vision_config

from dpo_pack.recipe.load import load_recipe
from dpo_pack.reports.pages import pairs_page
from dpo_pack.reports.pair_views import render_pairs, to_json
from dpo_pack.run.show import ShownRecipe, show_recipe
from dpo_pack.system.console import _Console
from dpo_pack.system.errors import DataError

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


@pytest.fixture(scope="module")
def shown(root: Path) -> ShownRecipe:
    console = _Console(verbose=False, file=io.StringIO(), width=80, force_terminal=False)
    return show_recipe(load_recipe(root / "recipe.yaml"), console, asked_rows=[1, 2, 3])


def test_a_picture_that_changes_while_it_is_shown_is_one_line(root: Path, shown: ShownRecipe) -> None:
    file = root / "a.png"
    picture(3).save(file)
    with pytest.raises(DataError, match=rf"{file} has changed .* run the same command again"):
        pairs_page(shown)
    picture(1).save(file)


def test_the_first_token_of_an_image_describes_it_and_the_file_has_all_tokens(shown: ShownRecipe) -> None:
    file = io.StringIO()
    render_pairs(shown.report, _Console(verbose=False, file=file, width=80, force_terminal=False))
    text = " ".join(file.getvalue().split())
    assert text.count(f"[image 40x30, {PROCESSOR.num_tokens((40, 30))} tokens]") >= 2
    assert "[image 154x77, " in text
    assert "1 of 3 images are scaled down to data.max_pixels" in text
    assert "||" not in text
    pair = json.loads(to_json(shown.report))["pairs"][0]
    placeholders = [token for token in pair["chosen"] if token["id"] == PROCESSOR.token_id]
    assert len(placeholders) == PROCESSOR.num_tokens((40, 30))
    assert [bool(token["text"]) for token in placeholders] == [True] + [False] * (len(placeholders) - 1)
    assert "base64" not in to_json(shown.report)


def test_the_page_draws_each_image_once(shown: ShownRecipe) -> None:
    figures = re.findall(r"<figure>.*?</figure>", pairs_page(shown), re.DOTALL)
    assert len(figures) == 2
    assert "pairs line 1, pairs line 2</figcaption>" in figures[0]
    for figure, expected in zip(figures, (picture(1), picture(2, 200, 100)), strict=True):
        (url,) = re.findall(r'src="data:image/png;base64,([^"]+)"', figure)
        drawn = Image.open(io.BytesIO(base64.b64decode(url)))
        scaled = expected.resize(drawn.size, Image.Resampling.LANCZOS)
        np.testing.assert_array_equal(np.asarray(drawn), np.asarray(scaled.convert("RGB")))
