"""What a command knows before the weights of a model are loaded: device, models' facts, tokenizer, data.

Then it loads models and proves that they compute rows exactly. Also the check of a recipe, which takes the
same steps on the first rows of each source and goes on after an error.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import patch_environment
from rich.console import Console
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from dpo_pack.data.faults import FEW, source_notes
from dpo_pack.data.images import ImageProcessor
from dpo_pack.data.ingest import Ingestion, columns_sentence
from dpo_pack.data.selection import select_pairs
from dpo_pack.data.sources import HELD_OUT, Data, load_data, load_source, locate_source
from dpo_pack.data.store import PairTable, longest_sequence
from dpo_pack.data.tokenizer import Tokenizer
from dpo_pack.losses.preference import make_objective
from dpo_pack.model.building import load_model
from dpo_pack.model.config import check_lengths
from dpo_pack.model.facts import ModelFacts
from dpo_pack.model.fast_layers import bfloat16_gain
from dpo_pack.model.fingerprint import meta_tensors
from dpo_pack.model.loading import load_config, load_tokenizer
from dpo_pack.model.lora import read_adapter, unknown_settings
from dpo_pack.model.parallel import ALONE
from dpo_pack.model.scorer import LoadedModel
from dpo_pack.recipe.data import DataRecipe, SourceRecipe, source_names
from dpo_pack.recipe.load import Recipe, has_tokenizer, is_adapter
from dpo_pack.recipe.online import OnlineRecipe
from dpo_pack.recipe.schema import EvalFraction
from dpo_pack.recipe.training import LossRecipe
from dpo_pack.reference.cache import default_cache_directory, find_leftovers
from dpo_pack.run.memory_estimate import memory_facts, step_bytes
from dpo_pack.run.models import (
    Setup,
    available_memory,
    check_accelerate_config,
    check_model,
    check_quantised_files,
    choose_strategy,
    load_and_prove,
    resolve_model,
)
from dpo_pack.run.run_dir import find_run
from dpo_pack.run.state import find_criterion
from dpo_pack.system import ranks
from dpo_pack.system.console import format_count, format_seconds, print_detail, shown
from dpo_pack.system.errors import DpoPackError, ModelError, RecipeError
from dpo_pack.system.files import discard
from dpo_pack.system.launch import num_threads
from dpo_pack.system.machine import keep_freed_memory
from dpo_pack.system.process import counted
from dpo_pack.training.optim import check_optimizer
from dpo_pack.training.references import LiveReference

Value = TypeVar("Value")
_ROWS_SHARE = 0.75  # of a machine's memory, for a step of longer rows; estimates can be too low


NO_PAIRS = "online: this command needs pairs, and an online run makes its pairs while it trains"
PROCESSOR_TEMPLATE = "Chat template: the processor's; that of its tokenizer, or none, is not used"


def prepare_tokenizer(recipe: Recipe, images: ImageProcessor | None = None) -> PreTrainedTokenizerBase:
    """Loads the recipe's tokenizer; for an adapter without one, that of its base model. Raises ModelError."""
    path, revision, key = recipe.model.path, recipe.model.revision, "model.path"
    trusts, template = recipe.model.trust_remote_code, recipe.tokenizer.chat_template
    if recipe.tokenizer.path is not None:
        path, revision, key = recipe.tokenizer.path, None, "tokenizer.path"
    elif is_adapter(path) and not has_tokenizer(path):
        base = read_adapter(Path(path), key)
        path, revision, key = base.base, base.base_revision, f"{key} (the base of {path})"
    tokenizer = load_tokenizer(
        path, revision=revision, trust_remote_code=trusts, chat_template=template, recipe_key=key
    )
    if images is not None and template is None:
        processor = images.processor
        if tokenizer.chat_template == processor.tokenizer.chat_template:
            tokenizer.chat_template = processor.chat_template or tokenizer.chat_template
    return tokenizer


def check_vocabulary(model: ModelFacts, tokenizer: PreTrainedTokenizerBase, *, writes: bool = False) -> None:
    """Raises ModelError if the model's own tokenizer has other tokens, see `other_tokens`."""
    if told := other_tokens(model, tokenizer, writes=writes):
        remedy = "sample them with two commands" if writes else "give a model with the same tokenizer"
        raise ModelError(f"{told}; {remedy}")


