"""Images of prompts: how they are found, read, refused, named and stored, and the text that stands for them.

An image is decoded once while its row is tokenised, and again whenever its row is computed. Its key is a hash
of its pixels as the processor gets them: upright, RGB, scaled to `data.max_pixels`.
"""

from __future__ import annotations

import base64
import errno
import hashlib
import io
import json
import math
import os
import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dpo_pack.data.formats import Pair
from dpo_pack.data.readers import other_content
from dpo_pack.data.values import BadRow, Message, holds_media, is_media_name
from dpo_pack.packing.lengths import Group
from dpo_pack.system.errors import first_line
from dpo_pack.system.files import regular_file
from dpo_pack.system.machine import package_versions

Pixels = NDArray[np.uint8]  # [height, width, 3]
MARK = "<image>"  # in a text of a prompt: here is an image
MAX_PIXELS = 100_000_000
_MAX_RATIO = 200  # of the sides; Qwen's processors refuse more, and others squeeze such an image
_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM")  # others run programs, or are not tested
_16_BITS = re.compile(r";16[BLN]")  # in the raw mode that Pillow reads, of which it keeps 8 bits
# How JPEG, PNG, WEBP, GIF, BMP, TIFF and PPM begin. No path is so long without a dot, and begins so.
_BASE64 = re.compile(r"(/9j/|iVBO|UklG|R0lG|Qk[0-3]|SUkq|TU0A|UD[EIMQUY])[\w+/\s-]{40,}=*\s*", re.ASCII)
_KEY_BYTES = 16
RECORDS, CONTENT, PAIRS = "image_records.bin", "image_content.bin", "pair_images.bin"
_RECORD_DTYPE = np.dtype(
    [
        ("key", "u1", _KEY_BYTES),
        ("width", "<i4"),
        ("height", "<i4"),
        ("offset", "<i8"),  # in the content: of an encoded image, or of a file's path
        ("size", "<i8"),  # bytes there
        ("changed", "<i8"),  # when the file changed, in ns; -1: the content has the image itself
        ("file_size", "<i8"),
    ]
)
_PAIR_DTYPE = np.dtype([("begin", "<i8"), ("image", "<i8")])


class ReadImage(NamedTuple):
    """An image of a row, checked."""

    key: bytes
    width: int  # as the processor gets it
    height: int
    content: bytes  # the encoded image, or the path of its file
    changed: int  # see _RECORD_DTYPE
    file_size: int
    is_scaled: bool
    written: bytes = b""  # a hash of the encoded image, whether in the row or in a file


