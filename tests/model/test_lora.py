"""Models with an adapter: log-probs and gradients as plain peft has them, proofs, what is refused."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from support.family_errors import skip_unless_packed
from support.loading import load_usual
from support.refusals import refusal
from support.tiny_adapters import saved_adapter
from support.tiny_models import VOCABULARY, tiny_config, tiny_model
from support.tiny_tokenizer import tiny_tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM, Gemma3Config, Gemma3ForConditionalGeneration, PreTrainedModel

from dpo_pack.model.layout import Row, packed_row, padded_row
from dpo_pack.model.lora import Adapter, attach_adapter, read_adapter
from dpo_pack.model.saving import save_model
from dpo_pack.model.scorer import LoadedModel, Precision
from dpo_pack.packing.lengths import Group
from dpo_pack.proofs import proof_groups
from dpo_pack.proofs.start_up import prove
from dpo_pack.recipe.schema import LoraRecipe
from dpo_pack.system.errors import ModelError

CPU = torch.device("cpu")


def test_a_saved_adapter_is_read_onto_the_device_of_its_model(
    bases: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """peft would take the first GPU, on every rank."""
    monkeypatch.setattr("peft.peft_model.infer_device", lambda: pytest.fail("peft chose the device"))
    load(bases("llama"), saved_adapter(tmp_path, bases("llama")))


def test_an_adapter_stays_trainable_while_its_base_is_the_reference(bases: Callable[[str], Path]) -> None:
    loaded = load(bases("llama"), settings())

    def trained() -> list[str]:
        return [name for name, parameter in loaded.model.named_parameters() if parameter.requires_grad]

    before = trained()
    with loaded.as_reference():
        assert trained() == before != []
    assert trained() == before


def load(base: Path, adapter: LoraRecipe | Path, *, packed: bool = True) -> LoadedModel:
    return load_usual(base, packed=packed, adapter=adapter)


def settings(*targets: str, dropout: float = 0.0) -> LoraRecipe:
    return LoraRecipe(r=4, alpha=8.0, dropout=dropout, target_modules=targets or "all-linear")


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Directories of tiny models by family."""
    root = tmp_path_factory.mktemp("bases")

    def base(family: str) -> Path:
        if not (root / family).is_dir():
            tiny_model(family).save_pretrained(root / family)
        return root / family

    return base


HEADS: dict[str, dict[str, Any]] = {
    "plain": {},
    "low rank": {"target_modules": ["q_proj", "lm_head"]},
    "saved whole": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens"]},
    "low-rank embeddings": {"target_modules": ["q_proj", "embed_tokens"]},
    "rank-stabilised with DoRA": {"use_rslora": True, "use_dora": True},
}


@pytest.mark.parametrize(
    ("head", "packed"),
    [
        *((head, True) for head in HEADS if head != "plain"),
        ("low rank", False),
        *(pytest.param("plain", packed, marks=pytest.mark.slow) for packed in (True, False)),
    ],
)
def test_log_probs_and_gradients_of_an_adapter_are_those_of_plain_peft(
    head: str, packed: bool, bases: Callable[[str], Path], tmp_path: Path
) -> None:
    base = bases("llama")
    adapter = saved_adapter(tmp_path / "adapter", base, **HEADS[head])
    loaded = load(base, adapter, packed=packed)
    torch.manual_seed(0)
    groups = proof_groups(VOCABULARY)
    sums = loaded.scorer(row_of(groups, packed)).sums
    sums.square().sum().backward()
    plain = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base), str(adapter), is_trainable=True
    ).eval()
    expected = torch.stack([plain_sum(plain, group, side) for group in groups for side in (0, 1)])
    expected.square().sum().backward()
    torch.testing.assert_close(sums, expected, atol=1e-4, rtol=1e-6)
    ours = {n: p.grad for n, p in loaded.model.named_parameters() if p.requires_grad}
    theirs = {n: p.grad for n, p in plain.get_base_model().named_parameters() if p.requires_grad}
    assert ours.keys() == theirs.keys() and ours
    for name, grad in ours.items():
        expected_grad = theirs[name]
        assert grad is not None and expected_grad is not None, name
        assert (grad - expected_grad).norm() <= 1e-5 * expected_grad.norm(), name
    assert all(proof.passed for proof in prove(loaded.scorer, CPU))


