"""Images of prompts: which rows have them, which are refused, what names them, and how a store keeps them."""

from __future__ import annotations

import base64
import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from support.real_processors import real_processor
from support.refusals import refusal
from support.rows import load_splits, write_rows
from support.tiny_pictures import (
    TEMPLATE,
    TOKEN,
    answer,
    encoded,
    picture,
    picture_processor,
    picture_tokenizer,
    trl_row,
    user,
)

from dpo_pack.data import ingest, sources
from dpo_pack.data.images import ImageProcessor, ImageReader, decode
from dpo_pack.data.sources import Data, keys_by_image
from dpo_pack.data.values import BadRow
from dpo_pack.system.errors import DataError

TOKENIZER = picture_tokenizer()
PROCESSOR = picture_processor()


def load(
    tmp_path: Path, train: Any, processor: ImageProcessor | None = PROCESSOR, seed: int = 0, **settings: Any
) -> Data:
    return load_splits(tmp_path, train, TOKENIZER, images=processor, seed=seed, **settings)


def load_rows(tmp_path: Path, *rows: dict[str, Any], **settings: Any) -> Data:
    return load(tmp_path, write_rows(tmp_path / "pairs.jsonl", rows), **settings)


def save(path: Path, image: Image.Image) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(encoded(image))
    return path


