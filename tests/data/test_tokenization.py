"""Token ids are TRL's; truncation does what it says; a store is whole or absent."""

import hashlib
import signal
from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.file_operations import in_forks
from support.refusals import refusal
from support.rows import assistant, said, tokenization_settings, user
from support.tiny_tokenizer import VOCABULARY_SIZE, tiny_tokenizer
from tokenizers.processors import TemplateProcessing

from dpo_pack.data import tokenization
from dpo_pack.data.formats import Pair
from dpo_pack.data.readers import NumberedRow
from dpo_pack.data.store import PairTable, TokenStore, open_store, sequence_key, write_store
from dpo_pack.data.tokenization import (
    ReadRow,
    TokenizedBatch,
    check_tokenizer,
    fit_pair,
    tokenize_batch,
    tokenize_rows,
    tokenizer_fingerprint,
    tokenizing,
    truncate,
)
from dpo_pack.data.values import BadRow
from dpo_pack.packing.lengths import Group
from dpo_pack.recipe.schema import DataRecipe
from dpo_pack.system.errors import CacheError, DataError, ModelError, RecipeError

TOKENIZER = tiny_tokenizer()
CHAT_TOKENIZER = tiny_tokenizer(chat_template=True)
EOS = 2

TEXT_ROWS = [
    {"prompt": "\n\nHuman: what is the sky?\n\nAssistant:", "chosen": " It is blue.", "rejected": " No idea"},
    {"prompt": "Bake bread.", "chosen": " Mix “flour” 🍞</s>", "rejected": "\nmix flour</s>"},
    {"prompt": "The sk", "chosen": "y is blue", "rejected": "in"},  # tokens merge across the boundary
    {"prompt": "same", "chosen": " answer", "rejected": " answer longer"},
]
CHAT_ROWS: list[dict[str, Any]] = [
    {
        "prompt": [said("system", "Be brief."), user("the sky?")],
        "chosen": [assistant("blue")],
        "rejected": [assistant("green, I think")],
    },
    {
        "prompt": [user("weather?")],
        "chosen": [assistant("call"), said("tool", "sunny")],
        "rejected": [assistant("rain")],
        "tools": [{"type": "function", "function": {"name": "weather"}}],
        "chat_template_kwargs": {"thinking": True},  # ends the prompt with what the whole dialogue lacks
    },
]


def numbered(rows: list[dict[str, Any]]) -> list[NumberedRow]:
    return list(enumerate(rows, start=1))


def tokenize(
    rows: list[dict[str, Any]], format: str, tokenizer: Any = TOKENIZER, **limits: Any
) -> TokenizedBatch:
    return tokenize_batch(numbered(rows), tokenization_settings(format, tokenizer, **limits))


def ids_of(pairs: TokenStore) -> list[list[list[int]]]:
    """[pair][prompt, chosen, rejected] token ids."""
    tokens, found = pairs.tokens.tolist(), []
    for record in pairs.records:
        parts = []
        for name in ("prompt_length", "chosen_length", "rejected_length"):
            length = int(record[name])
            parts.append(tokens[:length])
            tokens = tokens[length:]
        found.append(parts)
    assert tokens == []
    return found


def naive_ids(prompt: list[int], with_chosen: list[int], with_rejected: list[int]) -> list[list[int]]:
    """The boundary of TRL 1.16, token by token."""
    boundary = 0
    while (
        boundary < min(len(prompt), len(with_chosen), len(with_rejected))
        and prompt[boundary] == with_chosen[boundary] == with_rejected[boundary]
    ):
        boundary += 1
    return [prompt[:boundary], with_chosen[boundary:], with_rejected[boundary:]]


def naive_text_ids(row: dict[str, Any], tokenizer: Any) -> list[list[int]]:
    texts = [row["prompt"]]
    for completion in (row["chosen"], row["rejected"]):
        texts.append(row["prompt"] + completion + ("" if completion.endswith("</s>") else "</s>"))
    return naive_ids(*(tokenizer(text).input_ids for text in texts))


def naive_chat_ids(row: dict[str, Any], tokenizer: Any) -> list[list[int]]:
    options = {"tools": row.get("tools"), **row.get("chat_template_kwargs", {}), "return_dict": False}
    return naive_ids(
        tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, **options),
        tokenizer.apply_chat_template(row["prompt"] + row["chosen"], **options),
        tokenizer.apply_chat_template(row["prompt"] + row["rejected"], **options),
    )


