"""What `dpopack show` shows of pairs: their tokens as the model gets them, and their faults."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dpo_pack.data.faults import (
    FEW,
    SIDES,
    Origin,
    faults_of,
    find_in,
    longest_length,
    remedy_of,
    sentence_of,
)
from dpo_pack.data.images import ReadImage, image_label
from dpo_pack.data.tokenization import TokenizedPair
from dpo_pack.packing.lengths import AnyIntArray, common_prefix_length

# Tokens decode to this if their last bytes begin a character, whose other bytes are in the next tokens.
_PART_OF_A_CHARACTER = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownRecipe:
    """All that `dpopack show` shows."""

    # What `--json` writes. Tokens have `is_cut` besides: truncation removes them.
    report: dict[str, Any]
    images: list[ReadImage]  # of the pairs that are shown, as in the report

    @property
    def rows(self) -> list[dict[str, Any]]:
        """A dict for each pair: source, row, warnings, and as texts prompt, chosen and rejected."""

        def text(pair: dict[str, Any], side: str, part: str) -> str:
            return "".join(token["text"] for token in pair[side] if token["part"] == part)

        return [
            {name: pair[name] for name in ("source", "row", "warnings")}
            | {"prompt": text(pair, "chosen", "prompt")}
            | {side: text(pair, side, "completion") for side in SIDES}
            for pair in self.report["pairs"]
        ]

    def __repr__(self) -> str:
        names = ", ".join(source["name"] for source in self.report["sources"])
        pairs, warnings = (len(self.report[key]) for key in ("pairs", "warnings"))
        return f"ShownRecipe({names}: {pairs:,} pairs, {warnings:,} warnings)"


def find_faults(pairs: Sequence[TokenizedPair], origin: Origin) -> Iterator[dict[str, Any]]:
    """Yields the faults of the pairs of a source."""
    for name, found in faults_of(pairs, origin).items():
        if name == "prompt_in_completion" and len(found) < FEW * len(pairs):
            continue  # a few answers may well repeat it
        pair, evidence = max(found, key=lambda one: longest_length(one[0].whole))
        yield {
            "name": name,
            "sentence": sentence_of(name)
            + (f": {evidence}, and others" if evidence and "label" in name else ""),
            "remedy": remedy_of(name, evidence, pair, origin),
            "rows": [pair.row.number for pair, _ in found],
            "count": len(found),
            "of": len(pairs),
            "unit": "pair",
        }


def shown_pair(pair: TokenizedPair, origin: Origin, known: Collection[str]) -> dict[str, Any]:
    """Returns a pair as the model gets it; `known` are the faults of its source."""
    whole, fitted, num_prompt = pair.whole, pair.fitted, len(pair.whole.context)
    # `prompt_left` cuts the tokens before `end`; BOS stays if there is room for it.
    begin = int(len(fitted.context) > 1 and whole.context[0] == origin.bos)
    end = begin + num_prompt - len(fitted.context)
    shown: dict[str, Any] = {"row": pair.row.number}
    scored = whole.scored or [np.ones(len(ids), dtype=np.bool_) for ids in whole.completions]
    for number, side in enumerate(SIDES):
        ids = np.concatenate([whole.context, whole.completions[number]])
        num_kept = num_prompt + len(fitted.completions[number])
        shown[side] = [
            {
                "id": int(ids[at]),
                "text": text,
                "part": "prompt" if at < num_prompt else "completion",
                "scored": num_prompt <= at < num_kept and bool(scored[number][at - num_prompt]),
                "is_cut": begin <= at < end or at >= num_kept,
            }
            for at, text in enumerate(_token_texts(ids, pair, origin))
        ]
    ends = [origin.ends.found_in(completion)[-1:] for completion in fitted.completions]
    return shown | {
        "shared_tokens": len(fitted.context) + common_prefix_length(fitted.completions),
        "ends_with": {side: origin.text(np.array(ids)) for side, ids in zip(SIDES, ends, strict=True)},
        "warnings": [f"{name} {shows}".rstrip() for name, shows in find_in(pair, origin) if name in known],
    }


def _token_texts(ids: AnyIntArray, pair: TokenizedPair, origin: Origin) -> list[str]:
    """Returns the texts of tokens, which joined are that of the sequence. The last token of a character has
    the character, the first one of an image describes the image."""
    texts: list[str] = []
    begin = known = 0  # `ids[begin:known]` gave the last text that is not empty
    for end in range(1, len(ids) + 1):
        text = origin.text(ids[begin:end], known - begin)
        is_part = text.endswith(_PART_OF_A_CHARACTER) and end < len(ids)
        texts.append("" if is_part else text)
        if not is_part:
            begin, known = known, end
    if origin.settings.images is not None and pair.row.images:
        processor = origin.settings.images.processor
        places = iter(np.flatnonzero(ids == processor.token_id).tolist())
        for image in pair.row.images:
            label = image_label(image, processor)
            for _ in range(processor.num_tokens((image.width, image.height))):
                texts[next(places)], label = label, ""
    return texts