def other_tokens(model: ModelFacts, tokenizer: PreTrainedTokenizerBase, *, writes: bool = False) -> str:
    """Returns which ids are other tokens in the model's own tokenizer, or "". With `writes` also those that
    only one of the two has."""
    path, revision, key = model.settings.path, model.settings.revision, model.recipe_key
    if model.adapter is not None and has_tokenizer(model.adapter):
        path, revision = str(model.adapter), None
    if Path(path).is_dir() and not has_tokenizer(path):
        return ""
    trusts = model.settings.trust_remote_code
    own = load_tokenizer(
        path, revision=revision, trust_remote_code=trusts, chat_template=None, recipe_key=key
    )
    theirs, ours = ({id: token for token, id in one.get_vocab().items()} for one in (own, tokenizer))
    ids = theirs.keys() | ours.keys() if writes else theirs.keys() & ours.keys()
    others = sorted(id for id in ids if theirs.get(id) != ours.get(id))
    if not others:
        return ""
    return (
        f"{key}: {model.label} has another tokenizer than {tokenizer.name_or_path}: {len(others):,} ids are "
        f"other tokens there (first: {others[0]}, {theirs.get(others[0])!r}, here {ours.get(others[0])!r})"
    )


def _tokenizer_warning(policy: ModelFacts, tokenizer: PreTrainedTokenizerBase) -> str:
    told = other_tokens(policy, tokenizer)
    return told and f"Warning: {told}; this is right only if the model was trained with tokenizer.path"


def prepare_data(
    recipe: Recipe,
    tokenizer: PreTrainedTokenizerBase,
    console: Console,
    *,
    processor: ImageProcessor | None = None,
    takes_prompts: bool = False,
) -> Data:
    """Returns tokenised pairs, from the cache if it has them; prints counts. `takes_prompts`: also online."""
    if recipe.online is not None and not takes_prompts:
        raise RecipeError(NO_PAIRS)
    begun = time.monotonic()
    if processor is not None and processor.gives_template(tokenizer):
        console.print(PROCESSOR_TEMPLATE)
    with shown(console, "Reading data", "rows") as progress:
        data = ranks.of_node(
            partial(
                load_data,
                recipe.data,
                tokenizer=tokenizer,
                seed=recipe.seed,
                cache_dir=recipe.reference.cache_dir or default_cache_directory(),
                images=processor,
                progress=progress,
                max_new_tokens=None if recipe.online is None else recipe.online.max_new_tokens,
            )
        )
    if ranks.num_ranks() > 1:
        ranks.require_same(
            {"the data": data.fingerprint, "the held-out data": data.eval_fingerprint},
            "every node must see the same data files and the same reference.cache_dir",
        )
    _print_data(data, console, recipe.data.scored_turns, seconds=time.monotonic() - begun)
    return data


def _print_data(data: Data, console: Console, scored_turns: str, *, seconds: float) -> None:
    report, num_pairs = data.report, data.train.num_pairs
    num_prompts, pairs = len(data.prompts), counted(num_pairs, "pair")
    what = f"{counted(num_prompts, 'prompt')} to answer" if num_prompts else f"{pairs} to train on"
    sizes = {name: len(prompts) for name, prompts in data.eval_prompts.items()}
    for name, size in (sizes or {name: table.num_pairs for name, table in data.eval.items()}).items():
        what += f", {size:,} held out{'' if name == HELD_OUT else f' ({name})'}"
    console.print(f"Data: {what}; {format_seconds(seconds)}")
    if (shared := report["held_out_by"]) not in (None, "prompt", "image"):
        console.print(
            f"  no column has the prompts: pairs with the same {shared} are all held out or all trained on; "
            "for a split by prompt, name the column in data.train.*.columns.prompt"
        )
    num_copies = report["train"].get("duplicate_pairs", 0)
    for number, fault in (
        (report.get("train_pairs_in_eval"), "are held out too, so held-out metrics do not show new pairs"),
        (num_copies * (num_copies >= FEW * num_pairs), "repeat another one"),
        (
            report.get("train_pairs_contradicted"),
            "are contradicted: another pair has the same prompt and answers, and prefers the other one",
        ),
        (num_pairs * (not data.train.weights.any()), "have the weight 0 (column weight): none is learned"),
    ):
        if number:
            console.print(f"  Warning: {number:,} of {num_pairs:,} training pairs {fault}")
    of_eval = (held["source"] for held in report["eval"].values() if "source" in held)
    for source in (*report["train"]["sources"], *of_eval):
        notes = list(source_notes(source))
        if others := source.get("pairs_with_other_turns"):
            are = "not scored" if scored_turns == "assistant" else "scored too"
            notes.append(f"answers of {counted(others, 'pair')} have messages of others, which are {are}")
        if (number := source.get("pairs_in_mixture")) is not None:
            notes.append(f"its share of the mixture is its first {counted(number, 'pair')}")
        if columns := source["columns_not_read"]:
            notes.append(f"columns that are not read: {', '.join(columns)}")
        for note in notes:
            console.print(f"  {source['name']}: {note}")