def test_text_ids_are_those_of_prompt_and_completion_tokenised_together() -> None:
    batch = tokenize(TEXT_ROWS, "preference")
    assert ids_of(batch.pairs) == [naive_text_ids(row, TOKENIZER) for row in TEXT_ROWS]
    assert batch.counts["prompt_boundary_moved"] == 1
    assert batch.counts["completions_without_eos"] == 0
    assert all(completion.count(EOS) == 1 for _, *both in ids_of(batch.pairs) for completion in both)


@pytest.mark.parametrize("end", ["", "</s>", "</s>\n", "</s></s>", "</s> \n</s>\n"])
@pytest.mark.parametrize("adds_eos", [False, True])
def test_one_eos_ends_an_answer_of_text(end: str, adds_eos: bool) -> None:
    tokenizer = tiny_tokenizer()
    if adds_eos:
        added = TemplateProcessing(single="$A </s>", special_tokens=[("</s>", EOS)])
        tokenizer.backend_tokenizer.post_processor = added
    row = {"prompt": "Which one?", "chosen": f" The first. {end}", "rejected": f" None {end}"}
    ((_, *both),) = ids_of(tokenize([row], "preference", tokenizer).pairs)
    assert [ids.count(EOS) for ids in both] == [1, 1] and all(ids[-1] == EOS for ids in both)
    assert TOKENIZER.decode(both[0]) == " The first. </s>"


def test_special_tokens_that_the_tokenizer_adds_stay_in_text_and_are_left_out_of_templates() -> None:
    tokenizer = tiny_tokenizer(chat_template=True)
    add_bos = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.backend_tokenizer.post_processor = add_bos
    batch = tokenize(TEXT_ROWS, "preference", tokenizer)
    assert ids_of(batch.pairs) == [naive_text_ids(row, tokenizer) for row in TEXT_ROWS]
    assert all(prompt[0] == 1 for prompt, _, _ in ids_of(batch.pairs))
    batch = tokenize(CHAT_ROWS, "conversational", tokenizer)
    assert ids_of(batch.pairs) == [naive_chat_ids(row, tokenizer) for row in CHAT_ROWS]
    assert all(prompt[:2].count(1) == 1 for prompt, _, _ in ids_of(batch.pairs))  # the template's own


def test_chat_ids_are_those_of_the_template_without_added_tokens() -> None:
    batch = tokenize(CHAT_ROWS, "conversational", CHAT_TOKENIZER)
    assert ids_of(batch.pairs) == [naive_chat_ids(row, CHAT_TOKENIZER) for row in CHAT_ROWS]
    assert batch.counts["prompt_boundary_moved"] == 1
    assert batch.counts["completions_without_eos"] == 0  # </s> and a line break close each turn


def test_templates_that_do_not_close_a_turn_are_counted_and_left_alone() -> None:
    tokenizer = tiny_tokenizer(chat_template=True)
    template = "{# thinking #}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    tokenizer.chat_template = template
    batch = tokenize(CHAT_ROWS, "conversational", tokenizer)
    assert ids_of(batch.pairs) == [naive_chat_ids(row, tokenizer) for row in CHAT_ROWS]
    assert batch.counts["completions_without_eos"] == 4


def test_token_ids_of_the_user_are_kept() -> None:
    row = {"prompt_ids": [5, 6], "chosen_ids": [7, EOS], "rejected_ids": [7, 8], "weight": 0.5}
    batch = tokenize([row], "tokenized")
    assert ids_of(batch.pairs) == [[[5, 6], [7, EOS], [7, 8]]]
    assert batch.pairs.records["shared_length"].tolist() == [3]
    assert batch.pairs.records["weight"].tolist() == [0.5]
    assert batch.counts["completions_without_eos"] == 1