class ImageProcessor:
    """The processor of a model of transformers, as data and rows need it."""

    def __init__(self, processor: Any) -> None:
        self.processor = processor
        self.token: str = processor.image_token  # stands for an image in what the chat template writes
        self.token_id: int = processor.image_token_id
        names = ("video_token", "audio_token")
        self.other_marks = [mark for name in names if (mark := getattr(processor, name, None))]
        self._texts: dict[tuple[int, int], str] = {}

    @cached_property
    def fingerprint(self) -> str:
        """A hash of all that decides pixel values: classes, settings, versions of the libraries."""
        classes = [type(part).__name__ for part in (self.processor, self.processor.image_processor)]
        settings = [json.loads(self.processor.to_json_string()), self.processor.image_processor.to_dict()]
        known = package_versions()
        text = json.dumps([classes, settings, known.get("pillow"), known.get("torchvision")], default=str)
        return hashlib.blake2b(text.encode(), digest_size=_KEY_BYTES).hexdigest()

    def gives_template(self, tokenizer: Any) -> bool:
        """Whether the tokenizer has a chat template of the processor that the processor's own has not."""
        template: Any = self.processor.chat_template
        return bool(tokenizer.chat_template == template != self.processor.tokenizer.chat_template)

    def expand(self, text: str, sizes: Sequence[tuple[int, int]]) -> str:
        """Returns the text with each placeholder replaced by what stands for an image of (width, height)."""
        before, *after = text.split(self.token)
        both = zip(map(self.text_of, sizes), after, strict=True)
        return before + "".join(part for one in both for part in one)

    def text_of(self, size: tuple[int, int]) -> str:
        """Returns the text that stands for an image of (width, height). Raises BadRow if it is refused."""
        if size not in self._texts:
            black = np.zeros((size[1], size[0], 3), dtype=np.uint8)
            try:
                called = self._call([black], return_text_replacement_offsets=True)
            except ValueError as error:
                width, height = size
                detail = f"the model's processor refuses an image of {width}x{height} ({first_line(error)})"
                raise BadRow("image_refused", detail) from error
            self._texts[size] = called["text_replacement_offsets"][0][0]["replacement"]
        return self._texts[size]

    def image_ids(self, width: int, height: int) -> list[int]:
        """Returns the token ids of `text_of`."""
        called = self.processor.tokenizer(self.text_of((width, height)), add_special_tokens=False)
        return list(called["input_ids"])

    def num_tokens(self, size: tuple[int, int]) -> int:
        """Returns the number of placeholders of an image of (width, height): its features in the text."""
        return self.text_of(size).count(self.token)

    def pixel_inputs(self, images: Sequence[Pixels]) -> dict[str, Any]:
        """Returns the tensors of one prompt's images, as the processor gives them."""
        inputs = self._call(images, return_tensors="pt")
        names = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")
        return {name: value for name, value in inputs.items() if name not in names}

    def _call(self, images: Sequence[Pixels], **options: Any) -> Any:
        from PIL import Image

        pictures = [Image.fromarray(pixels) for pixels in images]  # arrays of 3 rows are ambiguous
        return self.processor(images=[pictures], text=[self.token * len(images)], **options)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageReader:
    """Reads the images of a source's rows."""

    processor: ImageProcessor
    folder: Path | None  # of the paths in rows; None: a hub data set without data.*.image_folder
    max_pixels: int | None

    def of_pair(self, pair: Pair, given: Sequence[Any]) -> tuple[Pair, tuple[ReadImage, ...]]:
        """Returns the pair with parts {type: image}, and the images in order; `given`: those beside the
        messages. Raises BadRow."""
        for completion in (pair.chosen, pair.rejected):
            if any(_holds_image(part) for message in completion for part in _parts(message)):
                raise BadRow("media", "a completion has images, video or audio; only prompts may")
        prompt, images = _placed(pair.prompt, given)
        return replace(pair, prompt=prompt), tuple(map(self.read, images))

    def expanded(self, texts: Sequence[str], images: Sequence[ReadImage]) -> tuple[str, ...]:
        """Returns the rendered texts with what stands for the images in place of their placeholders. Raises
        BadRow if their numbers differ, or if a mark of an image, a video or an audio is left as text."""
        sizes, token = [(image.width, image.height) for image in images], self.processor.token
        for mark in (MARK, *self.processor.other_marks):
            found = [mark in text for text in texts]
            if mark == token or not any(found):
                continue
            if mark != MARK:
                raise BadRow("media", f"a text has {mark}, which stands for video or audio")
            if found[0]:
                detail = f"the prompt has {MARK}, which stands for an image, and the row has none for it"
                raise BadRow("image_count", detail)
            raise BadRow("image_token_in_text", f"a completion has {MARK}, which stands for an image")
        counts = [text.count(token) for text in texts]
        if counts[0] != len(images):
            detail = f"the chat template writes {counts[0]} placeholders ({token}) for {len(images)} images"
            raise BadRow("image_count", f"{detail}; a text may have this token, too")
        if any(count != counts[0] for count in counts):
            raise BadRow("image_token_in_text", f"a completion has the placeholder of images, {token}")
        return tuple(self.processor.expand(text, sizes) for text in texts)

    def check_placeholders(self, pair: Group, *, has_images: bool) -> None:
        """Raises BadRow if the completions begin before the last image's end, or if there is no image."""
        parts = pair.completions if has_images else (pair.context, *pair.completions)
        if not any((part == self.processor.token_id).any() for part in parts):
            return
        if has_images:
            raise BadRow("image_in_completion", "the completions begin before the last image of the prompt")
        detail = f"a text or its token ids have the placeholder of images, {self.processor.token}"
        raise BadRow("image_count", f"{detail}, and the row has no image")

    def read(self, value: Any) -> ReadImage:
        """Reads one image: bytes, {bytes, path}, a path or a data URL. Raises BadRow."""
        if isinstance(value, dict):
            value = value.get("bytes") or value.get("path") or value.get("url") or b""
        changed, file_size = -1, 0
        if isinstance(value, str) and value.startswith("data:"):
            try:
                raw = content = base64.b64decode(value.partition("base64,")[2], validate=True)
            except ValueError as error:
                raise BadRow("broken_image", f"an image is no data URL of base64 ({error})") from error
        elif isinstance(value, str):
            path = self._path(value)
            try:
                status, raw = regular_file(path), path.read_bytes()
            except (OSError, ValueError) as error:
                kind = "missing_image" if getattr(error, "errno", 0) != errno.EFBIG else "image_too_large"
                reason = getattr(error, "strerror", None) or error
                raise BadRow(kind, f"image {value[:200]!r}: {reason} ({path.parent})") from error
            content, changed, file_size = os.fsencode(path), status.st_ctime_ns, status.st_size
        elif isinstance(value, bytes):
            raw = content = value
        else:
            raise BadRow("wrong_type", f"an image is a {type(value).__name__}, no bytes, path or data URL")
        name = f"image {value[-200:]!r}" if changed >= 0 else "an image in the row"
        picture = decode(raw, name)
        width, height = picture.size
        if self.max_pixels is not None and width * height > self.max_pixels:
            factor = math.sqrt(self.max_pixels / (width * height))
            width, height = max(1, int(width * factor)), max(1, int(height * factor))
        pixels = _pixels(picture, width, height)
        return ReadImage(
            key=image_key(pixels),
            width=width,
            height=height,
            content=content,
            changed=changed,
            file_size=file_size,
            is_scaled=(width, height) != picture.size,
            written=hashlib.blake2b(raw, digest_size=_KEY_BYTES).digest(),
        )

    def _path(self, value: str) -> Path:
        if value.startswith("file:"):
            raise BadRow("image_link", f"image {value[:200]!r} is a URL; give the path without file://")
        if _BASE64.fullmatch(value):
            what = "is plain base64; write data:image/png;base64, before it"
            raise BadRow("broken_image", f"image {value[:20]!r}... {what}")
        if "://" in value:
            raise BadRow("image_link", f"image {value[:200]!r} is a link; download it and give its path")
        if self.folder is None:
            detail = f"image {value[:200]!r} is a path, and a data set of the hub has no folder for it"
            raise BadRow("missing_image", detail)
        path = os.path.normpath(self.folder / value)
        if not Path(path).is_relative_to(self.folder):
            detail = f"image {value[:200]!r} is outside of {self.folder}, where this source's images are"
            raise BadRow("image_outside", detail)
        return Path(path)


