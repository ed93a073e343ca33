"""The last layer's feed-forward block, computed only at positions that a scored token needs.

After the attention of the last layer no position reads another position. So only positions whose hidden state
predicts a scored token need its feed-forward block; elsewhere its output and its gradients are zero.

Legend: T tokens of the row, U scored positions, D features.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

# Names of the feed-forward block in transformers' decoder layers, if it is one module.
_BLOCK_NAMES = ("mlp", "feed_forward", "ffn")


def last_feed_forward(model: PreTrainedModel) -> nn.Module | None:
    """Returns the last decoder layer's feed-forward block; None if the block is not one module."""
    layer = _last_layer(model)
    if layer is None:
        return None
    blocks = [block for name, block in layer.named_children() if name in _BLOCK_NAMES]
    return blocks[0] if len(blocks) == 1 else None


def trim_last_layer(model: PreTrainedModel) -> None:
    """Makes the last feed-forward block skip unscored positions of packed rows; changes the model in place.

    Exact if the block never mixes positions; proofs check that.
    """
    layer, block = _last_layer(model), last_feed_forward(model)
    if layer is None or block is None:
        return
    trimmed = _TrimmedBlock(block)
    block.forward = trimmed.forward
    layer.register_forward_pre_hook(trimmed.before_layer, with_kwargs=True)
    for part in layer.children():
        if part is not block and any(part.children()):  # the attention, because a norm does not get the row
            part.register_forward_pre_hook(trimmed.before_part, with_kwargs=True)


class _TrimmedBlock:
    """A feed-forward block's forward, and the positions at which the current row needs the block."""

    def __init__(self, block: nn.Module) -> None:
        self.whole = block.forward
        self.positions: Tensor | None = None  # [U], None: all

    def before_layer(self, layer: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        segments = keywords.get("row_segments")
        self.positions = None if segments is None else segments.scored_positions

    def before_part(self, part: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        # Activation checkpointing does not run the layer's hooks when it recomputes a layer.
        if "row_segments" in keywords:
            self.before_layer(part, inputs, keywords)

    def forward(self, features: Tensor, *others: Any, **options: Any) -> Any:
        """Runs the block: [1, T, D] -> [1, T, D], zero at positions that the row does not need."""
        if self.positions is None or others or options:
            return self.whole(features, *others, **options)
        needed = self.whole(features.index_select(1, self.positions))  # [1, U, D]
        if not isinstance(needed, Tensor):  # a block with a router also returns router values
            return self.whole(features)
        return needed.new_zeros(features.shape).index_copy(1, self.positions, needed)


def _last_layer(model: PreTrainedModel) -> nn.Module | None:
    """Finds the first ModuleList with as many modules as the model has layers; returns its last module."""
    num_layers = model.config.get_text_config().num_hidden_layers
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == num_layers]
    return lists[0][-1] if lists else None
