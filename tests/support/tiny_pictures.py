"""Pictures, bad pictures, and a small processor of the real class, which needs no torchvision."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from PIL import Image
from transformers import Idefics3Processor, PreTrainedTokenizerFast
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

from dpo_pack.data.images import ImageProcessor
from support.tiny_tokenizer import tiny_tokenizer

TOKEN = "<image>"
TEMPLATE = """\
{%- for message in messages %}{{ '<s>' + message.role + '\n' }}
{%- if message.content is string %}{{ message.content }}
{%- else %}{% for part in message.content %}{{ '<image>' if part.type == 'image' else part.text }}{% endfor %}
{%- endif %}{{ '</s>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<s>assistant\n' }}{% endif %}"""


def picture_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = tiny_tokenizer()
    names = [f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)]
    special = [TOKEN, "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", *names]
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def picture_processor(**changes: Any) -> ImageProcessor:
    """Idefics3's: an image is cut into tiles of 28 pixels with 4 tokens each, and one of the whole image."""
    edge = {"longest_edge": 28}
    settings = {"size": {"longest_edge": 112}, "max_image_size": edge, **changes}
    tokenizer = picture_tokenizer()
    tokenizer.image_token = TOKEN
    image_processor = Idefics3ImageProcessorPil(**settings)
    return ImageProcessor(Idefics3Processor(image_processor, tokenizer, image_seq_len=4))


def picture(seed: int = 0, width: int = 40, height: int = 30) -> Image.Image:
    """A smooth random picture, which JPEG keeps small."""
    low = np.random.default_rng(seed).integers(0, 255, (height // 8 + 1, width // 8 + 1, 3), dtype=np.uint8)
    return Image.fromarray(low).resize((width, height), Image.Resampling.BICUBIC)


def encoded(image: Image.Image, format: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def user(*content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content[0] if len(content) == 1 else list(content)}]


def answer(text: str) -> list[dict[str, Any]]:
    return [{"role": "assistant", "content": text}]


def trl_row(images: Any, question: str = "What is in the picture?") -> dict[str, Any]:
    """A row of trl-lib/rlaif-v."""
    return {
        "prompt": user(question),
        "chosen": answer("a cat"),
        "rejected": answer("a dog"),
        "images": images,
    }