def prepare(
    recipe: Recipe, console: Console, *, takes_prompts: bool = False, for_device: torch.device | None = None
) -> Setup:
    """Finds device, models' facts, tokenizer, data; writes only caches. `for_device` need not be here."""
    loss = recipe.loss
    objective = make_objective(
        loss.terms, loss.options, needs_reference=loss.needs_reference, weighting=loss.weighting
    )
    accelerator = _accelerator(recipe.logging.trackers, recipe.output_dir / "trackers")
    device = for_device or (accelerator.device if ranks.uses_cuda() else torch.device("cpu"))
    models = [policy := resolve_model(recipe, device)]
    if (path := recipe.reference.path) is not None:
        reference = resolve_model(recipe, device, path, recipe_key="reference.path")
        models.append(replace(reference, processor=policy.processor))
    for model in models if for_device is None else ():
        check_optimizer(recipe.optim.name, device)
        check_model(model, device, is_trained=model is policy)
    strategy = choose_strategy(recipe, policy, device) if for_device is None else ALONE
    if ranks.num_ranks() > 1:
        console.print(f"Strategy: {strategy.sentence()}")
        ranks.require_shared(policy.cache_dir, "reference.cache_dir")
    for leftover in find_leftovers(policy.cache_dir) if ranks.rank() == 0 else ():
        discard(leftover)
    with ranks.first_goes_first():  # the other ranks then read rank 0's downloads from the cache
        tokenizer = prepare_tokenizer(recipe, policy.processor)
        for model in models[1:]:
            check_vocabulary(model, tokenizer)
        if recipe.tokenizer.path is not None and (warning := _tokenizer_warning(policy, tokenizer)):
            console.print(warning)
    data = prepare_data(recipe, tokenizer, console, processor=policy.processor, takes_prompts=takes_prompts)
    setup = Setup(
        recipe=recipe,
        console=console,
        objective=objective,
        accelerator=accelerator,
        device=device,
        policy_facts=policy,
        reference_facts=models[-1],
        tokenizer=tokenizer,
        data=data,
        strategy=strategy,
    )
    longest = int(data.train.beginning_lengths.max(initial=0))
    budgets = recipe.token_budgets(device.type, longest, partial(_fits, setup))
    for model in models:
        check_data(model, tokenizer, setup.tables, max(budgets), recipe.online)
    return replace(setup, token_budget=budgets[0], reference_token_budget=budgets[1])


def _fits(setup: Setup, token_budget: int) -> bool:
    """Whether a step of such rows fits a machine with nothing else to do, on all ranks; all must call it."""
    needed = step_bytes(memory_facts(replace(setup, token_budget=token_budget), None)[0])
    number = setup.recipe.distributed.num_processes
    here = number if number != "auto" and ranks.num_ranks() == 1 else 1  # one process asks for so many
    return max(ranks.every_rank_says(needed - _ROWS_SHARE * available_memory(setup.device).total / here)) <= 0