@pytest.mark.parametrize(
    ("format", "change", "reason"),
    [
        ("preference", {"chosen": "half \ud83d of an emoji"}, "invalid_unicode"),
        ("preference", {"prompt": ""}, "empty_prompt"),
        ("preference", {"rejected": "a" * 10_000_000}, "text_too_long"),
        ("conversational", {"chosen": [{"role": "tool", "content": "a" * 10_000_000}]}, "text_too_long"),
        ("conversational", {"prompt": [{"role": "oracle", "content": "?"}]}, "template_error"),
        ("conversational", {"chosen": [said("tool", "\udc00")]}, "invalid_unicode"),
        ("conversational", {"chat_template_kwargs": {"thinking": True}}, None),
        ("conversational", {"chat_template_kwargs": {"tokenize": True}}, "unknown_option"),
        ("conversational", {"chat_template_kwargs": {"tools": {"a": 1}}}, "template_error"),
        ("conversational", {"chat_template_kwargs": {"continue_final_message": True}}, "unknown_option"),
        ("tokenized", {"rejected_ids": [-1]}, "token_id_out_of_range"),
        ("tokenized", {"rejected_ids": [VOCABULARY_SIZE]}, "token_id_out_of_range"),
        ("tokenized", {"rejected_ids": [2**40]}, "token_id_out_of_range"),
        ("tokenized", {"prompt_ids": []}, "empty_prompt"),
        ("tokenized", {"chosen_ids": []}, "empty_completion"),
    ],
)
def test_a_row_that_cannot_be_tokenised_is_dropped_with_its_reason_and_the_others_stay(
    format: str, change: dict[str, Any], reason: str | None
) -> None:
    good = {
        "preference": TEXT_ROWS[0],
        "conversational": CHAT_ROWS[0],
        "tokenized": {"prompt_ids": [5], "chosen_ids": [6], "rejected_ids": [7]},
    }[format]
    batch = tokenize([good, {**good, **change}, good], format, CHAT_TOKENIZER)
    assert [(number, bad.reason) for number, bad in batch.dropped] == ([(2, reason)] if reason else [])
    assert batch.pairs.records["row_number"].tolist() == ([1, 3] if reason else [1, 2, 3])


def test_a_template_that_tests_for_null_content_is_told_why_it_fails() -> None:
    tokenizer = tiny_tokenizer(chat_template=True)
    tokenizer.chat_template = "{% for m in messages %}{{ m.role + m.content }}{% endfor %}"
    call = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"function": {"name": "f", "arguments": {}}}],
    }
    ((_, bad),) = tokenize([{**CHAT_ROWS[0], "chosen": [call]}], "conversational", tokenizer).dropped
    assert bad.reason == "template_error" and "null does not reach the template" in bad.detail


def test_a_template_that_never_ends_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dpo_pack.data.tokenizer._TEMPLATE_SECONDS", 0.1)
    tokenizer = tiny_tokenizer(chat_template=True)
    tokenizer.chat_template = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(ModelError, match="the chat template does not end within"):
        tokenize([CHAT_ROWS[0]], "conversational", tokenizer)


def test_a_tokenizer_must_have_what_the_format_needs() -> None:
    with pytest.raises(ModelError, match="no chat template.*tokenizer.chat_template"):
        check_tokenizer(tokenization_settings("conversational", TOKENIZER), "pairs.jsonl")
    without_eos = tiny_tokenizer()
    without_eos.eos_token = None
    for format in ("preference", "transcript"):
        with pytest.raises(ModelError, match="no EOS token.*tokenizer.path"):
            check_tokenizer(tokenization_settings(format, without_eos), "pairs.jsonl")
    check_tokenizer(tokenization_settings("tokenized", without_eos), "pairs.jsonl")


def test_a_system_prompt_is_refused_where_no_template_could_show_it() -> None:
    for format in ("preference", "transcript", "tokenized"):
        with pytest.raises(RecipeError, match="data.system_prompt applies to conversational data only"):
            check_tokenizer(tokenization_settings(format, system_prompt="Be kind."), "pairs.jsonl")


@pytest.mark.parametrize(
    ("prompt", "chosen", "rejected"),
    [([1, 2, 3], [1, 2, 3, 4], [1, 2, 5]), ([1], [2], [1, 3]), ([1, 2], [1, 2], [1, 2, 3]), ([], [1], [2])],
)
def test_the_boundary_is_the_naive_one(prompt: list[int], chosen: list[int], rejected: list[int]) -> None:
    expected = naive_ids(prompt, chosen, rejected)
    arrays = [np.array(ids, dtype=np.int32) for ids in (prompt, chosen, rejected)]
    texts = Pair(prompt="")
    row, settings = ReadRow(1, texts, texts, (), {}), tokenization_settings("preference", TOKENIZER)
    if all(expected):
        pair = fit_pair(row, arrays, settings).whole
        assert [ids.tolist() for ids in (pair.context, *pair.completions)] == expected
    else:
        with pytest.raises(BadRow):
            fit_pair(row, arrays, settings)


def pair_of(prompt: int, chosen: int, rejected: int) -> Group:
    """A pair with so many tokens, all different."""
    ids = np.arange(10, 10 + prompt + chosen + rejected, dtype=np.int32)
    return Group(context=ids[:prompt], completions=(ids[prompt : prompt + chosen], ids[prompt + chosen :]))


