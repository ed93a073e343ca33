"""Leaves the trained model: writes it as its users read it, has it read back and compared, says how it came.

export_model -> writes weights, config, tokenizer and the model card, whole or not at all
prepare_verification, verify_model -> another process (proofs/read_back.py) reads the files as their users do:
    each tensor must be the trained one, bit for bit, and so must be the log-probs of a few made-up pairs
model_card -> base, data, results, how to use the model, and the recipe that trains it again
merge_adapter -> a model that needs no peft, from a LoRA adapter and its base
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
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
from dpo_pack.data.tokenizer import TURN_END_TOKENS, end_of_turn
from dpo_pack.model.building import load_model
from dpo_pack.model.config import eos_tokens, routes_tokens
from dpo_pack.model.facts import ModelFacts
from dpo_pack.model.fingerprint import stored_dtype, tensor_digest
from dpo_pack.model.loading import auto_class, load_config, load_tokenizer
from dpo_pack.model.lora import SavedAdapter, read_adapter, require_peft, unknown_settings
from dpo_pack.model.parallel import full_state, is_sharded
from dpo_pack.model.saving import find_beyond, is_tied, needs_transformers_5, round_weights, save_model
from dpo_pack.model.scorer import CompletionLogps, LoadedModel, Precision
from dpo_pack.packing.lengths import Group
from dpo_pack.proofs import FLOAT32_BOUND, image_groups, pair_sums, random_groups
from dpo_pack.proofs.start_up import distance_of_row
from dpo_pack.recipe.load import Recipe, dump_recipe, has_tokenizer, is_adapter
from dpo_pack.recipe.schema import EvalFraction, ModelRecipe
from dpo_pack.reference.cache import default_cache_directory
from dpo_pack.run.models import Setup, check_quantised_files
from dpo_pack.run.run_dir import RunDir
from dpo_pack.system import ranks
from dpo_pack.system.console import format_seconds, shown
from dpo_pack.system.errors import ModelError, RunError
from dpo_pack.system.files import dispensable, text_of, write_text_atomically, written_aside
from dpo_pack.system.hub import is_on_hub, name_for_others
from dpo_pack.system.interrupts import Interrupted
from dpo_pack.system.machine import host_memory, release_memory
from dpo_pack.system.process import counted, environment_alone
from dpo_pack.training.health import what_can_be_told

READER = Path(dpo_pack.__file__).parent / "proofs" / "read_back.py"
_LOOKED_AT = 64  # pairs, for the ends of answers
_ROOM_TO_READ = 1.5  # free memory in weights of the model, for a second one
_USAGE_TITLE = "## How to use it"
_NOT_FOR_4 = (
    "It needs transformers 5: older releases ignore `rope_parameters` in config.json, without an error."
)
_MERGE = "dpopack merge"

# ---------------------------------------------------------------------------------------------------- write


def export_model(
    setup: Setup,
    loaded: LoadedModel,
    target: Path,
    console: Console,
    *,
    totals: Mapping[str, Any],
    evaluation: Mapping[str, Mapping[str, Any]],
) -> dict[str, Tensor]:
    """Writes the policy as a model for transformers, PEFT or vLLM; prints what differs from the policy. Every
    rank must call it; rank 0 writes and returns the tensors in the files. The rest is for the model card."""
    adapter, recipe, tokenizer = loaded.adapter, setup.recipe, setup.tokenizer
    dtype = exported_dtype(setup, loaded, console)
    turn_end, note = name_turn_end(loaded, tokenizer, _answer_ends(setup))
    images, about_images = limit_images(loaded, recipe.data.max_pixels)
    note = ".\n\n".join(filter(None, (note, about_images)))
    place = recipe.export.path or recipe.output_dir / "model"
    usage = usage_section(loaded, tokenizer, place, note, trusts_code=recipe.model.trust_remote_code)
    base = None if adapter is None else adapter.base
    card = model_card(recipe, usage, totals=totals, evaluation=evaluation, adapter_base=base)
    settings: dict[str, Any] = {"dtype": dtype, "turn_end": turn_end, "image_size": images and images[1]}
    if is_sharded(loaded.model):
        settings["state"] = full_state(loaded.model, trained_only=adapter is not None)
    saved: dict[str, Tensor] = {}
    with ranks.first_goes_first():
        ranks.only_first_does(lambda: saved.update(write_model(loaded, tokenizer, target, card, **settings)))
    if note:
        console.print(note)
    return saved


def write_model(
    loaded: LoadedModel, tokenizer: PreTrainedTokenizerBase, target: Path, card: str, **settings: Any
) -> dict[str, Tensor]:
    """Writes the directory `target` with README.md, whole or not at all. `settings`: of `save_model`."""
    with written_aside(target) as directory:
        directory.mkdir()
        saved = save_model(loaded, tokenizer, directory, **settings)
        if needs_transformers_5(directory):
            card = card.replace(f"{_USAGE_TITLE}\n", f"{_USAGE_TITLE}\n\n{_NOT_FOR_4}\n", 1)
        (directory / "README.md").write_text(card, encoding="utf-8")
        for weights in directory.glob("*.safetensors"):
            # safetensors lets only the owner read its files. Who may read the card may read the weights.
            with dispensable("chmod"):
                shutil.copymode(directory / "README.md", weights)
    return saved


def exported_dtype(setup: Setup, loaded: LoadedModel, console: Console) -> torch.dtype | None:
    """Returns the type of exported weights; None: as trained; float32 beyond float16. All ranks call it."""
    wanted, facts = setup.recipe.export.dtype, setup.policy_facts
    trained: torch.dtype = facts.precision.parameters
    dtype = None if wanted == "auto" else getattr(torch, wanted)
    if wanted == "auto" and loaded.adapter is None:
        stored = stored_dtype(facts.settings.path, facts.settings.revision)
        dtype = stored if stored.itemsize < trained.itemsize else None
    if dtype == torch.float16:
        every = ranks.every_rank_says(find_beyond(loaded.model.state_dict(), dtype))
        if (beyond := next(filter(None, every), None)) is not None:
            console.print(
                f"Warning: export.dtype: {beyond} has values beyond float16, so the model is written in "
                "float32; export.dtype: bfloat16 writes two bytes a weight"
            )
            return torch.float32
    if dtype is not None and dtype.itemsize < trained.itemsize:
        console.print(
            f"The weights are rounded to {_name(dtype)} (export.dtype: float32 keeps them); 'dpopack "
            "evaluate' measures the model as it is written"
        )
    return dtype


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _answer_ends(setup: Setup) -> set[int] | None:
    """Returns tokens at the ends of trained answers; None: the policy's own answers end as the template's."""
    data = setup.data
    if setup.recipe.online is not None:
        return set() if all(prompt.messages is None for prompt in data.prompts) else None
    pairs = map(data.train.group, range(min(data.train.num_pairs, _LOOKED_AT)))
    return {end for pair in pairs for end in pair.completions[0][-TURN_END_TOKENS:].tolist()}


def name_turn_end(
    loaded: LoadedModel, tokenizer: PreTrainedTokenizerBase, seen: Collection[int] | None = None
) -> tuple[int | None, str]:
    """Returns the end of the template's turns if the model's files do not name it, and a line about it, if
    any. `seen`: tokens at the ends of trained answers; None: unknown."""
    turn_end, known = end_of_turn(tokenizer), eos_tokens(loaded.model)
    is_named = turn_end in known or (turn_end == tokenizer.eos_token_id and not known)
    if turn_end is None or is_named or (seen is not None and turn_end not in seen):
        return None, ""
    token = tokenizer.convert_ids_to_tokens(turn_end)
    if loaded.adapter is None:
        return turn_end, f"Answers end with {token}: the model's files name it as an end"
    return None, (
        f"Answers end with {token}, and an adapter has no file that says so: stop there where you generate, "
        "or use 'dpopack merge', which writes it"
    )


def limit_images(loaded: LoadedModel, max_pixels: int | None) -> tuple[Any, str]:
    """Returns the processor's limits of pixels and the exported ones, if they differ; a line about images."""
    vision = loaded.scorer.vision
    if vision is None or max_pixels is None:
        return None, ""
    said = f"In training, images of more than {max_pixels:,} pixels were scaled down (data.max_pixels)"
    if not (frames := vision.family.limited_frames):
        return None, f"{said}; its processor cannot do that, so do it where the model is used"
    size = dict(vision.processor.processor.image_processor.size)
    limit = max(max_pixels * frames, size["shortest_edge"])  # it scales smaller images up to this
    if limit >= size["longest_edge"]:
        return None, ""
    return (size, {**size, "longest_edge": limit}), f"{said}, as the exported processor does (longest_edge)"


