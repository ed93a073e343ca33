"""Every family of the table: exact in each mode it can run in, refused where it cannot; any rows."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from make_family_table import SPECIAL, page
from support import tiny_models
from support.family_errors import GROUPS, SEQUENCES, measure, packs, prove_under_autocast, skip_unless_packed
from support.groups import CPU, group, make_row
from support.loading import load_usual
from support.marks import TEN, slow_but_ten
from support.oracle import completion_logps_one_by_one, gradients
from support.tiny_models import tiny_config, tiny_model
from torch import nn
from transformers import Gemma2ForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import dpo_pack.model.config as configs
from dpo_pack.model.attention import ATTENTION_NAME, register_attention, row_attention
from dpo_pack.model.attention.sdpa import sdpa_attention
from dpo_pack.model.config import FAMILIES, Family, attention_needs, check_packs, layer_windows, routes_tokens
from dpo_pack.model.recurrence import wrap_recurrent_layers
from dpo_pack.model.scorer import CompletionLogps, LoadedModel
from dpo_pack.proofs import proof_groups, proof_row
from dpo_pack.proofs.layers import Recorded
from dpo_pack.system.errors import UnsupportedModelError

REPOSITORY = Path(__file__).resolve().parents[2]
REFUSED = [name for name, family in FAMILIES.items() if family.reason is not None]
PACKED = [name for name in SPECIAL if name not in REFUSED]
# Their bounds are absolute. Elsewhere the error of the gradient may be twice the noise floor of the family's
# own arithmetic, in norm. That of its worst entry may be four times: it is the largest of 100,000 values, and
# so is its floor, of one draw each. Of two CPUs and 94 families the most was 2.4 times (stablelm, padded).
ABSOLUTE = ("llama", "qwen3", "mistral", "gemma2", "gpt2")


def test_every_family_has_a_tiny_model_and_is_a_causal_lm_of_transformers() -> None:
    assert FAMILIES.keys() < SPECIAL.keys() == tiny_models.FAMILIES.keys()
    known = SPECIAL.keys() & CONFIG_MAPPING.keys()  # an older transformers lacks the newest
    assert known <= MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys()
    assert Family() not in FAMILIES.values(), "a plain family needs no line"


@pytest.mark.parametrize("family", slow_but_ten(SPECIAL))
def test_log_probs_and_gradients_of_a_family_are_those_of_one_sequence(family: str, tmp_path: Path) -> None:
    errors, noise = measure(family, tmp_path)
    assert errors.keys() == ({"shared", "unshared", "padded"} if packs(family) else {"padded"})
    floor = 1e-6 if family in ABSOLUTE else min(max(1e-6, 2 * noise.gradient), 2e-5)
    largest = 1e-6 if family in ABSOLUTE else min(max(1e-6, 4 * noise.max_gradient), 2e-5)
    for mode, error in errors.items():
        assert error.max_logp < 1e-4 and error.mean_logp < 2e-5, (mode, asdict(error))
        assert error.gradient < floor and error.max_gradient < largest, (mode, asdict(error), asdict(noise))


@pytest.mark.parametrize("packed", [True, False])
def test_a_softcap_is_not_lost_where_transformers_takes_sdpa_for_it(
    packed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_model("gemma2").save_pretrained(tmp_path)
    monkeypatch.setattr(Gemma2ForCausalLM, "_supports_sdpa", True)  # as in transformers 5.15 to 5.20
    loaded = load_usual(tmp_path, packed=packed)
    assert loaded.model.config._attn_implementation == (ATTENTION_NAME if packed else "eager")
    assert loaded.attention.name == ("sdpa" if packed else "model's own, eager")


@pytest.mark.parametrize("family", slow_but_ten(PACKED, {"gemma2", "gpt_oss", "qwen3_moe"}))
def test_every_packed_family_passes_the_proofs_under_bfloat16_autocast(family: str) -> None:
    skip_unless_packed(family)
    proofs = prove_under_autocast(family)
    assert all(proof.passed for proof in proofs), proofs


@pytest.mark.parametrize("family", REFUSED)
def test_a_family_that_cannot_be_packed_is_refused_before_it_is_loaded(family: str, tmp_path: Path) -> None:
    if packs(family):
        pytest.skip("the package that it needs is installed")
    tiny_config(family).save_pretrained(tmp_path)  # and no weights
    with pytest.raises(UnsupportedModelError, match=re.escape(str(FAMILIES[family].reason))):
        load_usual(tmp_path, packed=True)


YARN: dict[str, Any] = tiny_models.FAMILIES["ministral3"]["rope_parameters"]
# What a special feature is worth: the family's tiny model without it.
WITHOUT: list[tuple[str, dict[str, Any]]] = [
    ("afmoe", {"sliding_window": 100}),
    ("cohere", {"logit_scale": 1.0}),
    ("cohere2", {"sliding_window": 100}),
    ("dots1", {"sliding_window": 100}),
    ("exaone4", {"sliding_window": 100}),
    ("gemma2", {"sliding_window": 100}),
    ("gemma2", {"attn_logit_softcapping": None}),
    ("gemma2", {"final_logit_softcapping": None}),
    ("gemma2", {"query_pre_attn_scalar": 64}),
    ("gemma3_text", {"sliding_window": 100}),
    ("gemma3n_text", {"num_kv_shared_layers": 0}),
    ("gpt_oss", {"sliding_window": 100}),
    ("granite", {"logits_scaling": 1.0}),
    ("granite", {"attention_multiplier": 8**-0.5}),
    ("hyperclovax", {"logits_scaling": 1.0}),
    ("llama4_text", {"attention_chunk_size": 8}),
    ("minicpm3", {"dim_model_base": 32}),
    ("ministral3", {"rope_parameters": YARN | {"llama_4_scaling_beta": 0.0}}),
    ("mistral", {"sliding_window": None}),
    ("nanochat", {"final_logit_softcapping": None}),
    ("phi3", {"sliding_window": None}),
    ("qwen2", {"sliding_window": 100}),
    ("smollm3", {"no_rope_layers": [1, 1]}),
    ("falcon_h1", {"lm_head_multiplier": 1.0}),
    ("recurrent_gemma", {"logits_soft_cap": 1e6}),
    ("xlstm", {"output_logit_soft_cap": 1e6}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("family", "change"),
    [
        pytest.param(family, change, marks=[] if family in TEN else pytest.mark.slow, id=f"{family}-{change}")
        for family, change in WITHOUT
    ],
)
def test_what_is_special_about_a_family_shows_in_its_tiny_model(family: str, change: dict[str, Any]) -> None:
    """Or the test above would not see it missing."""
    with torch.no_grad():
        expected = completion_logps_one_by_one(tiny_model(family), SEQUENCES)
        changed = completion_logps_one_by_one(tiny_model(family, **change), SEQUENCES)
    assert (changed - expected).abs().max() > 0.01


def seam_calls(family: str) -> Recorded:
    register_attention()
    model = tiny_model(family, attention=ATTENTION_NAME)
    wrap_recurrent_layers(model)
    scorer = CompletionLogps(model, backend=sdpa_attention, autocast=None)
    return Recorded(scorer, proof_row(scorer, proof_groups(tiny_models.VOCABULARY), CPU))


@pytest.mark.parametrize("family", slow_but_ten(PACKED))
def test_what_a_config_says_of_attention_is_what_its_layers_ask_for(family: str) -> None:
    assert routes_tokens(tiny_config(family)) == ("mixture" in SPECIAL[family])
    skip_unless_packed(family)
    needs, calls = attention_needs(tiny_config(family)), seam_calls(family)
    if not calls.attention:  # Mamba 2
        assert layer_windows(tiny_config(family)) == []
        return
    shapes = [[state.shape for state in c.arguments] for c in calls.kinds.values() if c.name == "attention"]
    assert needs.head_dim == max(query[-1] for query, _, _ in shapes)
    assert needs.value_head_dim == max(value[-1] for _, _, value in shapes)
    assert needs.has_window == any(options.window is not None for options in calls.attention)
    assert needs.has_softcap == any(options.softcap is not None for options in calls.attention)
    assert needs.has_sinks == any(options.sinks is not None for options in calls.attention)


def test_a_hybrid_family_with_attention_layers_only_packs(tmp_path: Path) -> None:
    """Granite 4's small models."""
    plain = tiny_model("granitemoehybrid", layer_types=["full_attention"] * 2)
    plain.save_pretrained(tmp_path)
    with torch.no_grad():
        ours = load_usual(tmp_path, packed=True).scorer(make_row(GROUPS, "shared")).sums
        expected = completion_logps_one_by_one(plain, SEQUENCES)
    assert (ours - expected).abs().max() < 1e-4


