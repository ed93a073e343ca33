"""Recipes to begin with: a short one, and one for each known model and set-up (`recipe --template`)."""

import difflib
from dataclasses import dataclass

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
train: {epochs: 1}               # checkpoint: {every_steps: 100} lets a run that was killed go on
# All keys: dpopack recipe --defaults --all. More beginnings: dpopack recipe --template list
"""


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model of the hub, and the set-ups that can train it. A test compares the numbers with its config."""

    path: str  # hub id of a model that follows instructions, as DPO needs
    parameters: int
    embeddings: int  # parameters of the input embeddings and of the output head, unless the two are tied
    setups: str  # names in SETUPS, with spaces between them
    note: str = ""


_SMALL, _LARGE = "full-1gpu lora-1gpu full-8gpu", "qlora-1gpu lora-8gpu"
_MIDDLE = "lora-1gpu qlora-1gpu full-8gpu full-2nodes"
MODELS: dict[str, KnownModel] = {
    "qwen3-0.6b": KnownModel("Qwen/Qwen3-0.6B", 596_049_920, 155_582_464, _SMALL),
    "qwen3-1.7b": KnownModel("Qwen/Qwen3-1.7B", 1_720_574_976, 311_164_928, _SMALL),
    "qwen3-4b": KnownModel("Qwen/Qwen3-4B", 4_022_468_096, 388_956_160, _MIDDLE),
    "qwen3-8b": KnownModel("Qwen/Qwen3-8B", 8_190_735_360, 1_244_659_712, _MIDDLE),
    "qwen3-14b": KnownModel("Qwen/Qwen3-14B", 14_768_307_200, 1_555_824_640, _MIDDLE),
    "qwen3-32b": KnownModel("Qwen/Qwen3-32B", 32_762_123_264, 1_555_824_640, f"{_LARGE} full-2nodes"),
    "llama3.2-1b": KnownModel("meta-llama/Llama-3.2-1B-Instruct", 1_235_814_400, 262_668_288, _SMALL),
    "llama3.2-3b": KnownModel("meta-llama/Llama-3.2-3B-Instruct", 3_212_749_824, 394_002_432, _SMALL),
    "llama3.1-8b": KnownModel("meta-llama/Llama-3.1-8B-Instruct", 8_030_261_248, 1_050_673_152, _MIDDLE),
    "llama3.3-70b": KnownModel(
        "meta-llama/Llama-3.3-70B-Instruct", 70_553_706_496, 2_101_346_304, f"{_LARGE} full-4nodes"
    ),
    "gemma3-1b": KnownModel("google/gemma-3-1b-it", 999_885_952, 301_989_888, _SMALL),
    "mistral-7b": KnownModel("mistralai/Mistral-7B-Instruct-v0.3", 7_248_023_552, 268_435_456, _MIDDLE),
    "mistral-small-24b": KnownModel(
        "mistralai/Mistral-Small-24B-Instruct-2501", 23_572_403_200, 1_342_177_280, _MIDDLE
    ),
    "gpt-oss-20b": KnownModel(
        "unsloth/gpt-oss-20b-BF16", 20_914_757_184, 1_158_266_880, "lora-1gpu full-8gpu full-2nodes",
        "openai/gpt-oss-20b has its experts in 4 bits, which are not trained; this copy has bfloat16",
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
# Each template by its name: the model, and the set-up for it. A test estimates the memory of each.
TEMPLATES: dict[str, tuple[KnownModel, Setup]] = {
    f"{name}-{setup}": (model, SETUPS[setup])
    for name, model in MODELS.items()
    for setup in model.setups.split()
}
_ONE_NODE = "#     dpopack train RECIPE                # a process on each visible GPU"
_NODES = """\
#     torchrun --nnodes {nodes} --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:PORT \\
#         -m dpo_pack train RECIPE        # on each machine; see docs/distributed.md"""
_TEMPLATE = """\
# {path}: {setup} (80 GB).
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

loss: {{type: sigmoid, beta: 0.1}}
optim: {{lr: {lr}, schedule: linear, warmup_ratio: 0.1}}{lr_note}
train: {{epochs: 1, eval_every_steps: 100}}
checkpoint: {{every_steps: 100, keep: 1}}
{distributed}"""


def recipe_template(name: str) -> str:
    """Returns the recipe of a template. Raises RecipeError, which names near ones, for an unknown one."""
    if name not in TEMPLATES:
        near = [other for other in TEMPLATES if other.startswith(name)]
        near = near or difflib.get_close_matches(name, TEMPLATES, n=3)
        guess = f"did you mean {', '.join(near)}? " if near else ""
        raise RecipeError(f"--template {name}: no such template; {guess}'--template list' prints all names")
    model, setup = TEMPLATES[name]
    is_large = model.parameters > 20e9  # fp32 weights and 16-bit casts would not leave room for a row
    total = model.parameters * (2 if setup.is_lora else 14 if is_large else 16) / 1e9
    if setup.is_quantised:  # 4 bits, and 8 bits for each 64 weights; embeddings and head stay in bfloat16
        total -= (2 - (4 + 8 / 64) / 8) * (model.parameters - model.embeddings) / 1e9
    keys = "  gradient_checkpointing: true             # less memory, a third more time\n"
    dtype = "  dtype: bfloat16                          #"
    if setup.is_lora:
        keys = f"{dtype} the frozen weights; the adapter is in fp32\n{keys}  lora: {{r: 16, alpha: 32}}\n"
    elif is_large:
        keys = f"{dtype} AdamW keeps fp32 master weights\n{keys}"
    if setup.is_quantised:
        keys += "  quantize: nf4                            # QLoRA: needs pip install bitsandbytes\n"
    is_sharded = setup.gpus > 1 and total > 50  # else each GPU has a copy
    part = total / setup.gpus if is_sharded else total
    state = " in bfloat16" if setup.is_lora else ", gradients and AdamW's moments"
    how = "because FSDP2 divides them" if is_sharded else "where each GPU has a copy"
    return _TEMPLATE.format(
        name=name, setup=setup.title, path=model.path, model=keys, total=total,
        command=_ONE_NODE if setup.nodes == 1 else _NODES.format(nodes=setup.nodes),
        billions=model.parameters / 1e9,
        state=" in 4 bits" if setup.is_quantised else state,
        each=f",\n# {part:.0f} GB on each GPU, {how}." if setup.gpus > 1 else ".",
        note=f"\n# {model.note}." if model.note else "",
        lr="5.0e-6" if setup.is_lora else "5.0e-7",
        lr_note="  # lr: ten times that of full training" if setup.is_lora else "",
        distributed="distributed: {strategy: fsdp2}\n" if is_sharded else "",
    )  # fmt: skip