def row_of(groups: list[Group], packed: bool) -> Row:
    if packed:
        return packed_row(groups, CPU, share_prompt=True)
    return padded_row(groups, device=CPU)


def plain_sum(model: Any, group: Group, side: int) -> Tensor:
    completion = torch.from_numpy(group.completions[side])
    tokens = torch.cat((torch.from_numpy(group.context), completion))[None]
    scored = model(tokens).logits[0, len(group.context) - 1 : -1].log_softmax(-1)
    total: Tensor = scored.gather(1, completion[:, None]).double().sum()
    return total


@pytest.mark.parametrize(("family", "left_out"), [("falcon_h1", ["out_proj"]), ("bamba", [])])
def test_all_linear_leaves_out_what_peft_refuses_and_says_so(
    family: str, left_out: list[str], bases: Callable[[str], Path]
) -> None:
    skip_unless_packed(family)
    loaded = load(bases(family), settings())
    assert loaded.adapter is not None
    assert [note.split()[3] for note in loaded.adapter.notes] == left_out
    trained = {n.split(".lora_")[0] for n, p in loaded.scorer.named_parameters() if p.requires_grad}
    assert any(n.endswith("mamba.in_proj") for n in trained)
    assert any(n.endswith("mamba.out_proj") for n in trained) == (not left_out)
    assert all(proof.passed for proof in prove(loaded.scorer, CPU))


@pytest.mark.parametrize("family", ["llama4_text", "phimoe"])
def test_a_router_that_returns_a_tuple_gets_no_adapter(family: str, bases: Callable[[str], Path]) -> None:
    loaded = load(bases(family), settings())
    trained = {n.split(".lora_")[0] for n, p in loaded.scorer.named_parameters() if p.requires_grad}
    assert loaded.adapter is not None and "router (" in loaded.adapter.notes[0]
    assert trained and not any(name.endswith("router") for name in trained)
    loaded.scorer(row_of(proof_groups(VOCABULARY), packed=True))
    assert "no plain linear layer" in refusal(
        lambda: load(bases(family), settings("q_proj", "router")), ModelError
    )


@pytest.mark.parametrize("targets", [(), ("q_proj",)])
def test_only_the_language_model_of_a_vision_checkpoint_gets_an_adapter(targets: tuple[str, ...]) -> None:
    text = tiny_config("gemma3_text")
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 14}
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    model: Any = Gemma3ForConditionalGeneration(config)
    adapter = attach_adapter(
        model, settings(*targets), base="base", revision=None, recipe_key="model.path", reads_weights=True
    )
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert trained and all(".language_model." in name for name in trained)
    assert "vision_tower" in adapter.notes[0]


TIED: dict[str, dict[str, Any]] = {
    "tokens": {"trainable_token_indices": [5, 6]},
    "whole": {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
}


@pytest.mark.parametrize("kind", TIED)
def test_tied_embeddings_that_peft_keeps_tied_are_trained_and_merged(kind: str, tmp_path: Path) -> None:
    tiny_model("llama", tie_word_embeddings=True).save_pretrained(tmp_path / "base")
    adapter = saved_adapter(tmp_path / "adapter", tmp_path / "base", target_modules=["q_proj"], **TIED[kind])
    groups = proof_groups(VOCABULARY)
    loaded = load(tmp_path / "base", adapter)
    assert loaded.adapter is not None
    sums = loaded.scorer(row_of(groups, packed=True)).sums
    sums.sum().backward()
    trained = [p for n, p in loaded.model.named_parameters() if p.requires_grad and "embed_tokens" in n]
    assert trained and all(p.grad is not None and p.grad.any() for p in trained)
    plain = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), str(adapter))
    padded = load(tmp_path / "base", adapter, packed=False).adapter
    assert padded is not None
    for model in (plain.eval(), padded.merge()):
        expected = torch.stack([plain_sum(model, group, side) for group in groups for side in (0, 1)])
        torch.testing.assert_close(sums, expected, atol=1e-4, rtol=1e-6)


