"""Writes docs/recipe.md, the reference of all recipe keys, from the schema in dpo_pack/recipe/."""

from pathlib import Path

from pydantic import BaseModel

from dpo_pack.recipe.load import (
    COMPARING_KEYS,
    EARLY_STOPPING_KEYS,
    NEUTRAL_KEYS,
    default_in_yaml,
)
from dpo_pack.recipe.peers.peer_tables import PEERS, PeerKey, as_word, read_table, rows_of
from dpo_pack.recipe.schema import Recipe
from dpo_pack.recipe.types import Section, allowed_values, nested_sections

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
default. `configs/` has recipes for some models and machines, and `dpopack recipe --from` translates the
files of other projects, see [from-peers.md](from-peers.md). `dpopack recipe --check FILE` checks a recipe. An
unknown key, a value out of range, an option that the chosen loss does not use, a missing file: each is an
error before any model is loaded, in one line that names the key.

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
`reference.path`, `reference.cache_dir`, `checkpoint.resume`, `export.path`, `verdict.tasks`,
`verdict.command`, `verdict.lm_eval`, the `path` of data sources and of judges (`online.judges.N.path`),
and `keep.from` of data sources.

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
    parts = [INTRODUCTION, "## Keys\n", "### Top level\n", _table("", Recipe, without_sections=True)]
    for name, field in Recipe.model_fields.items():
        for section, _ in nested_sections(field.annotation):
            parts += [f"### `{name}`\n", f"{section.__doc__}\n", _table(f"{name}.", section)]
            parts += _nested(f"{name}.", section, shown=set())
    return "\n".join([*parts, _running_again()])


def _nested(prefix: str, section: type[BaseModel], shown: set[type[BaseModel]]) -> list[str]:
    """The headings and tables of the sections that keys of a section can hold, each once."""
    parts = []
    for name, field in section.model_fields.items():
        for nested, is_item in nested_sections(field.annotation):
            if nested not in shown:
                shown.add(nested)
                key = f"{prefix}{name}"
                heading = f"Items of a list in `{key}`" if is_item else f"`{key}`"
                inner = f"{key}.0." if is_item else f"{key}."
                parts += [f"#### {heading}\n", f"{nested.__doc__}\n", _table(inner, nested)]
                parts += _nested(inner, nested, shown)
    return parts


FROM_PEERS = """\
# From TRL, axolotl or LLaMA-Factory

<!-- Written by scripts/make_recipe_reference.py; edit dpo_pack/recipe/peers/*.yaml or the script instead. -->

```bash
dpopack recipe --from trl dpo.yaml > recipe.yaml            # the config of `trl dpo --config dpo.yaml`
dpopack recipe --from trl command.sh > recipe.yaml          # a command line of trl dpo, in a text file
dpopack recipe --from axolotl config.yml > recipe.yaml      # with rl: dpo, ipo, simpo or orpo
dpopack recipe --from llamafactory dpo.yaml > recipe.yaml   # with its dataset_info.json, if it is there
dpopack recipe --check recipe.yaml                          # would it start?
dpopack show recipe.yaml                                    # are these the pairs that you expect?
```

In Python, `dpo_pack.recipe_from("trl", config.to_dict())` returns the recipe for a `DPOConfig` as text: write
it into a file. A config has neither model nor data. Fill them in, or add TRL's keys for them to the mapping:
`config.to_dict() | {"model_name_or_path": "org/model", "dataset_name": "org/pairs"}`.

Comments in the recipe say how each key was translated:

- Translated: the comment at dpo-pack's key names the other project's key, and says if its value is the
  other project's default.
- No counterpart: the list at the top of the recipe says what is different, or what to do instead.
  A text where a number must be is an error, and a misspelt key is answered with the one that is meant.
- Not needed: the list at the end of the recipe says why.

Check five things in the new recipe first.

- **Devices.** `packing.pairs_per_step` is the batch of all devices together: the batch of one device x
  accumulation steps x devices. If the settings do not say how many devices there were, one is assumed, and
  the comment says so.
- **Chat templates.** Conversations get the tokenizer's own template. axolotl and LLaMA-Factory have templates
  of their own. `dpopack show` prints the tokens.
- **Length.** `data.truncation: completion_right` cuts completions as TRL does. A pair whose prompt alone is
  too long is left out. dpo-pack's default leaves out all pairs that are too long.
  `prompt_left` cuts as TRL's `keep_end`, but both sequences of a pair keep the same prompt.
- **Label smoothing.** TRL's `sigmoid` ignores it, so a recipe from TRL leaves it out. Here `sigmoid` with
  `loss.label_smoothing` is cDPO.
- **Precision.** TRL trains the weights in the type in which they were loaded. Here they are float32, or
  bfloat16 with float32 master weights, see [memory.md](memory.md).

What differs in every recipe:

- dpo-pack takes the pairs in another order, and a fraction holds out other pairs, because the same seed draws
  other random numbers. With `data.shuffle: false` both keep the order of the file, and a translated config
  takes the same steps as in TRL (`tests/run/test_conformance.py`).
- A logged line has the loss and rewards of one step here, and means over `logging_steps` steps there. A pair
  whose margin is 0 counts half in the accuracy here.
- The newest two checkpoints are kept, unless `checkpoint.keep` says another number.
- AdamW's betas and eps that the recipe does not name are the other project's: dpo-pack has the same defaults.

If a recipe has a key of TRL, axolotl or LLaMA-Factory, dpo-pack refuses it and names its own key for it.
"""