# ------------------------------------------------------------------------------------- read back and compare


@torch.no_grad()
def prepare_verification(
    setup: Setup, loaded: LoadedModel, directory: Path, saved: Mapping[str, Tensor]
) -> dict[str, Any]:
    """Computes what proofs/read_back.py needs to compare the export with the policy; every rank must call it.

    `export.verify` says whether log-probs are compared, too (auto: if the weights fit into memory a second
    time); on a quantised base they are not. The pairs are those of the start-up proof, which measures how far
    rounding moves a log-prob; the model in the files may differ by three times that. First the policy's own
    weights are rounded to the exported values: they are not trained any more.
    """
    facts, scorer, device = setup.policy_facts, loaded.scorer, setup.device
    wanted, trained = setup.recipe.export.verify, facts.precision.parameters
    release_memory()
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else host_memory().free
    fits = ranks.first_says(free > _ROOM_TO_READ * facts.num_parameters * trained.itemsize)
    groups, logps, bound = list[Group](), list[float](), FLOAT32_BOUND
    if facts.quantization is None and (wanted == "full" or (wanted == "auto" and fits)):
        dtype = exported_dtype(setup, loaded, Console(quiet=True))
        if dtype is not None and dtype.itemsize < trained.itemsize and loaded.adapter is None:
            round_weights(loaded.model, dtype, keeps_type=True)
        with random_groups(scorer, device) as groups:
            groups = groups if scorer.vision is None else image_groups(scorer)
            numbers, _ = distance_of_row(scorer, groups, device)
            logps = pair_sums(scorer, groups, device).flatten().tolist()
        bound = max(bound, 3 * numbers.get("rounding a token", 0.0))
    autocast = scorer.autocast or scorer.gather_dtype
    return {
        "directory": str(directory),
        "auto_class": auto_class(loaded.model.config).__name__,
        "image_sizes": limit_images(loaded, setup.recipe.data.max_pixels)[0],
        "base": None if loaded.adapter is None else loaded.adapter.base,
        "revision": facts.settings.revision,
        "trust_remote_code": facts.settings.trust_remote_code,
        "parameters": _name(next(scorer.model.parameters()).dtype),
        "autocast": None if autocast is None else _name(autocast),
        "device": str(device),
        "digests": {name: tensor_digest(tensor) for name, tensor in saved.items()},
        "is_tied": is_tied(loaded.model),
        "sequences": [
            ([*group.context.tolist(), *ids.tolist()], len(ids), [png_url(read()) for read in group.images])
            for group in groups
            for ids in group.completions
        ],
        "logps": logps,
        "bound": bound,
        "routes": int(routes_tokens(scorer.model.config)),
    }


