"""Rows with images: log-probs and gradients are those of each sequence alone through the model's own code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.loading import load_usual
from support.marks import slow
from support.tiny_vision import (
    CONFIGS,
    IMAGE_TOKEN,
    StandIn,
    image_group,
    picture,
    vision_config,
    vision_model,
)
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel

from dpo_pack.model import vision
from dpo_pack.model.attention import ATTENTION_NAME
from dpo_pack.model.config import attention_names
from dpo_pack.model.fingerprint import relevant_config
from dpo_pack.model.layout import packed_row
from dpo_pack.model.recurrence import torch_recurrences
from dpo_pack.model.scorer import CompletionLogps, LoadedModel
from dpo_pack.model.vision import VisionInputs, vision_family
from dpo_pack.online.transformers_generator import generating
from dpo_pack.packing.lengths import Group
from dpo_pack.proofs import Proof, image_groups
from dpo_pack.proofs.start_up import as_published, prove_equivalence
from dpo_pack.recipe.schema import LoraRecipe
from dpo_pack.system.errors import ModelError, UnsupportedModelError

CPU = torch.device("cpu")
INPUTS = ("pixel_values", "pixel_attention_mask", "image_grid_thw", "image_sizes", "spatial_shapes")


def groups_of(model: PreTrainedModel, family: str) -> list[Group]:
    """One image; two of other sizes; none; the first image again. Sides have two tokens or more: of a single
    one, wrong positions would be right."""
    size = (2, 2) if family in ("llava_next", "internvl", "llava") else (2, 3)
    one, two, three = picture(1, *size), picture(2, *size[::-1]), picture(3, 2, 2)
    images = [[one], [two, three], [], [one]]
    return [image_group(model, family, shown, seed=seed, alike=seed % 2) for seed, shown in enumerate(images)]


def alone(model: Any, family: str, groups: list[Group]) -> Tensor:
    """[N] log-probs of the tokens of completions, a sequence at a time, with eager attention."""
    found = []
    for group in groups:
        for completion in group.completions:
            ids = torch.from_numpy(np.concatenate([group.context, completion]))[None]
            inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            if group.images:
                pixels = StandIn(family).pixel_inputs([read() for read in group.images])
                inputs |= {name: pixels[name] for name in INPUTS if name in pixels}
                if "image_grid_thw" in pixels:
                    inputs["mm_token_type_ids"] = (ids == IMAGE_TOKEN).int()
            logits = model(**inputs, use_cache=False).logits[0, len(group.context) - 1 : -1]
            targets = torch.from_numpy(completion)[:, None]
            found.append(logits.log_softmax(-1).gather(1, targets)[:, 0])
    return torch.cat(found)


def load(family: str, directory: Path, **settings: Any) -> tuple[LoadedModel, PreTrainedModel, list[Group]]:
    plain = vision_model(family)
    plain.save_pretrained(directory)
    return (
        load_usual(directory, processor=StandIn(family, plain), **settings),
        plain,
        groups_of(plain, family),
    )


def in_row(scorer: CompletionLogps, groups: list[Group], kind: str) -> Tensor:
    logps: Tensor = scorer(packed_row(groups, CPU, share_prompt=kind == "shared")).token_logps
    return logps


QUICK = ("qwen3_vl", "qwen3_5", "idefics3", "llava")  # axes and DeepStack, recurrence, tiles, plain


@pytest.mark.parametrize("family", [*QUICK, *slow(*(family for family in CONFIGS if family not in QUICK))])
def test_a_row_with_images_is_exact_in_log_probs_and_gradients(family: str, tmp_path: Path) -> None:
    loaded, plain, groups = load(family, tmp_path)
    for parameter in loaded.model.parameters():
        parameter.requires_grad_(True)
    with torch_recurrences(plain):
        expected = alone(plain, family, groups)
        weights = torch.linspace(-1, 1, len(expected))
        (expected * weights).sum().backward()
    ours = in_row(loaded.scorer, groups, "shared")
    assert (ours - expected).abs().max() < 1e-5
    assert (in_row(loaded.scorer, groups, "unshared") - expected).abs().max() < 1e-5
    (ours * weights).sum().backward()
    gradients = dict(plain.named_parameters())
    text = [*plain.get_decoder().parameters(), *plain.get_output_embeddings().parameters()]
    norm = torch.stack([p.grad.norm() for p in text if p.grad is not None]).norm()
    is_text = {id(parameter) for parameter in text}
    for name, parameter in loaded.model.named_parameters():
        if id(gradients[name]) not in is_text:
            assert parameter.grad is None  # of the tower, which is frozen
        elif gradients[name].grad is not None:
            expected_grad: Any = gradients[name].grad
            assert parameter.grad is not None
            assert (parameter.grad - expected_grad).norm() < 1e-5 * norm


def in_features(change: Callable[[Any], object]) -> Callable[[pytest.MonkeyPatch], None]:
    """Changes the tower's output, for rows only."""
    right = VisionInputs.of_row

    def wrong(self: VisionInputs, *arguments: Any) -> dict[str, Any]:
        made = right(self, *arguments)
        change(made["mm_encoder_outputs"]["image"])
        return made

    return lambda patch: patch.setattr(VisionInputs, "of_row", wrong)