def peers() -> str:
    """The text of docs/from-peers.md."""
    parts, shared = [FROM_PEERS], rows_of("transformers")
    for peer in ("transformers", *PEERS):
        cells: dict[str, list[str]] = {}
        for name, row in rows_of(peer).items():
            if peer == "transformers" or row is not shared.get(name):
                cells.setdefault(_here(row), []).append(f"`{name}`")
        parts += [f"## Keys of {read_table(peer)['name']}\n", "| key | here |", "|---|---|"]
        parts += [_line(", ".join(names), here) for here, names in cells.items()]
        parts.append("")
    return "\n".join(parts)


def _here(row: PeerKey) -> str:
    values = [f"{theirs}: {as_word(ours)}" for theirs, ours in row.values.items() if theirs != as_word(ours)]
    remark = "; ".join(filter(None, (", ".join(values), row.remark)))
    keys = ", ".join(f"`{key}`" for key in row.ours) or row.kind
    return f"{keys}: {remark}" if remark else keys


def _line(*cells: str) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _table(prefix: str, section: type[BaseModel], *, without_sections: bool = False) -> str:
    lines = ["| key | value | default | meaning |", "|---|---|---|---|"]
    for name, field in section.model_fields.items():
        is_section = isinstance(field.annotation, type) and issubclass(field.annotation, Section)
        if not (is_section and without_sections):
            default = "required" if field.is_required() else f"`{default_in_yaml(field)}`"
            allowed = allowed_values(field.annotation, field.metadata)
            lines.append(_line(f"`{prefix}{name}`", allowed, default, str(field.description)))
    return "\n".join([*lines, ""])


def _running_again() -> str:
    stopping, comparing = (
        ", ".join(f"`{key}`" for key in keys) for keys in (EARLY_STOPPING_KEYS, COMPARING_KEYS)
    )
    sections: dict[str, list[str]] = {}
    for key in NEUTRAL_KEYS:
        sections.setdefault(key.partition(".")[0], []).append(f"`{key}`")
    neutral = "\n".join(f"- {', '.join(keys)}" for keys in sections.values())
    return f"""\
## Running again

With `checkpoint.resume: auto`, a run in `output_dir` goes on only if no key that changes training
differs. A key changes training when exact arithmetic would take other steps; what moves only the last
bits of a result does not count, so that a run can go on with less memory, another attention backend or
other hardware.

Free to change (a section stands for all its keys):

{neutral}
- a judge's `max_new_tokens`, `retries` and `endpoint`, except the endpoint's `model`
- the `name` of a source, its `keep.from` if the run then keeps the same pairs, and `data.eval` unless it is a
  fraction of the training pairs

With `train.early_stopping`, {stopping} and `data.eval` are not free, because they say when the run
ends. With `train.early_stopping` or `checkpoint.load_best`, {comparing} is not free, because
evaluations are compared with earlier ones.
"""


if __name__ == "__main__":
    main()