def verify(job: dict[str, Any]) -> tuple[bool, str]:
    """Compares the files with what was trained, in another process. Returns whether it did, or the process
    ended early, as without enough memory, and a sentence. Raises RunError if the files hold another model."""
    alone = environment_alone()
    if not job["device"].startswith("cuda"):
        alone["CUDA_VISIBLE_DEVICES"] = ""
    command = [sys.executable, "-P", "-W", "ignore", str(READER)]
    ended = subprocess.run(
        command, input=json.dumps(job), env=alone, capture_output=True, text=True, check=False
    )
    if ended.returncode != 0 or not ended.stdout.strip():
        return False, "not verified: the process that reads the model ended early"
    answer = json.loads(ended.stdout.splitlines()[-1])
    if answer["failure"] is not None:
        raise RunError(
            f"export.verify: the model in the files is not the one that was trained: {answer['failure']}; "
            "its checkpoints are right; report this, or export anew with other releases of the packages"
        )
    sentence = f"verified: the files hold all {answer['tensors']} trained tensors bit for bit"
    if job["sequences"]:
        number, error = len(job["sequences"]), answer["error"]
        sentence += f"; log-probs of {number} made-up sequences differ by {error:.1e} nats a token"
    return True, sentence


def verify_model(run: RunDir, console: Console, job: dict[str, Any]) -> bool:
    """Verifies the finished run's model on rank 0, and notes in run.json what was found. Returns whether it
    did. Raises RunError if the files hold another model, Interrupted after a stop signal."""
    try:
        with shown(console, "Verifying the model"):
            is_verified, found = verify(job)
    except (RunError, Interrupted) as error:
        run.update(not_verified=str(error))
        if isinstance(error, Interrupted):
            error.next_step = "the run is finished and its model is saved, but it was not read back"
        raise
    run.update(verified=is_verified, not_verified=None if is_verified else found)
    console.print(found.capitalize() if is_verified else f"Warning: {run.model} is {found}")
    return is_verified


# --------------------------------------------------------------------------------------------------- the card