def decode(raw: bytes, name: str = "an image") -> Any:
    """Returns the upright RGB image of Pillow; transparent pixels are white. Raises BadRow."""
    from PIL import Image, ImageOps, UnidentifiedImageError

    if what := other_content(raw[:4096], "image"):
        raise BadRow("broken_image", f"{name} is {what}")
    Image.WARN_POSSIBLE_FORMATS = True  # Pillow says then why a decoder refuses a file of its format
    try:
        with warnings.catch_warnings(action="always", record=True) as told:  # and of sizes, checked below
            picture: Any = Image.open(io.BytesIO(raw), formats=_FORMATS)
            is_animated = getattr(picture, "is_animated", False)  # reads the file
    except Image.DecompressionBombError as error:
        raise BadRow("image_too_large", f"{name} has more than {MAX_PIXELS:,} pixels") from error
    except Exception as error:  # decoders raise errors of many types
        is_known = not isinstance(error, UnidentifiedImageError)
        reasons = [first_line(error)] if is_known else [str(one.message) for one in told[-1:]]
        detail = f"{name} is none of {', '.join(_FORMATS)}, or is broken"
        raise BadRow("broken_image", " ".join([detail, *(f"({reason})" for reason in reasons)])) from error
    width, height = picture.size
    size = f"{name} has {width:,} x {height:,} pixels"
    if width * height > MAX_PIXELS:
        raise BadRow("image_too_large", f"{size}, more than {MAX_PIXELS:,}")
    if max(width, height) > _MAX_RATIO * min(width, height):
        raise BadRow("image_too_narrow", f"{size}; sides differ over 200 times")
    maxvals = [tile[3][1] for tile in picture.tile if tile[0].startswith("ppm")]
    if picture.mode[0] in "IF" or _16_BITS.search(repr(picture.tile)) or max(maxvals, default=0) > 255:
        raise BadRow("image_of_16_bits", f"{name} has more than 8 bits a colour; convert it to 8")
    if is_animated and picture.format != "MPO":  # a second view of some cameras
        raise BadRow("animated_image", f"{name} is animated or has several pages; save the one you mean")
    try:
        picture = ImageOps.exif_transpose(picture)
        if picture.has_transparency_data:
            colours = picture.convert("RGBA")
            picture = Image.alpha_composite(Image.new("RGBA", picture.size, (255, 255, 255)), colours)
        return picture.convert("RGB")
    except Exception as error:
        raise BadRow("broken_image", f"{name} cannot be decoded ({first_line(error)})") from error


def image_label(image: ReadImage, processor: ImageProcessor) -> str:
    num_tokens = processor.num_tokens((image.width, image.height))
    return f"[image {image.width}x{image.height}, {num_tokens:,} tokens]"