LENGTHS = st.integers(1, 12)
DATA = DataRecipe.model_validate({"train": "pairs.jsonl"})


def limits_of(**limits: Any) -> DataRecipe:
    return DATA.model_copy(update=limits)


@given(LENGTHS, LENGTHS, LENGTHS, st.integers(2, 16), st.none() | LENGTHS, st.booleans())
def test_prompt_left_keeps_completions_whole_and_as_much_of_the_prompt_as_fits(
    prompt: int, chosen: int, rejected: int, max_length: int, max_prompt_length: int | None, has_bos: bool
) -> None:
    pair = pair_of(prompt, chosen, rejected)
    limits = limits_of(max_length=max_length, max_prompt_length=max_prompt_length, truncation="prompt_left")
    room = max_length - max(chosen, rejected)
    if room < 1:
        with pytest.raises(BadRow, match="too_long"):
            truncate(pair, limits, None)
        return
    length = min(prompt, room, max_prompt_length or prompt)
    fitted = truncate(pair, limits, bos_token_id=10 if has_bos else None)
    assert list(map(list, fitted.completions)) == list(map(list, pair.completions))
    if has_bos and length > 1:
        assert fitted.context.tolist() == [10, *pair.context[prompt - length + 1 :].tolist()]
    else:
        assert fitted.context.tolist() == pair.context[prompt - length :].tolist()


@given(LENGTHS, LENGTHS, LENGTHS, st.integers(2, 16))
def test_completion_right_cuts_as_trl_does(prompt: int, chosen: int, rejected: int, max_length: int) -> None:
    pair = pair_of(prompt, chosen, rejected)
    limits = limits_of(max_length=max_length, truncation="completion_right")
    if prompt >= max_length:
        with pytest.raises(BadRow, match="too_long"):
            truncate(pair, limits, None)
        return
    fitted = truncate(pair, limits, None)
    for before, after in zip(pair.completions, fitted.completions, strict=True):
        assert after.tolist() == np.concatenate([pair.context, before])[:max_length][prompt:].tolist()
    assert fitted.context.tolist() == pair.context.tolist()


@given(LENGTHS, LENGTHS, LENGTHS, st.integers(2, 16), st.sampled_from(["drop", "error"]))
def test_drop_and_error_refuse_exactly_what_is_too_long(
    prompt: int, chosen: int, rejected: int, max_length: int, truncation: str
) -> None:
    pair = pair_of(prompt, chosen, rejected)
    limits = limits_of(max_length=max_length, truncation=truncation)
    if prompt + max(chosen, rejected) > max_length:
        with pytest.raises(BadRow, match="too_long"):
            truncate(pair, limits, None)
    else:
        assert truncate(pair, limits, None) is pair


@pytest.mark.parametrize("truncation", ["drop", "error", "completion_right"])
def test_a_prompt_beyond_its_own_limit_is_refused_where_prompts_are_not_cut(truncation: str) -> None:
    limits = limits_of(max_length=100, max_prompt_length=3, truncation=truncation)
    assert len(truncate(pair_of(3, 1, 1), limits, None).context) == 3
    with pytest.raises(BadRow, match="prompt_too_long"):
        truncate(pair_of(4, 1, 1), limits, None)


def test_what_truncation_does_is_counted() -> None:
    rows = [{"prompt_ids": [5] * 6, "chosen_ids": [7, 8, EOS], "rejected_ids": [9, EOS]}]
    for truncation, expected in (
        ("prompt_left", {"prompt_truncated": 1}),
        ("completion_right", {"completions_truncated": 1, "eos_lost": 1}),
    ):
        counts = tokenize(rows, "tokenized", truncation=truncation, max_length=8).counts
        assert +counts == expected


def test_a_sequence_key_is_blake2b_of_prompt_length_and_ids() -> None:
    content = (2).to_bytes(8, "little") + np.array([5, 6, 7], dtype="<i4").tobytes()
    prompt, completion = np.array([5, 6], dtype=np.int32), np.array([7], dtype=np.int32)
    key = sequence_key(prompt, completion)
    assert key == hashlib.blake2b(content, digest_size=16).digest()
    assert key != sequence_key(prompt[:1], np.array([6, 7], dtype=np.int32))
    assert key == sequence_key(np.array([5, 0, 6])[::2], completion)