def test_an_unknown_family_is_refused_for_layers_without_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configs, "FAMILIES", {})
    with pytest.raises(UnsupportedModelError, match="its conv layers mix"):
        check_packs(tiny_config("lfm2"))
    check_packs(tiny_config("stablelm"))  # the proofs decide


def test_a_vision_language_model_trains_its_text_model(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, Gemma3Config

    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 14}
    config = Gemma3Config(text_config=tiny_config("gemma3_text").to_dict(), vision_config=vision)
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    plain.save_pretrained(tmp_path)
    with torch.no_grad():
        ours = load_usual(tmp_path, packed=True).scorer(make_row(GROUPS, "shared")).sums
        expected = completion_logps_one_by_one(plain, SEQUENCES)
    assert (ours - expected).abs().max() < 1e-4


def test_the_documentation_is_what_the_script_writes() -> None:
    """But for the numbers and versions, which are of the machine that it ran on."""
    written = (REPOSITORY / "docs" / "families.md").read_text(encoding="utf-8")
    experts = re.findall(r"^\| `(\w+)` \| (\de-\d\d \| \de-\d\d) \|$", written, flags=re.MULTILINE)
    rows = re.findall(r"^\| `(\w+)` .*?((?: \| \de-\d\d){4}) \|$", written, flags=re.MULTILINE)
    versions = re.search(r"torch (\S+) and transformers (\S+), against", written)
    assert versions, "the introduction names no versions"
    measured = {family: numbers.removeprefix(" | ") for family, numbers in rows}
    mixtures = {name for name in PACKED if "mixture" in SPECIAL[name]}
    assert set(measured) == set(SPECIAL) and {name for name, _ in experts} == mixtures, (
        "run python scripts/make_family_table.py"
    )
    expected = page(measured, dict(experts), torch_version=versions[1], transformers_version=versions[2])
    assert written == expected, "run python scripts/make_family_table.py"