def test_whole_embeddings_of_an_adapter_are_trained_too(bases: Callable[[str], Path], tmp_path: Path) -> None:
    adapter = saved_adapter(tmp_path / "adapter", bases("llama"), target_modules=["q_proj"])
    file, name = adapter / "adapter_model.safetensors", "base_model.model.model.embed_tokens.weight"
    embeddings = torch.randn(VOCABULARY, 32)
    save_file({**load_file(file), name: embeddings}, file)
    loaded = load(bases("llama"), adapter)
    assert loaded.adapter is not None and "embed_tokens.weight" in loaded.adapter.notes[0]
    weight: Any = loaded.model.get_input_embeddings().weight
    assert torch.equal(weight, embeddings)
    loaded.adapter.save(tmp_path / "trained")
    assert torch.equal(load_file(tmp_path / "trained" / file.name)[name], embeddings)
    save_file({**load_file(file), name: torch.randn(VOCABULARY + 4, 32)}, file)
    message = refusal(lambda: load(bases("llama"), adapter), ModelError)
    assert str([VOCABULARY + 4, 32]) in message and str([VOCABULARY, 32]) in message


@pytest.mark.parametrize(("value", "told"), [(4.0, True), (None, False), (False, False)])
def test_a_setting_that_peft_does_not_know_is_named(
    value: object, told: bool, bases: Callable[[str], Path], tmp_path: Path
) -> None:
    file = saved_adapter(tmp_path, bases("llama")) / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "spectral_scale": value}))
    loaded = load(bases("llama"), tmp_path)
    assert loaded.adapter is not None
    assert ["spectral_scale" in note for note in loaded.adapter.notes] == [True] * told


def test_a_new_adapter_depends_on_the_seed_alone(bases: Callable[[str], Path]) -> None:
    def first(seed: int) -> Tensor:
        torch.manual_seed(torch.initial_seed() + 1)
        model = load_usual(bases("llama"), adapter=LoraRecipe(r=2, alpha=4), seed=seed)
        return next(p for p in model.scorer.parameters() if p.requires_grad).detach()

    assert torch.equal(first(3), first(3)) and not torch.equal(first(3), first(4))


def test_a_new_adapter_starts_as_its_bfloat16_base_to_the_bit(tmp_path: Path) -> None:
    """The head as well, whose weight is the base's in bfloat16 plus a delta of zeros in fp32."""
    tiny_model("llama").bfloat16().save_pretrained(tmp_path)
    precision = Precision(parameters=torch.bfloat16, autocast=None)
    loaded = load_usual(tmp_path, precision=precision, adapter=settings("q_proj", "lm_head"))
    trained = {parameter.dtype for parameter in loaded.scorer.parameters() if parameter.requires_grad}
    row = row_of(proof_groups(VOCABULARY), packed=True)
    with torch.no_grad():
        adapted = loaded.scorer(row).token_logps
        with loaded.as_reference():
            assert torch.equal(loaded.scorer(row).token_logps, adapted) and trained == {torch.float32}


def test_dropout_draws_only_where_gradients_are_wanted(bases: Callable[[str], Path]) -> None:
    loaded = load(bases("llama"), settings(dropout=0.5))
    for name, parameter in loaded.scorer.named_parameters():
        if "lora_B" in name:
            torch.nn.init.constant_(parameter, 0.05)
    row = row_of(proof_groups(VOCABULARY), packed=True)
    one, other = loaded.scorer(row).sums, loaded.scorer(row).sums
    assert (one - other).abs().max() > 0.1
    with torch.no_grad():
        one, other = loaded.scorer(row).sums, loaded.scorer(row).sums
    assert torch.equal(one, other)


def test_adapters_of_tied_or_odd_heads_are_refused(bases: Callable[[str], Path], tmp_path: Path) -> None:
    tied = bases("gpt2")
    for target in ("lm_head", "wte"):
        message = refusal(functools.partial(load, tied, settings("c_attn", target)), ModelError)
        assert "model.lora" in message and "one tensor" in message
    assert "without dropout" in refusal(
        lambda: load(bases("llama"), settings("lm_head", dropout=0.1)), ModelError
    )
    with_bias = saved_adapter(
        tmp_path / "dora", bases("llama"), use_dora=True, target_modules=["q_proj", "lm_head"]
    )
    assert "output head in a way" in refusal(lambda: load(bases("llama"), with_bias), ModelError)