def in_each(change: Callable[[Tensor], Tensor]) -> Callable[[pytest.MonkeyPatch], None]:
    def of_all(found: Any) -> None:
        for part in found.pooler_output:
            part.copy_(change(part))

    return in_features(of_all)


def in_deep_stack(change: Callable[[Any], object]) -> Callable[[pytest.MonkeyPatch], None]:
    def of_all(found: Any) -> None:
        found.deepstack_features = [change(list(layer)) for layer in found.deepstack_features]

    return in_features(of_all)


def in_positions(change: Callable[..., Tensor]) -> Callable[[pytest.MonkeyPatch], None]:
    right = vision._row_positions

    def wrong(prompts: Sequence[Tensor], tokens: Sequence[int], position_ids: Tensor) -> Tensor:
        return change(right(prompts, tokens, position_ids), prompts, tokens, position_ids)

    return lambda patch: patch.setattr(vision, "_row_positions", wrong)


def late_tails(positions: Tensor, prompts: Any, tokens: Any, plain: Tensor) -> Tensor:
    begins = (plain.flatten().diff(prepend=plain.flatten()[:1] - 1) != 1) & (plain.flatten() > 0)
    return positions + begins.cumsum(0).bool().int()  # from the first tail on, which is enough


def at_the_length(
    positions: Tensor, prompts: Sequence[Tensor], tokens: Sequence[int], plain: Tensor
) -> Tensor:
    lengths = torch.tensor([prompt.shape[1] for prompt in prompts]).repeat_interleave(torch.tensor(tokens))
    return torch.where(plain < lengths, positions, plain)


def as_one_sequence(patch: pytest.MonkeyPatch) -> None:
    """The model's own positions, of the row as if it were one sequence."""
    right = VisionInputs.of_row

    def wrong(self: VisionInputs, *arguments: Any) -> dict[str, Any]:
        made = right(self, *arguments)
        on_axes = made["position_ids"]
        same = (on_axes == on_axes[:1]).all(dim=0)
        return made | {"position_ids": torch.where(same, torch.arange(on_axes.shape[-1]), on_axes)}

    patch.setattr(VisionInputs, "of_row", wrong)


FAULTS: dict[str, tuple[str, Callable[[pytest.MonkeyPatch], None]]] = {
    "plain positions": (
        "qwen3_vl",
        in_positions(lambda right, prompts, tokens, plain: plain.expand(3, *plain.shape)),
    ),
    "completions at the prompt's length": ("qwen3_5", in_positions(at_the_length)),
    "tails a position late": ("qwen2_5_vl", in_positions(late_tails)),
    "the row as one sequence": ("glm4v", as_one_sequence),
    "images in reversed order": (
        "qwen2_5_vl",
        in_features(lambda found: setattr(found, "pooler_output", found.pooler_output[::-1])),
    ),
    "an image's features reversed": ("idefics3", in_each(lambda part: part.flip(0))),
    "features a token late": ("llava", in_each(lambda part: part.roll(1, 0))),
    "features are zero": ("lfm2_vl", in_each(torch.zeros_like)),
    "DeepStack features are zero": ("qwen3_vl", in_deep_stack(lambda layer: [part * 0 for part in layer])),
    "DeepStack features in reversed order": ("qwen3_vl", in_deep_stack(lambda layer: layer[::-1])),
}


