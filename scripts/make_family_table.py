"""Writes docs/families.md: what each model family needs, whether it packs, and how exact it is here.

Builds a tiny random model of every family and measures it as tests/model/test_families.py does: a minute.
"""

from __future__ import annotations

import contextlib
import io
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parent.parent
sys.path += [str(ROOT), str(ROOT / "tests")]  # the tiny models are in tests/

import torch  # noqa: E402
import transformers  # noqa: E402
from support.family_errors import Errors, bfloat16_cells, measure, prove_under_autocast  # noqa: E402
from support.tiny_models import tiny_config  # noqa: E402

from dpo_pack.model.config import FAMILIES, routes_tokens  # noqa: E402

TABLE = ROOT / "docs" / "families.md"

# What is special about a family: the features that a packed row, or the head, must compute correctly.
SPECIAL: dict[str, str] = {
    "afmoe": "mixture of experts, sliding window on some layers, gated attention",
    "apertus": "query and key norms, xIELU",
    "arcee": "squared ReLU",
    "bailing_hybrid": "linear attention on most layers, mixture of experts",
    "bamba": "Mamba 2 on most layers",
    "biogpt": "learned absolute positions",
    "bitnet": "norms inside attention and MLP",
    "cohere": "logit scale, parallel attention and MLP",
    "cohere2": "logit scale, sliding window on some layers, no positions on the others",
    "cohere2_moe": "mixture of experts, logit scale, sliding window on some layers",
    "cwm": "sliding window on some layers",
    "deepseek_v2": "mixture of experts, MLA: value heads narrower than query heads",
    "deepseek_v3": "mixture of experts, MLA: value heads narrower than query heads",
    "dots1": "mixture of experts, sliding window on some layers",
    "ernie4_5": "interleaved rotary positions",
    "ernie4_5_moe": "mixture of experts from the second layer on",
    "exaone4": "sliding window on some layers, no positions on the others, norms after",
    "exaone_moe": "mixture of experts, sliding window on some layers, no positions on the others",
    "falcon_h1": "Mamba 2 beside attention, head multiplier",
    "flex_olmo": "mixture of experts, query and key norms",
    "gemma": "scaled embeddings, tied head",
    "gemma2": "attention and logit softcaps, sliding window on some layers, own scale",
    "gemma3_text": "sliding window and other rotary base on some layers, own scale",
    "gemma3n_text": "keys and values shared by layers, embeddings of each layer, logit softcap",
    "gemma4_text": "wider heads on global layers, embeddings of each layer, scale of 1",
    "glm": "partial rotary positions",
    "glm4": "partial rotary positions, norms before and after",
    "glm4_moe": "mixture of experts, partial rotary positions",
    "glm4_moe_lite": "mixture of experts, MLA: value heads narrower than query heads",
    "gpt2": "learned absolute positions, tied head",
    "gpt_bigcode": "learned absolute positions, one key and value head",
    "gpt_neox": "partial rotary positions, parallel attention and MLP",
    "gpt_oss": "mixture of experts, attention sinks, sliding window on some layers",
    "granite": "logit divisor, own attention scale",
    "granitemoe": "mixture of experts, logit divisor, own attention scale",
    "granitemoehybrid": "Mamba 2 on most layers, mixture of experts, logit divisor",
    "granitemoeshared": "mixture of experts, logit divisor, own attention scale",
    "helium": "interleaved rotary positions",
    "hunyuan_v1_dense": "norms of rotated queries and keys",
    "hunyuan_v1_moe": "mixture of experts, norms of rotated queries and keys",
    "hyperclovax": "logit factor, own attention scale",
    "jetmoe": "mixtures of experts, of attention heads too",
    "kimi_linear": "linear attention on most layers, MLA, mixture of experts",
    "lfm2": "short convolutions on most layers",
    "lfm2_moe": "short convolutions on most layers, mixture of experts",
    "lfm3": "short convolutions on most layers, sliding window on others",
    "llama": "nothing: the plain case",
    "llama4_text": "mixture of experts, chunked attention, queries scaled by their position in the row",
    "longcat_flash": "mixture of experts, two MLA attentions a block",
    "mamba2": "Mamba 2",
    "minicpm3": "MLA, logit divisor",
    "minimax_m2": "mixture of experts, query and key norms",
    "ministral": "sliding window on some layers",
    "ministral3": "queries scaled by their position",
    "mistral": "sliding window",
    "mixtral": "mixture of experts, sliding window",
    "nanochat": "logit softcap, norms of rotated queries and keys",
    "nemotron_h": "Mamba 2 on most layers, mixture of experts",
    "olmo": "clipped queries, keys and values",
    "olmo2": "norms after attention and MLP",
    "olmo3": "sliding window on some layers",
    "olmo_hybrid": "gated delta nets on most layers",
    "olmoe": "mixture of experts, query and key norms",
    "opt": "learned absolute positions with an offset, narrower embeddings",
    "persimmon": "query and key norms, partial rotary positions",
    "phi": "partial rotary positions, head with a bias",
    "phi3": "sliding window, longrope within its original positions",
    "phimoe": "mixture of experts, head with a bias",
    "qwen2": "biases of queries, keys and values; sliding window on some layers",
    "qwen2_moe": "mixture of experts with a shared one",
    "qwen3": "query and key norms",
    "qwen3_5_moe_text": "gated delta nets on most layers, mixture of experts",
    "qwen3_5_text": "gated delta nets on most layers",
    "qwen3_moe": "mixture of experts, query and key norms",
    "qwen3_next": "gated delta nets on most layers, mixture of experts",
    "seed_oss": "biases of queries, keys and values; dropout in its config",
    "smollm3": "no positions on some layers",
    "starcoder2": "sliding window, biases",
    "vaultgemma": "attention and logit softcaps, sliding window on some layers",
    "zamba2": "Mamba 2 with shared attention blocks",
    "bloom": "ALiBi",
    "codegen": "partial rotary positions",
    "falcon": "one key and value head",
    "falcon_mamba": "Mamba",
    "gpt_neo": "learned absolute positions, local layers",
    "gptj": "partial rotary positions, head with a bias",
    "jamba": "Mamba on most layers, mixture of experts",
    "mamba": "Mamba",
    "minimax": "linear attention on most layers, mixture of experts",
    "mpt": "ALiBi",
    "nemotron": "partial rotary positions, squared ReLU",
    "qwen4_exp_text": (
        "gated delta nets on most layers, mixture of experts, n-gram embeddings, selected tokens"
    ),
    "recurrent_gemma": "linear recurrences on most layers, logit softcap",
    "rwkv": "recurrence instead of attention",
    "stablelm": "partial rotary positions",
    "xlstm": "matrix LSTM, logit softcap",
}