def setting_warnings(loss: LossRecipe, lr: float, policy: ModelFacts) -> Iterator[str]:
    """Yields a sentence for each setting that a run takes, but that is most often a mistake."""
    if loss.beta > 1 and "sigmoid" in dict(loss.terms):
        yield f"Warning: loss.beta is {loss.beta:g}; above 1, pairs soon teach little; usual: 0.01 to 0.5"
    is_whole, size = policy.settings.lora is None and policy.adapter is None, policy.num_parameters
    if lr > 1e-4 and is_whole and size >= 50_000_000:
        whole = f"{format_count(size)} parameters without an adapter"
        yield f"Warning: optim.lr is {lr:g}; above 1e-4, {whole} forget what they knew; usual: 1e-7 to 1e-5"
    if lr >= 1e-2 and not is_whole and size >= 50_000_000:
        yield f"Warning: optim.lr is {lr:g}; from 1e-2 on, adapters do harm; usual: 1e-6 to 1e-4"


def autocast_advice(policy: ModelFacts, num_processes: int | str = "auto") -> list[str]:
    """Returns a sentence if a CPU will compute in fp32 by default, and bf16 is twice as fast."""
    times = bfloat16_gain(default_cache_directory(), num_threads(num_processes))
    is_default = policy.settings.autocast == "auto" and policy.precision.activations == torch.float32
    if times < 2 or not is_default or ranks.uses_cuda():
        return []
    what = f"Note: this CPU multiplies {times:.2g} times as fast in bf16 as in fp32 (dpopack doctor)"
    return [f"{what}; set model.autocast: bfloat16, or none to keep fp32"]


def _accelerator(trackers: Sequence[str], directory: Path) -> Accelerator:
    # The recipe sets precision and compilation, and shards are torch's (docs/distributed.md). Without these
    # settings accelerate would take all three from its own configuration.
    with patch_environment(ACCELERATE_USE_FSDP="false"):
        accelerator = Accelerator(
            # Only CUDA or the CPU: else accelerate uses a Mac's GPU, or one process on several ranks.
            cpu=not ranks.uses_cuda(),
            mixed_precision="no",
            dynamo_backend="no",
            log_with=list(trackers) or None,
            project_dir=str(directory),
        )
    assert (accelerator.num_processes, accelerator.process_index) == (ranks.num_ranks(), ranks.rank())
    if not ranks.uses_cuda():
        keep_freed_memory()
    return accelerator


def check_data(
    model: ModelFacts,
    tokenizer: Tokenizer,
    tables: Sequence[PairTable],
    token_budget: int,
    online: OnlineRecipe | None,
) -> None:
    """Raises ModelError if the model cannot read all token ids, or compute the longest sequence and row."""
    longest = longest_sequence(tables) + (0 if online is None else online.max_new_tokens)
    # A prompt with its completions that exceeds the budget gets its own row. Without a shared prompt, the row
    # repeats the prompt for each completion.
    most_sequences = 2 if online is None else online.completions_per_prompt
    longest_row = max(token_budget, most_sequences * longest) if model.is_packed else None
    check_lengths(model.config, longest_sequence=longest, longest_row=longest_row)
    num_embeddings = int(model.config.get_text_config().vocab_size)
    if len(tokenizer) <= num_embeddings:
        return
    # Some tokenizers have more entries, but never produce the additional ids.
    largest = max(part.largest_token_id for table in tables for part in table.parts)
    if largest >= num_embeddings:
        raise ModelError(
            f"{model.recipe_key}: the data has token id {largest}, but {model.settings.path} embeds "
            f"{num_embeddings} tokens only; use the tokenizer that belongs to the model"
        )


def load_second_model(setup: Setup) -> LoadedModel:
    """Loads the reference as a second model beside the policy, with frozen weights. Raises ModelError."""
    loaded = load_proved(setup, setup.reference_facts)
    loaded.scorer.requires_grad_(False)
    return loaded