def test_a_tokenizer_fingerprint_changes_with_what_changes_ids_and_with_nothing_else(tmp_path: Path) -> None:
    fingerprint = tokenizer_fingerprint(TOKENIZER)
    used = tiny_tokenizer()
    used(["a", "bb"], padding=True, truncation=True, max_length=2)
    assert tokenizer_fingerprint(used) == fingerprint
    used.save_pretrained(tmp_path)
    assert tokenizer_fingerprint(type(used).from_pretrained(tmp_path)) == fingerprint
    assert tokenizer_fingerprint(CHAT_TOKENIZER) != fingerprint
    with_token = tiny_tokenizer()
    with_token.add_tokens(["sky"])
    assert tokenizer_fingerprint(with_token) != fingerprint
    other_eos = tiny_tokenizer()
    other_eos.eos_token = "<s>"
    assert tokenizer_fingerprint(other_eos) != fingerprint


def written(directory: Path, batches: list[TokenStore]) -> TokenStore:
    write_store(directory, batches, lambda: {"rows_read": 3})
    store = open_store(directory)
    assert store is not None
    return store


def some_pairs() -> list[TokenStore]:
    return [tokenize(rows, "preference").pairs for rows in (TEXT_ROWS[:1], TEXT_ROWS[1:])]


def test_a_store_gives_back_each_pair_s_tokens_lengths_and_keys(tmp_path: Path) -> None:
    store = written(tmp_path / "store", some_pairs())
    largest = int(store.tokens.max())
    assert store.summary == {"rows_read": 3, "largest_token_id": largest}
    # A store that an earlier release wrote has no such number.
    assert store.largest_token_id == replace(store, summary={}).largest_token_id == largest
    table = PairTable.of([store, store]).select(np.array([5, 0, 3]))
    assert table.source_indices.tolist() == [1, 0, 0]
    for pair, row in enumerate((TEXT_ROWS[1], TEXT_ROWS[0], TEXT_ROWS[3])):
        prompt, chosen, rejected = naive_text_ids(row, TOKENIZER)
        assert table.group(pair).context.tolist() == prompt
        assert table.group(pair).completions[0].tolist() == chosen
        assert table.group(pair).completions[1].tolist() == rejected
        lengths = table.prompt_lengths[pair], table.chosen_lengths[pair], table.rejected_lengths[pair]
        assert lengths == (len(prompt), len(chosen), len(rejected))
        shared, _, _ = naive_ids(prompt + chosen, prompt + chosen, prompt + rejected)
        assert table.shared_lengths[pair] == len(shared)
        ids = table.group(pair).context, table.group(pair).completions[0], table.group(pair).completions[1]
        assert table.chosen_keys[pair].tobytes() == sequence_key(ids[0], ids[1])
        assert table.rejected_keys[pair].tobytes() == sequence_key(ids[0], ids[2])
        assert table.prompt_keys[pair].tobytes() == sequence_key(ids[0], ids[0][:0])


def test_fingerprints_name_pairs_and_order_not_batches(tmp_path: Path) -> None:
    batches = some_pairs(), [tokenize(TEXT_ROWS, "preference").pairs], some_pairs()[:1]
    table, other_batches, fewer = (
        PairTable.of([written(tmp_path / str(number), some)]) for number, some in enumerate(batches)
    )
    assert table.fingerprint == other_batches.fingerprint != fewer.fingerprint
    assert table.select(np.array([1, 0, 2, 3])).fingerprint != table.fingerprint


def test_of_two_processes_that_write_the_same_store_the_first_one_s_stays(tmp_path: Path) -> None:
    def batches() -> Iterator[TokenStore]:
        yield from some_pairs()
        write_store(tmp_path / "store", some_pairs(), lambda: {"writer": "first"})

    write_store(tmp_path / "store", batches(), lambda: {"writer": "second"})
    store = open_store(tmp_path / "store")
    assert store is not None and store.summary["writer"] == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def flipped(file: Path) -> Iterator[int]:
    """Flips one bit of each byte of the file in turn, yields the byte's position, and flips the bit back."""
    whole = file.read_bytes()
    for position, byte in enumerate(whole):
        file.write_bytes(whole[:position] + bytes([byte ^ 1 << position % 8]) + whole[position + 1 :])
        yield position
    file.write_bytes(whole)


