"""The models of the templates: their committed shapes have the parameters of the hub's, and each run fits."""

from __future__ import annotations

from functools import cache

import pytest
import torch
import yaml
from transformers import AutoConfig

from dpo_pack.model.quantize import bits_per_weight, quantization_settings
from dpo_pack.model.shape import model_shape, num_parameters, without_weights
from dpo_pack.recipe.load import parse_recipe
from dpo_pack.recipe.templates import SHAPES, TEMPLATES, recipe_template
from dpo_pack.run.memory.estimate import GIB, MemoryFacts, MemoryShape, RowSize, estimate_memory, memory_shape

FREE_BYTES = 70 * GIB  # of an 80 GB device, which has 79 GiB; the estimate may be too low


@cache
def shape_of(name: str) -> MemoryShape:
    values = dict(SHAPES[name].config)
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    model = without_weights(config)
    return memory_shape(config, model_shape(model), num_parameters(model))


@pytest.mark.parametrize("name", SHAPES)
def test_a_committed_shape_has_the_parameters_of_the_model(name: str) -> None:
    assert shape_of(name).num_parameters == SHAPES[name].parameters


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_run_of_a_template_fits_on_its_devices(name: str) -> None:
    recipe = parse_recipe(yaml.safe_load(recipe_template(name)))
    setup = TEMPLATES[name][1]
    shape = shape_of(next(key for key in SHAPES if name.startswith(f"{key}-")))
    tokens = recipe.packing.token_budget
    facts = MemoryFacts(
        shape=shape,
        row=RowSize(tokens=tokens, keys=2 * tokens, scored=tokens),  # the worst: everything is scored
        device=torch.device("cuda"),
        lora_rank=None if recipe.model.lora is None else recipe.model.lora.r,
        bits=bits_per_weight(quantization_settings("nf4").to_dict()) if setup.is_quantised else None,
        num_shards=setup.gpus if recipe.distributed.strategy == "fsdp2" else 1,
        num_gradients=2 if setup.gpus > 1 else 1,
    )
    assert sum(estimate_memory(recipe, facts).values()) < FREE_BYTES