INTRODUCTION = """\
# Model families

<!-- Written by scripts/make_family_table.py; edit dpo_pack/model/config.py or the script instead. -->

Any causal language model that transformers builds can be tried: before a run the
[start-up proofs](numerics.md#the-proofs-at-the-start) decide. For the families below the outcome is known.
Each was measured on a tiny random model (2 layers, windows shorter than the sequences, softcaps that
bend) in fp32 on CPU with torch {torch} and transformers {transformers}, against the plain computation:
one sequence at a time, the model's own eager attention, full logits. `tests/model/test_families.py` does so
for packed rows with and without shared prompts and for padded batches, and prints the table; the quick tests
do so for ten families, the slow tests for all. It fails above 1e-4 nats for a sequence's log-prob; for
gradients above 1e-6 relative or twice the noise floor (their worst entry: four times), where that is higher,
and above 2e-5 in any case.

*Noise* is the rounding of fp32 for that family: the distance between the gradients of the plain computation
in fp32 and in float64. A smaller error is only rounding. Mixtures of experts have no further noise in
fp32; in bf16 they do, see below.

The name is `model_type` in config.json (of the text model, where a model has several).
"""

PACKED = """
## Packed

Largest and mean error of a sequence's log-prob in nats, and the relative error of the gradient's norm, the
worse of shared and unshared rows.

| family | special | log-probs: max | mean | gradient | noise |
|---|---|---|---|---|---|
"""

REFUSED = """
## Refused in packed rows, exact with `packing.mode: padded`

Refused before any weights are read. Padded batches are right-padded: no real token sees padding, and no state
is carried from padding into a real token, so recurrent layers are exact too.

| family | special | why not packed | log-probs: max | mean | gradient | noise |
|---|---|---|---|---|---|---|
"""

EXPERTS = """
## Mixtures of experts in bf16

In bf16 two computations of the same thing now and then pick another expert at a near tie, so these families
have a noise floor of their own. The [equivalence proof](numerics.md#mixtures-of-experts) measures it on
the model at hand. Mean error a token in nats under bf16 autocast, of packed rows and of what rounding alone
does to the plain computation; three times the latter is the bound. `tests/model/test_families.py` proves all
packed families, these and the dense ones, under autocast.

| family | packed | rounding |
|---|---|---|
"""

