"""The last layer's feed-forward block at scored positions only: what it would say elsewhere, nobody reads.

After the last attention no position looks at another. So a prompt's positions need no feed-forward block
there, only those whose hidden state predicts a scored token: in a prompt-heavy row of preference pairs less
than half. The residual around the block is zero elsewhere, and so are its gradients.

Legend: L tokens of the row, U scored positions, D features.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

# What decoder layers of transformers call their feed-forward block, where it is one module.
_BLOCK_NAMES = ("mlp", "feed_forward", "ffn")


def last_feed_forward(model: PreTrainedModel) -> nn.Module | None:
    """The last decoder layer's feed-forward block; None where it is not a module of its own."""
    layer = _last_layer(model)
    if layer is None:
        return None
    blocks = [block for name, block in layer.named_children() if name in _BLOCK_NAMES]
    return blocks[0] if len(blocks) == 1 else None


def trim_last_layer(model: PreTrainedModel) -> None:
    """Let packed rows skip what nobody reads; changes the model in place. Other calls are left as they are.

    Whether the block is position by position, as it should be, is what the proofs look at.
    """
    layer, block = _last_layer(model), last_feed_forward(model)
    if layer is None or block is None:
        return
    trimmed = _TrimmedBlock(block)
    block.forward = trimmed.forward
    layer.register_forward_pre_hook(trimmed.before_layer, with_kwargs=True)
    for part in layer.children():
        if part is not block and any(part.children()):  # a norm is told nothing
            part.register_forward_pre_hook(trimmed.before_part, with_kwargs=True)


class _TrimmedBlock:
    """A feed-forward block's forward, and which positions the layer around it is asked for now."""

    def __init__(self, block: nn.Module) -> None:
        self.whole = block.forward
        self.positions: Tensor | None = None  # [U], None: all

    def before_layer(self, layer: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """The layer is called: its row, if it is one, says what is asked for."""
        segments = keywords.get("row_segments")
        self.positions = None if segments is None else segments.scored_positions

    def before_part(self, part: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """The same where the layer is recomputed in a backward pass, without its own hooks, for another row
        than the last: its attention is told the row again."""
        if "row_segments" in keywords:
            self.before_layer(part, inputs, keywords)

    def forward(self, features: Tensor, *others: Any, **options: Any) -> Any:
        """[1, L, D] -> [1, L, D], zero where nothing is asked for."""
        if self.positions is None or others or options:
            return self.whole(features, *others, **options)
        asked = self.whole(features.index_select(1, self.positions))  # [1, U, D]
        if not isinstance(asked, Tensor):  # routers tell more, of all positions
            return self.whole(features)
        return asked.new_zeros(features.shape).index_copy(1, self.positions, asked)


def _last_layer(model: PreTrainedModel) -> nn.Module | None:
    """The last of the one list that has as many modules as the model has layers."""
    num_layers = model.config.get_text_config().num_hidden_layers
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == num_layers]
    return lists[0][-1] if lists else None