@pytest.mark.parametrize("name", ["records.bin", "manifest.json"])
def test_a_store_with_a_changed_bit_in_records_or_manifest_is_absent(tmp_path: Path, name: str) -> None:
    store = written(tmp_path / "store", some_pairs())
    opened = [open_store(tmp_path / "store") for _ in flipped(tmp_path / "store" / name)]
    # A space of the manifest may become a line break.
    assert all(again is None or again.summary == store.summary for again in opened)
    assert sum(again is None for again in opened) > 0.9 * len(opened)
    assert open_store(tmp_path / "store") is not None


def test_a_changed_bit_of_the_tokens_is_found_by_whoever_reads_them_and_the_store_is_written_again(
    tmp_path: Path,
) -> None:
    table = PairTable.of([written(tmp_path / "store", some_pairs())])
    manifest = (tmp_path / "store" / "manifest.json").read_bytes()
    for position in flipped(tmp_path / "store" / "tokens.bin"):
        (tmp_path / "store" / "manifest.json").write_bytes(manifest)
        assert open_store(tmp_path / "store") is not None  # to open a store of gigabytes must take no time
        pair = int(np.searchsorted(table.offsets, position // 4, side="right")) - 1
        for other in set(range(table.num_pairs)) - {pair}:
            assert len(table.group(other).completions) == 2
        sides = [partial(table.group, pair, sides) for sides in ((True, False), (False, True))]
        message = refusal(lambda sides=sides: [read() for read in sides], CacheError)  # type: ignore[misc]
        assert f"store is damaged: its token ids of row {table.row_numbers[pair]} have" in message
        assert open_store(tmp_path / "store") is None
        if position // 4 - table.offsets[pair] < table.prompt_lengths[pair]:
            refusal(partial(table.group, pair, (False, False)), CacheError)


def stream(rows: list[dict[str, Any]], limit: int) -> Iterator[NumberedRow]:
    """The rows, and a failure where more than `limit` are asked for."""
    for number, row in numbered(rows):
        assert number <= limit, "read more rows than needed"
        yield number, row


def all_batches(rows: Iterator[NumberedRow], num_workers: int, max_pairs: int | None) -> TokenizedBatch:
    with tokenizing(tokenization_settings("preference", TOKENIZER), num_workers) as submit:
        batches = list(tokenize_rows(rows, submit, num_workers=num_workers, max_pairs=max_pairs))
    return TokenizedBatch(
        num_rows=sum(batch.num_rows for batch in batches),
        pairs=TokenStore(
            tokens=np.concatenate([batch.pairs.tokens for batch in batches]),
            records=np.concatenate([batch.pairs.records for batch in batches]),
        ),
        prompts=(),
        dropped=tuple(row for batch in batches for row in batch.dropped),
        counts=sum((batch.counts for batch in batches), start=batches[0].counts.__class__()),
    )


def test_no_row_is_read_beyond_those_that_max_pairs_needs() -> None:
    rows = [{}, *TEXT_ROWS, {}, *TEXT_ROWS]
    batch = all_batches(stream(rows, limit=7), num_workers=0, max_pairs=5)
    assert batch.pairs.records["row_number"].tolist() == [2, 3, 4, 5, 7]
    assert [number for number, _ in batch.dropped] == [1, 6]


@pytest.mark.slow
@pytest.mark.multiprocess
def test_several_processes_give_what_one_gives() -> None:
    rows = [{**row, "prompt": f"{number} {row['prompt']}"} for number in range(400) for row in TEXT_ROWS]
    rows[7] = {"prompt": "no completions"}
    here, there = (all_batches(iter(numbered(rows)), workers, max_pairs=1500) for workers in (0, 2))
    assert there.pairs.tokens.tobytes() == here.pairs.tokens.tobytes()
    assert there.pairs.records.tobytes() == here.pairs.records.tobytes()
    assert (there.num_rows, there.counts) == (here.num_rows, here.counts)
    assert [(number, bad.args) for number, bad in there.dropped] == [
        (number, bad.args) for number, bad in here.dropped
    ]
    assert len(here.pairs.records) == 1500


def test_a_process_that_dies_while_it_tokenises_is_one_line() -> None:
    message = refusal(_die, DataError)
    assert "a process that tokenised was killed" in message and "data.num_workers: 0" in message


def _die() -> None:
    with tokenizing(tokenization_settings("preference", TOKENIZER), 2):
        raise BrokenProcessPool


def test_ctrl_c_ends_no_process_that_tokenises_before_its_parent_asks() -> None:
    def handler() -> bool:
        tokenization._start_worker(tokenization_settings("preference", TOKENIZER))
        return signal.getsignal(signal.SIGINT) is signal.SIG_IGN

    assert in_forks([handler]) == [True]
