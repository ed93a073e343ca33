"""What contenders train on: pairs as token ids, the same ids for each of them.

Lengths of the synthetic workloads are log-normal, fitted to published statistics; their ids are random,
which no kernel's time depends on. Legend: P pairs; lengths in tokens.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dpo_pack.data.beginnings import find_beginnings
from dpo_pack.data.formats import FORMATS, TRANSCRIPT_TURNS, Format, Pair
from dpo_pack.data.tokenizer import apply_chat_template
from dpo_pack.data.values import BadRow
from dpo_pack.packing.lengths import AnyIntArray, PairLengths, common_prefix_length
from dpo_pack.system.files import write_json_atomically, write_text_atomically

PAD_ID, BOS_ID, EOS_ID = 0, 1, 2
FIRST_ORDINARY_ID = 3
HH_VOCABULARY = 8192
HH_URL = "https://huggingface.co/datasets/Anthropic/hh-rlhf/resolve/main/harmless-base/test.jsonl.gz"
HH_TEST_SHA256 = "14d765196c9f18d84f9bb3a78bac608c8f2915110ebcbd74ec95db7b7198b008"  # unpacked
# Between the logarithms of prompt, chosen and rejected lengths: 0.25, 0.24 and 0.31 in HH-RLHF's
# harmless-base test set. Alike completions waste less padding, so independent draws would flatter packing.
LENGTH_CORRELATION = 0.27

TokenIds = tuple[Sequence[int], Sequence[int], Sequence[int]]  # prompt, chosen, rejected


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthMix:
    """Log-normal prompt and completion lengths; pairs above `max_length` are drawn again."""

    median_prompt: float
    median_completion: float
    prompt_spread: float  # standard deviation of the logarithm
    completion_spread: float
    max_length: int  # of a prompt with one completion
    origin: str  # where the numbers come from

    def draw(self, num_pairs: int, *, seed: int) -> PairLengths:
        """Lengths of `num_pairs` pairs; completions hold their EOS."""
        random = np.random.default_rng(seed)
        drawn = np.zeros((0, 3), dtype=np.int64)
        while len(drawn) < num_pairs:
            common = random.standard_normal((num_pairs, 1)) * np.sqrt(LENGTH_CORRELATION)
            normal = common + random.standard_normal((num_pairs, 3)) * np.sqrt(1 - LENGTH_CORRELATION)
            spreads = np.array([self.prompt_spread, self.completion_spread, self.completion_spread])
            medians = np.array([self.median_prompt, self.median_completion, self.median_completion])
            lengths = np.maximum(2, np.exp(normal * spreads) * medians).astype(np.int64)
            fits = lengths[:, 0] + lengths[:, 1:].max(axis=1) <= self.max_length
            drawn = np.concatenate([drawn, lengths[fits]])
        prompt, chosen, rejected = drawn[:num_pairs].T
        return PairLengths(prompt=prompt, chosen=chosen, rejected=rejected, shared=prompt)


_MEDIANS = (
    "medians of the whole pair and of prompt / completion from arXiv 2410.20305's table of data sets, "
    "taken as prompt + both completions"
)
MIXES = {
    "hh-like": LengthMix(
        median_prompt=96,
        median_completion=45,
        prompt_spread=1.0,
        completion_spread=0.9,
        max_length=1024,
        origin=f"HH-RLHF: {_MEDIANS} (186, 2.15); spreads measured on its harmless-base test set",
    ),
    "ultrafeedback": LengthMix(
        median_prompt=71,
        median_completion=169,
        prompt_spread=1.08,
        completion_spread=1.07,
        max_length=2048,
        origin=f"UltraFeedback binarized: {_MEDIANS} (409, 0.42); spreads such that means are 127 and 300 "
        "tokens, from the data set card's 405,688,662 bytes of 61,135 rows at 4.5 bytes a token",
    ),
    "tulu3": LengthMix(
        median_prompt=97,
        median_completion=232,
        prompt_spread=1.08,
        completion_spread=1.07,
        max_length=2048,
        origin="Tulu 3 8B preference mixture: means of 174 and 411 tokens, from the data set card's "
        "1,680,549,462 bytes of 271,409 rows at 4.5 bytes a token; UltraFeedback's ratio and spreads, cut at "
        "the 2,048 tokens Tulu 3 trained with",
    ),
    "long16k": LengthMix(
        median_prompt=600,
        median_completion=900,
        prompt_spread=1.3,
        completion_spread=1.2,
        max_length=16384,
        origin="made up: a long tail of dialogues and answers up to 16,384 tokens",
    ),
}
HH_WORKLOADS = ("hh", "hh-chat")  # these need HH-RLHF's rows
WORKLOADS = (*HH_WORKLOADS, "agents", *MIXES)
AGENTS_COMMON = 2000  # tokens that each prompt of `agents` begins with
AGENTS_TURN, AGENTS_ANSWER = (20, 80), (100, 300)  # tokens: at least, at most


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Pairs on disk, as rows of `prompt_ids`, `chosen_ids` and `rejected_ids`."""

    name: str
    directory: Path
    num_pairs: int
    max_length: int
    digest: str  # hash of the ids of all pairs in their order
    origin: str

    @property
    def pairs(self) -> Path:
        return self.directory / "pairs.jsonl"

    def rows(self, num_pairs: int) -> list[dict[str, list[int]]]:
        """The first `num_pairs` rows."""
        with self.pairs.open(encoding="utf-8") as lines:
            return [json.loads(line) for line, _ in zip(lines, range(num_pairs), strict=False)]

    def lengths(self, num_pairs: int) -> PairLengths:
        """Of the first `num_pairs`; `shared` counts the tokens both sequences begin with, `common` those that
        prompts of several pairs begin with."""
        rows = self.rows(num_pairs)
        prompts: list[AnyIntArray] = [np.array(row["prompt_ids"]) for row in rows]
        found = find_beginnings(prompts.__getitem__, np.array([len(prompt) for prompt in prompts]))
        both = [[row["prompt_ids"] + row[side] for side in ("chosen_ids", "rejected_ids")] for row in rows]
        return PairLengths(
            prompt=np.array([len(row["prompt_ids"]) for row in rows]),
            chosen=np.array([len(row["chosen_ids"]) for row in rows]),
            rejected=np.array([len(row["rejected_ids"]) for row in rows]),
            shared=np.array([len(os.path.commonprefix(sequences)) for sequences in both]),
            beginning=found["key"].astype(np.int64),
            common=found["length"],
        )


