"""Writes the trained model in Hugging Face layout, with a model card that describes the training.

`merge_adapter` writes a model that needs no peft from a LoRA adapter and its base.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import ModelCardData
from rich.console import Console
from torch import Tensor
from transformers import PreTrainedTokenizerBase

import dpo_pack
from dpo_pack.data.images import png_url
from dpo_pack.data.tokenizer import end_of_turn
from dpo_pack.model.building import load_model
from dpo_pack.model.config import routes_tokens
from dpo_pack.model.facts import ModelFacts
from dpo_pack.model.fingerprint import HEADER_NAMES, stored_dtype, tensor_digest
from dpo_pack.model.loading import auto_class, load_config, load_tokenizer
from dpo_pack.model.lora import SavedAdapter, read_adapter, require_peft, unknown_settings
from dpo_pack.model.parallel import full_state, is_sharded
from dpo_pack.model.saving import (
    eos_tokens,
    find_beyond,
    is_tied,
    needs_transformers_5,
    round_weights,
    save_model,
)
from dpo_pack.model.scorer import CompletionLogps, LoadedModel, Precision
from dpo_pack.packing.lengths import Group
from dpo_pack.proofs.rows import pair_sums
from dpo_pack.proofs.start_up import FLOAT32_BOUND, distance_of_row
from dpo_pack.recipe.load import INFO_FILE, Recipe, dump_recipe, has_tokenizer, load_recipe
from dpo_pack.recipe.schema import EvalFraction, ModelRecipe
from dpo_pack.reference.cache import default_cache_directory
from dpo_pack.run.checkpoint_files import MODEL
from dpo_pack.run.models import check_quantised_files
from dpo_pack.run.run_dir import RunDir
from dpo_pack.run.samples import Sample
from dpo_pack.run.setup import Setup, prepare
from dpo_pack.system import ranks
from dpo_pack.system.console import format_seconds, make_console, shown
from dpo_pack.system.errors import DpoPackError, ModelError, RunError
from dpo_pack.system.files import dispensable, read_json, text_of, written_aside
from dpo_pack.system.hub import is_adapter, is_on_hub, name_for_others
from dpo_pack.system.interrupts import Interrupted
from dpo_pack.system.process import printable
from dpo_pack.training.health import what_can_be_told


def export_model(
    loaded: LoadedModel,
    tokenizer: PreTrainedTokenizerBase,
    target: Path,
    *,
    card: Callable[[], str],
    dtype: torch.dtype | None = None,
    turn_end: int | None = None,
) -> dict[str, Tensor]:
    """Writes weights, config, generation config, tokenizer and README.md; the directory is whole or absent.

    `card` returns the text of README.md; `dtype` and `turn_end` as in `save_model`. All ranks must call this;
    rank 0 writes, and returns what it wrote. If the model is sharded, rank 0 gathers the shards first.
    """
    settings: dict[str, Any] = {"dtype": dtype, "turn_end": turn_end}
    if is_sharded(loaded.model):
        settings["state"] = full_state(loaded.model, trained_only=loaded.adapter is not None)
    saved: dict[str, Tensor] = {}
    with ranks.first_goes_first():
        ranks.only_first_does(
            lambda: saved.update(_write_model(loaded, tokenizer, target, card(), **settings))
        )
    return saved


def _write_model(
    loaded: LoadedModel, tokenizer: PreTrainedTokenizerBase, target: Path, card: str, **settings: Any
) -> dict[str, Tensor]:
    """`settings` are those of `save_model`."""
    with written_aside(target) as directory:
        directory.mkdir()
        saved = save_model(loaded, tokenizer, directory, **settings)
        card = card.replace("AutoModelForCausalLM", _auto_class(loaded))
        if needs_transformers_5(directory):
            card = card.replace("# pip install transformers", '# pip install "transformers>=5"', 1)
        (directory / "README.md").write_text(card, encoding="utf-8")
        for weights in directory.glob("*.safetensors"):
            # safetensors lets only the owner read its files. Who may read the card may read the weights.
            with dispensable("chmod"):
                shutil.copymode(directory / "README.md", weights)
    return saved


def _auto_class(loaded: LoadedModel) -> str:
    name: str = auto_class(loaded.model.config, "model.path").__name__
    return name


def name_turn_end(
    loaded: LoadedModel, tokenizer: PreTrainedTokenizerBase, seen: Collection[int] | None = None
) -> tuple[int | None, str]:
    """Returns the end of the template's turns if the model's files do not name it, and a line about it.

    `seen`: tokens at the ends of trained answers; None: unknown. The line is empty where nothing is to say.
    """
    turn_end, known = end_of_turn(tokenizer), eos_tokens(loaded.model)
    is_eos = turn_end == tokenizer.eos_token_id
    if turn_end is None or (seen is not None and turn_end not in seen):
        return None, ""
    if is_eos and (turn_end in known or not known):
        return None, ""
    token = tokenizer.convert_ids_to_tokens(turn_end)
    if turn_end in known:
        gguf = f"GGUF files name one end only, the tokenizer's: {tokenizer.eos_token}"
        return None, f"Answers end with {token}. {gguf}"
    others = sorted(known | ({tokenizer.eos_token_id} - {turn_end, None}))
    eos = ", ".join(map(str, tokenizer.convert_ids_to_tokens(others)))
    if loaded.adapter is not None:
        return None, (
            f"Answers end with {token}, and an adapter has no file that says so: add it to the ends of the "
            f"base ({eos}) where you generate, or use 'dpopack merge', which writes it"
        )
    return turn_end, f"Answers end with {token}: the model's files name it as an end, as well as {eos}"


def compared_pairs(setup: Setup, *, reads_images: bool) -> list[Group]:
    """Returns the two shortest of the first pairs, held-out ones if there are any, to measure exports.

    With `reads_images` those with images are before others.
    """
    if setup.recipe.online is not None:  # its pairs do not exist beforehand
        return []
    table = next((table for table in setup.data.eval.values() if table.num_pairs), setup.data.train)
    pairs = [table.group(pair) for pair in range(min(table.num_pairs, _LOOKED_AT))]
    pairs = [pair for pair in pairs if reads_images or not pair.images]
    pairs.sort(key=lambda pair: len(pair.context) + sum(map(len, pair.completions)))
    return sorted(pairs, key=lambda pair: not pair.images)[:2]


@torch.no_grad()
def round_and_measure(
    loaded: LoadedModel, dtype: torch.dtype, setup: Setup | None, known: Sequence[float], *, key: str
) -> str:
    """Rounds the weights to values of `dtype`, in their type. Returns a line about what that changes.

    `setup` is of the run, for pairs on its device; None: they are unknown. `known` are mean margins of
    held-out pairs. `key` is what keeps float32.
    """
    pairs = [] if setup is None else compared_pairs(setup, reads_images=loaded.scorer.vision is not None)
    line = f"The weights are rounded to {str(dtype).removeprefix('torch.')}"

    def margins() -> Tensor:
        sums = [pair_sums(loaded.scorer, [pair], loaded.model.device) for pair in pairs]
        return torch.cat(sums).diff(dim=-1)

    before = margins() if pairs else None
    counts = ranks.every_rank_says(round_weights(loaded.model, dtype, keeps_type=True))
    changed, lost = map(sum, zip(*counts, strict=True))
    if lost:
        line += f"; {lost / changed:.1%} of the values that this changes become 0 or subnormal"
    if before is not None and setup is not None:
        change = setup.recipe.loss.beta * float((margins() - before).abs().mean())
        line += f"; that changes the reward margins of {len(pairs)} pairs by {change:.1e} in the mean"
        if known and change > 0.1 * abs(known[0]):
            line += f", more than a tenth of {known[0]:.1e}; {key} keeps them"
    return line


@torch.no_grad()
def reader_job(
    loaded: LoadedModel,
    facts: ModelFacts,
    directory: Path,
    saved: Mapping[str, Tensor],
    groups: Sequence[Group],
    device: torch.device,
) -> dict[str, Any]:
    """Returns what proofs/read_back.py needs to compare the export with the model; every rank must call it.

    `saved` is what rank 0 wrote. The log-probs of `groups` must equal the reader's within three times what
    rounding changes in them, as in the start-up proof.
    """
    scorer, sequences, logps, bounds = loaded.scorer, [], [], [FLOAT32_BOUND]
    for group in groups:
        numbers, _ = distance_of_row(scorer, [group], device)
        bounds.append(3 * numbers.get("rounding a token", 0.0))
        logps += pair_sums(scorer, [group], device).flatten().tolist()
        pictures = [png_url(read()) for read in group.images]
        for completion in group.completions:
            ids = [*group.context.tolist(), *completion.tolist()]
            sequences.append((ids, len(completion), pictures))
    autocast = scorer.autocast or scorer.gather_dtype
    return {
        "directory": str(directory),
        "auto_class": _auto_class(loaded),
        "base": None if loaded.adapter is None else loaded.adapter.base,
        "revision": facts.settings.revision,
        "trust_remote_code": facts.settings.trust_remote_code,
        "quantization": None if facts.settings.quantize is None else facts.quantization,
        "parameters": str(next(scorer.model.parameters()).dtype).removeprefix("torch."),
        "autocast": None if autocast is None else str(autocast).removeprefix("torch."),
        "device": str(device),
        "digests": {name: tensor_digest(tensor) for name, tensor in saved.items()},
        "types": sorted(
            {HEADER_NAMES[tensor.dtype] for tensor in saved.values() if tensor.dtype in HEADER_NAMES}
        ),
        "is_tied": is_tied(loaded.model),
        "sequences": sequences,
        "logps": logps,
        "bound": max(bounds),
        "routes": int(routes_tokens(scorer.model.config)),
    }


# A reader is one process, not a rank.
_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def read_back(job: dict[str, Any]) -> dict[str, Any] | None:
    """Runs proofs/read_back.py. Returns its answer; None if it came to no end, as without enough memory."""
    alone = {name: value for name, value in os.environ.items() if name not in _RANK_VARIABLES}
    if not job["device"].startswith("cuda"):
        alone["CUDA_VISIBLE_DEVICES"] = ""
    program = Path(dpo_pack.__file__).parent / "proofs" / "read_back.py"
    command = [sys.executable, "-P", "-W", "ignore", str(program)]
    ended = subprocess.run(
        command, input=json.dumps(job), env=alone, capture_output=True, text=True, check=False
    )
    answer: dict[str, Any] | None = None
    if ended.returncode == 0 and ended.stdout.strip():
        answer = json.loads(ended.stdout.splitlines()[-1])
    return answer


def verify_model(run: RunDir, console: Console, job: dict[str, Any]) -> None:
    """Compares the files of the finished run's model with what was trained; only rank 0 may call it.

    Raises RunError if they differ, Interrupted after a stop signal. run.json says what was found.
    """
    try:
        with shown(console, "Verifying the model"):
            answer = read_back(job)
    except Interrupted as stopped:
        run.update(not_verified=str(stopped))
        stopped.next_step = "the run is finished and its model is saved, but it was not read back"
        raise
    if answer is None:
        run.update(not_verified="the process that reads the model ended early")
        console.print(f"Warning: {run.model} was not verified: the process that reads it ended early")
        return
    if answer["failure"] is not None:
        run.update(not_verified=answer["failure"])
    sentence = verified_sentence(job, answer)
    run.update(verified=True, not_verified=None)
    console.print(sentence[0].upper() + sentence[1:])


def verified_sentence(job: dict[str, Any], answer: dict[str, Any] | None) -> str:
    """Returns what `read_back` has found. Raises RunError if the files hold another model."""
    if answer is None:
        return "not verified: the process that reads it ended early"
    if answer["failure"] is not None:
        raise RunError(
            f"export.verify: the model in the files is not the one that was trained: {answer['failure']}; "
            "its checkpoints are right; report this, or export anew with other releases of the packages"
        )
    sequences, error, plain = len(job["sequences"]), answer["error"], answer["unquantised"]
    also = f"; log-probs of {sequences} sequences differ by {error:.1e} nats a token" if sequences else ""
    also += f" (with the base that is not quantised, by {plain:.1e})" if plain is not None else ""
    return f"verified: the files hold all {answer['tensors']} trained tensors bit for bit{also}"


def model_card(
    recipe: Recipe,
    *,
    totals: dict[str, Any],
    evaluation: dict[str, dict[str, float]],
    samples: Sequence[tuple[str, Sample]] = (),
    adapter_base: str | None = None,
    is_chat: bool = False,
    note: str = "",
) -> str:
    """Returns the model card in Markdown, with the front matter that the hub reads.

    `evaluation` maps the name of each held-out set to its latest metrics. `adapter_base` is the base of an
    adapter. `is_chat`: the tokenizer has a chat template. `note` follows the example.
    """
    name = recipe.logging.run_name or recipe.output_dir.name
    base = adapter_base or recipe.model.path
    columns = _ONLINE_COLUMNS if recipe.online is not None else _COLUMNS
    held_out, eval_sources = recipe.data.eval, recipe.data.eval_sources
    data_lines = [_source_line("training", source.path) for source in recipe.data.train]
    data_lines += [_source_line("held out", source.path) for source in eval_sources]
    if isinstance(held_out, EvalFraction):
        data_lines.append(f"- held out: a fraction of {held_out.fraction} of the training data")
    both = (recipe.data.chat_template_kwargs | source.chat_template_kwargs for source in recipe.data.train)
    options = dict.fromkeys(json.dumps(of_source) for of_source in both if of_source)
    data_lines += [f"- trained with these options of the chat template: `{option}`" for option in options]
    datasets = dict.fromkeys(source.path for source in recipe.data.train if is_on_hub(source.path))
    head = ModelCardData(
        library_name="transformers" if adapter_base is None else "peft",
        pipeline_tag="image-text-to-text" if recipe.model.images else "text-generation",
        # The hub refuses a card that names a base model or data set which the hub does not have.
        base_model=base if is_on_hub(base) else None,
        datasets=list(datasets) or None,
        tags=["dpo", "preference-optimization", "dpo-pack"] + ["lora"] * (adapter_base is not None),
    )
    adapter = "" if adapter_base is None else f"A LoRA adapter for {name_for_others(adapter_base)}: "
    lines = [
        f"---\n{head.to_yaml().strip()}\n---\n\n# {name}\n",
        f"{adapter}{name_for_others(recipe.model.path)} fine-tuned with DPO (Rafailov et al. 2023, "
        f"arXiv 2305.18290) by dpo-pack {dpo_pack.__version__}.\n",
        _usage(
            str(recipe.output_dir / "model"),
            is_chat=is_chat,
            needs_peft=adapter_base is not None,
            needs_code=recipe.model.trust_remote_code,
        ),
        *([f"{note}.\n"] if note else []),
    ]
    if evaluation:
        lines += [
            f"| held-out set | {' | '.join(columns.values())} |",
            f"|---|{'---|' * len(columns)}",
            *(f"| {name} | {_cells(metrics, columns)} |" for name, metrics in evaluation.items()),
            *(f"\n{name}: {told}." for name, of in evaluation.items() if (told := what_can_be_told(of))),
            "",
        ]
    lines += [
        f"Training: {totals['steps']:,} steps, {totals['pairs']:,} preference pairs, "
        f"{totals['tokens']:,} tokens, {format_seconds(totals['train_seconds'])}.\n",
        *_samples_in_markdown(samples),
        "## Data\n",
        *data_lines,
        f"\n## Recipe\n\n```yaml\n{dump_recipe(recipe, for_others=True).strip()}\n```\n",
    ]
    return "\n".join(lines)


def _samples_in_markdown(samples: Sequence[tuple[str, Sample]]) -> list[str]:
    lines = ["## Samples", "", "Greedy completions, before training and later.", ""] if samples else []
    for before, after in samples:
        texts = {"Prompt": after.prompt, "Before": before, f"After step {after.step}": after.completion}
        for title, text in texts.items():
            shown = "\n".join(map(printable, text.split("\n")))
            lines += [f"{title}:", "", textwrap.indent(shown, "    ", lambda line: True), ""]
    return lines


_LOOKED_AT = 64  # pairs, for those to measure exports with
_USAGE_TITLE = "## How to use it"


def _usage(model_id: str, *, is_chat: bool, needs_peft: bool, needs_code: bool) -> str:
    """Returns the card's section with an example. transformers loads an adapter with its base, if peft is
    installed. An upload replaces the line of `model_id`."""
    trusts = ", trust_remote_code=True" if needs_code else ""
    question = "How do I learn a language?"
    inputs = f'inputs = tokenizer("{question}", return_tensors="pt")'
    if is_chat:
        inputs = f"""messages = [{{"role": "user", "content": "{question}"}}]