def model_card(
    recipe: Recipe,
    usage: str,
    *,
    totals: Mapping[str, Any],
    evaluation: Mapping[str, Mapping[str, Any]],
    adapter_base: str | None = None,
) -> str:
    """Returns the model card in Markdown, with the front matter that the hub reads. `usage`: of
    `usage_section`. `evaluation`: the latest metrics of each held-out set."""
    datasets = dict.fromkeys(source.path for source in recipe.data.train if is_on_hub(source.path))
    head = _front_matter(
        adapter_base or recipe.model.path,
        ["dpo", "preference-optimization", "dpo-pack"] + ["lora"] * (adapter_base is not None),
        library_name="transformers" if adapter_base is None else "peft",
        pipeline_tag="image-text-to-text" if recipe.model.images else "text-generation",
        datasets=list(datasets) or None,
    )
    adapter = "" if adapter_base is None else f"A LoRA adapter for {card_name(adapter_base)}: "
    trained = ", ".join(_linked(source.path) for source in recipe.data.train)
    held_out = ", ".join(_linked(source.path) for source in recipe.data.eval_sources)
    if isinstance(recipe.data.eval, EvalFraction):
        held_out = f"a fraction of {recipe.data.eval.fraction} of the training data"
    return f"""{head}
# {recipe.logging.run_name or recipe.output_dir.name}

{adapter}{card_name(recipe.model.path)} fine-tuned with DPO (Rafailov et al. 2023, arXiv 2305.18290) \
by dpo-pack {dpo_pack.__version__}.

{usage}
{_results(evaluation, _ONLINE_COLUMNS if recipe.online is not None else _COLUMNS)}\
Training: {counted(totals["steps"], "step")}, {counted(totals["pairs"], "preference pair")}, \
{counted(totals["tokens"], "token")}, \
{format_seconds(totals["train_seconds"])}.

Trained on: {trained}. Held out: {held_out or "nothing"}.

## Recipe

```yaml
{dump_recipe(recipe, for_others=True).strip()}
```
"""


def add_to_card(card: Path, title: str, told: str, rows: Sequence[Sequence[str]]) -> None:
    """Writes a section with a table into a model card, above the recipe, in place of one with this title."""
    lines = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    table = "\n".join(
        f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |" for cells in lines
    )
    text = re.sub(rf"^## {re.escape(title)}\n.*?(?=^## |\Z)", "", text_of(card), flags=re.M | re.DOTALL)
    above, recipe, below = text.partition("## Recipe\n")
    write_text_atomically(card, f"{above}## {title}\n\n{told}\n\n{table}\n\n{recipe}{below}")


def card_name(path: str) -> str:
    """`name_for_others`; of a path that ends in `model`, as that of a run's does, two parts."""
    name, parent = name_for_others(path), Path(path).absolute().parent
    return f"{parent.name}/{name}" if name == "model" and parent != Path.home() else name


def _front_matter(base: str, tags: list[str], **settings: Any) -> str:
    # The hub refuses a card that names a base model or data set which the hub does not have.
    known = base if is_on_hub(base) else None
    return f"---\n{ModelCardData(base_model=known, tags=tags, **settings).to_yaml().strip()}\n---\n"


def usage_section(
    loaded: LoadedModel, tokenizer: PreTrainedTokenizerBase, target: Path, note: str, *, trusts_code: bool
) -> str:
    """Returns the card's section with an example. transformers loads an adapter with its base, if peft is
    installed. An upload replaces the line of `model_id`."""
    trusts = ", trust_remote_code=True" if trusts_code else ""
    auto = auto_class(loaded.model.config).__name__
    question = "How do I learn a language?"
    inputs = f'inputs = tokenizer("{question}", return_tensors="pt")'
    if tokenizer.chat_template is not None:
        inputs = f"""messages = [{{"role": "user", "content": "{question}"}}]
inputs = tokenizer.apply_chat_template(
    messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
)"""
    said = f"{note}.\n\n" if note else ""
    return f"""{_USAGE_TITLE}

{said}```python
# pip install transformers torch{" peft" * (loaded.adapter is not None)}
from transformers import {auto}, AutoTokenizer

model_id = {json.dumps(str(target), ensure_ascii=False)}
tokenizer = AutoTokenizer.from_pretrained(model_id{trusts})
model = {auto}.from_pretrained(model_id, dtype="auto"{trusts})
{inputs}
output = model.generate(**inputs, max_new_tokens=100)
print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
```
"""


def _linked(path: str) -> str:
    name = name_for_others(path)
    return f"[{name}](https://huggingface.co/datasets/{name})" if is_on_hub(path) else f"`{name}`"


