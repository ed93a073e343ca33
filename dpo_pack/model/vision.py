"""Images in prompts: what a vision-language model needs for the images of one row.

Pixels are read and made when a row's forward pass begins. The tower, which turns pixels into features, runs
once a row, without gradients. The features take the places of placeholder tokens, which the prompts have.

Most families number the tokens of a sequence. Others have positions on three axes (M-RoPE, Wang et al. 2024,
arXiv 2409.12191): the tokens of an image have rows and columns, and the text behind an image goes on at the
largest position + 1. The model's own function computes them, for each prompt alone.

Legend: T tokens of a row, B and L lines and length of a batch (a packed row has B = 1 and L = T), C tokens of
a prompt, n prompts of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from dpo_pack.model.config import TRANSFORMERS
from dpo_pack.packing.lengths import Group
from dpo_pack.system.errors import ModelError, UnsupportedModelError


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionFamily:
    """What is special about one `model_type` that reads images."""

    has_axes: bool = False  # positions are on three axes
    limited_frames: int = 0  # its processor has a limit of an image's pixels, times this; 0: it has none
    by_prompt: bool = False  # its processor returns the tiles of a prompt, [1, tiles, ...], not of an image
    since: tuple[int, int] = (5, 18)  # older transformers ignores features without an error


_QWEN, _PLAIN = VisionFamily(has_axes=True, limited_frames=1), VisionFamily()
FAMILIES: dict[str, VisionFamily] = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5"), _QWEN),
    "glm4v": VisionFamily(has_axes=True, limited_frames=2),
    **dict.fromkeys(("internvl", "llava", "llava_next", "mistral3"), _PLAIN),
    **dict.fromkeys(("idefics3", "smolvlm"), VisionFamily(by_prompt=True)),
    "lfm2_vl": VisionFamily(since=(5, 22)),
}
_SEES_AHEAD = frozenset({"gemma3", "gemma3n", "gemma4", "paligemma"})
# What the towers take of a processor's outputs; the others are for tokens.
_INPUTS = ("pixel_values", "pixel_attention_mask", "image_grid_thw", "image_sizes", "spatial_shapes")


def vision_family(config: PretrainedConfig) -> VisionFamily:
    """Raises UnsupportedModelError if rows with images were not tested with this family or transformers."""
    kind, family = config.model_type, FAMILIES.get(config.model_type)
    if family is not None and family.since <= TRANSFORMERS:
        return family
    if family is not None:
        needed = "transformers {}.{} or newer".format(*family.since)
        reason = f"{kind} needs {needed} for images, and this is {transformers.__version__}"
    elif kind in _SEES_AHEAD:
        reason = f"in {kind} the tokens of an image see later tokens, which a packed row does not allow"
    else:
        reason = f"images were tested with {', '.join(sorted(FAMILIES))} only, not with {kind}"
    raise UnsupportedModelError(f"model.images: {reason}; take another model, or leave the key out")


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionInputs:
    """Makes the inputs of rows with images for one model."""

    processor: Any  # an `ImageProcessor`, data/images.py
    family: VisionFamily

    def of_row(
        self,
        model: PreTrainedModel,
        prompts: Sequence[Group],
        prompt_tokens: Sequence[int],
        position_ids: Tensor,
    ) -> dict[str, Any]:
        """Returns keyword arguments of the model's layers for a row with images and positions [B, L]. The
        first two are those of the row. Raises ModelError."""
        backbone: Any = model.base_model
        inputs = [self._of_prompt(group) for group in prompts]
        shown = [of_prompt for of_prompt in inputs if of_prompt]
        pixels = {name: self._join([one[name] for one in shown]) for name in shown[0]}
        with torch.no_grad():
            features = backbone.get_image_features(
                **_put(pixels, model, position_ids.device), return_dict=True
            )
        written = sum(int((group.context == backbone.config.image_token_id).sum()) for group in prompts)
        made = sum(part.shape[:-1].numel() for part in features.pooler_output)
        if written != made:  # LLaVA's processor, for instance, has the model's patch_size as a setting
            what = f"the processor writes {written} tokens for a row's images, and the model has {made}"
            raise ModelError(f"model.images: {what} features; use a processor with the model's settings")
        arguments: dict[str, Any] = {"mm_encoder_outputs": {"image": features}}
        if self.family.has_axes:
            on_axes = [_on_axes(backbone, *both) for both in zip(prompts, inputs, strict=True)]
            arguments["position_ids"] = _row_positions(on_axes, prompt_tokens, position_ids)
        return arguments

    def of_sequence(self, model: PreTrainedModel, prompt: Group, ids: Tensor) -> dict[str, Any]:
        """Returns keyword arguments of the whole model, as it reads one sequence of `ids`, [1, L], alone."""
        inputs: dict[str, Any] = _put(self._of_prompt(prompt), model, ids.device)
        if inputs and self.family.has_axes:
            inputs["mm_token_type_ids"] = (ids == model.config.image_token_id).int()
        return inputs

    def _of_prompt(self, prompt: Group) -> dict[str, Tensor]:
        if not prompt.images:
            return {}
        made = self.processor.pixel_inputs([read() for read in prompt.images])
        return {name: made[name] for name in _INPUTS if name in made}

    def _join(self, parts: Sequence[Tensor]) -> Tensor:
        """Puts the prompts' inputs one behind another, filled up with zeros where their sizes differ."""
        along = int(self.family.by_prompt)
        sizes = [max(part.shape[axis] for part in parts) for axis in range(parts[0].ndim)]
        padded = []
        for part in parts:
            missing = [0 if axis == along else size - part.shape[axis] for axis, size in enumerate(sizes)]
            filled = [number for size in reversed(missing) for number in (0, size)]
            padded.append(nn.functional.pad(part, filled) if any(filled) else part)
        return torch.cat(padded, dim=along)