inputs = tokenizer.apply_chat_template(
    messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
)"""
    return f"""{_USAGE_TITLE}

```python
# pip install transformers torch{" peft" * needs_peft}
from transformers import AutoModelForCausalLM, AutoTokenizer

model_id = {json.dumps(model_id, ensure_ascii=False)}
tokenizer = AutoTokenizer.from_pretrained(model_id{trusts})
model = AutoModelForCausalLM.from_pretrained(model_id, dtype="auto"{trusts})
{inputs}
output = model.generate(**inputs, max_new_tokens=100)
print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
```
"""


def _source_line(part: str, path: str) -> str:
    name = name_for_others(path)
    is_link = is_on_hub(path)
    return f"- {part}: " + (f"[{name}](https://huggingface.co/datasets/{name})" if is_link else f"`{name}`")


def _cells(metrics: Mapping[str, float], columns: Mapping[str, str]) -> str:
    cells = (f"{metrics[name]:{_FORMATS.get(name, '.4f')}}" if name in metrics else "" for name in columns)
    return " | ".join(cells)


_COLUMNS = {"rewards/accuracies": "reward accuracy", "rewards/margins": "reward margin", "loss": "loss"}
_FORMATS = {"rewards/accuracies": ".3f", "online/win_rate": ".3f"}
_ONLINE_COLUMNS = {
    "online/win_rate": "wins against the starting policy",
    "online/scores": "score",
    "online/scores_start": "score of the starting policy",
}


# ------------------------------------------------------------- a LoRA adapter and its base as one model

_MERGE = "dpopack merge"


def merge_adapter(
    source: Path, target: Path, *, base: str | None, dtype: str, trust_remote_code: bool
) -> tuple[SavedAdapter, list[str]]:
    """Writes the merged model and the tokenizer to `target`, whole or not at all.

    Returns the adapter, and lines about settings that peft does not know, about tokens that the base does not
    embed, and about what rounding changes.

    `source` is the directory of an adapter or of a run. `base` replaces the base that the adapter names. Base
    plus adapter is computed in float32 and rounded once, to `dtype`; `auto`: the type of the base's weights.
    Tensors that transformers always reads in float32 stay in float32. Raises ModelError if the adapter or its
    base cannot be loaded, RunError if `target` exists and is not an empty directory.
    """
    directory = next((path for path in (source, source / "model") if is_adapter(path)), None)
    if directory is None:
        raise ModelError(
            f"{source}: no adapter_config.json in this directory or in its model/; give the directory of an "
            "adapter, or of a run with model.lora"
        )
    require_peft(_MERGE)
    adapter = read_adapter(directory, _MERGE)
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise RunError(f"{target} exists already; give a path that does not exist")
    if base is not None:
        adapter = replace(adapter, base=base, base_revision=None)
    has_own_tokenizer = has_tokenizer(adapter.directory)
    tokenizer = load_tokenizer(
        str(adapter.directory) if has_own_tokenizer else adapter.base,
        revision=None if has_own_tokenizer else adapter.base_revision,
        trust_remote_code=trust_remote_code,
        chat_template=None,
        recipe_key=_MERGE,
    )
    merged = _merged(adapter, trust_remote_code)
    rounded = getattr(torch, dtype) if dtype != "auto" else stored_dtype(adapter.base, adapter.base_revision)
    if (beyond := find_beyond(merged.model.state_dict(), rounded)) is not None:
        kind = str(rounded).removeprefix("torch.")
        raise ModelError(f"{_MERGE}: {beyond} has values beyond {kind}; use --dtype bfloat16 or float32")
    lines = list(unknown_settings(adapter.directory))
    embeddings: Any = merged.model.get_input_embeddings()
    num_embeddings = embeddings.num_embeddings
    if unread := [token for token, id in tokenizer.get_vocab().items() if id >= num_embeddings]:
        lines.append(
            f"Warning: {adapter.base} does not embed all tokens of the adapter's tokenizer ({unread[0]!r} "
            f"and {len(unread) - 1:,} more), so the merged model cannot read them; if the adapter was "
            "trained with them, give the model that it was trained on with --base"
        )
    if rounded != torch.float32:
        setup, known = None, list[float]()
        run = directory.parent if directory.name == MODEL else directory
        with contextlib.suppress(DpoPackError):  # its data may be gone
            overrides = ["distributed.num_processes=auto", "logging.trackers=[]"]
            recipe = load_recipe(run, overrides, lenient=True)
            setup = prepare(recipe, make_console(quiet=True), takes_prompts=True)
            evaluations = (read_json(run / INFO_FILE) or {}).get("evaluation", {}).values()
            known = [one["rewards/margins"] for one in evaluations if "rewards/margins" in one]
        lines.append(round_and_measure(merged, rounded, setup, known, key="--dtype float32"))
        round_weights(merged.model, rounded, keeps_type=False)
    turn_end, note = name_turn_end(merged, tokenizer)
    example = _usage(
        str(target),
        is_chat=tokenizer.chat_template is not None,
        needs_peft=False,
        needs_code=trust_remote_code,
    )
    card = _merged_card(adapter, f"{example}\n{note}.\n" if note else example)
    _write_model(merged, tokenizer, target, card, dtype=rounded, turn_end=turn_end)
    return adapter, lines


def _merged(adapter: SavedAdapter, trust_remote_code: bool) -> LoadedModel:
    key = f"{_MERGE} (the base of {adapter.directory}; --base gives another)"
    config = load_config(
        adapter.base, revision=adapter.base_revision, trust_remote_code=trust_remote_code, recipe_key=key
    )
    if what := check_quantised_files(config, adapter.base, adapter.base_revision, key):
        raise ModelError(f"{what}; give the unquantised model with --base")
    facts = ModelFacts(
        settings=ModelRecipe(
            path=adapter.base,
            revision=adapter.base_revision,
            trust_remote_code=trust_remote_code,
            unused_tensors="warn",
        ),
        recipe_key=key,
        adapter=adapter.directory,
        config=config,
        precision=Precision(parameters=torch.float32, autocast=None),
        is_packed=False,
        cache_dir=default_cache_directory(),
    )
    loaded = load_model(facts, device=torch.device("cpu"))
    assert loaded.adapter is not None
    model = loaded.adapter.merge()
    return replace(loaded, scorer=CompletionLogps(model, backend=None, autocast=None))


def _merged_card(adapter: SavedAdapter, example: str) -> str:
    """Returns the adapter's card, changed into that of the merged model; a short card, if dpo-pack did not
    write the adapter's. `example` is the section that says how to use the merged model."""
    name = adapter.directory.resolve()
    name = name.parent if name.name == "model" else name
    base = name_for_others(adapter.base)
    origin = f"The LoRA adapter {name.name}, merged into {base} by dpo-pack {dpo_pack.__version__}."
    before, title, after = text_of(adapter.directory / "README.md").partition(_USAGE_TITLE)
    if not title:
        head = "---\nlibrary_name: transformers\npipeline_tag: text-generation\ntags: [dpo-pack]\n---\n\n"
        return f"{head}# {name.name}\n\n{origin}\n\n{example}"
    before = re.sub("^library_name: peft$", "library_name: transformers", before, count=1, flags=re.MULTILINE)
    before = re.sub("^- lora\n|^A LoRA adapter for .*?: ", "", before, flags=re.MULTILINE)
    rest = after.partition("\n```\n\n")[2]
    return f"{before.rstrip()}\n\n{origin}\n\n{example}\n{rest}"