# ------------------------------------------------------------------------------------------ Whatever the rows


# Few token values, so that completions begin alike, repeat and are prefixes of each other.
_tokens = st.lists(st.integers(3, 5), min_size=1, max_size=8)
_contents = st.lists(
    st.tuples(
        st.lists(st.integers(3, 5), min_size=1, max_size=20), st.lists(_tokens, min_size=1, max_size=4)
    ),
    min_size=1,
    max_size=4,
)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, CompletionLogps]:
    """(plain, packed): one tiny model for all random rows."""
    directory = tmp_path_factory.mktemp("llama")
    plain = tiny_model("llama")
    plain.save_pretrained(directory)
    return plain, load_usual(directory, packed=True).scorer


@settings(max_examples=20)
@given(contents=_contents, weights=st.lists(st.floats(-2, 2), min_size=16, max_size=16))
def test_log_probs_and_gradients_of_random_rows_equal_those_of_each_sequence_alone(
    llama: tuple[PreTrainedModel, CompletionLogps],
    contents: list[tuple[list[int], list[list[int]]]],
    weights: list[float],
) -> None:
    """Groups of one to four completions: of one token, prefixes of each other, duplicates, empty tails."""
    plain, packed = llama
    groups = [group(context, *completions) for context, completions in contents]
    sequences = [(context, completion) for context, completions in contents for completion in completions]
    factors = torch.tensor(weights[: len(sequences)])
    plain.zero_grad()
    packed.zero_grad()
    expected = completion_logps_one_by_one(plain, sequences)
    (expected * factors).sum().backward()
    with torch.no_grad():
        unshared = packed(make_row(groups, "unshared"))
    shared = packed(make_row(groups, "shared"))
    for output in (shared, unshared):
        torch.testing.assert_close(output.sums.float(), expected, atol=1e-4, rtol=0)
        assert output.num_tokens.tolist() == [len(completion) for _, completion in sequences]
    (shared.sums * factors).sum().backward()
    theirs, ours = gradients(plain), gradients(packed.model)
    # Of each sequence's weight, not of their sum, which may cancel.
    scale = sum(abs(weight) for weight in weights[: len(sequences)]) + 1e-6
    for name in theirs:
        torch.testing.assert_close(ours[name], theirs[name], atol=1e-5 * scale, rtol=1e-4, msg=name)


def test_what_no_row_can_have_is_refused_by_its_attention() -> None:
    row = make_row(GROUPS[:1], "shared")
    layout: dict[str, Any] = {"row_segments": row.segments, "row_backend": sdpa_attention}
    states, more = torch.zeros(1, 2, row.num_tokens, 4), torch.zeros(1, 2, row.num_tokens + 3, 4)
    assert row_attention(nn.Module(), states, states, states, None, **layout)[0].shape[1] == row.num_tokens
    with pytest.raises(UnsupportedModelError, match="does not pass keyword arguments.*padded"):
        row_attention(nn.Module(), states, states, states, None)
    # A prefix of keys, or keys compressed from others.
    with pytest.raises(UnsupportedModelError, match="45 keys in a row of 42 tokens.*padded"):
        row_attention(nn.Module(), states, more, more, None, **layout)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(
    ("family", "dropout"),
    [
        ("gpt2", {"attn_pdrop": 0.5, "embd_pdrop": 0.5, "resid_pdrop": 0.5}),
        ("opt", {"dropout": 0.5, "layerdrop": 0.5}),
        ("mixtral", {}),
        ("phimoe", {}),
    ],
)
def test_dropout_and_routers_noise_are_off_in_training(
    family: str, dropout: dict[str, float], checkpointing: bool, tmp_path: Path
) -> None:
    changes: dict[str, Any] = {**dropout}
    if family == "mixtral":  # Phi 3.5 MoE draws experts anyway
        changes["router_jitter_noise"] = 0.5
    tiny_model(family, **changes).save_pretrained(tmp_path)
    loaded: LoadedModel = load_usual(tmp_path, packed=True, gradient_checkpointing=checkpointing)
    row = make_row(GROUPS, "shared")
    assert torch.equal(loaded.scorer(row).sums, loaded.scorer(row).sums)
    assert dropout.items() <= loaded.replaced.items()
