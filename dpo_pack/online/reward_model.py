"""A judge that scores with a sequence classifier with one output, in padded batches, by its own forward pass.

Legend: n completions of a prompt, S sequences.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForSequenceClassification, PreTrainedModel, PreTrainedTokenizerBase

from dpo_pack.data.formats import Pair
from dpo_pack.data.tokenizer import apply_chat_template
from dpo_pack.data.values import BadRow
from dpo_pack.data.written import check_written, suited
from dpo_pack.model.config import known_positions, own_attention
from dpo_pack.model.loading import check_report, load_config, load_errors, quiet_transformers, whole_reports
from dpo_pack.model.scorer import Precision
from dpo_pack.online.interface import Failure, Rollout, Scores
from dpo_pack.packing.bin_packing import padded_rows
from dpo_pack.recipe.schema import ModelRecipe
from dpo_pack.system.errors import ModelError, UnsupportedModelError

TokenIds = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardModelJudge:
    """Scores with a classifier. A batch of several sequences has up to `token_budget` tokens with padding."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    autocast: torch.dtype | None
    token_budget: int
    max_tokens: int | None  # the number of positions that the model has; None: unknown
    device: torch.device

    def score(self, rollouts: Sequence[Rollout]) -> list[Scores | Failure]:
        answers = [self._sequences(rollout) for rollout in rollouts]
        tokenized = [answer for answer in answers if not isinstance(answer, Failure)]
        scores = self.scores_of([ids for sequences in tokenized for ids in sequences])
        ends = np.cumsum([len(sequences) for sequences in tokenized], dtype=np.int64)
        not_finite = Failure(reason="reward model: a score is not finite")
        by_prompt = (own if np.isfinite(own).all() else not_finite for own in np.split(scores, ends))
        return [answer if isinstance(answer, Failure) else next(by_prompt) for answer in answers]

    @torch.no_grad()
    def scores_of(self, sequences: Sequence[TokenIds]) -> Scores:
        """Returns the scores [S]. The classifier reads each at the last token that is not its pad token."""
        pad = self.model.config.get_text_config().pad_token_id
        lengths = np.array([len(ids) for ids in sequences], dtype=np.int64)
        scores = np.zeros(len(sequences))
        for batch in padded_rows(lengths, 1 if pad is None else self.token_budget):  # 1: each alone
            rows = [torch.from_numpy(sequences[place]) for place in batch]
            ids = pad_sequence(rows, batch_first=True, padding_value=pad or 0)
            mask = torch.arange(ids.shape[1]) < torch.from_numpy(lengths[batch])[:, None]
            inputs = {"input_ids": ids, "attention_mask": mask.long()}
            with torch.autocast(self.device.type, self.autocast, enabled=self.autocast is not None):
                output = self.model(**{k: v.to(self.device) for k, v in inputs.items()}, use_cache=False)
            scores[batch] = output.logits.flatten().double().cpu().numpy()
        return scores

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
        longest = max(len(ids) for ids in encoded)
        if self.max_tokens is not None and longest > self.max_tokens:
            reason = f"reward model: {longest} tokens, but the model has {self.max_tokens} positions"
            return Failure(reason=reason)
        return [np.array(ids, dtype=np.int64) for ids in encoded]

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


def load_reward_model(
    path: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    settings: ModelRecipe,
    precision: Precision,
    token_budget: int,
    device: torch.device,
    recipe_key: str,
) -> tuple[RewardModelJudge, list[str]]:
    """Loads the classifier at `path`, with `settings` of the policy. Returns it, and notes about tensors that
    it does not use.

    Raises ModelError when it cannot be loaded or gives no single score, or if padding changes its scores.
    """
    trusts = settings.trust_remote_code
    config = load_config(path, revision=None, trust_remote_code=trusts, recipe_key=recipe_key)
    config.num_labels = 1  # many published configs lack it: score.weight decides
    with load_errors(path, recipe_key), quiet_transformers(), whole_reports() as reports:
        loaded: tuple[Any, Any] = AutoModelForSequenceClassification.from_pretrained(
            path,
            config=config,
            trust_remote_code=trusts,
            dtype=precision.parameters,
            attn_implementation=own_attention(config),
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # `check_report` refuses them
        )
    model, loading = loaded
    others = [stored[0] for name, stored, _ in loading["mismatched_keys"] if name.startswith("score.")]
    if others or "score" not in dict(model.named_children()) or "score.weight" in loading["missing_keys"]:
        what = f"has {others[0]} outputs" if others else "lacks score.weight"
        remedy = "choose a trained reward model with a linear `score` head of one output (num_labels: 1)"
        raise ModelError(f"{recipe_key}: {path} {what}; {remedy}")
    # The head of the model that it was trained from, and what is added to each score.
    reports[0].unexpected_keys -= {"lm_head.weight", "score.bias"}
    strict = settings.unused_tensors == "error"
    notes = check_report(model, reports[0], loading, source=f"{recipe_key}: {path}", refuses_unused=strict)
    judge = RewardModelJudge(
        model=model.to(device).eval().requires_grad_(False),
        tokenizer=tokenizer,
        autocast=precision.autocast,
        token_budget=token_budget,
        max_tokens=known_positions(config),
        device=device,
    )
    _check_padding(replace(judge, autocast=None), f"{recipe_key}: {path}")  # which would hide differences
    return judge, notes


def _check_padding(judge: RewardModelJudge, source: str) -> None:
    """Raises UnsupportedModelError if a sequence has another score in a padded batch than alone."""
    config, random = judge.model.config.get_text_config(), np.random.default_rng(0)
    tokens = [token for token in range(config.vocab_size) if token != config.pad_token_id]
    sequences = [random.choice(tokens, length) for length in (3, 8, 24)]
    alone = np.array([judge.scores_of([ids])[0] for ids in sequences])
    difference = float(np.abs(judge.scores_of(sequences) - alone).max())
    rounding = max(1e-4, 16 * torch.finfo(judge.model.dtype).eps)
    if not difference <= rounding * (1 + np.abs(alone).max()):  # `not <=` is true for NaN, too
        remedy = "its code does not ignore padding; choose another reward model"
        raise UnsupportedModelError(f"{source}: padding changes a score by {difference:.1e}: {remedy}")
