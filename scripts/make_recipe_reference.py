"""Writes docs/recipe.md, the reference of all recipe keys, from the schema in dpo_pack/recipe/."""

from pathlib import Path

from pydantic import BaseModel

from dpo_pack.recipe.changes import EARLY_STOPPING_KEYS, NEUTRAL_KEYS, ROW_LAYOUT_KEYS
from dpo_pack.recipe.data import EvalFraction, SourceRecipe
from dpo_pack.recipe.load import default_in_yaml
from dpo_pack.recipe.loss import LossTerm
from dpo_pack.recipe.online import EndpointRecipe, GeneratorRecipe, JudgeRecipe, OnlineRecipe, PairingRecipe
from dpo_pack.recipe.peers import NAMES, TABLES
from dpo_pack.recipe.peers.rules import TRANSFORMERS, Rule
from dpo_pack.recipe.schema import LoraRecipe, PushRecipe, Recipe, SamplesRecipe, SyncRecipe
from dpo_pack.recipe.training import EarlyStoppingRecipe
from dpo_pack.recipe.types import allowed_values

DOCS = Path(__file__).resolve().parent.parent / "docs"

INTRODUCTION = """\
# Recipe reference

<!-- Written by scripts/make_recipe_reference.py; edit dpo_pack/recipe/*.py or the script instead. -->

A recipe is a YAML file that says everything about a run. Three keys are required:

```yaml
output_dir: runs/my-run
model:
  path: Qwen/Qwen3-0.6B
data:
  train: pairs.jsonl
```

`dpopack recipe --defaults` prints a short recipe, with `--all` one with every key, its meaning and its
default. `dpopack recipe --template NAME` prints one for a known model and machine (`--template list` prints
the names), and `dpopack recipe --from` translates the files of other projects, see
[from-peers.md](from-peers.md). `dpopack recipe --check FILE` checks a recipe. An unknown key, a value out of
range, an option that the chosen loss does not use, a missing file: each is an error before any model is
loaded, in one line that names the key.

## Overriding keys

`dpopack train recipe.yaml optim.lr=1e-6 data.train.0.max_pairs=1000` replaces keys of the file. Values
are YAML, so lists and mappings work too: `'loss.type=[{type: sigmoid}, {type: ipo, weight: 0.5}]'`. Items
of a list are numbered from 0; a single source is item 0, and its number may be left out:
`data.train.max_pairs=1000`. Of two overrides of a key the last wins.

## YAML

Plain values are read as YAML 1.2 reads them: `1e-6` is a number, only `true` and `false` are truth values
(`yes`, `no`, `on` and `off` are text). A key given twice is an error. A section with nothing in it is a
section of defaults.

## Paths

Relative paths start at the working directory. `${recipe_dir}` is the directory of the recipe file and `~`
your home directory in `output_dir`, `model.path`, `tokenizer.path`, `tokenizer.chat_template`,
`reference.path`, `reference.cache_dir`, `checkpoint.resume`, and the `path` of data sources and of judges
(`online.judges.N.path`).

A model's path is a hub id unless a directory of that name exists. A data source is a local file when it
ends in a known suffix or begins with `.`, `/` or `~`; else a directory if there is one, else a hub id.

## Editors

`dpopack recipe --schema > recipe.schema.json` writes the JSON schema. With the YAML language server,
begin a recipe with `# yaml-language-server: $schema=recipe.schema.json` to have keys completed and
explained.
"""


def main() -> None:
    """Writes the pages."""
    for name, text in pages().items():
        (DOCS / name).write_text(text, encoding="utf-8")


def pages() -> dict[str, str]:
    """The texts of the pages in docs, by name."""
    return {"recipe.md": reference(), "from-peers.md": peers()}


def reference() -> str:
    """The text of docs/recipe.md."""
    sections = {
        name: field.annotation
        for name, field in Recipe.model_fields.items()
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
    }
    parts = [INTRODUCTION, "## Keys\n", "### Top level\n", _table("", Recipe, without=set(sections))]
    for name, section in sections.items():
        parts += [f"### `{name}`\n", f"{section.__doc__}\n", _table(f"{name}.", section)]
        for heading, prefix, nested in NESTED.get(name, ()):
            parts += [f"#### {heading}\n", f"{nested.__doc__}\n", _table(prefix, nested)]
    parts += ["### `online`\n", f"{OnlineRecipe.__doc__}\n", _table("online.", OnlineRecipe)]
    for heading, prefix, nested in ONLINE:
        parts += [f"#### {heading}\n", f"{nested.__doc__}\n", _table(prefix, nested)]
    return "\n".join([*parts, _running_again()])