def _put(inputs: dict[str, Tensor], model: PreTrainedModel, device: torch.device) -> dict[str, Tensor]:
    """Puts inputs on the device; pixels get the type of the model's weights."""
    put = {}
    for name, values in inputs.items():
        host = values.pin_memory() if device.type == "cuda" else values
        dtype = model.dtype if values.is_floating_point() else values.dtype
        put[name] = host.to(device, non_blocking=True).to(dtype)
    return put


def _on_axes(backbone: Any, prompt: Group, inputs: dict[str, Tensor]) -> Tensor:
    """Returns the positions of a prompt's tokens on three axes, [3, C]."""
    ids = torch.from_numpy(prompt.context.astype(np.int64))[None]
    if not inputs:
        return torch.arange(ids.shape[1]).expand(3, -1)
    is_image = (ids == backbone.config.image_token_id).int()
    grid = inputs["image_grid_thw"]
    positions: Tensor = backbone.get_rope_index(ids, mm_token_type_ids=is_image, image_grid_thw=grid)[0]
    return positions[:, 0]


def _row_positions(prompts: Sequence[Tensor], prompt_tokens: Sequence[int], position_ids: Tensor) -> Tensor:
    """n times [3, C], the n numbers of tokens that they and their completions have in the row, and plain
    positions [B, L] -> [3, B, L]. Completions go on at the largest + 1."""
    plain = position_ids.flatten()
    lengths = torch.tensor([prompt.shape[1] for prompt in prompts])  # [n]
    largest = torch.stack([prompt.max() for prompt in prompts])  # [n]
    # [B * L] which prompt a token belongs to
    number = torch.arange(len(prompts)).repeat_interleave(torch.tensor(prompt_tokens)).to(plain.device)
    begins, lengths, next_positions = (
        values.to(plain.device)[number] for values in (lengths.cumsum(0) - lengths, lengths, largest + 1)
    )
    of_prompts = torch.cat(list(prompts), dim=1).to(plain.device)[:, begins + plain.clamp(max=lengths - 1)]
    positions = torch.where(plain < lengths, of_prompts, plain - lengths + next_positions)
    return positions.view(3, *position_ids.shape)
