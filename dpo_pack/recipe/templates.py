"""Recipes to begin with: a short one, and one for each known model and set-up (`dpopack recipe --template`).

`SHAPES` has the shapes of the models, so that tests can count their parameters and estimate their memory.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dpo_pack.system.errors import RecipeError

BEGINNING = """\
# A dpo-pack recipe: DPO of all parameters. Start it with: dpopack train RECIPE
output_dir: runs/my-run
model:
  path: Qwen/Qwen3-0.6B          # a hub id or a directory
  # lora: {r: 16, alpha: 32}     # train an adapter instead; then lr: 5.0e-6
data:
  train: pairs.jsonl             # prompt, chosen, rejected; docs/data.md has all formats
  eval: {fraction: 0.02}         # held out of training, to measure
  max_length: 2048               # tokens of prompt and one completion; longer pairs are left out
packing:
  token_budget: 8192             # tokens in one forward pass: as many as fit in memory
  pairs_per_step: 64             # the batch, of all GPUs together
loss: {type: sigmoid, beta: 0.1}
optim: {lr: 5.0e-7, schedule: linear, warmup_ratio: 0.1}
train: {epochs: 1}
# All keys: dpopack recipe --defaults --all. More beginnings: dpopack recipe --template list
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A model of the hub: what its config says, and how many parameters it has."""

    path: str  # hub id of a model that follows instructions, as DPO needs; `config` is from its config.json
    title: str
    parameters: int
    config: Mapping[str, Any]
    setups: str
    note: str = ""


def _config(family: str, hidden: int, layers: int, ffn: int, heads: int, kv: int, head: int, vocabulary: int,
            *, tied: bool = False, **others: Any) -> dict[str, Any]:  # fmt: skip
    return {
        "model_type": family, "hidden_size": hidden, "num_hidden_layers": layers, "intermediate_size": ffn,
        "num_attention_heads": heads, "num_key_value_heads": kv, "head_dim": head, "vocab_size": vocabulary,
        "tie_word_embeddings": tied, **others,
    }  # fmt: skip


_SMALL, _MIDDLE = "full-1gpu lora-1gpu full-8gpu", "lora-1gpu qlora-1gpu full-8gpu full-2nodes"
SHAPES: dict[str, Shape] = {
    "qwen3-0.6b": Shape(
        path="Qwen/Qwen3-0.6B", title="Qwen3 0.6B", parameters=596_049_920, setups=_SMALL,
        config=_config("qwen3", 1024, 28, 3072, 16, 8, 128, 151936, tied=True),
    ),
    "qwen3-1.7b": Shape(
        path="Qwen/Qwen3-1.7B", title="Qwen3 1.7B", parameters=1_720_574_976, setups=_SMALL,
        config=_config("qwen3", 2048, 28, 6144, 16, 8, 128, 151936, tied=True),
    ),
    "qwen3-4b": Shape(
        path="Qwen/Qwen3-4B", title="Qwen3 4B", parameters=4_022_468_096, setups=_MIDDLE,
        config=_config("qwen3", 2560, 36, 9728, 32, 8, 128, 151936, tied=True),
    ),
    "qwen3-8b": Shape(
        path="Qwen/Qwen3-8B", title="Qwen3 8B", parameters=8_190_735_360, setups=_MIDDLE,
        config=_config("qwen3", 4096, 36, 12288, 32, 8, 128, 151936),
    ),
    "qwen3-14b": Shape(
        path="Qwen/Qwen3-14B", title="Qwen3 14B", parameters=14_768_307_200, setups=_MIDDLE,
        config=_config("qwen3", 5120, 40, 17408, 40, 8, 128, 151936),
    ),
    "qwen3-32b": Shape(
        path="Qwen/Qwen3-32B", title="Qwen3 32B", parameters=32_762_123_264,
        setups="qlora-1gpu lora-8gpu full-2nodes",
        config=_config("qwen3", 5120, 64, 25600, 64, 8, 128, 151936),
    ),
    "llama3.2-1b": Shape(
        path="meta-llama/Llama-3.2-1B-Instruct", title="Llama 3.2 1B", parameters=1_235_814_400,
        setups=_SMALL,
        config=_config("llama", 2048, 16, 8192, 32, 8, 64, 128256, tied=True),
    ),
    "llama3.2-3b": Shape(
        path="meta-llama/Llama-3.2-3B-Instruct", title="Llama 3.2 3B", parameters=3_212_749_824,
        setups=_SMALL,
        config=_config("llama", 3072, 28, 8192, 24, 8, 128, 128256, tied=True),
    ),
    "llama3.1-8b": Shape(
        path="meta-llama/Llama-3.1-8B-Instruct", title="Llama 3.1 8B", parameters=8_030_261_248,
        setups=_MIDDLE,
        config=_config("llama", 4096, 32, 14336, 32, 8, 128, 128256),
    ),
    "llama3.3-70b": Shape(
        path="meta-llama/Llama-3.3-70B-Instruct", title="Llama 3.3 70B", parameters=70_553_706_496,
        setups="qlora-1gpu lora-8gpu full-4nodes",
        config=_config("llama", 8192, 80, 28672, 64, 8, 128, 128256),
    ),
    "gemma3-1b": Shape(
        path="google/gemma-3-1b-it", title="Gemma 3 1B", parameters=999_885_952, setups=_SMALL,
        config=_config("gemma3_text", 1152, 26, 6912, 4, 1, 256, 262144, tied=True, sliding_window=512),
    ),
    "mistral-7b": Shape(
        path="mistralai/Mistral-7B-Instruct-v0.3", title="Mistral 7B", parameters=7_248_023_552,
        setups=_MIDDLE,
        config=_config("mistral", 4096, 32, 14336, 32, 8, 128, 32768),
    ),
    "mistral-small-24b": Shape(
        path="mistralai/Mistral-Small-24B-Instruct-2501", title="Mistral Small 24B",
        parameters=23_572_403_200, setups="lora-1gpu qlora-1gpu full-8gpu full-2nodes",
        config=_config("mistral", 5120, 40, 32768, 32, 8, 128, 131072),
    ),
    "gpt-oss-20b": Shape(
        path="unsloth/gpt-oss-20b-BF16", title="gpt-oss 20B", parameters=20_914_757_184,
        setups="lora-1gpu full-8gpu full-2nodes",
        note="openai/gpt-oss-20b has its experts in 4 bits, which are not trained; this copy has bfloat16",
        config=_config("gpt_oss", 2880, 24, 2880, 64, 8, 64, 201088, num_local_experts=32,
                       num_experts_per_tok=4, sliding_window=128, attention_bias=True),
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Setup:
    """Which parameters are trained, and on which machines."""

    title: str
    is_lora: bool
    gpus: int  # of all nodes
    nodes: int = 1
    is_quantised: bool = False


SETUPS: dict[str, Setup] = {
    "full-1gpu": Setup("all parameters, on one GPU", False, 1),
    "lora-1gpu": Setup("a LoRA adapter, on one GPU", True, 1),
    "qlora-1gpu": Setup("a LoRA adapter on a base in 4 bits, on one GPU", True, 1, is_quantised=True),
    "full-8gpu": Setup("all parameters, on a machine with eight GPUs", False, 8),
    "lora-8gpu": Setup("a LoRA adapter, on a machine with eight GPUs", True, 8),
    "full-2nodes": Setup("all parameters, on two machines with eight GPUs each", False, 16, 2),
    "full-4nodes": Setup("all parameters, on four machines with eight GPUs each", False, 32, 4),
}
# Each template by its name: the model, and the set-up for it.
TEMPLATES: dict[str, tuple[Shape, Setup]] = {
    f"{name}-{setup}": (shape, SETUPS[setup])
    for name, shape in SHAPES.items()
    for setup in shape.setups.split()
}
_ONE_NODE = "#     dpopack train RECIPE                # a process on each visible GPU"
_NODES = """\
#     torchrun --nnodes {nodes} --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:PORT \\
#         -m dpo_pack train RECIPE        # on each machine; see docs/distributed.md"""
_TEMPLATE = """\
# {title}: {setup}, of 80 GB each.
#
#     dpopack recipe --check RECIPE       # would it start?
{command}
#
# {billions:.2f} billion parameters: weights{state} take {total:.0f} GB{each}
# The estimate of dpo-pack says that this fits; nobody has run it yet.{note}

output_dir: runs/{name}

model:
  path: {path}
{model}
data:
  train: trl-lib/ultrafeedback_binarized   # name your own pairs: a file, a directory or a hub id
  eval: {{fraction: 0.02}}                   # held out of training, to measure
  max_length: 2048                         # tokens of prompt and one completion; longer pairs are left out

packing:
  token_budget: 8192                       # tokens in one forward pass: raise it until the GPU is full
  pairs_per_step: 128                      # the batch, of all GPUs together

loss:
  type: sigmoid
  beta: 0.1

optim:
  lr: {lr}
  schedule: linear
  warmup_ratio: 0.1

train:
  epochs: 1
  eval_every_steps: 100

checkpoint:
  every_steps: 100
  keep: 1
{distributed}"""