FROM_PEERS = """\
# From TRL, axolotl or LLaMA-Factory

<!-- Written by scripts/make_recipe_reference.py; edit dpo_pack/recipe/peers/*.py or the script instead. -->

```bash
dpopack recipe --from trl dpo.yaml > recipe.yaml            # the config of `trl dpo --config dpo.yaml`
dpopack recipe --from trl train.py > recipe.yaml            # a script that calls DPOTrainer; it is not run
dpopack recipe --from trl command.sh > recipe.yaml          # a command line of trl dpo, in a text file
dpopack recipe --from axolotl config.yml > recipe.yaml      # with rl: dpo, ipo, simpo or orpo
dpopack recipe --from llamafactory dpo.yaml > recipe.yaml   # with its dataset_info.json
dpopack recipe --check recipe.yaml                          # would it start?
dpopack show recipe.yaml                                    # are these the pairs that you expect?
```

Comments in the recipe say how each key of the file was translated:

- Translated: the comment beside dpo-pack's key names the other project's key, and says if its value is the
  other project's default.
- No counterpart: the list at the top of the recipe says what is different, or what to do instead.
- Not needed: the list at the end of the recipe says why.

Check four things in the new recipe first.

- **Devices.** `packing.pairs_per_step` is the batch of all devices together: batch size x accumulation x
  devices. If the file does not say how many devices there were, one is assumed, and the comment says so.
- **Chat templates.** Conversations get the tokenizer's own template. axolotl and LLaMA-Factory have templates
  of their own. `dpopack show` prints the tokens.
- **Length.** `data.truncation: completion_right` cuts completions as TRL does. A pair whose prompt alone is
  too long is left out. dpo-pack's default leaves out all pairs that are too long.
- **Precision.** TRL trains the weights in the type in which they were loaded. Here they are float32, or
  bfloat16 with float32 master weights, see [memory.md](memory.md).

dpo-pack takes the pairs in another order, because the same seed draws other random numbers. With
`data.shuffle: false` both keep the order of the file, and a translated config takes the same steps as in TRL
(`tests/run/test_conformance.py`).

If a recipe has a key of TRL, axolotl or LLaMA-Factory, dpo-pack refuses it and names its own key for it.
"""


def peers() -> str:
    """The text of docs/from-peers.md."""
    parts = [FROM_PEERS]
    shared = {name: id(rule) for name, rule in TRANSFORMERS.items()}
    trainer = "transformers' Trainer, for all three"
    for title, table in ((trainer, TRANSFORMERS), *((NAMES[peer], table) for peer, table in TABLES.items())):
        rows: dict[int, list[str]] = {}
        for name, rule in table.items():
            if title == trainer or shared.get(name) != id(rule):
                rows.setdefault(id(rule), []).append(name)
        rules = {id(rule): rule for rule in table.values()}
        parts += [f"## Keys of {title}\n", "| key | here |", "|---|---|"]
        for number, names in rows.items():
            cells = ", ".join(f"`{name}`" for name in names), _here(rules[number])
            parts.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
        parts.append("")
    return "\n".join(parts)


def _here(rule: Rule) -> str:
    keys = ", ".join(f"`{key}`" for key in rule.keys)
    if keys:
        return f"{keys}: {rule.remark}" if rule.remark else keys
    return f"no counterpart: {rule.remark}" if rule.is_needed else f"not needed: {rule.remark}"


NESTED: dict[str, tuple[tuple[str, str, type[BaseModel]], ...]] = {
    "model": (("`model.lora`", "model.lora.", LoraRecipe),),
    "reference": (("`reference.sync`", "reference.sync.", SyncRecipe),),
    "data": (
        ("Sources: items of `data.train` and `data.eval`", "data.train.0.", SourceRecipe),
        ("`data.eval` as a fraction", "data.eval.", EvalFraction),
    ),
    "loss": (("Items of a list in `loss.type`", "loss.type.0.", LossTerm),),
    "train": (("`train.early_stopping`", "train.early_stopping.", EarlyStoppingRecipe),),
    "logging": (("`logging.samples`", "logging.samples.", SamplesRecipe),),
    "export": (("`export.push_to_hub`", "export.push_to_hub.", PushRecipe),),
}


ONLINE: tuple[tuple[str, str, type[BaseModel]], ...] = (
    ("`online.generator`", "online.generator.", GeneratorRecipe),
    ("Items of `online.judges`", "online.judges.0.", JudgeRecipe),
    ("`online.pairing`", "online.pairing.", PairingRecipe),
    ("`endpoint` of a generator or a judge", "online.generator.endpoint.", EndpointRecipe),
)


def _table(prefix: str, section: type[BaseModel], without: frozenset[str] | set[str] = frozenset()) -> str:
    lines = ["| key | value | default | meaning |", "|---|---|---|---|"]
    for name, field in section.model_fields.items():
        if name not in without:
            allowed = allowed_values(field.annotation, field.metadata)
            default = "required" if field.is_required() else f"`{default_in_yaml(field)}`"
            cells = (f"`{prefix}{name}`", allowed, default, str(field.description))
            lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join([*lines, ""])


def _running_again() -> str:
    neutral, layout, stopping = (
        ", ".join(f"`{key}`" for key in keys) for keys in (NEUTRAL_KEYS, ROW_LAYOUT_KEYS, EARLY_STOPPING_KEYS)
    )
    return f"""\
## Running again

With `checkpoint.resume: auto`, a run in `output_dir` goes on only if no key that changes training
differs. A key changes training when exact arithmetic would take other steps; what moves only the last
bits of a result does not count, so that a run can go on with less memory, another attention backend or
other hardware.

Free to change: {neutral}, where and how a judge's `endpoint` is asked (all but its `model`) and `retries`,
the `name` of a source, and `data.eval` unless it is a fraction of the training pairs.
With `packing.scope: step` also {layout}. With `train.early_stopping`, {stopping}
and `data.eval` are not free: they say when the run ends.
"""


if __name__ == "__main__":
    main()
