"""What goes wrong while a model is loaded is told as what it is."""

from __future__ import annotations

import pytest
import torch

from dpo_pack.model.loading import load_errors
from dpo_pack.system.errors import ModelError


def test_a_model_that_does_not_fit_is_no_wrong_path() -> None:
    with pytest.raises(ModelError) as caught, load_errors("org/model", "reference.path"):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore of it")
    message = str(caught.value)
    assert message.startswith("reference.path: org/model does not fit in memory (CUDA out of memory. Tried")
    assert "model.dtype=bfloat16" in message and "hub id" not in message and message.isprintable()