def prove_images(scorer: CompletionLogps) -> Proof:
    return prove_equivalence(scorer, image_groups(scorer), CPU)


QUICK_FAULTS = ("completions at the prompt's length", "images in reversed order", "features are zero")


@pytest.mark.parametrize("fault", [*QUICK_FAULTS, *slow(*(one for one in FAULTS if one not in QUICK_FAULTS))])
def test_the_start_up_proof_notices_what_a_wrong_implementation_would_do(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, plant = FAULTS[fault]
    loaded, _, _ = load(family, tmp_path)
    assert prove_images(loaded.scorer).passed
    plant(monkeypatch)
    proof = prove_images(loaded.scorer)
    assert not proof.passed


def test_a_processor_that_forgets_order_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row and sequence alone agree then, so only the change by exchanged images tells."""
    loaded, _, _ = load("llava", tmp_path)
    right = StandIn.pixel_inputs
    monkeypatch.setattr(StandIn, "pixel_inputs", lambda self, images: right(self, sorted(images, key=np.sum)))
    proof = prove_images(loaded.scorer)
    assert not proof.passed and proof.numbers["max error"] < 1e-5


@pytest.mark.parametrize("family", slow(*CONFIGS))
@pytest.mark.parametrize("kind", ["packed", "padded"])
def test_the_start_up_proof_holds_with_images(family: str, kind: str, tmp_path: Path) -> None:
    loaded, _, _ = load(family, tmp_path, packed=kind == "packed")
    proof = prove_images(loaded.scorer)
    assert proof.passed and proof.numbers["max error"] < 1e-5, proof.numbers


def test_proofs_and_generation_give_the_tower_its_own_attention_back(tmp_path: Path) -> None:
    loaded, _, _ = load("qwen2_5_vl", tmp_path)
    before = attention_names(loaded.model.config)
    assert before == {"": ATTENTION_NAME, "text_config": ATTENTION_NAME, "vision_config": "sdpa"}
    with as_published(loaded.model):
        assert set(attention_names(loaded.model.config).values()) == {"eager"}
    assert attention_names(loaded.model.config) == before
    with generating(loaded.model):
        assert ATTENTION_NAME not in attention_names(loaded.model.config).values()
    assert attention_names(loaded.model.config) == before


def test_an_adapter_of_tied_embeddings_is_refused_where_the_whole_config_says_so(tmp_path: Path) -> None:
    config = vision_config("qwen2_5_vl", tie_word_embeddings=True)
    AutoModelForImageTextToText.from_config(config).save_pretrained(tmp_path)
    adapter = LoraRecipe(r=2, alpha=2, dropout=0.0, target_modules=("q_proj", "embed_tokens"))
    with pytest.raises(ModelError, match="are one tensor in this model"):
        load_usual(tmp_path, adapter=adapter)


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("gemma3", "see later tokens"),
        ("llama4", "images were tested with"),
        ("llava_onevision", "tested with"),
    ],
)
def test_families_of_which_rows_with_images_were_not_exact_are_refused(family: str, reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=reason):
        vision_family(AutoConfig.for_model(family))


def test_the_namespace_of_a_model_that_reads_images_has_the_config_of_its_tower(tmp_path: Path) -> None:
    def namespace(**settings: Any) -> dict[str, Any]:
        config = vision_config("llava")
        config.vision_config.update(settings)
        directory = tmp_path / "-".join(settings)
        AutoModelForImageTextToText.from_config(config).save_pretrained(directory)
        return relevant_config(AutoConfig.from_pretrained(directory), whole=True)

    assert namespace() == namespace() != namespace(hidden_act="relu")