def make_workload(
    name: str,
    directory: Path,
    *,
    num_pairs: int,
    vocabulary: int,
    hh_pairs: Path | None,
    tokenizer: str = "",
    seed: int = 0,
) -> Workload:
    """Write the workload into `directory`, or take the same one that is there. Exits when HH rows lack.

    `tokenizer`: a directory with one for HH's texts; empty: it is trained on them.
    """
    request = {"name": name, "num_pairs": num_pairs, "vocabulary": vocabulary, "seed": seed}
    request |= {"tokenizer": tokenizer} if tokenizer else {}
    if (directory / "workload.json").is_file():
        made = json.loads((directory / "workload.json").read_text(encoding="utf-8"))
        if made.pop("request") == request:
            return Workload(directory=directory, **made)
    if name in HH_WORKLOADS:
        assert hh_pairs is not None
        own = "the model's tokenizer" if tokenizer else "a byte-level BPE of their own text"
        if name == "hh-chat":
            pairs, own = (
                hh_chat_token_ids(hh_pairs, num_pairs, tokenizer),
                f"messages of the chat template of {own}",
            )
        else:
            pairs = hh_token_ids(hh_pairs, num_pairs, tokenizer)
        max_length, origin = MIXES["hh-like"].max_length, f"{_hh_origin(hh_pairs)}, by {own}"
    elif name == "agents":
        pairs = agents_token_ids(num_pairs, vocabulary, seed=seed)
        max_length = AGENTS_COMMON + AGENTS_TURN[1] + AGENTS_ANSWER[1]
        (shortest, longest), (least, most) = AGENTS_TURN, AGENTS_ANSWER
        origin = (
            f"random ids, which this script makes: each prompt is the same {AGENTS_COMMON:,} tokens, in "
            f"place of a system prompt with definitions of tools, and a turn of {shortest} to {longest} "
            f"tokens; answers have {least} to {most}"
        )
    else:
        pairs = list(synthetic_token_ids(MIXES[name].draw(num_pairs, seed=seed), vocabulary, seed=seed))
        max_length = MIXES[name].max_length
        origin = f"random ids, which this script makes; lengths: {MIXES[name].origin}"
    directory.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(dict(zip(_COLUMNS, pair, strict=True))) + "\n" for pair in pairs]
    write_text_atomically(directory / "pairs.jsonl", "".join(lines))
    made = {
        "name": name,
        "num_pairs": num_pairs,
        "max_length": max_length,
        "digest": digest_of(pairs),
        "origin": origin,
    }
    write_json_atomically(directory / "workload.json", {**made, "request": request})
    return Workload(directory=directory, **made)


_COLUMNS = ("prompt_ids", "chosen_ids", "rejected_ids")


def synthetic_token_ids(lengths: PairLengths, vocabulary: int, *, seed: int) -> Iterator[TokenIds]:
    """Random ordinary ids of these lengths, completions ending with EOS."""
    random = np.random.default_rng(seed + 1)

    def ids(count: int) -> list[int]:
        return [int(token) for token in random.integers(FIRST_ORDINARY_ID, vocabulary, count)]

    for prompt, chosen, rejected in zip(lengths.prompt, lengths.chosen, lengths.rejected, strict=True):
        yield ids(int(prompt)), [*ids(int(chosen) - 1), EOS_ID], [*ids(int(rejected) - 1), EOS_ID]