def test_target_modules_that_match_nothing_are_named(bases: Callable[[str], Path]) -> None:
    assert "model.lora" in refusal(lambda: load(bases("llama"), settings("no_such")), ModelError)
    message = refusal(lambda: load(bases("llama"), settings("q_proj", "w_proj")), ModelError)
    assert "no linear module named w_proj" in message


def test_an_adapter_that_does_not_fit_is_one_line(bases: Callable[[str], Path], tmp_path: Path) -> None:
    adapter = saved_adapter(tmp_path / "adapter", bases("llama"))
    assert "does not fit" in refusal(lambda: load(bases("gpt2"), adapter), ModelError)
    file = adapter / "adapter_model.safetensors"
    weights = load_file(file)
    removed = next(iter(weights))
    save_file({name: tensor for name, tensor in weights.items() if name != removed}, file)
    assert "its weights lack" in refusal(lambda: load(bases("llama"), adapter), ModelError)
    save_file({**weights, removed: torch.full_like(weights[removed], torch.nan)}, file)
    assert "values that are not finite" in refusal(lambda: load(bases("llama"), adapter), ModelError)
    save_file({**weights, "base_model.model.model.layers.7.lora_A.weight": torch.ones(1)}, file)
    assert "has no layer for its weight" in refusal(lambda: load(bases("llama"), adapter), ModelError)
    file.write_bytes(b"not weights")
    assert "does not fit" in refusal(lambda: load(bases("llama"), adapter), ModelError)
    file.unlink()
    assert refusal(lambda: load(bases("llama"), adapter), ModelError)
    torch.save({**weights, "more": Path()}, adapter / "adapter_model.bin")  # torch's error advises to run it
    assert "save them as safetensors" in refusal(lambda: load(bases("llama"), adapter), ModelError)


def attached(model: PreTrainedModel, base: str = "base") -> Adapter:
    return attach_adapter(
        model, settings(), base=base, revision=None, recipe_key="model.path", reads_weights=True
    )


def test_an_adapter_that_is_not_finite_is_not_merged() -> None:
    model = tiny_model("llama")
    adapter = attached(model)
    matrix = next(p for name, p in model.named_parameters() if "lora_A" in name)
    matrix.data[0, 0] = float("inf")
    assert refusal(adapter.merge, ModelError).startswith("cannot merge the adapter into base: NaNs detected")


@pytest.mark.parametrize("base", ["base", "somebody/base"])
def test_a_saved_adapter_has_its_own_matrices_alone_and_names_its_base_from_anywhere(
    base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "base").mkdir()
    monkeypatch.chdir(tmp_path)
    attached(tiny_model("llama"), base=base).save(tmp_path / "adapter")
    assert all(".lora_" in name for name in load_file(tmp_path / "adapter" / "adapter_model.safetensors"))
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == (str(tmp_path / "base") if base == "base" else base)


def test_an_adapter_whose_base_is_drawn_anew_is_refused(bases: Callable[[str], Path], tmp_path: Path) -> None:
    """With peft alone, log-probs of two loads differ by nats."""
    adapter = saved_adapter(tmp_path, bases("llama"), init_lora_weights="pissa_niter_4")
    message = refusal(lambda: read_adapter(adapter, "model.path"), ModelError)
    assert "init_lora_weights: pissa_niter_4" in message and "write pissa" in message
    file = adapter / "adapter_config.json"
    file.write_text(file.read_text().replace("pissa_niter_4", "pissa"))
    assert read_adapter(adapter, "model.path").rank == 4


def test_a_frozen_part_of_an_adapter_is_exported_too(bases: Callable[[str], Path], tmp_path: Path) -> None:
    adapter = saved_adapter(tmp_path / "adapter", bases("llama"), init_lora_weights="mica")
    loaded = load(bases("llama"), adapter)
    frozen = [n for n, p in loaded.model.named_parameters() if "lora_B" in n and not p.requires_grad]
    saved = save_model(loaded, tiny_tokenizer(), tmp_path / "saved", dtype=torch.bfloat16)
    assert frozen and set(frozen) <= saved.keys()
    files = [load_file(path / "adapter_model.safetensors") for path in (adapter, tmp_path / "saved")]
    assert files[0].keys() == files[1].keys()
