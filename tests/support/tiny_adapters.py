"""Adapters that plain peft wrote, and what every refusal must be like."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModelForCausalLM
from transformers import AutoModelForCausalLM


def saved_adapter(directory: Path, base: Path, *, seed: int = 1, **settings: Any) -> Path:
    """An adapter of plain peft's whose B is not 0."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(base)
    config = LoraConfig(task_type="CAUSAL_LM", **{"r": 4, "target_modules": "all-linear", **settings})
    adapted = PeftModelForCausalLM(model, config)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                parameter.add_(0.05 * torch.randn_like(parameter))
    adapted.save_pretrained(str(directory), save_embedding_layers=False)
    return directory