def recipe_template(name: str) -> str:
    """Returns the recipe of a template. Raises RecipeError, which lists the names, for an unknown one."""
    if name not in TEMPLATES:
        near = difflib.get_close_matches(name, TEMPLATES, n=1)
        guess = f"did you mean {near[0]}? " if near else ""
        raise RecipeError(f"--template {name}: no such template; {guess}There are {', '.join(TEMPLATES)}")
    shape, setup = TEMPLATES[name]
    is_large = shape.parameters > 20e9  # fp32 weights and 16-bit casts would not leave room for a row
    number_bytes = 2 if setup.is_lora else 14 if is_large else 16
    total = shape.parameters * number_bytes / 1e9
    if setup.is_quantised:  # 4 bits, and 8 bits for each 64 weights; embeddings and head stay in bfloat16
        config = shape.config
        tables = config["vocab_size"] * config["hidden_size"] * (1 if config["tie_word_embeddings"] else 2)
        total = (2 * tables + (4 + 8 / 64) / 8 * (shape.parameters - tables)) / 1e9
    model = "  gradient_checkpointing: true             # less memory, a third more time\n"
    dtype = "  dtype: bfloat16                          #"
    if setup.is_lora:
        model = f"{dtype} the frozen weights; the adapter is in fp32\n{model}  lora: {{r: 16, alpha: 32}}\n"
    elif is_large:
        model = f"{dtype} AdamW keeps fp32 master weights\n{model}"
    if setup.is_quantised:
        model += "  quantize: nf4                            # QLoRA: needs pip install bitsandbytes\n"
    is_sharded = setup.gpus > 1 and total > 50  # else each GPU has a copy
    part = total / setup.gpus if is_sharded else total
    state = " in bfloat16" if setup.is_lora else ", gradients and AdamW's moments"
    how = "because FSDP2 divides them" if is_sharded else "where each GPU has a copy"
    return _TEMPLATE.format(
        name=name,
        title=shape.title,
        setup=setup.title,
        command=_ONE_NODE if setup.nodes == 1 else _NODES.format(nodes=setup.nodes),
        billions=shape.parameters / 1e9,
        state=" in 4 bits" if setup.is_quantised else state,
        total=total,
        each=f",\n# {part:.0f} GB on each GPU, {how}." if setup.gpus > 1 else ".",
        note=f"\n# {shape.note}." if shape.note else "",
        path=shape.path,
        model=model,
        lr=f"5.0e-6{'# ten times that of full training':>66}" if setup.is_lora else "5.0e-7",
        distributed="\ndistributed:\n  strategy: fsdp2\n" if is_sharded else "",
    )  # fmt: skip