def png_url(pixels: Pixels) -> str:
    """Returns an image as a data URL, for a page."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def _pixels(picture: Any, width: int, height: int) -> Pixels:
    from PIL import Image

    if picture.size != (width, height):
        picture = picture.resize((width, height), Image.Resampling.LANCZOS)
    return np.asarray(picture)


def image_key(pixels: Pixels) -> bytes:
    """Returns 16 bytes that name an image: a hash of its size and its pixels."""
    digest = hashlib.blake2b(np.array(pixels.shape, dtype="<i4").tobytes(), digest_size=_KEY_BYTES)
    digest.update(np.ascontiguousarray(pixels).data)
    return digest.digest()


def pixels_of(image: ReadImage) -> Pixels:
    """Reads an image again. Raises BadRow if it is not there or not the same."""
    raw, name = image.content, "an image in the store"
    if image.changed >= 0:
        name = os.fsdecode(image.content)
        try:
            regular_file(Path(name))
            raw = Path(name).read_bytes()
        except OSError as error:
            raise BadRow("missing_image", f"{name}: {error.strerror}") from error
    pixels = _pixels(decode(raw, name), image.width, image.height)
    if image_key(pixels) != image.key:
        raise BadRow("changed_image", f"{name} has changed since its row was tokenised")
    return pixels


def _parts(message: Any) -> Iterator[Any]:
    content = message.get("content") if isinstance(message, dict) else None
    return iter(content if isinstance(content, list) else ())


def _holds_image(part: Any) -> bool:
    return isinstance(part, dict) and (
        is_media_name(str(part.get("type"))) or any(holds_media(*item) for item in part.items())
    )


def _placed(prompt: Any, given: Sequence[Any]) -> tuple[list[Message], list[Any]]:
    """Returns the prompt with parts {type: image}, and their images. Those of `given` are at parts without
    one and at each MARK in a text, or before the first text of the user."""
    images: list[Any] = []
    placed: list[Message] = []
    for message in prompt:
        content = message["content"]
        if isinstance(content, str) and given and MARK in content:
            content = [{"type": "text", "text": content}]
        if isinstance(content, list):
            content = [new for part in content for new in _placed_part(part, images, bool(given))]
        placed.append({**message, "content": content})
    places = images.count(None)
    if given and not places and not images:
        first = next((at for at, message in enumerate(placed) if message["role"] == "user"), 0)
        content = placed[first]["content"]
        texts = [{"type": "text", "text": content}] if isinstance(content, str) else list(content or ())
        placed[first] = {**placed[first], "content": [*[{"type": "image"}] * len(given), *texts]}
        return placed, list(given)
    if places != len(given):
        what = f"{len(given)} images beside the messages, and the prompt has {places} places for them"
        raise BadRow("image_count", f"the row has {what} (parts of type image, {MARK} in a text)")
    rest = iter(given)
    return placed, [next(rest) if image is None else image for image in images]


def _placed_part(part: Any, images: list[Any], splits: bool) -> Iterator[Any]:
    """Yields the parts that a part becomes, and adds its images to `images`; None: it has only the place."""
    if not isinstance(part, dict) or not _holds_image(part):
        text = part.get("text") if isinstance(part, dict) else part
        pieces = text.split(MARK) if splits and isinstance(text, str) else []
        if len(pieces) < 2:
            yield part
            return
        for number, piece in enumerate(pieces):
            if number:
                images.append(None)
                yield {"type": "image"}
            if piece:
                yield {"type": "text", "text": piece}
        return
    image = next((part[key] for key in ("image", "image_url", "url", "path") if part.get(key)), None)
    if "image" not in str(part.get("type", "image")):
        raise BadRow("media", "the prompt has video or audio, and only text and images are read")
    images.append(image)
    yield {"type": "image"}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StoredImages:
    """The images of a store's pairs. Embedded images are in `content`, of others it has the paths."""

    records: NDArray[np.void]  # [N] of _RECORD_DTYPE
    content: Pixels  # [bytes]
    pairs: NDArray[np.void]  # [n] of _PAIR_DTYPE: first token of a pair, and one of its images; in order
    fingerprint: str  # of the processor

    @staticmethod
    def of(images: Sequence[Sequence[ReadImage]], begins: Sequence[int], fingerprint: str) -> StoredImages:
        """Puts the images of pairs, whose first tokens are `begins`, into memory."""
        every = [(begin, image) for of_pair, begin in zip(images, begins, strict=True) for image in of_pair]
        records, offset = list[Any](), 0
        for _, image in every:
            key, size = np.frombuffer(image.key, dtype=np.uint8), len(image.content)
            records.append((key, image.width, image.height, offset, size, image.changed, image.file_size))
            offset += size
        return StoredImages(
            records=np.array(records, dtype=_RECORD_DTYPE),
            content=np.frombuffer(b"".join(image.content for _, image in every), dtype=np.uint8),
            pairs=np.array([(begin, at) for at, (begin, _) in enumerate(every)], dtype=_PAIR_DTYPE),
            fingerprint=fingerprint,
        )

    @staticmethod
    def open(directory: Path, fingerprint: str) -> StoredImages:
        """Maps the files in `directory`. Raises OSError and ValueError."""
        kinds: dict[str, Any] = {RECORDS: _RECORD_DTYPE, CONTENT: np.uint8, PAIRS: _PAIR_DTYPE}
        records, content, pairs = (
            np.asarray(np.memmap(directory / name, dtype=kind, mode="r")) for name, kind in kinds.items()
        )
        return StoredImages(records=records, content=content, pairs=pairs, fingerprint=fingerprint)

    @property
    def checksum(self) -> str:
        """A hash of records and pairs. Of the content only the size counts: records have its hashes."""
        parts = (self.records, self.pairs, np.array([len(self.content)], dtype="<i8"))
        return hashlib.blake2b(b"".join(part.tobytes() for part in parts)).hexdigest()

    def of_pair(self, begin: int) -> tuple[int, ...]:
        """Returns the images of the pair whose tokens begin at `begin`."""
        between = np.searchsorted(self.pairs["begin"], (begin, begin + 1))
        return tuple(self.pairs["image"][slice(*between)].tolist())

    def keys_of(self, begin: int) -> bytes:
        """Returns what the key of a sequence of this pair hashes beside its tokens; b"": it has no image."""
        keys: bytes = self.records["key"][list(self.of_pair(begin))].tobytes()
        return keys and keys + bytes.fromhex(self.fingerprint)

    def path_of(self, image: int) -> str | None:
        """Returns the path of an image's file; None: the store has the image itself."""
        is_path = self.records["changed"][image] >= 0
        return os.fsdecode(self.content_of(image)) if is_path else None

    def content_of(self, image: int) -> bytes:
        """Returns the encoded image, or the path of its file."""
        begin = int(self.records["offset"][image])
        return self.content[begin : begin + int(self.records["size"][image])].tobytes()

    def read(self, image: int) -> Pixels:
        """Decodes an image. Raises BadRow if it is not the one that was tokenised."""
        record = self.records[image]
        key, width, height, _, _, changed, file_size = record.item()
        content = self.content_of(image)
        return pixels_of(ReadImage(bytes(key), width, height, content, changed, file_size, False))

    def have_changed(self) -> bool:
        """Whether a file is not as it was: a run would find it at the step that reads it."""
        files = np.flatnonzero(self.records["changed"] >= 0).tolist()
        stamps = self.records[["changed", "file_size"]]
        return any(_stamp(str(self.path_of(file))) != stamps[file].item() for file in files)


