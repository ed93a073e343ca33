"""A judge that is a sequence classifier with one output, run on packed rows with prompts computed once.

The classifier's backbone goes through the same attention seam as the policy. A sequence's score is read at
its last token; to have that position in the layout, which knows the positions that predict something, one
more token is appended to each completion. Attention is causal: nothing that counts sees it.

Legend: n completions of a prompt, D hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from transformers import AutoModelForSequenceClassification, PreTrainedModel, PreTrainedTokenizerBase

from dpo_pack.attention import ATTENTION_NAME, BACKENDS, register_attention
from dpo_pack.attention.select import select_backend
from dpo_pack.data.bin_packing import pack_sequences_longest_first, padded_rows
from dpo_pack.errors import ModelError
from dpo_pack.layout import Group, Row, common_prefix_length, layout_row, packed_row, padded_row
from dpo_pack.loading import load_config, load_errors, quiet_transformers, replace_settings
from dpo_pack.model_config import attention_needs, check_packs, known_positions, own_attention
from dpo_pack.models import CompletionLogps, Precision
from dpo_pack.online.interface import Completion, Failure, Rollout, Scores

TokenIds = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardModelJudge:
    """Scores by a classifier; rows have at most `token_budget` tokens, a prompt's group apart."""

    backbone: CompletionLogps  # its log-probs are not asked for
    head: nn.Module  # [*, D] -> [*, 1]
    tokenizer: PreTrainedTokenizerBase
    token_budget: int
    max_tokens: int | None  # that the model knows positions for
    device: torch.device

    @torch.no_grad()
    def score(self, rollouts: Sequence[Rollout]) -> list[Scores | Failure]:
        tokenized = [self._sequences(rollout) for rollout in rollouts]
        results: list[Scores | Failure] = [
            ids if isinstance(ids, Failure) else np.zeros(len(ids)) for ids in tokenized
        ]
        sequences = {place: ids for place, ids in enumerate(tokenized) if not isinstance(ids, Failure)}
        places = list(sequences)
        groups = [as_groups(ids) for ids in sequences.values()]
        for members in self._rows(groups):
            row = self.row([group for member in members for group in groups[member]])
            scores = self.row_scores(row)
            for member in members:
                place = places[member]
                num_sequences = len(sequences[place])
                results[place], scores = scores[:num_sequences], scores[num_sequences:]
        not_finite = Failure(reason="reward model: a score is not finite")
        return [r if isinstance(r, Failure) or np.isfinite(r).all() else not_finite for r in results]

    def _sequences(self, rollout: Rollout) -> list[TokenIds] | Failure:
        """[n] prompt and completion in the classifier's own tokens; why not, if it cannot take them."""
        try:
            texts = [self._text(rollout, completion) for completion in rollout.completions]
        except Exception as error:  # a template is a program that came with the model: it may raise anything
            what = (str(error).strip() or type(error).__name__).splitlines()[0]
            return Failure(reason=f"reward model: its chat template cannot render the conversation ({what})")
        encoded: Any = self.tokenizer(
            texts, add_special_tokens=rollout.draw.prompt.messages is None, return_attention_mask=False
        )
        pad = self.backbone.model.config.get_text_config().pad_token_id
        sequences = [without_padding(np.array(ids, dtype=np.int32), pad) for ids in encoded["input_ids"]]
        longest = max(len(ids) for ids in sequences)
        if self.max_tokens is not None and longest >= self.max_tokens:
            return Failure(reason=f"reward model: {longest} tokens, it knows {self.max_tokens} positions")
        return sequences

    def _text(self, rollout: Rollout, completion: Completion) -> str:
        prompt = rollout.draw.prompt
        if prompt.messages is not None and self.tokenizer.chat_template is not None:
            conversation: Any = [*prompt.messages, {"role": "assistant", "content": completion.text}]
            return str(self.tokenizer.apply_chat_template(conversation, tokenize=False))
        end = str(self.tokenizer.eos_token or "") if completion.is_finished else ""
        return prompt.text + completion.text + end

    def _rows(self, groups: Sequence[Sequence[Group]]) -> list[npt.NDArray[np.int64]]:
        """Which prompts share a row."""
        if self.backbone.backend is not None:
            tokens = [layout_row(group, share_prompt=True).num_tokens for group in groups]
            return pack_sequences_longest_first(np.array(tokens, dtype=np.int64), self.token_budget)
        widest = [_padded_tokens(group) for group in groups]
        return padded_rows(np.array(widest, dtype=np.int64), self.token_budget)

    def row(self, groups: Sequence[Group]) -> Row:
        if self.backbone.backend is not None:
            return packed_row(layout_row(groups, share_prompt=True), self.device)
        return padded_row(groups, pad_token_id=0, device=self.device)

    def row_scores(self, row: Row) -> Scores:
        """[S] of the row's sequences."""
        with self.backbone.autocasting(self.device):
            hidden = self.backbone.hidden_states(row)  # [B, L, D]
            ends = row.completion_lengths.cumsum(0) - 1
            last = hidden.flatten(0, 1).index_select(0, row.logit_index.index_select(0, ends))  # [S, D]
            scores: Scores = self.head(last).squeeze(-1).double().cpu().numpy()
        return scores


