"""A judge that scores with a sequence classifier with one output. Packed rows hold each prompt only once.

A score is the output at the last token, but a row gives hidden states only where they predict a token. So the
judge appends a token to each sequence, which changes no score.

Legend: n completions of a prompt, S sequences of a row, D hidden size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, PreTrainedModel, PreTrainedTokenizerBase

from dpo_pack.data.formats import BadRow, Pair
from dpo_pack.data.tokenizer import apply_chat_template
from dpo_pack.data.written import check_written, suited
from dpo_pack.model.attention import ATTENTION_NAME, BACKENDS
from dpo_pack.model.config import choose_attention, known_positions, own_attention, replace_settings
from dpo_pack.model.layout import Row, packed_row
from dpo_pack.model.loading import check_report, load_config, load_errors, quiet_transformers, whole_reports
from dpo_pack.model.recurrence import wrap_recurrent_layers
from dpo_pack.model.scorer import CompletionLogps, Precision
from dpo_pack.online.interface import Failure, Rollout, Scores
from dpo_pack.packing.bin_packing import pack_sequences_longest_first, padded_rows
from dpo_pack.packing.lengths import Group, common_prefix_length
from dpo_pack.proofs.layers import prove_layers
from dpo_pack.proofs.rows import PADDED_REMEDY, Proof, ProofOutcome, proof_row, random_groups
from dpo_pack.proofs.start_up import as_published, distance_from_stock
from dpo_pack.recipe.schema import ModelRecipe
from dpo_pack.system.errors import ModelError

TokenIds = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardModelJudge:
    """Scores with a classifier. A row may exceed `token_budget` tokens only if it has a single prompt."""

    backbone: CompletionLogps  # only its hidden states are used
    head: nn.Module  # [*, D] -> [*, 1]
    tokenizer: PreTrainedTokenizerBase
    token_budget: int
    max_tokens: int | None  # the number of positions that the model has; None: unknown
    device: torch.device

    @torch.no_grad()
    def score(self, rollouts: Sequence[Rollout]) -> list[Scores | Failure]:
        tokenized = [self._sequences(rollout) for rollout in rollouts]
        sequences = [ids for ids in tokenized if not isinstance(ids, Failure)]
        groups = [as_groups(ids) for ids in sequences]
        scores: dict[int, Scores] = {}
        if self.backbone.backend is not None:
            tokens = [packed_row(g, torch.device("cpu"), share_prompt=True).num_tokens for g in groups]
            rows = pack_sequences_longest_first(np.array(tokens, dtype=np.int64), self.token_budget)
        else:
            padded = [len(ids) * max(map(len, ids)) + len(ids) for ids in sequences]
            rows = padded_rows(np.array(padded, dtype=np.int64), self.token_budget)
        for prompts in rows:  # indices of the prompts of a row
            row = proof_row(self.backbone, [group for p in prompts for group in groups[p]], self.device)
            row_scores = self.row_scores(row)
            ends = np.cumsum([len(sequences[p]) for p in prompts])
            scores.update(zip(prompts.tolist(), np.split(row_scores, ends[:-1]), strict=True))
        not_finite = Failure(reason="reward model: a score is not finite")
        in_order = (scores[p] if np.isfinite(scores[p]).all() else not_finite for p in range(len(sequences)))
        return [ids if isinstance(ids, Failure) else next(in_order) for ids in tokenized]

    def _sequences(self, rollout: Rollout) -> list[TokenIds] | Failure:
        """Returns n sequences (prompt + completion) in tokens of the classifier's tokenizer."""
        prompt = rollout.draw.prompt
        if prompt.messages is not None and self.tokenizer.chat_template is not None:
            try:
                texts = self._conversations(rollout)
            except BadRow as bad:
                return Failure(reason=f"reward model: {bad.detail}")
        else:
            end = str(self.tokenizer.eos_token or "")
            texts = [prompt.text + one.text + end * one.is_finished for one in rollout.completions]
        encoded: Any = self.tokenizer(texts, add_special_tokens=prompt.messages is None)["input_ids"]
        pad = self.backbone.model.config.get_text_config().pad_token_id
        sequences = [without_padding(np.array(ids, dtype=np.int32), pad) for ids in encoded]
        longest = max(len(ids) for ids in sequences)
        if self.max_tokens is not None and longest >= self.max_tokens:
            reason = f"reward model: {longest} tokens, but the model has {self.max_tokens} positions"
            return Failure(reason=reason)
        return sequences

    def _conversations(self, rollout: Rollout) -> list[str]:
        """Returns the prompt with each completion as the classifier's template writes them. Raises BadRow if
        it leaves out a text or the tools of the prompt."""
        prompt = rollout.draw.prompt
        options = {"tools": prompt.tools} if prompt.tools else {}
        asked = suited(Pair(prompt=list(prompt.messages or ()), template_options=options), self.tokenizer)
        answers = [[{"role": "assistant", "content": one.text}] for one in rollout.completions]
        alone, *texts = apply_chat_template(asked.pair, answers, self.tokenizer)
        if "tools_not_written" in check_written(asked, [alone], self.tokenizer)[0]:
            raise BadRow("tools_not_written", "the chat template does not write the tools of the prompt")
        return texts

    def row_scores(self, row: Row) -> Scores:
        """Returns the scores [S] of the row's sequences."""
        with self.backbone.autocasting(self.device):
            hidden = self.backbone.hidden_states(row)  # [B, L, D]
            ends = row.completion_lengths.cumsum(0) - 1
            last = hidden.flatten(0, 1).index_select(0, row.logit_index.index_select(0, ends))  # [S, D]
            scores: Scores = self.head(last).squeeze(-1).double().cpu().numpy()
        return scores