def load_moving_reference(setup: Setup) -> LiveReference:
    """Loads the reference as a second model that follows the policy (`reference.sync`). Raises ModelError."""
    facts, sync = setup.reference_facts, setup.recipe.reference.sync
    assert sync is not None
    if facts.adapter is not None:
        raise ModelError(
            f"reference.sync: the reference {facts.label} is an adapter; merge it first (dpopack merge)"
        )
    return LiveReference(
        model=load_second_model(setup), device=setup.device, follow_every=sync.every_steps, mixup=sync.mixup
    )


def load_proved(setup: Setup, other: ModelFacts | None = None) -> LoadedModel:
    """Loads the starting policy, with the recipe's new adapter if it has one, or another model. Prints what
    proves that it computes packed rows exactly. Raises ModelError."""
    facts, adds_adapter = other or setup.policy_facts, other is None
    where: Any = {"device": setup.device, "strategy": setup.strategy}
    with shown(setup.console, f"Loading {facts.label}, and proving that its rows are exact"):
        loaded, outcome = load_and_prove(facts, **where, adds_adapter=adds_adapter)
    for note in loaded.notes:
        setup.console.print(note)
    outcome.raise_failure()
    sentence, details = outcome.sentences()
    whose = "" if facts is setup.policy_facts else f" of {facts.label}"
    setup.console.print(f"Proof{whose}: {sentence}")
    print_detail(setup.console, f"  {details}")
    return loaded


# --------------------------------------------------------------------------------- the check of a recipe

CHECKED_ROWS = 200  # of each source, as `show` reads


def check_recipe(recipe: Recipe) -> tuple[list[str], list[str]]:
    """Answers whether a run would start: lines for what is in order, and for what is wrong. It calls what
    `prepare` calls, on the first rows of each source, and loads no weights. An error ends a step, not the
    check. It writes nothing except the files that it downloads from the hub."""
    found: list[str] = []
    wrong: list[str] = []

    def attempt(step: Callable[..., Value], *arguments: Any) -> Value | None:
        try:
            return step(*arguments)
        except DpoPackError as error:  # it would end a run
            wrong.extend({str(error)}.difference(wrong))  # a model and its tokenizer may have one fault
            return None

    device, evals = torch.device("cuda" if ranks.uses_cuda() else "cpu"), recipe.data.eval
    attempt(make_objective, recipe.loss.terms, recipe.loss.options)
    attempt(check_optimizer, recipe.optim.name, device)
    held_out = [HELD_OUT] if isinstance(evals, EvalFraction) else list(source_names(evals))
    attempt(find_criterion, recipe, held_out)
    models: dict[str, ModelFacts] = {}
    budget = max(recipe.token_budgets(device.type))
    for key, path in (("model.path", recipe.model.path), ("reference.path", recipe.reference.path)):
        model = path and attempt(partial(resolve_model, recipe, device, path, recipe_key=key))
        if model and (lines := attempt(_check_weights, model, device, key, budget)):
            found += lines
            models[key] = model
    if "model.path" in models:
        warnings = setting_warnings(recipe.loss, recipe.optim.lr, models["model.path"])
        found += attempt(list, warnings) or ()
        attempt(check_accelerate_config, models["model.path"], recipe.distributed.cpu_offload)
    for number, judge in enumerate(() if recipe.online is None else recipe.online.judges):
        key, trusts = f"online.judges.{number}.path", recipe.model.trust_remote_code
        if judge.path and (files := attempt(load_judge_files, judge.path, key, trusts)) is not None:
            found.append(f"{key}: {judge.path}, {files[0].model_type}")
    images = models["model.path"].processor if "model.path" in models else None
    tokenizer = attempt(prepare_tokenizer, recipe, images)
    if tokenizer is not None and not (recipe.model.images and images is None):  # else nothing can read rows
        found += attempt(_check_tokenizer, tokenizer, models, recipe.tokenizer.path is not None) or ()
        sources = [(f"data.train.{number}", source) for number, source in enumerate(recipe.data.train)]
        sources += [(f"data.eval.{number}", source) for number, source in enumerate(recipe.data.eval_sources)]
        for key, source in sources:
            rows = (source, key, recipe.data, recipe.online, models.values())
            found += attempt(_check_rows, *rows, tokenizer, budget) or ()
    if (run := attempt(partial(find_run, recipe, overwrite=False))) is not None:
        if "model.path" in models and not (run.info or run.checkpoint):  # a run that goes on keeps its type
            found += autocast_advice(models["model.path"], recipe.distributed.num_processes)
        state = "its run is finished, so train has nothing to do" if run.is_finished else "a run can use it"
        found.append(f"output_dir: {run.root}, {state}")
    return found, wrong


