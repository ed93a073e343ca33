"""Values that must not change unless a version is raised: token ids, log-probs and plans.

`scripts/make_golden_values.py` writes them to tests/fixtures/golden.json.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer, PreTrainedModel

from dpo_pack.data import tokenization
from dpo_pack.data.formats import possible_formats
from dpo_pack.data.tokenization import tokenize_batch
from dpo_pack.model import fingerprint
from dpo_pack.packing import plan
from dpo_pack.packing.plan import epoch_order
from dpo_pack.reference.cache import ReferenceCache
from support.conformance import CONFORMANCE
from support.oracle import completion_logps_one_by_one
from support.plans import make_plan
from support.reference_pairs import NAMESPACE, Pair, all_sums, load_scorer, make_table, run_pass
from support.rows import assistant, said, tokenization_settings, user
from support.tiny_models import VOCABULARY, tiny_model
from support.tiny_tokenizer import CHAT_TEMPLATE

GOLDEN = Path(__file__).resolve().parents[1] / "fixtures" / "golden.json"
REMAKE = "run scripts/make_golden_values.py and commit tests/fixtures/golden.json"

# Nats. Between CPUs a sum of log-probs in float32 differs by rounding alone: their kernels add the terms of a
# product in another order. On these models float32 is at most 1.3e-5 from float64 (a test allows 2.5e-5), so
# two CPUs are at most 2.6e-5 from each other. Measured on one CPU with kernels for AVX2 and for no vector
# instructions (ATEN_CPU_CAPABILITY, MKL_ENABLE_INSTRUCTIONS, MKL_CBWR): at most 1.3e-5. AMX and AVX512-BF16
# compute no float32 product, unless a program lowers torch's float32 precision. Mistakes are larger: a window
# one token longer moves these sums by 4, another scale by 0.1, another epsilon of the norms by 1e-3.
LOGP_BOUND = 1e-4

CALL_A, CALL_B = "\n\nHuman: which colour has the sky?\n\nAssistant:", "\n\nHuman: and bread?\n\nAssistant:"
TEXTS: list[dict[str, Any]] = [
    {"prompt": "what is the sky?", "chosen": " It is blue.", "rejected": " No idea"},
    {"prompt": "Bake bread.", "chosen": " Mix “flour” 🍞</s>", "rejected": "\nmix flour</s>"},
    {"prompt": "The sk", "chosen": "y is blue", "rejected": "in"},  # tokens merge over the boundary
    {"chosen": "a common beginning, then this", "rejected": "a common beginning, then that one"},
]
DIALOGUES: list[dict[str, Any]] = [
    {"chosen": CALL_A + " Blue.", "rejected": CALL_A + " I will not say."},
    {"chosen": CALL_A + " Blue." + CALL_B + " Brown", "rejected": CALL_A + " Blue." + CALL_B + " Red"},
]
_QUESTION = [user("the sky?")]
CHATS: list[dict[str, Any]] = [
    {
        "prompt": [said("system", "Be brief."), *_QUESTION],
        "chosen": [assistant("blue")],
        "rejected": [assistant("green, I think")],
    },
    {
        "prompt": _QUESTION,
        "chosen": [assistant("call"), said("tool", "sunny")],
        "rejected": [assistant("rain")],
        "tools": [{"type": "function", "function": {"name": "weather"}}],
        "chat_template_kwargs": {"thinking": True},
    },
    {"chosen": [*_QUESTION, assistant("blue")], "rejected": [*_QUESTION, assistant("grey")]},
]
IDS: list[dict[str, Any]] = [{"prompt_ids": [5, 6, 7], "chosen_ids": [8, 2], "rejected_ids": [9, 10, 2]}]
FORMATS = {"preference": TEXTS, "transcript": DIALOGUES, "conversational": CHATS, "tokenized": IDS}


def token_ids() -> dict[str, Any]:
    """By kind of rows: prompt, chosen and rejected of each row, or the reason why it gives no pair."""
    found: dict[str, Any] = {
        f"{name}: format of each row": [possible_formats(row, {})[0] for row in rows]
        for name, rows in FORMATS.items()
    }
    for name, rows in FORMATS.items():
        found[name] = _tokenized(rows, name)
        found[f"{name}: prompts alone"] = _tokenized(rows, name, completion_tokens=8)
    found["with a system prompt"] = _tokenized(CHATS, "conversational", system_prompt="Answer in a word.")
    for truncation in ("drop", "prompt_left", "completion_right"):
        found[f"truncation: {truncation}"] = _tokenized(TEXTS, "preference", truncation, max_length=12)
    found["max_prompt_length"] = _tokenized(TEXTS, "preference", "prompt_left", max_prompt_length=3)
    return found


def _tokenized(
    rows: list[dict[str, Any]],
    format: str,
    truncation: Any = "drop",
    *,
    max_length: int = 1000,
    max_prompt_length: int | None = None,
    system_prompt: str | None = None,
    completion_tokens: int | None = None,
) -> list[Any]:
    tokenizer: Any = AutoTokenizer.from_pretrained(CONFORMANCE / "policy")
    tokenizer.chat_template = CHAT_TEMPLATE
    settings = tokenization_settings(
        format,
        tokenizer,
        system_prompt=system_prompt,
        max_length=max_length,
        max_prompt_length=max_prompt_length,
        truncation=truncation,
        completion_tokens=completion_tokens,
    )
    batch = tokenize_batch(list(enumerate(rows, start=1)), settings)
    by_row: dict[int, Any] = {number: bad.reason for number, bad in batch.dropped}
    tokens = batch.pairs.tokens.tolist()
    for record in batch.pairs.records:
        parts = []
        for name in ("prompt_length", "chosen_length", "rejected_length"):
            length = int(record[name])
            parts.append(tokens[:length])
            tokens = tokens[length:]
        by_row[int(record["row_number"])] = parts
    return [by_row[number] for number in sorted(by_row)]


# A plain model; windows and softcaps; windows, sinks and experts.
MODELS = ("llama", "gemma2", "gpt_oss")


def golden_model(family: str, experts: str | None = None) -> PreTrainedModel:
    """Weights that are the same on every machine: numpy promises so of RandomState, torch of no generator."""
    model = tiny_model(family, experts=experts)
    random = np.random.RandomState(0)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            drawn = random.uniform(-0.5, 0.5, tuple(parameter.shape))
            parameter.copy_(torch.from_numpy(drawn + (1.0 if parameter.ndim == 1 else 0.0)))
    return model


def golden_pairs() -> list[Pair]:
    random = np.random.RandomState(0)

    def ids(most: int) -> list[int]:
        drawn: list[int] = random.randint(3, VOCABULARY, random.randint(1, most + 1)).tolist()
        return drawn

    pairs = [(ids(24), ids(16), ids(16)) for _ in range(6)]
    return [*pairs, (pairs[0][0], ids(9), ids(9))]  # one prompt twice


def log_probs() -> dict[str, list[float]]:
    """By family: the sums of all chosen, then all rejected completions, as a reference pass computes them."""
    found = {}
    with TemporaryDirectory() as scratch:
        for family in MODELS:
            directory = Path(scratch) / family
            golden_model(family).save_pretrained(directory)
            cache, tables = ReferenceCache(directory / "cache", NAMESPACE), [make_table(golden_pairs())]
            run_pass(cache, tables, load_scorer(directory))
            found[family] = [round(value, 6) for value in all_sums(cache, tables).tolist()]
    return found


def plain_log_probs(family: str, dtype: torch.dtype = torch.float32) -> list[float]:
    """The same sums by the plain model, a sequence at a time."""
    pairs = golden_pairs()
    sequences = [(pair[0], pair[side]) for side in (1, 2) for pair in pairs]
    with torch.no_grad():
        model: Any = golden_model(family, experts="eager")
        model.to(dtype)
        sums: list[float] = completion_logps_one_by_one(model, sequences).tolist()
    return sums


def plans() -> dict[str, Any]:
    """By settings: the rows of each step and rank, and the fingerprint."""
    random = np.random.RandomState(0)
    tokens = random.randint(5, 120, 48)
    costs = tokens * (1.0 + tokens / 64.0)
    order = epoch_order(np.zeros(48, dtype=np.int64), np.ones(1), shuffle=True, seed=3, epoch=1)
    variants: dict[str, dict[str, Any]] = {
        "scope step": {},
        "scope step, two ranks": {"num_ranks": 2, "row_costs": costs},
        "scope step, equal rows": {"num_ranks": 2, "row_costs": costs, "equal_rows": True},
        "padded": {"is_packed": False},
    }
    weighted = epoch_order(np.arange(48) % 2, np.array([0.5, 1.25]), shuffle=True, seed=3, epoch=0)
    found: dict[str, Any] = {"order": order.tolist(), "order of weighted sources": weighted.tolist()}
    for name, arguments in variants.items():
        made = make_plan(tokens, order=order, token_budget=256, pairs_per_step=20, **arguments)
        rows = [[[row.tolist() for row in rows] for rows in ranks] for ranks in made]
        found[name] = {"fingerprint": made.fingerprint, "rows": rows}
    return found


def _same(found: Any, golden: Any) -> bool:
    return bool(found == golden)


def _close(found: list[float], golden: list[float]) -> bool:
    return np.shape(found) == np.shape(golden) and bool(np.allclose(found, golden, rtol=0, atol=LOGP_BOUND))


@dataclass(frozen=True, slots=True, kw_only=True)
class Golden:
    """One kind of values, and the version that says that they have changed."""

    module: Any
    constant: str
    values: Callable[[], dict[str, Any]]
    is_same: Callable[[Any, Any], bool] = _same

    @property
    def version(self) -> int:
        return int(getattr(self.module, self.constant))

    def complaint(self, written: dict[str, Any]) -> str | None:
        """One line about the first value that is not as `written` in golden.json; None if all are."""
        if self.version != written["version"]:
            is_now = f"{self.constant} is {self.version}"
            return f"{is_now}, and the golden values are those of {written['version']}: {REMAKE}"
        golden, found = written["values"], self.values()
        for name in {**golden, **found}:
            is_same = name in golden and name in found and self.is_same(found[name], golden[name])
            if not is_same:
                file = f"{self.module.__name__.replace('.', '/')}.py"
                return f"{name} has other values than before: raise {self.constant} in {file}, then {REMAKE}"
        return None


KINDS = {
    "token_ids": Golden(module=tokenization, constant="TOKENIZATION_VERSION", values=token_ids),
    "log_probs": Golden(module=fingerprint, constant="NUMERICS_VERSION", values=log_probs, is_same=_close),
    "plans": Golden(module=plan, constant="PLAN_VERSION", values=plans),
}


def read_golden() -> dict[str, Any]:
    """golden.json: of each kind its `version` and its `values`."""
    written: dict[str, Any] = json.loads(GOLDEN.read_text(encoding="utf-8"))
    return written