def data_url(raw: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(raw).decode()


def texts(data: Data, pair: int = 0) -> tuple[str, str, str]:
    """Prompt, with what stands for an image written as <size>, chosen and rejected."""
    group = data.train.group(pair)
    prompt, *completions = (
        str(TOKENIZER.decode(ids.tolist())) for ids in (group.context, *group.completions)
    )
    for size in [(40, 30), (64, 64), (30, 40)]:
        prompt = prompt.replace(PROCESSOR.text_of(size), f"<{size[0]}x{size[1]}>")
    return prompt, *completions  # type: ignore[return-value]


def read(data: Data, pair: int = 0) -> list[np.ndarray[Any, Any]]:
    return [image() for image in data.train.group(pair).images]


# ---- Forms of rows


FIRST, SECOND = picture(1), picture(2, 64, 64)
WANTED = ("<s>user\n<40x30>What is it?</s>\n<s>assistant\n", "a cat</s>\n", "a dog</s>\n")
ANSWERS = {"chosen": "a cat", "rejected": "a dog"}
# TRL's rlaif-v; RLAIF-V (with its other columns); MMPR; ShareGPT as LLaMA-Factory has it; OpenAI's parts.
FORMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "trl": (trl_row(["a.png"], "What is it?"), {}),
    "trl, parts": (trl_row(["a.png"], [{"type": "image"}, {"type": "text", "text": "What is it?"}]), {}),  # type: ignore[arg-type]
    "rlaif-v": (
        {
            **{"ds_name": "x", "image": "a.png", "question": "What is it?", "origin_split": "{}", "idx": 0},
            **{"image_path": "somewhere/else.jpg", "origin_dataset": "y", **ANSWERS},
        },
        {"columns": {"prompt": "question"}},
    ),
    "mmpr": (
        {"image": "a.png", "question": "What is it?", **ANSWERS}, {"columns": {"instruction": "question"}}
    ),
    "sharegpt": (
        {
            "conversations": [{"from": "human", "value": "<image>What is it?"}],
            "chosen": {"from": "gpt", "value": "a cat"},
            "rejected": {"from": "gpt", "value": "a dog"},
            "images": ["a.png"],
        },
        {},
    ),
    "openai parts": (
        {
            "prompt": user(
                {"type": "image_url", "image_url": {"url": "a.png"}}, {"type": "text", "text": "What is it?"}
            ),
            **{"chosen": answer("a cat"), "rejected": answer("a dog")},
        },
        {},
    ),
    "a column named as one answer's": (
        {"chosen_image": "a.png", "prompt": "What is it?", **ANSWERS}, {"columns": {"image": "chosen_image"}}
    ),
    "another column": ({"pic": "a.png", "prompt": "What is it?", **ANSWERS}, {"columns": {"image": "pic"}}),
    "swift": (
        {
            "messages": [*user("<image>What is it?"), *answer("a cat")],
            **{"rejected_response": "a dog", "images": ["a.png"]},
        },
        {},
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_rows_of_known_data_sets_have_the_image_before_the_question(tmp_path: Path, form: str) -> None:
    row, settings = FORMS[form]
    save(tmp_path / "a.png", FIRST)
    path = write_rows(tmp_path / "pairs.jsonl", [row])
    data = load(tmp_path, {"path": path, **settings})
    assert texts(data) == WANTED
    np.testing.assert_array_equal(read(data)[0], np.asarray(FIRST))
    assert (data.train.group(0).context == PROCESSOR.token_id).sum() == PROCESSOR.num_tokens((40, 30))


@pytest.mark.parametrize("form", ["bytes", "struct", "list", "json", "datasets", "part", "struct in a part"])
def test_columnar_files_and_datasets_have_the_bytes_of_images(tmp_path: Path, form: str) -> None:
    raw = encoded(FIRST, "JPEG", quality=90)
    values = {"bytes": raw, "struct": {"bytes": raw, "path": "x.jpg"}, "list": [{"bytes": raw, "path": None}]}
    row = {"prompt": "What is it?", **ANSWERS, "image": values.get(form)}
    if form == "datasets":
        names = {name: datasets.Value("string") for name in ("prompt", *ANSWERS)}
        features = datasets.Features({**names, "image": datasets.Image()})
        rows = {name: [value] for name, value in {**row, "image": {"bytes": raw, "path": None}}.items()}
        datasets.Dataset.from_dict(rows, features).save_to_disk(tmp_path / "saved")
        data = load(tmp_path, str(tmp_path / "saved"))
    else:
        if form == "list":
            row = {"prompt": "What is it?", **ANSWERS, "images": values["list"]}
        elif "part" in form:
            image = {"type": "image", "image": values["struct" if "struct" in form else "bytes"]}
            row = {"prompt": user(image, {"type": "text", "text": "What is it?"})}
            row |= {side: answer(text) for side, text in ANSWERS.items()}
        table = pa.Table.from_pylist([row])
        if form == "json":
            (tmp_path / "a.jpg").write_bytes(raw)
            paths = pa.array(['["a.jpg"]'], pa.string()).cast(pa.json_())
            table = table.drop_columns("image").append_column("images", paths)
        pq.write_table(table, tmp_path / "a.parquet")
        data = load(tmp_path, str(tmp_path / "a.parquet"))
    assert texts(data) == WANTED
    np.testing.assert_array_equal(read(data)[0], np.asarray(decode(raw)))


def test_images_stand_at_their_marks_and_a_row_may_have_none(tmp_path: Path) -> None:
    for name, image in (("a.png", FIRST), ("b.png", SECOND)):
        save(tmp_path / name, image)
    dialogue = [*user("<image> and"), *answer("yes"), *user("then <image>?")]
    rows = [
        {**trl_row(["a.png", "b.png"]), "prompt": dialogue},
        {
            **trl_row(["a.png"]),
            "prompt": user(*({"type": "text", "text": text} for text in ("<image>?", "!"))),
        },
        trl_row([]),
        trl_row(["b.png", "a.png"], "both?"),
    ]
    data = load_rows(tmp_path, *rows)
    assert texts(data, 0)[0].startswith(
        "<s>user\n<40x30> and</s>\n<s>assistant\nyes</s>\n<s>user\nthen <64x64>?"
    )
    assert texts(data, 1)[0].startswith("<s>user\n<40x30>?!</s>")
    assert texts(data, 2)[0].startswith("<s>user\nWhat is") and read(data, 2) == []
    assert texts(data, 3)[0].startswith("<s>user\n<64x64><40x30>both?")
    sizes = [[image.shape for image in read(data, pair)] for pair in range(4)]
    assert sizes == [[(30, 40, 3), (64, 64, 3)], [(30, 40, 3)], [], [(64, 64, 3), (30, 40, 3)]]
    source = data.report["train"]["sources"][0]
    assert source["images"] == 5 and len(data.train.parts[0].images.records) == 2  # type: ignore[union-attr]


MARKED = TEMPLATE.replace(
    "{%- if message.content is string %}",
    "{%- if message.role == 'assistant' %}{% generation %}{{ message.content }}{{ '</s>' }}"
    "{% endgeneration %}{{ '\n' }}{%- continue %}{%- elif message.content is string %}",
)


@pytest.mark.parametrize("template", [TEMPLATE, MARKED])
def test_of_completions_behind_images_the_assistant_s_turns_are_scored(
    tmp_path: Path, template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TOKENIZER, "chat_template", template)
    save(tmp_path / "a.png", FIRST)
    turns = {side: [*answer(text), *user("sure?"), *answer("yes")] for side, text in ANSWERS.items()}
    text = {"prompt": user("What is it?"), **turns}
    one, two = (trl_row(["a.png"] * num) | turns for num in (1, 2))
    data = load_rows(tmp_path, one, two, text, {**one, "rejected": answer("a dog")})
    groups = [data.train.group(pair) for pair in range(4)]
    assert [len(group.images) for group in groups] == [1, 2, 0, 1]
    ends = "</s>" if template == MARKED else "</s>\n"
    for group in groups[:3]:
        assert group.scored is not None
        said = [ids[of_side] for ids, of_side in zip(group.completions, group.scored, strict=True)]
        assert [TOKENIZER.decode(ids) for ids in said] == [f"{a}{ends}yes{ends}" for a in ANSWERS.values()]
    assert groups[3].scored is not None and groups[3].scored[1].all()


def test_texts_with_images_are_those_of_the_processor(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for _ in range(12):
        images = [picture(0, *rng.integers(8, 200, 2).tolist()) for _ in range(2)]
        text = f"<s>user\nhello {TOKEN} and\n\n{TOKEN}\nwhat?</s>\n"
        called = PROCESSOR.processor(images=[images], text=[text], add_special_tokens=False)
        expanded = PROCESSOR.expand(text, [image.size for image in images])
        assert TOKENIZER(expanded, add_special_tokens=False)["input_ids"] == called["input_ids"][0]


def test_pixel_inputs_are_those_of_the_whole_processor() -> None:
    images = [FIRST, SECOND]
    called = PROCESSOR.processor(images=[images], text=[TOKEN * 2], return_tensors="pt")
    inputs = PROCESSOR.pixel_inputs([np.asarray(image) for image in images])
    assert inputs.keys() == {"pixel_values", "pixel_attention_mask"}
    for name, values in inputs.items():
        assert values.equal(called[name])


# ---- Bad images


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png(width: int, height: int, bits: int) -> bytes:
    """Colours; of a large size, it ends after its first pixels. Pillow opens 16 bits as RGB of 8 bits."""
    header = struct.pack(">IIBBBBB", width, height, bits, 2, 0, 0, 0)
    pixels = zlib.compress(b"".join(b"\0" + bytes(range(48)) for _ in range(8)))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def in_row(raw: bytes) -> dict[str, Any]:
    return trl_row([data_url(raw)])


JPEG = encoded(picture(1, 100, 60), "JPEG", quality=90)
BAD: dict[str, tuple[Callable[[], dict[str, Any]], str, str]] = {
    "half": (lambda: in_row(JPEG[: len(JPEG) // 2]), "broken_image", "cannot be decoded"),
    "empty": (lambda: in_row(b""), "broken_image", "is empty"),
    "a page": (lambda: in_row(b"\n<html>404</html>"), "broken_image", "is a page of the web, not the data"),
    "a pointer": (lambda: in_row(b"version https://git-lfs.github.com/"), "broken_image", "git lfs pull"),
    "HEIC": (lambda: in_row(b"\0\0\0\x18ftypheic\0\0\0\0"), "broken_image", "is HEIC; save it as PNG"),
    "AVIF": (lambda: in_row(b"\0\0\0\x20ftypavif\0\0\0\0"), "broken_image", "is AVIF; save it as PNG"),
    "SVG": (lambda: in_row(b'<?xml version="1.0"?>\n<svg></svg>'), "broken_image", "is SVG; save it as PNG"),
    "a film": (lambda: in_row(b"\0\0\0\x20ftypisom\0\0\0\0"), "broken_image", "is a video; save"),
    "EPS, which runs a program": (lambda: in_row(encoded(FIRST, "EPS")), "broken_image", "a PDF or Post"),
    "ICO": (lambda: in_row(encoded(FIRST, "ICO")), "broken_image", "none of JPEG, PNG"),
    "header": (lambda: in_row(encoded(FIRST)[:20] + b"xxxx" * 9), "broken_image", "(PNG opening failed. "),
    "films begun": (
        lambda: in_row(encoded(FIRST, "GIF", save_all=True, append_images=[FIRST.rotate(90)])[:-950]),
        "broken_image", "or is broken (index out of range)",
    ),
    "grey of 16 bits": (
        lambda: in_row(encoded(Image.fromarray(np.ones((9, 9), dtype=np.uint16)))),
        "image_of_16_bits", "8 bits",
    ),
    "colours of 16 bits": (lambda: in_row(png(8, 8, 16)), "image_of_16_bits", "8 bits a colour"),
    "float": (
        lambda: in_row(encoded(Image.fromarray(np.ones((9, 9), dtype=np.float32)), "TIFF")),
        "image_of_16_bits", "8 bits",
    ),
    "animated": (
        lambda: in_row(encoded(FIRST, "GIF", save_all=True, append_images=[FIRST.rotate(90)])),
        "animated_image", "is animated",
    ),
    "bomb": (lambda: in_row(png(20000, 20000, 8)), "image_too_large", "100,000,000"),
    "narrow": (lambda: in_row(encoded(Image.new("RGB", (2000, 3)))), "image_too_narrow", "2,000 x 3"),
    "no base64": (lambda: trl_row(["data:image/png;base64,@@@"]), "broken_image", "no data URL"),
    "plain base64": (
        lambda: trl_row([base64.b64encode(JPEG).decode()]),
        "broken_image", "is plain base64; write data:image/png;base64, before it",
    ),
    "a URL of a file": (lambda: trl_row(["file:///a.png"]), "image_link", "give the path without file://"),
    "a link": (lambda: trl_row(["https://x.org/a.png"]), "image_link", "download it and give its path"),
    "missing": (lambda: trl_row(["none.png"]), "missing_image", "'none.png': No such file"),
    "a directory": (lambda: trl_row(["."]), "missing_image", "Is a directory"),
    "a pipe": (lambda: trl_row(["pipe.png"]), "missing_image", "a pipe"),
    "far too large": (lambda: trl_row(["sparse.png"]), "image_too_large", "214,748,364,800 bytes"),
    "outside": (lambda: trl_row(["../secret.png"]), "image_outside", "is outside of"),
    "absolute": (lambda: trl_row(["/etc/passwd"]), "image_outside", "is outside of"),
    "a number": (lambda: trl_row([7]), "wrong_type", "an image is a int"),
    "null": (lambda: trl_row([None]), "wrong_type", "an image is a NoneType"),
    "too few marks": (
        lambda: {**trl_row(["a.png", "a.png"]), "prompt": user("<image>?")}, "image_count", "2 images"
    ),
    "too many marks": (
        lambda: {**trl_row(["a.png"]), "prompt": user("<image> or <image>?")}, "image_count", "has 2 places"
    ),
    "placeholder in a text": (lambda: trl_row([], f"what is {TOKEN}?"), "image_count", "1 placeholders"),
    "placeholder in a completion": (
        lambda: {**trl_row(["a.png"]), "chosen": answer(f"a {TOKEN}")}, "image_token_in_text", TOKEN
    ),
    "in a completion": (
        lambda: {**trl_row(["a.png"]), "chosen": [{"role": "assistant", "content": [{"type": "image"}]}]},
        "media", "a completion has images",
    ),
    "video": (
        lambda: trl_row(["a.png"], [{"type": "video", "video": "a.mp4"}]), "media", "has video"  # type: ignore[arg-type]
    ),
    "two columns": (lambda: {**trl_row(["a.png"]), "image": "a.png"}, "image_count", "both have images"),
    "a column of video": (lambda: {**trl_row(["a.png"]), "video": "a.mp4"}, "media", "column 'video'"),
}  # fmt: skip


@pytest.mark.parametrize("fault", BAD)
def test_a_bad_image_is_one_line_and_can_be_skipped(tmp_path: Path, fault: str) -> None:
    make, reason, words = BAD[fault]
    save(tmp_path / "a.png", FIRST)
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "sparse.png").touch()
    os.truncate(tmp_path / "sparse.png", 200 << 30)
    path = write_rows(tmp_path / "pairs.jsonl", [trl_row(["a.png"]), make(), trl_row(["a.png"])])
    message = refusal(lambda: load(tmp_path, path))
    assert "pairs.jsonl line 2: " in message and words in message and f"{reason}: 1 of " in message
    data = load(tmp_path, path, on_bad_row="skip")
    assert data.report["train"]["sources"][0]["dropped"] == {reason: {"rows": 1, "line_numbers": [2]}}
    assert data.train.num_pairs == 2


def test_plain_base64_of_every_format_is_told_and_no_path_is_taken_for_it() -> None:
    reader = ImageReader(processor=PROCESSOR, folder=Path("/folder"), max_pixels=None)
    for kind in ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM"):
        value = base64.b64encode(encoded(Image.new("RGB", (3, 3)), kind)).decode()
        for written in (value, value[:44] + "\n" + value[44:]):
            with pytest.raises(BadRow, match="is plain base64"):
                reader.read(written)
    for path in ("iVBORw0KGgo/" + "a" * 60 + ".png", "a" * 99, "Qk0/short"):
        with pytest.raises(BadRow, match="No such file"):
            reader.read(path)


IDS = {"prompt_ids": [5], "chosen_ids": [6], "rejected_ids": [7]}
TEXT_ROW = {"prompt": "What is it?", **ANSWERS}


@pytest.mark.parametrize(
    ("rows", "processor", "message"),
    [
        ([trl_row(["a.png"])], None, r"only text is read; .*set model\.images: true"),
        ([{**IDS, "images": ["a.png"]}], PROCESSOR, "rows of format tokenized have no place for images"),
        ([{**TEXT_ROW, "picture": "a.png"}], PROCESSOR, r"'picture' has .*image in data\.train\.0\.columns"),
        (
            [TEXT_ROW] * 100 + [{**TEXT_ROW, "image": "a.png"}],
            PROCESSOR,
            r"line 101: .*set data\.train\.0\.format \(pictured",
        ),
    ],
)
def test_images_where_none_are_read_are_refused_with_what_reads_them(
    tmp_path: Path, rows: list[dict[str, Any]], processor: ImageProcessor | None, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        load_rows(tmp_path, *rows, processor=processor)


@pytest.mark.parametrize("part", ["prompt", "chosen"])
@pytest.mark.parametrize("kind", ["texts", "token ids"])
def test_texts_and_token_ids_with_placeholders_are_bad_rows(tmp_path: Path, kind: str, part: str) -> None:
    row: dict[str, Any] = {"prompt": "What is it?", **ANSWERS}
    bad, reason = {**row, part: f"a {TOKEN}?"}, "image_count"
    if kind == "token ids":
        row = {"prompt_ids": [5], "chosen_ids": [6, 2], "rejected_ids": [7, 2]}
        bad = {**row, f"{part}_ids": [PROCESSOR.token_id, 2]}
    elif part == "chosen":
        reason = "image_token_in_text"
    data = load_rows(tmp_path, row, bad, row, on_bad_row="skip")
    dropped = {reason: {"rows": 1, "line_numbers": [2]}}
    assert data.report["train"]["sources"][0]["dropped"] == dropped


def test_a_mark_of_an_image_is_never_text_where_the_model_has_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = ImageProcessor(real_processor("qwen2_5_vl", monkeypatch))
    tokenizer = other.processor.tokenizer
    save(tmp_path / "a.png", FIRST)
    part = user({"type": "image", "image": "a.png"}, {"type": "text", "text": f"{TOKEN}which?"})
    rows = [
        trl_row(["a.png"], f"{TOKEN}what?"),
        trl_row([], f"{TOKEN}what?"),
        {**trl_row(["a.png"]), "chosen": answer(f"the {TOKEN}")},
        {**trl_row([]), "prompt": part},
        {**trl_row([]), "prompt": [{"role": "system", "content": TOKEN}, *user("what?")]},
        trl_row(["a.png"], "<|video_pad|>what?"),
        {"prompt": f"{TOKEN}what?", **ANSWERS},
    ]
    reasons = ["", "image_count", "image_token_in_text", "image_count", "image_count", "media", "image_count"]
    for row, reason in zip(rows, reasons, strict=True):
        good = trl_row(["a.png"]) if "images" in row else TEXT_ROW
        path = write_rows(tmp_path / "pairs.jsonl", [good, row])
        data = load_splits(tmp_path, path, tokenizer, images=other, on_bad_row="skip")
        dropped = {reason: {"rows": 1, "line_numbers": [2]}} if reason else {}
        assert data.report["train"]["sources"][0]["dropped"] == dropped


def upright(exif: Image.Exif) -> np.ndarray[Any, Any]:
    exif[0x0112] = 6
    return np.asarray(decode(encoded(FIRST, "PNG", exif=exif)))


def test_pixels_are_upright_rgb_and_white_where_they_are_transparent() -> None:
    np.testing.assert_array_equal(upright(Image.Exif()), np.rot90(np.asarray(FIRST), -1))
    hidden = Image.merge("RGBA", [*FIRST.split(), Image.new("L", FIRST.size, 0)])
    for transparent in (hidden, hidden.convert("LA"), hidden.quantize()):
        assert np.asarray(decode(encoded(transparent))).min() == 255
    for mode, format in (("CMYK", "JPEG"), ("L", "PNG"), ("1", "PNG"), ("P", "PNG"), ("RGB", "WEBP")):
        image = decode(encoded(FIRST.convert(mode), format))
        assert image.mode == "RGB" and image.size == FIRST.size
    views = encoded(FIRST, "MPO", save_all=True, append_images=[FIRST])  # of some cameras
    assert decode(views).size == FIRST.size


# ---- Scaling, lengths, split


def test_large_images_are_scaled_once_and_told(tmp_path: Path) -> None:
    save(tmp_path / "a.png", picture(3, 200, 100))
    data = load_rows(tmp_path, trl_row(["a.png"]), max_pixels=5000)
    assert read(data)[0].shape == (50, 100, 3)
    small = picture(3, 200, 100).resize((100, 50), Image.Resampling.LANCZOS)
    np.testing.assert_array_equal(read(data)[0], np.asarray(small))
    assert data.report["train"]["sources"][0]["images_scaled"] == 1
    whole = load_rows(tmp_path, trl_row(["a.png"]))
    assert read(whole)[0].shape == (100, 200, 3)
    assert whole.fingerprint != data.fingerprint


def test_prompts_with_images_are_never_cut(tmp_path: Path) -> None:
    save(tmp_path / "a.png", FIRST)
    rows = [trl_row(["a.png"]), trl_row([], "word " * 60)]
    data = load_rows(tmp_path, *rows, truncation="prompt_left", max_length=24)
    assert data.train.row_numbers.tolist() == [2]
    assert data.report["train"]["sources"][0]["dropped"] == {"too_long": {"rows": 1, "line_numbers": [1]}}


def test_pairs_that_share_an_image_are_held_out_together(tmp_path: Path) -> None:
    for number in range(12):
        save(tmp_path / f"{number}.png", picture(number))
    # Images 0 and 1 meet in a pair, 1 and 2 in another one.
    shared = [
        trl_row(["0.png", "1.png"]),
        trl_row(["1.png", "2.png"]),
        trl_row(["2.png"]),
        trl_row(["0.png"]),
    ]
    others = [trl_row([f"{number}.png"]) for number in range(3, 12)]
    path = write_rows(tmp_path / "pairs.jsonl", [*shared, *others, *others, trl_row([], "no image")])
    together = 0
    for seed in range(12):
        data = load(tmp_path, path, seed=seed, eval={"fraction": 0.3})
        assert data.report["held_out_by"] == "image"
        held_out = set(data.eval["held_out"].row_numbers.tolist())
        assert len(held_out & {1, 2, 3, 4}) in (0, 4)
        assert all((row in held_out) == (row + 9 in held_out) for row in range(5, 14))
        together += {1, 2, 3, 4} <= held_out
    assert 0 < together < 12
    one = write_rows(tmp_path / "one.jsonl", [trl_row(["3.png"], f"q{number}") for number in range(4)])
    late = write_rows(tmp_path / "late.jsonl", [trl_row(["3.png"] * (n // 4), f"q{n}") for n in range(5)])
    texts = write_rows(tmp_path / "texts.jsonl", [trl_row([], f"t{number}") for number in range(4)])
    for paths, num_held_out in (((path, one), 4), ((late, texts), 3)):  # the first pairs of each source
        mixed = load(tmp_path, [{"path": name, "share": 1} for name in paths], eval={"fraction": 0.3})
        assert (mixed.train.num_pairs, mixed.eval["held_out"].num_pairs) == (8 - num_held_out, num_held_out)


# ---- Keys and stores


def keys(data: Data) -> list[bytes]:
    return [data.train.chosen_keys[pair].tobytes() for pair in range(data.train.num_pairs)]


def test_a_key_names_pixels_and_processor_not_files_or_order(tmp_path: Path) -> None:
    save(tmp_path / "a.png", FIRST)
    save(tmp_path / "b.png", picture(9))
    (tmp_path / "a.bmp").write_bytes(encoded(FIRST, "BMP"))
    rows = [trl_row([name]) for name in ("a.png", "a.bmp", "b.png")]
    first = keys(load_rows(tmp_path, *rows, trl_row([data_url(encoded(FIRST))])))
    assert first[0] == first[1] == first[3] != first[2]
    assert keys(load_rows(tmp_path, *rows[::-1])) == first[2::-1]
    other = picture_processor(image_mean=[0.4, 0.5, 0.5])
    changed = keys(load_rows(tmp_path, *rows, processor=other))
    assert not set(changed) & set(first)


def test_a_text_pair_has_the_key_that_it_has_without_images(tmp_path: Path) -> None:
    with_images = load_rows(tmp_path, trl_row([]))
    (tmp_path / "text").mkdir()
    assert keys(with_images) == keys(load_rows(tmp_path / "text", trl_row([]), processor=None))


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_store_has_each_embedded_image_once_and_no_copy_of_files(tmp_path: Path, num_workers: int) -> None:
    raw = encoded(picture(4))
    file = save(tmp_path / "a.png", picture(5))
    rows = [trl_row([data_url(raw)], f"question {n}") for n in range(520)] + [trl_row(["a.png"])] * 2
    data = load_rows(tmp_path, *rows, num_workers=num_workers)
    images = data.train.parts[0].images
    assert images is not None and len(images.records) == 2
    assert len(images.content) == len(raw) + len(str(file))
    np.testing.assert_array_equal(read(data, 519)[0], np.asarray(picture(4)))
    np.testing.assert_array_equal(read(data, 521)[0], np.asarray(picture(5)))
    again = load_rows(tmp_path, *rows)
    assert again.report["rows_tokenized"] == 0 and again.fingerprint == data.fingerprint


def test_a_picture_replaced_under_its_path_is_noticed_at_the_start(tmp_path: Path) -> None:
    file = save(tmp_path / "img" / "a.png", FIRST)
    first = load_rows(tmp_path, trl_row(["img/a.png"]), trl_row([]))
    assert load_rows(tmp_path, trl_row(["img/a.png"]), trl_row([])).report["rows_tokenized"] == 0
    status = file.stat()
    file.write_bytes(encoded(picture(8)))
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    second = load_rows(tmp_path, trl_row(["img/a.png"]), trl_row([]))
    assert second.report["rows_tokenized"] == 2
    assert keys(second)[0] != keys(first)[0] and keys(second)[1] == keys(first)[1]
    np.testing.assert_array_equal(read(second)[0], np.asarray(picture(8)))


def test_a_picture_that_changes_while_a_run_goes_on_is_an_error_with_file_and_row(tmp_path: Path) -> None:
    file = save(tmp_path / "a.png", FIRST)
    data = load_rows(tmp_path, trl_row([]), trl_row(["a.png"]))
    file.write_bytes(encoded(picture(8)))
    lines = tmp_path / "pairs.jsonl"
    with pytest.raises(DataError, match=rf"{lines} row 2: {file} has changed .*; restore .* --overwrite"):
        read(data, 1)
    assert load_rows(tmp_path, trl_row([]), trl_row(["a.png"])).report["rows_tokenized"] == 2
    file.unlink()
    with pytest.raises(DataError, match="No such file"):
        read(data, 1)
    assert not Path(data.train.parts[0].directory or "", "manifest.json").exists()


def test_a_changed_byte_of_an_embedded_image_is_noticed(tmp_path: Path) -> None:
    data = load_rows(tmp_path, trl_row([data_url(encoded(FIRST, "BMP"))]))
    content = Path(data.train.parts[0].directory or "", "image_content.bin")
    raw = bytearray(content.read_bytes())
    raw[-1] ^= 1
    content.write_bytes(raw)
    with pytest.raises(DataError, match="has changed"):
        read(load_rows(tmp_path, trl_row([data_url(encoded(FIRST, "BMP"))])))


def test_ranges_of_a_source_have_their_own_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in ((sources, "SMALLEST_RANGE"), (ingest, "SMALLEST_RANGE"), (ingest, "LARGEST_RANGE")):
        monkeypatch.setattr(module, name, 8)
    for number in range(20):
        save(tmp_path / f"{number}.png", picture(number))
    rows = [trl_row([f"{n}.png"] if n % 3 else [data_url(encoded(picture(n)))], f"q{n}") for n in range(20)]
    first = load_rows(tmp_path, *rows)
    assert len(first.train.parts) == 3
    for pair in range(20):
        np.testing.assert_array_equal(read(first, pair)[0], np.asarray(picture(pair)))
    assert len(np.unique(keys_by_image(first.train), axis=0)) == 20
    save(tmp_path / "10.png", picture(99))
    with pytest.raises(DataError, match="pairs.jsonl row 11: .*10.png has changed"):
        read(first, 10)
    second = load_rows(tmp_path, *rows)
    assert second.report["rows_tokenized"] == 8
    np.testing.assert_array_equal(read(second, 10)[0], np.asarray(picture(99)))
    changed = [one != other for one, other in zip(keys(first), keys(second), strict=True)]
    assert changed == [number == 10 for number in range(20)]
    save(tmp_path / "16.png", picture(98))  # noticed at the start
    assert load_rows(tmp_path, *rows).report["rows_tokenized"] == 4


def test_paths_may_have_a_folder_of_their_own(tmp_path: Path) -> None:
    save(tmp_path / "pictures" / "a.png", FIRST)
    path = write_rows(tmp_path / "pairs.jsonl", [trl_row(["a.png"])])
    with pytest.raises(DataError, match=r"set data\.train\.0\.image_folder"):
        load(tmp_path, path)
    data = load(tmp_path, {"path": path, "image_folder": str(tmp_path / "pictures")})
    np.testing.assert_array_equal(read(data)[0], np.asarray(FIRST))