NOTES = """
## Notes

- Layers with a state (gated delta nets, Kimi delta attention, Mamba 2, short convolutions) are exact in
  packed rows, with shared prompts: a shared part runs once from the zero state, and each tail starts from
  the state behind it. Convolutions see the end of the shared part in the same way. transformers' own
  functions in torch compute the states, in fp32, on batches of padded pieces. On CUDA the kernels of
  flash-linear-attention (gated delta nets, Kimi delta attention), causal-conv1d (convolutions) and
  mamba-ssm (Mamba 2) replace them if these packages are installed. Before a run each kernel's output and
  gradients are compared with the family's own functions, for this model's shapes
  ([proofs](numerics.md#the-proofs-at-the-start)).
  A kernel that is missing, raises an error or is not exact enough is not used, and a line says why. A
  function that gets padded pieces gets a step of 0 at the padding, so that it decays no state. mamba-ssm's
  kernel for whole layers is never used: it would mix sequences and ignore an adapter of `out_proj`. No GPU
  has run these kernels yet.
- Kimi delta attention (`kimi_linear`, `bailing_hybrid`) is packed by flash-linear-attention's kernel only:
  transformers' function in torch takes more than ten times as long. Without the package a packed run is
  refused before weights are read; with a kernel that cannot be used on this device, before the first step.
- The layers of older transformers do not pass a row's layout on, so the run is refused in one line that
  names the release: `falcon_h1` before 5.16, `mamba2` and `nemotron_h` before 5.17, `lfm2` and `lfm2_moe`
  before 5.22.
- A hybrid family whose config has attention layers only (`layer_types`) is packed; a family that is not
  listed and whose config has other layers (`inkling`, `zaya`) is refused.
- `llama4_text`: packed sequences must fit into one attention chunk (8,192 tokens), and rows stay below the
  step of its query scaling (8,192 tokens too); both are checked.
- `phi3`, `phimoe` and others with `longrope` or `dynamic` rotary positions: sequences must stay within the
  original maximum, which is checked.
- A sliding window that a family keeps to its mask and does not pass on (`phimoe`) is refused, unless it is
  wider than any sequence.
- `rwkv` and `xlstm`: what their code does in evaluation mode for inference (weights halved in place every
  `rescale_every` layers; blocks of `max_inference_chunksize` tokens without gradients) is off in training,
  and back in the exported config.
- `dbrx` is not listed: it packs exactly in fp32, but transformers' own code for it fails under autocast.
"""


def main() -> None:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    measured, experts = {}, {}
    for name in SPECIAL:
        with TemporaryDirectory() as directory, contextlib.redirect_stderr(io.StringIO()):
            errors, noise = measure(name, Path(directory))
        modes = ("shared", "unshared") if _reason(name) is None else ("padded",)
        measured[name] = _numbers([errors[mode] for mode in modes], noise)
        if _reason(name) is None and routes_tokens(tiny_config(name)):
            experts[name] = " | ".join(bfloat16_cells(prove_under_autocast(name)))
    torch_version = torch.__version__.partition("+")[0]
    text = page(measured, experts, torch_version=torch_version, transformers_version=transformers.__version__)
    TABLE.write_text(text, encoding="utf-8")


def page(
    measured: Mapping[str, str], experts: Mapping[str, str], *, torch_version: str, transformers_version: str
) -> str:
    """The page, from the cells of numbers of each family, and of each that is a mixture of experts."""
    packed, refused = "", ""
    for name, special in SPECIAL.items():
        if _reason(name) is None:
            packed += f"| `{name}` | {special} | {measured[name]} |\n"
        else:
            refused += f"| `{name}` | {special} | {_reason(name)} | {measured[name]} |\n"
    introduction = INTRODUCTION.format(torch=torch_version, transformers=transformers_version)
    in_bfloat16 = "".join(f"| `{name}` | {cells} |\n" for name, cells in experts.items())
    return introduction + PACKED + packed + REFUSED + refused + EXPERTS + in_bfloat16 + NOTES


def _reason(name: str) -> str | None:
    return FAMILIES[name].reason if name in FAMILIES else None


def _numbers(errors: Sequence[Errors], noise: Errors) -> str:
    numbers = (
        max(error.max_logp for error in errors),
        max(error.mean_logp for error in errors),
        max(error.gradient for error in errors),
        noise.gradient,
    )
    return " | ".join(f"{number:.0e}" for number in numbers)


if __name__ == "__main__":
    main()