def _check_weights(model: ModelFacts, device: torch.device, key: str, longest_row: int) -> list[str]:
    """Compares the names and shapes of a model's tensors with its config."""
    check_model(model, device, is_trained=key == "model.path")
    notes: list[str] = []
    if model.is_packed:
        check_lengths(model.config, longest_sequence=0, longest_row=longest_row)
    if model.quantization is not None:
        model.architecture  # noqa: B018  # builds the model on the meta device
        tensors: dict[str, Tensor] | str = "they are quantised, or will be"
    else:
        tensors = meta_tensors(model.settings.path, model.settings.revision, model.recipe_key)
        named = {} if isinstance(tensors, str) else tensors
        notes = load_model(model, device=device, adds_adapter=True, tensors=named).notes
    seen = f"its {len(tensors):,} tensors are there"
    if isinstance(tensors, str):
        seen = f"its tensors were not compared with its config ({tensors})"
    settings = [] if model.adapter is None else unknown_settings(model.adapter)
    head = f"{key}: {model.label}, {model.config.model_type}; {seen}"
    return [head, *(f"  {note}" for note in notes), *settings]


def load_judge_files(
    path: str, recipe_key: str, trust_remote_code: bool
) -> tuple[PretrainedConfig, PreTrainedTokenizerBase]:
    """Returns config and tokenizer of a reward model. Raises ModelError."""
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code, "recipe_key": recipe_key}
    config = load_config(path, revision=None, **options)
    check_quantised_files(config, path, None, recipe_key)
    return config, load_tokenizer(path, revision=None, chat_template=None, **options)


def _check_tokenizer(
    tokenizer: PreTrainedTokenizerBase, models: dict[str, ModelFacts], is_given: bool
) -> list[str]:
    lines, policy = [f"tokenizer: {len(tokenizer):,} tokens"], models.get("model.path")
    if policy is not None and is_given:
        lines += [f"  {warning}" for warning in [_tokenizer_warning(policy, tokenizer)] if warning]
    if policy is not None and policy.processor is not None and policy.processor.gives_template(tokenizer):
        lines.append(f"  {PROCESSOR_TEMPLATE}")
    if "reference.path" in models:
        check_vocabulary(models["reference.path"], tokenizer)
    return lines


def _check_rows(
    source: SourceRecipe,
    key: str,
    data: DataRecipe,
    online: OnlineRecipe | None,
    models: Collection[ModelFacts],
    tokenizer: PreTrainedTokenizerBase,
    token_budget: int,
) -> list[str]:
    images = next((model.processor for model in models), None)
    ingestion = Ingestion(
        located=locate_source(source, key, None, reads_images=images is not None),
        source=source,
        data=data,
        tokenizer=tokenizer,
        images=images,
        completion_tokens=None if online is None else online.max_new_tokens,
        max_rows=CHECKED_ROWS,
    )
    rows = load_source(ingestion, "", default_cache_directory())
    table, counts = PairTable.of([rows.store]), {**rows.store.summary}
    for model in models:
        check_data(model, tokenizer, [table], token_budget, online)
    if source.selecting_keys:
        _, (counts["selection"],) = select_pairs(table, {key: source}, 0, refuses_none=False)
    which = "all" if rows.reads_all and counts["rows_read"] > 1 else "the first"
    others = "" if rows.reads_all else "(no others were read) "
    kept = "pair" if online is None else "prompt"
    head = (
        f"{key}: {source.path}, format {counts['format']}, {which} {counted(counts['rows_read'], 'row')} "
        f"{others}{'has' if counts['rows_read'] == 1 else 'have'} {counted(counts[f'{kept}s_kept'], kept)}"
    )
    notes = (*source_notes(counts), columns_sentence(rows.columns_read, counts["columns_not_read"]))
    return [head, *(f"  {note}" for note in notes)]
