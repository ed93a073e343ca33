"""Makes a tiny vision-language model and pairs about pictures, for configs/images.yaml.

    python scripts/make_pictures.py [DIRECTORY]        # default: runs/pictures/assets

The model is an Idefics 3 with random weights and the real processor of this family, which needs Pillow but no
torchvision. Each picture has a shape of one colour on a grey ground; the chosen answer names its colour, the
rejected one another colour.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForImageTextToText, Idefics3Processor, PreTrainedTokenizerFast
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

NUM_PAIRS = 800
SIDE = 56  # pixels of a picture; 16 tokens
COLOURS = {"red": (200, 30, 30), "green": (30, 160, 40), "blue": (40, 60, 200), "yellow": (220, 210, 40)}
QUESTIONS = ("Which colour is the shape?", "What colour do you see?", "Name the colour of the shape.")
ANSWERS = ("It is {colour}.", "The shape is {colour}.", "I see a {colour} shape.")
SPECIAL = ("<|pad|>", "<|begin|>", "<|end|>", "<image>", "<fake_token_around_image>", "<global-img>")
TEMPLATE = """\
{%- for message in messages %}{{ '<|begin|>' + message.role + '\n' }}
{%- if message.content is string %}{{ message.content }}
{%- else %}{% for part in message.content %}{{ '<image>' if part.type == 'image' else part.text }}{% endfor %}
{%- endif %}{{ '<|end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|begin|>assistant\n' }}{% endif %}"""


def tokenizer() -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [*QUESTIONS, *(answer.format(colour=colour) for answer in ANSWERS for colour in COLOURS)]
    backend.train_from_iterator([*texts, "user\n", "assistant\n"], trainer)
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<|pad|>",
        eos_token="<|end|>",
        extra_special_tokens=[*SPECIAL[1:], "<end_of_utterance>"],
    )
    made.chat_template = TEMPLATE
    return made


def make_model(directory: Path) -> None:
    words = tokenizer()
    size = {"longest_edge": SIDE}
    pictures = Idefics3ImageProcessorPil(size=size, max_image_size=size, do_image_splitting=False)
    processor = Idefics3Processor(pictures, words, image_seq_len=16, chat_template=TEMPLATE)
    text = {"model_type": "llama", "vocab_size": len(words), "hidden_size": 96, "intermediate_size": 192}
    text |= {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4}
    text |= {"max_position_embeddings": 256, "pad_token_id": 0, "eos_token_id": words.eos_token_id}
    tower = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = AutoConfig.for_model(
        "idefics3",
        text_config=text,
        vision_config={**tower, "image_size": SIDE, "patch_size": 7},
        image_token_id=words.convert_tokens_to_ids("<image>"),
        scale_factor=2,
    )
    torch.manual_seed(0)
    AutoModelForImageTextToText.from_config(config).save_pretrained(directory)
    processor.save_pretrained(directory)


def picture(rng: random.Random, colour: str) -> Image.Image:
    ground = rng.randint(90, 170)
    image = Image.new("RGB", (SIDE, SIDE), (ground,) * 3)
    left, top, size = rng.randint(2, 14), rng.randint(2, 14), rng.randint(26, 38)
    box = (left, top, left + size, top + size)
    values = tuple(min(255, max(0, value + rng.randint(-25, 25))) for value in COLOURS[colour])
    draw = ImageDraw.Draw(image)
    (draw.ellipse if rng.random() < 0.5 else draw.rectangle)(box, fill=values)
    return image


def make_pairs(directory: Path) -> None:
    rng = random.Random(0)
    (directory / "pictures").mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    for number in range(NUM_PAIRS):
        right, wrong = rng.sample(sorted(COLOURS), 2)
        name = f"pictures/{number:04}.png"
        picture(rng, right).save(directory / name)
        answers = [
            [{"role": "assistant", "content": rng.choice(ANSWERS).format(colour=colour)}]
            for colour in (right, wrong)
        ]
        prompt = [{"role": "user", "content": rng.choice(QUESTIONS)}]
        rows.append({"prompt": prompt, "chosen": answers[0], "rejected": answers[1], "images": [name]})
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (directory / "pairs.jsonl").write_text(text, encoding="utf-8")


def main(directory: Path) -> None:
    make_model(directory / "model")
    make_pairs(directory)
    print(f"{directory}: a model, and {NUM_PAIRS} pairs with a picture each")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/pictures/assets"))