def as_groups(sequences: Sequence[TokenIds]) -> list[Group]:
    """A prompt's sequences, one token longer, as one group; where they begin differently, as several."""
    shared = min(common_prefix_length(sequences), min(len(ids) for ids in sequences))
    more = np.zeros(1, dtype=np.int32)
    if shared == 0:
        return [Group(context=ids, completions=(more,)) for ids in sequences]
    completions = tuple(np.concatenate((ids[shared:], more)) for ids in sequences)
    return [Group(context=sequences[0][:shared], completions=completions)]


def _padded_tokens(groups: Sequence[Group]) -> int:
    lengths = [len(group.context) + len(ids) for group in groups for ids in group.completions]
    return len(lengths) * max(lengths)


def without_padding(ids: TokenIds, pad: int | None) -> TokenIds:
    """transformers reads the score at the last token that is no padding, also where text ends in it."""
    places = np.flatnonzero(ids != pad) if pad is not None else np.arange(len(ids))
    return ids[: int(places[-1]) + 1] if len(places) else ids[:1]


def load_reward_model(
    path: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    trust_remote_code: bool,
    precision: Precision,
    attention: str,
    packed: bool,
    token_budget: int,
    device: torch.device,
    recipe_key: str,
) -> RewardModelJudge:
    """A classifier for packed rows or padded batches.

    Raises ModelError when it cannot be loaded or has not one output at the last token, UnsupportedModelError
    when its family cannot be packed.
    """
    config = load_config(path, revision=None, trust_remote_code=trust_remote_code, recipe_key=recipe_key)
    if config.num_labels != 1:
        raise ModelError(
            f"{recipe_key}: {path} has {config.num_labels} outputs, and a reward model has one; give another"
        )
    pooling = config.get_text_config().to_dict().get("pooling")
    if pooling not in (None, "eos"):
        raise ModelError(
            f"{recipe_key}: {path} pools scores over tokens ({pooling}), and a reward model's is of the last "
            "token; give another"
        )
    backend = None
    if packed:
        check_packs(config)
        register_attention()
        needs = attention_needs(config)
        backend = BACKENDS[select_backend(attention, needs, device=device, dtype=precision.activations).name]
    replace_settings(config)
    with load_errors(path, recipe_key), quiet_transformers():
        loaded: tuple[Any, dict[str, Any]] = AutoModelForSequenceClassification.from_pretrained(
            path,
            config=config,
            trust_remote_code=trust_remote_code,
            dtype=precision.parameters,
            attn_implementation=ATTENTION_NAME if packed else own_attention(config),
            output_loading_info=True,
        )
    model, loading = loaded
    assert isinstance(model, PreTrainedModel)
    heads = [module for name, module in model.named_children() if name == "score"]
    if loading["missing_keys"] or not heads:
        missing = sorted(loading["missing_keys"])[:1] or ["score"]
        raise ModelError(
            f"{recipe_key}: {path} lacks {missing[0]}, which a reward model of {type(model).__name__} has; "
            "point at a trained reward model with a linear `score` head"
        )
    backbone = CompletionLogps(model, backend=backend, autocast=precision.autocast).to(device).eval()
    return RewardModelJudge(
        backbone=backbone.requires_grad_(False),
        head=heads[0],
        tokenizer=tokenizer,
        token_budget=token_budget,
        max_tokens=known_positions(config),
        device=device,
    )
