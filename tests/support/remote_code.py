"""Models that bring code of their own, beside an architecture that transformers has too."""

from __future__ import annotations

import json
from pathlib import Path

_CODE = """\
from pathlib import Path

from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, TokenizersBackend

Path({mark!r}).touch()


class OwnConfig(LlamaConfig):
    pass


class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig


class OwnClassifier(LlamaForSequenceClassification):
    config_class = OwnConfig


class OwnTokenizer(TokenizersBackend):
    pass


def generate(model, *arguments, **options):
    raise AssertionError
"""
_CLASSES = {
    "AutoConfig": "own.OwnConfig",
    "AutoModelForCausalLM": "own.OwnModel",
    "AutoModelForSequenceClassification": "own.OwnClassifier",
}


def add_remote_code(model: Path, mark: Path) -> None:
    """Gives a saved Llama code of its own, which leaves `mark` wherever it is imported."""
    _edit(model / "config.json", auto_map=_CLASSES)
    if (model / "tokenizer_config.json").exists():
        _edit(model / "tokenizer_config.json", auto_map={"AutoTokenizer": [None, "own.OwnTokenizer"]})
    code = _CODE.format(mark=str(mark))
    (model / "own.py").write_text(code, encoding="utf-8")
    (model / "custom_generate").mkdir()
    (model / "custom_generate" / "generate.py").write_text(code, encoding="utf-8")


def _edit(file: Path, **values: object) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text(encoding="utf-8")), **values}), encoding="utf-8")