def as_groups(sequences: Sequence[TokenIds]) -> list[Group]:
    """Appends a token to each of a prompt's sequences. Returns one Group, with their common beginning once,
    or one for each sequence, if they begin with different tokens."""
    shared = common_prefix_length(sequences)
    appended = np.zeros(1, dtype=np.int32)
    if shared == 0:
        return [Group(context=ids, completions=(appended,)) for ids in sequences]
    completions = tuple(np.concatenate((ids[shared:], appended)) for ids in sequences)
    return [Group(context=sequences[0][:shared], completions=completions)]


def without_padding(ids: TokenIds, pad: int | None) -> TokenIds:
    """Returns `ids` up to the last token that is not `pad`, where transformers reads the score."""
    places = np.flatnonzero(ids != pad) if pad is not None else np.arange(len(ids))
    return ids[: int(places[-1]) + 1] if len(places) else ids[:1]


def load_reward_model(
    path: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    settings: ModelRecipe,
    precision: Precision,
    packed: bool,
    token_budget: int,
    device: torch.device,
    recipe_key: str,
) -> tuple[RewardModelJudge, list[str]]:
    """Loads the classifier at `path`, for packed rows or padded batches, with `settings` of the policy.
    Returns it, and notes about tensors that it does not use.

    Raises ModelError when it cannot be loaded, gives no single score at the last token, or cannot be packed.
    """
    trusts = settings.trust_remote_code
    config = load_config(path, revision=None, trust_remote_code=trusts, recipe_key=recipe_key)
    config.num_labels = 1  # many published configs lack it: score.weight decides
    pooling = config.get_text_config().to_dict().get("pooling")
    if pooling not in (None, "eos"):
        raise ModelError(
            f"{recipe_key}: {path} pools its score over tokens ({pooling}); choose one for the last token"
        )
    backend = None
    if packed:
        choice = choose_attention(config, settings.attention, device=device, dtype=precision.activations)
        backend = BACKENDS[choice.name]
    replace_settings(config)
    with load_errors(path, recipe_key), quiet_transformers(), whole_reports() as reports:
        loaded: tuple[Any, dict[str, Any]] = AutoModelForSequenceClassification.from_pretrained(
            path,
            config=config,
            trust_remote_code=trusts,
            dtype=precision.parameters,
            attn_implementation=ATTENTION_NAME if packed else own_attention(config),
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # `check_report` refuses them
        )
    model, loading = loaded
    assert isinstance(model, PreTrainedModel)
    heads = [module for name, module in model.named_children() if name == "score"]
    others = [stored[0] for name, stored, _ in loading["mismatched_keys"] if name.startswith("score.")]
    if others or not heads or "score.weight" in loading["missing_keys"]:
        what = f"has {others[0]} outputs" if others else "lacks score.weight"
        remedy = "choose a trained reward model with a linear `score` head of one output (num_labels: 1)"
        raise ModelError(f"{recipe_key}: {path} {what}; {remedy}")
    # The head of the model that it was trained from, and what is added to each score.
    reports[0].unexpected_keys -= {"lm_head.weight", "score.bias"}
    strict = settings.unused_tensors == "error"
    notes = check_report(model, reports[0], loading, source=f"{recipe_key}: {path}", refuses_unused=strict)
    if packed:
        wrap_recurrent_layers(model)
    backbone = CompletionLogps(model, backend=backend, autocast=precision.autocast).to(device).eval()
    judge = RewardModelJudge(
        backbone=backbone.requires_grad_(False),
        head=heads[0],
        tokenizer=tokenizer,
        token_budget=token_budget,
        max_tokens=known_positions(config),
        device=device,
    )
    return judge, notes


@torch.no_grad()
def prove_reward_model(judge: RewardModelJudge, recipe_key: str) -> None:
    """Proves on small rows that packing or padding changes no score. Raises UnsupportedModelError."""
    scorer, device, is_packed = judge.backbone, judge.device, judge.backbone.backend is not None

    def alone() -> Tensor:  # [S]
        with as_published(scorer.model), scorer.autocasting(device):
            scores = [scorer.model(input_ids=ids, use_cache=False).logits.flatten() for ids in inputs]
        return torch.cat(scores).double()

    with random_groups(scorer, device) as groups:
        proofs = prove_layers(scorer, groups, device, compute=judge.row_scores) if is_packed else []
        if all(proof.passed for proof in proofs):
            # Scores of one row equal transformers' of each sequence alone, see `distance_from_stock`.
            pad = scorer.model.config.get_text_config().pad_token_id
            prompts = [
                [without_padding(np.concatenate((group.context, ids)), pad) for ids in group.completions]
                for group in groups
            ]
            inputs = [torch.from_numpy(ids).to(device)[None] for prompt in prompts for ids in prompt]
            row = proof_row(scorer, [group for prompt in prompts for group in as_groups(prompt)], device)
            together = torch.from_numpy(judge.row_scores(row)).to(device)
            measured, passed = distance_from_stock(scorer, together, alone, torch.ones_like(together))
            causal = "judge with a causal model that scores at the last token"
            scores = Proof(
                name="scores",
                passed=passed,
                numbers={name.removesuffix(" a token"): number for name, number in measured.items()},
                bound="mean error <= 3 x rounding",
                remedy=PADDED_REMEDY if is_packed else causal,
            )
            proofs.append(scores)
    proved = f"{recipe_key}: {'packed rows' if is_packed else 'padded batches'}"
    ProofOutcome(what=proved, proofs=tuple(proofs), seconds=0.0, is_remembered=False).raise_failure()