def agents_token_ids(num_pairs: int, vocabulary: int, *, seed: int) -> list[TokenIds]:
    """Random ordinary ids; every prompt begins with the same ones."""
    random = np.random.default_rng(seed)
    turn, chosen, rejected = (
        random.integers(least, most + 1, num_pairs)
        for least, most in (AGENTS_TURN, AGENTS_ANSWER, AGENTS_ANSWER)
    )
    common = random.integers(FIRST_ORDINARY_ID, vocabulary, AGENTS_COMMON).tolist()
    lengths = PairLengths(prompt=turn, chosen=chosen, rejected=rejected, shared=turn)
    pairs = synthetic_token_ids(lengths, vocabulary, seed=seed)
    return [([*common, *prompt], chosen, rejected) for prompt, chosen, rejected in pairs]


def _hh_pairs(path: Path, reader: Format, num_pairs: int) -> Iterator[Pair]:
    """The first usable HH-RLHF rows, twice as many as needed: some of them are too long."""
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as lines:
        rows = (json.loads(line) for line in lines)
        count = 0
        for row in rows:
            with contextlib.suppress(BadRow):
                yield reader.pair(row)
                count += 1
            if count == 2 * num_pairs:
                return


def hh_chat_token_ids(path: Path, num_pairs: int, tokenizer_directory: str) -> list[TokenIds]:
    """The same rows as messages, by the chat template in the directory, as a run with `turns: messages`."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_directory)
    pairs: list[TokenIds] = []
    for pair in _hh_pairs(path, TRANSCRIPT_TURNS, num_pairs):
        texts = apply_chat_template(pair, (pair.chosen, pair.rejected), tokenizer)
        encoded = [np.array(ids) for ids in tokenizer(list(texts), add_special_tokens=False)["input_ids"]]
        prompt = common_prefix_length(encoded)  # completions begin where the three first differ
        ids = [encoded[0][:prompt].tolist(), *(whole[prompt:].tolist() for whole in encoded[1:])]
        if max(map(len, encoded)) <= MIXES["hh-like"].max_length and all(ids):
            pairs.append((ids[0], ids[1], ids[2]))
    return _enough(pairs, num_pairs, path)


def hh_token_ids(path: Path, num_pairs: int, tokenizer_directory: str = "") -> list[TokenIds]:
    """The first usable HH-RLHF rows of at most the workload's length, by the tokenizer in a directory, or by
    one that is trained on them.
    """
    limit = MIXES["hh-like"].max_length
    rows = [
        (str(pair.prompt), str(pair.chosen), str(pair.rejected))
        for pair in _hh_pairs(path, FORMATS["transcript"], num_pairs)
    ]
    if tokenizer_directory:
        from transformers import AutoTokenizer

        loaded = AutoTokenizer.from_pretrained(tokenizer_directory)
        tokenizer, eos = loaded.backend_tokenizer, loaded.eos_token_id
    else:
        tokenizer, eos = _byte_level_bpe(text for row in rows for text in row), EOS_ID
    pairs: list[TokenIds] = []
    for row in rows:
        prompt, chosen, rejected = (tokenizer.encode(text, add_special_tokens=False).ids for text in row)
        if len(prompt) + max(len(chosen), len(rejected)) < limit:
            pairs.append((prompt, [*chosen, eos], [*rejected, eos]))
    return _enough(pairs, num_pairs, path)


def _enough(pairs: list[TokenIds], num_pairs: int, path: Path) -> list[TokenIds]:
    if len(pairs) < num_pairs:
        raise SystemExit(f"--pairs: {path} has {len(pairs)} usable rows, not {num_pairs}; set --num-pairs")
    return pairs[:num_pairs]


def _hh_origin(path: Path) -> str:
    """What the rows are and how to get them, as far as their text tells."""
    content = path.read_bytes()
    digest = hashlib.sha256(gzip.decompress(content) if path.suffix == ".gz" else content).hexdigest()
    source = f"{path.name}; its text has the sha256 {digest[:16]}"
    if digest == HH_TEST_SHA256:
        source = f"HH-RLHF, harmless-base, test split ({HH_URL}; its text has the sha256 {digest[:16]})"
    return f"the first usable rows of {source}"


def _byte_level_bpe(texts: Iterable[str]) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=HH_VOCABULARY,
        special_tokens=["<pad>", "<s>", "</s>"],  # PAD_ID, BOS_ID, EOS_ID
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def digest_of(pairs: Iterable[TokenIds]) -> str:
    """Names token ids and their order: each contender's must equal the workload's."""
    digest = hashlib.blake2b(digest_size=16)
    for pair in pairs:
        for ids in pair:
            array: npt.NDArray[np.int64] = np.asarray(ids, dtype="<i8")
            digest.update(len(array).to_bytes(8, "little") + array.tobytes())
    return digest.hexdigest()