class ImageJoiner:
    """Joins the images of several stores: each different one once, and each file."""

    def __init__(self, content: BinaryIO, fingerprint: str) -> None:
        self.content, self.fingerprint = content, fingerprint
        self.records: list[NDArray[np.void]] = []
        self.pairs: list[NDArray[np.void]] = []
        self._found: dict[tuple[bytes, bytes], int] = {}

    def add(self, images: StoredImages, num_tokens: int) -> None:
        """Adds the images of a store, before whose tokens come `num_tokens` others."""
        stored, pairs = list[int](), images.pairs.copy()
        for position, record in enumerate(images.records.copy()):
            content = images.content_of(position)
            name = (record["key"].tobytes(), content if record["changed"] >= 0 else b"")
            if name not in self._found:
                self._found[name] = len(self.records)
                record["offset"] = self.content.tell()
                self.records.append(record)
                self.content.write(content)
            stored.append(self._found[name])
        pairs["begin"] += num_tokens
        pairs["image"] = np.array(stored)[pairs["image"]]
        self.pairs.append(pairs)

    def write(self, directory: Path) -> dict[str, Any]:
        """Writes what is not in `content`, and returns what the store's summary has of images."""
        np.array(self.records, dtype=_RECORD_DTYPE).tofile(directory / RECORDS)
        np.concatenate(self.pairs).tofile(directory / PAIRS)
        return {"image_processor": self.fingerprint}


def _stamp(path: str) -> tuple[int, int]:
    """Returns when a file changed, in ns, and its size; (-1, -1): it is not there."""
    try:
        status = os.stat(path)
    except OSError:
        return -1, -1
    return status.st_ctime_ns, status.st_size
