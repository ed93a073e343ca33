"""The real processors of the families that read images, small and built in code, on a tiny tokenizer.

Their image processors are transformers' Pillow-backed ones, so all but LFM2-VL's need no torchvision. Where a
processor reads video, too, `NoVideo` stands for that part, which only torchvision has.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from typing import Any

import pytest
from transformers.processing_utils import transformers_module
from transformers.video_processing_utils import VideoProcessorMixin

from support.tiny_pictures import TEMPLATE, TOKEN, picture_tokenizer

_SQUARE = {"height": 28, "width": 28}
_FEW = {"shortest_edge": 28 * 28 * 4, "longest_edge": 28 * 28 * 12}  # pixels of an image
_TILED = {"size": {"longest_edge": 56}, "max_image_size": {"longest_edge": 28}}
_CLIP = {"size": {"shortest_edge": 28}, "crop_size": _SQUARE}
_FEATURES = {"patch_size": 7, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
_QWEN = "qwen2_vl.image_processing_pil_qwen2_vl:Qwen2VLImageProcessorPil"
_QWEN3: tuple[str, str, dict[str, Any], dict[str, Any]] = (
    "qwen3_vl.processing_qwen3_vl:Qwen3VLProcessor",
    _QWEN,
    {"size": _FEW, "patch_size": 16, "image_mean": [0.5] * 3, "image_std": [0.5] * 3},
    {},
)
# The classes of processor and image processor, in transformers.models, and the settings of both.
_PARTS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "qwen2_vl": ("qwen2_vl.processing_qwen2_vl:Qwen2VLProcessor", _QWEN, {"size": _FEW}, {}),
    "qwen2_5_vl": ("qwen2_5_vl.processing_qwen2_5_vl:Qwen2_5_VLProcessor", _QWEN, {"size": _FEW}, {}),
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe", "qwen3_5"), _QWEN3),
    "glm4v": (
        "glm4v.processing_glm4v:Glm4vProcessor",
        "glm4v.image_processing_pil_glm4v:Glm4vImageProcessorPil",
        {"size": {name: 2 * pixels for name, pixels in _FEW.items()}},
        {},
    ),
    "idefics3": (
        "idefics3.processing_idefics3:Idefics3Processor",
        "idefics3.image_processing_pil_idefics3:Idefics3ImageProcessorPil",
        _TILED,
        {"image_seq_len": 4},
    ),
    "smolvlm": (
        "smolvlm.processing_smolvlm:SmolVLMProcessor",
        "smolvlm.image_processing_pil_smolvlm:SmolVLMImageProcessorPil",
        _TILED,
        {"image_seq_len": 4},
    ),
    "llava": (
        "llava.processing_llava:LlavaProcessor",
        "clip.image_processing_pil_clip:CLIPImageProcessorPil",
        _CLIP,
        _FEATURES,
    ),
    "llava_next": (
        "llava_next.processing_llava_next:LlavaNextProcessor",
        "llava_next.image_processing_pil_llava_next:LlavaNextImageProcessorPil",
        {**_CLIP, "image_grid_pinpoints": [[28, 56], [56, 28], [56, 56]]},
        _FEATURES,
    ),
    "internvl": (
        "internvl.processing_internvl:InternVLProcessor",
        "got_ocr2.image_processing_pil_got_ocr2:GotOcr2ImageProcessorPil",
        {"size": _SQUARE, "min_patches": 1, "max_patches": 4},
        {"image_seq_length": 4},
    ),
    "mistral3": (
        "pixtral.processing_pixtral:PixtralProcessor",
        "pixtral.image_processing_pil_pixtral:PixtralImageProcessorPil",
        {"size": {"longest_edge": 112}},
        {"patch_size": 14, "spatial_merge_size": 2},
    ),
    "lfm2_vl": (  # only torchvision has its image processor
        "lfm2_vl.processing_lfm2_vl:Lfm2VlProcessor",
        "lfm2_vl.image_processing_lfm2_vl:Lfm2VlImageProcessor",
        {
            **{"encoder_patch_size": 7, "tile_size": 28, "max_num_patches": 64, "do_image_splitting": False},
            **{"min_image_tokens": 2, "max_image_tokens": 8},
        },
        {},
    ),
}
FAMILIES = tuple(_PARTS)
_AROUND = {family: ("<|vision_start|>", "<|vision_end|>") for family in FAMILIES if "qwen" in family}
_AROUND["glm4v"] = ("<|begin_of_image|>", "<|end_of_image|>")
_TOKENS = (
    *("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"),
    *("<|image|>", "<|video|>", "<|begin_of_image|>", "<|end_of_image|>"),
    *("<|image_start|>", "<|image_end|>", "<|img_thumbnail|>"),
    *("<|begin_of_video|>", "<|end_of_video|>", "<img>", "</img>", "<IMG_CONTEXT>", "<video>"),
    *("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
)
_OF_INTERNVL = {
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
}


class NoVideo(VideoProcessorMixin):
    """Reads no video. SmolVLM's chat template asks it for numbers, with images, too."""

    num_frames = fps = 1


def real_processor(family: str, patch: pytest.MonkeyPatch) -> Any:
    """Returns a family's processor, whose chat template writes what the family's does for an image."""
    patch.setattr(transformers_module, "VideoProcessorMixin", VideoProcessorMixin, raising=False)
    if family == "mistral3":  # it imports a function, which is not called here, from torchvision's part
        pixtral = "transformers.models.pixtral.image_processing"
        pillow = importlib.import_module(f"{pixtral}_pil_pixtral")
        patch.setitem(sys.modules, f"{pixtral}_pixtral", pillow)
    processor_class, image_class, image_settings, settings = _PARTS[family]
    if family == "smolvlm":  # a package that writes numbers of frames in words
        patch.setattr("transformers.models.smolvlm.processing_smolvlm.num2words", str)
    tokenizer: Any = picture_tokenizer()
    tokenizer.add_special_tokens({"extra_special_tokens": _TOKENS}, replace_extra_special_tokens=False)
    if family == "internvl":
        for name, token in _OF_INTERNVL.items():
            setattr(tokenizer, name, token)
            setattr(tokenizer, f"{name}_id", tokenizer.convert_tokens_to_ids(token))
    make = _named(processor_class)
    if "video_processor" in inspect.signature(make).parameters:
        settings = {**settings, "video_processor": NoVideo()}
    processor = make(image_processor=_named(image_class)(**image_settings), tokenizer=tokenizer, **settings)
    begin, end = _AROUND.get(family, ("", ""))
    processor.chat_template = TEMPLATE.replace(TOKEN, f"{begin}{processor.image_token}{end}")
    tokenizer.chat_template = processor.chat_template
    return processor


def _named(path: str) -> Any:
    module, name = path.split(":")
    return getattr(importlib.import_module(f"transformers.models.{module}"), name)
