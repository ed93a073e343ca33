"""Compares a checkpoint's tensors with its model's, both ways, by transformers' own report of a load.

What the files lack would start with random values, and what the model does not use would be lost in training
and export. The same report comes from the headers of safetensors files, without the tensors.
"""

from __future__ import annotations

import contextlib
import copy
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any
from unittest import mock

from transformers import PreTrainedModel

from dpo_pack.system.errors import ModelError

# Layers that predict further tokens (MTP). Config keys that name their number; names of their tensors.
_MTP_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")
_MTP = re.compile(r"(^|\.)(mtp|nextn)\w*\.")
_LAYER = re.compile(r"\blayers\.(\d+)\.")
_TOWER = re.compile(
    r"(^|\.)(vision|visual|image|audio|speech|multi_modal|mm_projector|embed_(vision|audio)|vq(model|_?vae))"
)
_ROTARY = re.compile(r"rotary_emb\.(original_)?inv_freq$")
_NO_MTP = "layers that predict further tokens are not trained, and an exported model's config says 0"


@contextlib.contextmanager
def whole_reports() -> Iterator[list[Any]]:
    """Collects the reports of loads before transformers takes out the tensors that it expects not to use."""
    reports: list[Any] = []
    take_out = PreTrainedModel._adjust_missing_and_unexpected_keys

    def collect(model: PreTrainedModel, report: Any) -> None:
        reports.append(copy.copy(report))  # `take_out` puts other sets into `report`
        take_out(model, report)

    with mock.patch.object(PreTrainedModel, take_out.__name__, collect):
        yield reports


def check_report(
    model: PreTrainedModel, whole: Any, loading: dict[str, Any], *, source: str, refuses_unused: bool
) -> list[str]:
    """Returns lines about tensors that the model does not use. Raises ModelError if it cannot start.

    `whole` and `loading`: the report of a load before and after transformers' clean-up. `source`: recipe key
    and checkpoint. With `refuses_unused`, tensors left out for no known reason are an error."""
    if loading["missing_keys"] or whole.mismatched_keys:
        what = _why_incomplete(type(model).__name__, loading["missing_keys"], whole.mismatched_keys)
        raise ModelError(f"{source}: {what}")
    if not whole.unexpected_keys:
        return []
    expected = whole.unexpected_keys - loading["unexpected_keys"]
    return _unused_tensors(model, whole.unexpected_keys, expected, source=source, refuses=refuses_unused)


def _why_incomplete(name: str, missing_keys: set[str], mismatched_keys: Iterable[Any]) -> str:
    if missing := sorted(missing_keys):
        remedy = "give a model with complete weights"
        if missing == ["lm_head.weight"]:
            remedy += "; if its head is its embeddings, set tie_word_embeddings: true in its config.json"
        return (
            f"the weights lack {len(missing)} of {name}'s tensors (first: {missing[0]}), which "
            f"would start with random values; {remedy}"
        )
    others = sorted((tensor, *map(tuple, shapes)) for tensor, *shapes in mismatched_keys)
    tensor, found, expected = others[0]
    return (
        f"tensors with other shapes than config.json says: {len(others)} (first: {tensor}, "
        f"{found} and not {expected}); give the config that belongs to the weights"
    )


def _unused_tensors(
    model: PreTrainedModel, unused: set[str], expected: set[str], *, source: str, refuses: bool
) -> list[str]:
    name, left_out = type(model).__name__, defaultdict[str | None, list[str]](list)
    for tensor in sorted(unused):
        left_out[_why_unused(tensor, model, is_expected=tensor in expected)].append(tensor)
    text, lines = model.config.get_text_config(), []
    if _NO_MTP in left_out:
        text.update({key: 0 for key in _MTP_KEYS if text.to_dict().get(key)})
    for reason, tensors in left_out.items():
        what = f"{name} does not use {len(tensors)} tensors of the checkpoint (first: {tensors[0]})"
        if reason is None and refuses:
            raise ModelError(
                f"{source}: {what}, so they would be lost; correct config.json, which does not name them, or "
                "set model.unused_tensors: warn to train without them"
            )
        lines.append(f"{'Warning: ' if reason is None else ''}{what}{f': {reason}' if reason else ''}")
    return lines


def _why_unused(tensor: str, model: PreTrainedModel, *, is_expected: bool) -> str | None:
    """Returns why a tensor is left out on purpose; None: nobody knows. `is_expected`: by transformers."""
    text = model.config.get_text_config()
    layer = _LAYER.search(tensor)
    is_behind = layer is not None and int(layer[1]) >= text.num_hidden_layers
    if _MTP.search(tensor) or (is_behind and (is_expected or any(map(text.to_dict().get, _MTP_KEYS)))):
        return _NO_MTP
    if _TOWER.search(tensor):
        return "text needs no tower for images or sound, and an exported model has none"
    return "transformers does not need them" if is_expected or _ROTARY.search(tensor) else None


def check_tied(model: PreTrainedModel) -> list[str]:
    """Corrects a config that says that head and embeddings are one, but the weights differ; says so."""
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    configs = (model.config, model.config.get_text_config())
    says_tied = [config for config in configs if config.to_dict().get("tie_word_embeddings")]
    if not says_tied or head is None or head.weight is table.weight:
        return []
    for config in says_tied:
        config.update({"tie_word_embeddings": False})
    return [
        "Warning: config.json says tie_word_embeddings: true, but the weights of head and embeddings differ, "
        "so both are trained, and an exported model's config says false"
    ]
