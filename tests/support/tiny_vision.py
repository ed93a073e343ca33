"""Tiny random vision-language models of the real classes, and stand-ins for their image processors.

A stand-in makes pixel values of an image's bytes, in the form of the family's processor, so that the tests of
rows need neither torchvision nor files. Sizes are of an image's features: an image of [H, W, 3] has H * W.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText, PretrainedConfig, PreTrainedModel

from dpo_pack.packing.lengths import Group
from support.tiny_models import VOCABULARY

Image = npt.NDArray[np.uint8]
IMAGE_TOKEN, VIDEO_TOKEN, BEGIN, END = 90, 91, 92, 93  # text has smaller ids
_IDS = {
    "image_token_id": IMAGE_TOKEN,
    "video_token_id": VIDEO_TOKEN,
    "vision_start_token_id": BEGIN,
    "vision_end_token_id": END,
}
_ENCODER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}


def _text(kind: str, section: Sequence[int] = (), **changes: Any) -> dict[str, Any]:
    if section:
        rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(section)}
        changes["rope_parameters"] = {**rope, **changes.pop("rope", {})}
    plain = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
    plain |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
    plain |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False}
    return {**plain, **({"model_type": kind} if kind else {}), **changes}


def _qwen(tower: dict[str, Any], **text: Any) -> dict[str, Any]:
    return {"text_config": _text("", **text), "vision_config": tower, **_IDS}


_QWEN2 = {"depth": 2, "num_heads": 2, "hidden_size": 32}
_QWEN3 = {**_QWEN2, "depth": 4, "out_hidden_size": 32, "intermediate_size": 48}
_QWEN3 |= {"num_position_embeddings": 64}
_DEEP = {**_QWEN3, "deepstack_visual_indexes": [0, 1, 2]}
_WIDE = {"num_attention_heads": 2, "num_key_value_heads": 1}  # these have no head_dim of their own
_INTERLEAVED = {"num_hidden_layers": 4, "head_dim": 16, "rope": {"mrope_interleaved": True}}
_CLIP = {**_ENCODER, "model_type": "clip_vision_model", "image_size": 28, "patch_size": 7}
_CLIP |= {"projection_dim": 32, "num_hidden_layers": 3}
_PIXTRAL = {**_ENCODER, "model_type": "pixtral", "image_size": 112, "patch_size": 14}
_IDEFICS = {
    "text_config": _text("llama"),
    "vision_config": {**_ENCODER, "image_size": 28, "patch_size": 7},
    "image_token_id": IMAGE_TOKEN,
    "scale_factor": 2,
}
_DELTA = {
    **_INTERLEAVED,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "rope": {"mrope_interleaved": True, "partial_rotary_factor": 0.5},
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
CONFIGS: dict[str, dict[str, Any]] = {
    "glm4v": {
        **_qwen(
            {**_QWEN2, "intermediate_size": 48, "out_hidden_size": 32, "image_size": 56},
            section=(2, 3, 3), rope={"partial_rotary_factor": 1.0}, **_WIDE,
        ),
        "image_start_token_id": BEGIN,
        "image_end_token_id": END,
        "video_start_token_id": 94,
        "video_end_token_id": 95,
    },
    "qwen2_vl": _qwen({**_QWEN2, "embed_dim": 32, "mlp_ratio": 2}, section=(2, 3, 3), **_WIDE),
    "qwen2_5_vl": _qwen(
        {**_QWEN2, "depth": 3, "out_hidden_size": 32, "intermediate_size": 48, "window_size": 56,
         "fullatt_block_indexes": [1]},
        section=(2, 3, 3), **_WIDE,
    ),
    "qwen3_vl": _qwen(_DEEP, section=(4, 2, 2), **_INTERLEAVED),
    "qwen3_vl_moe": _qwen(_DEEP, section=(4, 2, 2), **_INTERLEAVED, **_EXPERTS),
    "qwen3_5": _qwen(_QWEN3, section=(2, 1, 1), **_DELTA),
    "idefics3": _IDEFICS,
    "smolvlm": _IDEFICS,
    "internvl": {
        "text_config": _text("qwen2"),
        "vision_config": {
            **_ENCODER, "model_type": "internvl_vision", "image_size": [28, 28], "patch_size": [7, 7]
        },
        "image_token_id": IMAGE_TOKEN,
        "image_seq_length": 4,
        "tie_word_embeddings": False,
    },
    "llava": {
        "text_config": _text("llama"), "vision_config": _CLIP, "image_token_index": IMAGE_TOKEN,
        "image_seq_length": 16,
    },
    "llava_next": {
        "text_config": _text("llama"), "vision_config": _CLIP, "image_token_index": IMAGE_TOKEN,
        "image_grid_pinpoints": [[28, 56], [56, 28], [56, 56]],
    },
    "mistral3": {
        "text_config": _text("mistral", head_dim=8, sliding_window=None), "vision_config": _PIXTRAL,
        "image_token_index": IMAGE_TOKEN, "spatial_merge_size": 2, "tie_word_embeddings": False,
    },
    "lfm2_vl": {
        "text_config": _text("lfm2", num_hidden_layers=4, conv_L_cache=3, block_auto_adjust_ff_dim=False,
                             layer_types=["conv", "full_attention"] * 2),
        "vision_config": {
            **_ENCODER, "model_type": "siglip2_vision_model", "patch_size": 7, "num_patches": 16,
            "vision_use_head": False,
        },
        "image_token_id": IMAGE_TOKEN, "projector_hidden_size": 40, "downsample_factor": 2,
    },
}  # fmt: skip


def vision_config(family: str, **changes: Any) -> PretrainedConfig:
    config: PretrainedConfig = AutoConfig.for_model(family, **CONFIGS[family], **changes)
    return config


def vision_model(family: str) -> PreTrainedModel:
    """Weights larger than the initial ones, so that every part acts."""
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(vision_config(family), attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                parameter.mul_(20.0 if "embed_tokens" in name else 4.0)
            elif "norm" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.eval()
    assert isinstance(model, PreTrainedModel)
    return model


def picture(seed: int, height: int, width: int) -> Image:
    return np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)


def _values(image: Image, *shape: int) -> Tensor:
    seed = int.from_bytes(hashlib.blake2b(image.tobytes(), digest_size=4).digest(), "big")
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _qwen_pixels(images: Sequence[Image], *, patch: int) -> dict[str, Tensor]:
    values = [_values(image, 4 * image.shape[0] * image.shape[1], 6 * patch**2) for image in images]
    grids = [[1, 2 * image.shape[0], 2 * image.shape[1]] for image in images]
    return {"pixel_values": torch.cat(values), "image_grid_thw": torch.tensor(grids)}


def _square_pixels(images: Sequence[Image]) -> dict[str, Tensor]:
    return {"pixel_values": torch.stack([_values(image, 3, 28, 28) for image in images])}


def _idefics_pixels(images: Sequence[Image]) -> dict[str, Tensor]:
    tiles = [_values(image, len(image), 3, 28, 28) for image in images]  # a tile for each row of the image
    values = torch.cat(tiles)[None]
    mask = torch.ones(values.shape[:2] + values.shape[3:], dtype=torch.long)
    return {"pixel_values": values, "pixel_attention_mask": mask, "rows": torch.zeros(1)}


def _next_pixels(images: Sequence[Image]) -> dict[str, Tensor]:
    tiles = [1 + max(1, image.shape[0]) * max(1, image.shape[1]) for image in images]
    values = [_values(image, number, 3, 28, 28) for image, number in zip(images, tiles, strict=True)]
    padded = torch.zeros(len(images), max(tiles), 3, 28, 28)
    for line, value in zip(padded, values, strict=True):
        line[: len(value)] = value
    sizes = [[28 * image.shape[0], 28 * image.shape[1]] for image in images]
    return {"pixel_values": padded, "image_sizes": torch.tensor(sizes)}


def _pixtral_pixels(images: Sequence[Image]) -> dict[str, Tensor]:
    sizes = [(28 * image.shape[0], 28 * image.shape[1]) for image in images]
    padded = torch.zeros(len(images), 3, max(h for h, _ in sizes), max(w for _, w in sizes))
    for line, image, (height, width) in zip(padded, images, sizes, strict=True):
        line[:, :height, :width] = _values(image, 3, height, width)
    return {"pixel_values": padded, "image_sizes": torch.tensor(sizes)}


def _lfm_pixels(images: Sequence[Image]) -> dict[str, Tensor]:
    shapes = [[2 * image.shape[0], 2 * image.shape[1]] for image in images]
    longest = 64
    values, mask = torch.zeros(len(images), longest, 147), torch.zeros(len(images), longest, dtype=torch.long)
    for number, (image, (height, width)) in enumerate(zip(images, shapes, strict=True)):
        values[number, : height * width] = _values(image, height * width, 147)
        mask[number, : height * width] = 1
    return {"pixel_values": values, "pixel_attention_mask": mask, "spatial_shapes": torch.tensor(shapes)}


_PIXELS: dict[str, Callable[[Sequence[Image]], dict[str, Tensor]]] = {
    **dict.fromkeys(("glm4v", "qwen2_vl", "qwen2_5_vl"), partial(_qwen_pixels, patch=14)),
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe", "qwen3_5"), partial(_qwen_pixels, patch=16)),
    **dict.fromkeys(("idefics3", "smolvlm"), _idefics_pixels),
    **dict.fromkeys(("internvl", "llava"), _square_pixels),
    "llava_next": _next_pixels,
    "mistral3": _pixtral_pixels,
    "lfm2_vl": _lfm_pixels,
}


class StandIn:
    """The image processor of a family. The proof's images get 2 x 3 features, or 2 x 2."""

    fingerprint = "stand-in"

    def __init__(self, family: str, model: PreTrainedModel | None = None) -> None:
        self.family, self.model = family, model

    def image_ids(self, width: int, height: int) -> list[int]:
        assert self.model is not None
        return [IMAGE_TOKEN] * num_features(self.model, self.family, picture(0, height, width))

    def pixel_inputs(self, images: Sequence[Image]) -> dict[str, Tensor]:
        # The first two: images of the proof; the last: of `image_flops`.
        step = {112: 56, 84: 42, 512: 256}.get(len(images[0]), 1)
        return _PIXELS[self.family]([image[::step, ::step] for image in images])


def num_features(model: PreTrainedModel, family: str, image: Image) -> int:
    """How many tokens an image takes, by the model itself."""
    backbone: Any = model.base_model
    inputs = StandIn(family).pixel_inputs([image])
    with torch.no_grad():
        features = backbone.get_image_features(
            **{name: value for name, value in inputs.items() if name != "rows"}, return_dict=True
        ).pooler_output
    return sum(int(np.prod(part.shape[:-1])) for part in features)


def image_group(
    model: PreTrainedModel, family: str, images: Sequence[Image], *, seed: int, alike: int = 0
) -> Group:
    """A pair about images: text, each image between two tokens, text."""
    rng = np.random.default_rng(seed)
    text = partial(rng.integers, 3, 90, dtype=np.int64)
    prompt: list[Any] = [text(4)]
    for image in images:
        prompt += [[BEGIN], [IMAGE_TOKEN] * num_features(model, family, image), [END], text(2)]
    begin = text(alike)
    return Group(
        context=np.concatenate([*prompt, text(3)]).astype(np.int64),
        completions=(np.concatenate([begin, text(5)]), np.concatenate([begin, text(3)])),
        images=tuple(partial(np.asarray, image) for image in images),
    )