_COLUMNS = {"rewards/accuracies": "reward accuracy", "rewards/margins": "reward margin", "loss": "loss"}
_ONLINE_COLUMNS = {
    "online/win_rate": "wins against the starting policy",
    "online/scores": "score",
    "online/scores_start": "score of the starting policy",
}


def _results(evaluation: Mapping[str, Mapping[str, Any]], columns: Mapping[str, str]) -> str:
    """Returns a table of held-out sets, and what each can show."""
    if not evaluation:
        return ""
    lines = [f"| held-out set | {' | '.join(columns.values())} |", f"|---|{'---|' * len(columns)}"]
    for name, metrics in evaluation.items():
        cells = (f"{metrics[column]:z.4f}" if column in metrics else "" for column in columns)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    told = {name: what_can_be_told(metrics) for name, metrics in evaluation.items()}
    lines += [f"\n{name}: {sentence}." for name, sentence in told.items() if sentence]
    return "\n".join(lines) + "\n\n"


# ------------------------------------------------------------- a LoRA adapter and its base as one model


def merge_adapter(
    source: Path, target: Path, *, base: str | None, dtype: str, trust_remote_code: bool
) -> tuple[SavedAdapter, list[str]]:
    """Writes the merged model and the tokenizer to `target`, whole or not at all. `source`: of an adapter or
    a run. `base` replaces the base that the adapter names. Base plus adapter is computed in float32 and
    rounded once, to `dtype`; `auto`: the type of the base's weights. Tensors that transformers always reads
    in float32 stay in float32. Returns the adapter, and lines to say. Raises ModelError if the adapter or its
    base cannot be loaded, RunError if `target` is not empty."""
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
    has_own_tokenizer = has_tokenizer(directory)
    tokenizer = load_tokenizer(
        str(directory) if has_own_tokenizer else adapter.base,
        revision=None if has_own_tokenizer else adapter.base_revision,
        trust_remote_code=trust_remote_code,
        chat_template=None,
        recipe_key=_MERGE,
    )
    merged = _merged(adapter, trust_remote_code)
    rounded = getattr(torch, dtype) if dtype != "auto" else stored_dtype(adapter.base, adapter.base_revision)
    if (beyond := find_beyond(merged.model.state_dict(), rounded)) is not None:
        what = f"{beyond} has values beyond {_name(rounded)}"
        raise ModelError(f"{_MERGE}: {what}; use --dtype bfloat16 or float32")
    lines = list(unknown_settings(directory))
    embeddings: Any = merged.model.get_input_embeddings()
    if unread := [token for token, id in tokenizer.get_vocab().items() if id >= embeddings.num_embeddings]:
        lines.append(
            f"Warning: {adapter.base} does not embed all tokens of the adapter's tokenizer ({unread[0]!r} "
            f"and {len(unread) - 1:,} more), so the merged model cannot read them; if the adapter was "
            "trained with them, give the model that it was trained on with --base"
        )
    if rounded != torch.float32:
        lines.append(f"The weights are rounded to {_name(rounded)} (--dtype float32 keeps them)")
        round_weights(merged.model, rounded, keeps_type=False)
    turn_end, note = name_turn_end(merged, tokenizer)
    told = text_of(directory / "README.md").partition(_USAGE_TITLE)[2].partition("\n```")[0].split("\n\n")
    note = ".\n\n".join(filter(None, (note, *(one.strip(".") for one in told if "data.max_pixels" in one))))
    usage = usage_section(merged, tokenizer, target, note, trusts_code=trust_remote_code)
    card, images = _merged_card(adapter, usage), {"processor": str(directory)}
    write_model(merged, tokenizer, target, card, dtype=rounded, turn_end=turn_end, **images)
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


def _merged_card(adapter: SavedAdapter, usage: str) -> str:
    """Returns a card with the results, data and recipe of the adapter's, if dpo-pack wrote that."""
    name, base = adapter.directory.resolve(), name_for_others(adapter.base)
    name = name.parent if name.name == "model" else name
    head = _front_matter(
        adapter.base, ["dpo-pack"], library_name="transformers", pipeline_tag="text-generation"
    )
    rest = text_of(adapter.directory / "README.md").partition(_USAGE_TITLE)[2].partition("\n```\n\n")[2]
    origin = f"The LoRA adapter {name.name}, merged into {base} by dpo-pack {dpo_pack.__version__}."
    return f"{head}\n# {name.name}\n\n{origin}\n\n{usage}\n{rest}"
