"""Tries the start of a run on random models and data at each level of the CPU: right ones, and planted faults.

    python scripts/start_check.py --trials 200 --results results.jsonl --page docs/dev/start-check.md

Each level has one process with one thread and one with two. A trial draws a model of one of six families, its
precision, sizes and pairs by its number. The results are lines of a file; what is there is not tried again.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path += [str(ROOT), str(ROOT / "tests")]  # the tiny models are in tests/

import numpy as np  # noqa: E402
import torch  # noqa: E402
from support.kernels import OtherKernel  # noqa: E402
from support.loading import CPU, facts_of  # noqa: E402
from support.reference_pairs import make_table  # noqa: E402
from support.tiny_models import tiny_model  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from dpo_pack.model.building import load_model  # noqa: E402
from dpo_pack.model.layout import Row  # noqa: E402
from dpo_pack.model.scorer import CompletionLogps, Precision  # noqa: E402
from dpo_pack.proofs.start_up import prove  # noqa: E402
from dpo_pack.recipe.schema import LoraRecipe  # noqa: E402
from dpo_pack.system.errors import RunError  # noqa: E402
from dpo_pack.system.machine import cpu_name, package_versions  # noqa: E402
from dpo_pack.training.batches import RowBuilder  # noqa: E402
from dpo_pack.training.references import check_start  # noqa: E402

# Level -> environment. "default" is what ATen and oneDNN choose without instructions beyond SSE.
LEVELS = {
    "SSE41": {"ONEDNN_MAX_CPU_ISA": "SSE41", "ATEN_CPU_CAPABILITY": "default"},
    "AVX2": {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"},
    "AVX512_CORE": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE", "ATEN_CPU_CAPABILITY": "avx512"},
    "AVX512_CORE_BF16": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16", "ATEN_CPU_CAPABILITY": "avx512"},
    "AVX512_CORE_AMX": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_AMX", "ATEN_CPU_CAPABILITY": "avx512"},
}
OTHER_KERNEL = "other kernel"  # the machine's own level, with a switch of kernels that needs no AVX-512
# What torch and oneDNN say that they use.
_PROBE = """
import torch
torch.nn.Conv2d(16, 32, 3)(torch.ones(2, 16, 32, 32))
print("aten", torch.backends.cpu.get_cpu_capability())
"""
FAMILIES = ("llama", "qwen3", "gemma2", "gpt_neox", "qwen3_moe", "qwen3_5_text")
PRECISIONS = {
    "float32": Precision(parameters=torch.float32, autocast=None),
    "bfloat16 autocast": Precision(parameters=torch.float32, autocast=torch.bfloat16),
    "bfloat16": Precision(parameters=torch.bfloat16, autocast=None),
}
VOCABULARY = 2048
Sums = Callable[[], np.ndarray[Any, Any]]


def large_changes(family: str, random: np.random.Generator) -> dict[str, Any]:
    """The config of a model that rounds as real ones do: 16 layers or more, width 512 or more."""
    heads, layers = int(random.choice([8, 10])), int(random.integers(16, 19))
    changes: dict[str, Any] = {
        "hidden_size": 64 * heads,
        "intermediate_size": 96 * heads,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "max_position_embeddings": 8192,
    }
    changes |= {} if family == "gpt_neox" else {"num_key_value_heads": heads // 2, "head_dim": 64}
    if family == "gemma2":
        kinds = ["sliding_attention", "full_attention"] * layers
        changes |= {"layer_types": kinds[:layers], "sliding_window": 256, "final_logit_softcapping": 60.0}
        changes |= {"attn_logit_softcapping": 50.0, "query_pre_attn_scalar": 64}
    if family == "qwen3_5_text":
        changes["layer_types"] = (["linear_attention"] * 3 + ["full_attention"]) * layers
        changes["layer_types"] = changes["layer_types"][:layers]
    return changes


def save_drawn(directory: Path, family: str, is_large: bool, random: np.random.Generator) -> None:
    """Large models have largest logits of 16 to 32, and weights as at the start of a pretraining otherwise."""
    changes = large_changes(family, random) if is_large else {}
    seed = int(random.integers(2**31))
    changes |= {"vocab_size": VOCABULARY, "tie_word_embeddings": False}
    model = tiny_model(family, seed=seed, **changes)
    if is_large:
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if weight.ndim > 1 and "A_log" not in name:
                    weight.div_(8.0)  # tiny_model's factor
            ids = torch.from_numpy(random.integers(3, VOCABULARY, (1, 64)))
            largest = model(ids, use_cache=False).logits.abs().max()
            model.get_output_embeddings().weight.mul_(float(random.uniform(16, 32)) / largest)
    model.save_pretrained(directory)


def draw_pairs(is_large: bool, random: np.random.Generator) -> tuple[list[Any], int]:
    """Returns pairs, and of how many the policy's row consists; the reference's row has all of them."""
    least, longest = (700, 300) if is_large else (60, 40)
    tokens = int(least * 4 ** random.random())
    pairs: list[Any] = []
    sizes: list[int] = []
    while sum(sizes) < 1.5 * tokens:
        lengths = random.integers(1, longest, 3)
        pairs.append(tuple(random.integers(3, VOCABULARY, n).tolist() for n in lengths))
        sizes.append(int(lengths.sum()))
    return pairs, max(1, int(np.searchsorted(np.cumsum(sizes), tokens)))


@contextmanager
def with_dropout(scorer: CompletionLogps) -> Iterator[None]:
    def drop(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        return nn.functional.dropout(output, 0.1, training=True)

    hook = scorer.model.get_input_embeddings().register_forward_hook(drop)
    yield
    hook.remove()


@contextmanager
def with_leak(scorer: CompletionLogps) -> Iterator[None]:
    """In each layer that attends, the first token of the second part of a row gets half of the token before."""
    attend: Any = scorer.backend

    def leaky(query: Tensor, key: Tensor, value: Tensor, segments: Any, options: Any) -> Tensor:
        output = attend(query, key, value, segments, options).clone()
        begin = segments.query_lengths[0] + segments.query_lengths[1]
        if begin < len(output):
            output[begin] = (output[begin] + output[begin - 1]) / 2
        return output

    with scorer.replaced(backend=leaky):
        yield


@contextmanager
def with_shift(scorer: CompletionLogps) -> Iterator[None]:
    """Second parts of sequences, behind prompts that are shared, stand one position too late."""
    forward = scorer.forward

    def shifted(row: Row) -> Any:
        assert row.segments is not None
        lengths = torch.tensor(row.segments.query_lengths)
        is_second = lengths != torch.tensor(row.segments.key_lengths)
        return forward(replace(row, position_ids=row.position_ids + is_second.repeat_interleave(lengths)))

    scorer.forward = shifted  # type: ignore[method-assign]
    yield
    del scorer.forward


@contextmanager
def with_weights(scorer: CompletionLogps, change: Callable[[str, Tensor], Tensor]) -> Iterator[None]:
    before = {name: weight.detach().clone() for name, weight in scorer.model.named_parameters()}
    with torch.no_grad():
        for name, weight in scorer.model.named_parameters():
            weight.copy_(change(name, weight))
    yield
    with torch.no_grad():
        for name, weight in scorer.model.named_parameters():
            weight.copy_(before[name])


def revised(name: str, weight: Tensor) -> Tensor:
    """Of another revision: each weight differs by 3 % of the matrix' own size."""
    if weight.ndim < 2 or ".lora_" in name:
        return weight
    noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(len(name)))
    return weight + 0.03 * weight.float().std() * noise


def one_step_on(name: str, weight: Tensor) -> Tensor:
    """Of an adapter after one step at a learning rate of 1e-4."""
    return weight + 1e-4 if ".lora_B." in name else weight


def draw_kind(number: int) -> tuple[str, str, bool, np.random.Generator]:
    random = np.random.default_rng(number)
    precision = str(random.choice(list(PRECISIONS)))
    return FAMILIES[number % len(FAMILIES)], precision, bool(random.random() < 0.5), random


def run_trial(number: int, directory: Path) -> dict[str, Any]:
    """Returns what was drawn, why the right start was refused, if it was, and the planted faults missed."""
    family, precision, is_large, random = draw_kind(number)
    save_drawn(directory / "model", family, is_large, random)
    pairs, num_in_row = draw_pairs(is_large, random)
    lora = LoraRecipe.model_validate({"r": 4, "alpha": 8})
    facts = facts_of(directory / "model", precision=PRECISIONS[precision], lora=lora)
    facts.namespace  # noqa: B018  # hashed before the weights are read, as in a run
    scorer = load_model(facts, device=CPU, adds_adapter=True).scorer
    builder = RowBuilder(
        table=make_table(pairs), reference=None, is_packed=True, share_prompt=True, device=CPU
    )

    @torch.no_grad()
    def cached() -> RowBuilder:
        sums = scorer(builder.build(np.arange(len(pairs))).row).sums
        return replace(builder, reference=sums.view(-1, 2).numpy())

    def refusal(reference: RowBuilder, *, proves: bool) -> str | None:
        try:
            check_start(scorer, facts, reference, np.arange(num_in_row))
        except RunError as error:
            return str(error)
        failed = [proof.name for proof in prove(scorer, CPU) if not proof.passed] if proves else []
        return f"proofs: {', '.join(failed)}" if failed else None

    right, missed = cached(), []
    refused = refusal(right, proves=True)
    for plant in (with_dropout, with_leak, with_shift):
        with plant(scorer):
            if refusal(right, proves=True) is None:
                missed.append(plant.__name__)
    with with_weights(scorer, revised):
        of_other_revision = cached()
    if refusal(of_other_revision, proves=False) is None:
        missed.append("another revision's reference")
    with with_weights(scorer, one_step_on):
        of_adapter = cached() if precision == "float32" else None
        if refusal(right, proves=False) is None:
            missed.append("an adapter that has moved")
    if of_adapter is not None and refusal(of_adapter, proves=False) is None:
        missed.append("a reference with an adapter")
    tokens = [builder.row_tokens()[:num_in_row].sum(), builder.row_tokens().sum()]
    drawn = {"family": family, "precision": precision, "is_large": is_large, "tokens": list(map(int, tokens))}
    return {"number": number, **drawn, "refused": refused, "missed": missed}


def run_level(
    level: str, threads: int, numbers: range, results: Path, *, until: float, small_only: bool
) -> None:
    """Runs in a process of its own, whose environment has the level."""
    torch.set_num_threads(threads)
    done = {(line["level"], line["threads"], line["number"]) for line in read(results)}
    for number in numbers:
        is_left_out = small_only and draw_kind(number)[2]
        if (level, threads, number) in done or is_left_out or time.time() > until:
            continue
        begun = time.monotonic()
        with TemporaryDirectory() as directory, ExitStack() as stack:
            if level == OTHER_KERNEL:
                stack.enter_context(OtherKernel(more_than_rows=1600 if number % 2 else 100))
            line = run_trial(number, Path(directory))
        line |= {"level": level, "threads": threads, "seconds": round(time.monotonic() - begun, 1)}
        with results.open("a") as file:
            file.write(json.dumps(line) + "\n")


def read(results: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []


def instructions(level: str) -> tuple[str, str]:
    """Returns what oneDNN and ATen say that they use at a level."""
    environment = {**os.environ, **LEVELS[level], "ONEDNN_VERBOSE": "1"}
    command = [sys.executable, "-c", _PROBE]
    lines = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    onednn = next(line.partition("isa:")[2] for line in lines.splitlines() if "isa:" in line)
    return onednn, lines.split()[-1]


def page(lines: list[dict[str, Any]], lacking: list[str], said: dict[str, str]) -> str:
    table = ""
    for level in (*LEVELS, OTHER_KERNEL):
        for threads in (1, 2):
            here = [line for line in lines if (line["level"], line["threads"]) == (level, threads)]
            if here:
                planted = sum(5 + (line["precision"] == "float32") for line in here)
                counts = (len(here), sum(line["is_large"] for line in here), sum(map(refused, here)))
                found = planted - sum(len(line["missed"]) for line in here)
                table += f"| {level} | {threads} | {' | '.join(map(str, counts))} | {found} of {planted} |\n"
    versions = ", ".join(f"{name} {version}" for name, version in package_versions().items())
    text = INTRODUCTION.format(
        cpu=cpu_name(), versions=f"Python {platform.python_version()}, {versions}", command=" ".join(sys.argv)
    )
    wrong = [line for line in lines if line["refused"] or line["missed"]]
    listed = "".join(
        f"- {line['level']}, {line['threads']} threads, trial {line['number']} ({line['family']}, "
        f"{line['precision']}, {'large' if line['is_large'] else 'small'}): "
        f"{line['refused'] or 'missed ' + ', '.join(line['missed'])}\n"
        for line in wrong
    )
    lacks = f"This machine lacks {', '.join(lacking)}. " if lacking else ""
    levels = "; ".join(f"{level}: {words}" for level, words in said.items())
    return f"{text}{table}\n{lacks}What torch and oneDNN say: {levels}.\n" + (f"\n{listed}" if wrong else "")


def refused(line: dict[str, Any]) -> bool:
    return line["refused"] is not None


INTRODUCTION = """\
# The start of a run on random models

<!-- Written by scripts/start_check.py; edit the script instead. -->

Before the first step a run proves that packed rows are exact and that the policy is its cached reference
([numerics.md](../numerics.md#step-0)). Each trial draws a model of one of six families, in fp32, under bf16
autocast or in bf16, and pairs of random tokens. Half of the models are large: width 512 or more, 16 layers or more,
largest logits of 16 to 32, and rows of 700 to 4,000 tokens. The reference is computed in a row with half as many
tokens again. Then the start is tried as it is, which must not be refused, and with faults, which must be: dropout, a
leak of one token, a shift by one position, the reference of another revision (weights that differ by 3 %), an adapter
that has moved by one step at 1e-4, and in fp32 a reference with that adapter.

*{other}*: products in 16 bits are computed with sums in fp32, and rows above a limit (1,600 tokens or 100) sum in
another order. This is what oneDNN does with AVX-512 or AMX when a row is long enough for its other kernel. With
SmolLM2-135M-Instruct it changes a row's log-probs by 0.051 nats a token, as AMX does.

{cpu}; {versions}; `{command}`.

| level | threads | trials | large ones | right ones refused | faults found |
|---|---|---|---|---|---|
""".replace("{other}", OTHER_KERNEL.capitalize())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=200, help="of each level and number of threads")
    parser.add_argument("--first", type=int, default=0, help="the number of the first trial")
    parser.add_argument("--seconds", type=float, default=math.inf, help="no trial begins later, of each level")
    parser.add_argument("--levels", nargs="*", default=[*LEVELS, OTHER_KERNEL])
    parser.add_argument("--threads", nargs="*", type=int, default=[1, 2])
    parser.add_argument("--results", type=Path, default=Path("start-check.jsonl"))
    parser.add_argument("--page", type=Path, help="write the table of all results here")
    parser.add_argument("--small-only", action="store_true", help="leave out large models: where bf16 is slow")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    numbers = range(given.first, given.first + given.trials)
    if given.inside:
        (level,), (threads,) = given.levels, given.threads
        until = time.time() + given.seconds
        run_level(level, threads, numbers, given.results, until=until, small_only=given.small_only)
        return
    said = {level: ", ".join(instructions(level)) for level in LEVELS}
    used = [said[level] for level in LEVELS]
    lacking = [level for number, level in enumerate(LEVELS) if used[number] in used[:number]]
    for level in given.levels:
        for threads in given.threads if level not in lacking else ():
            options = ["--trials", str(given.trials), "--first", str(given.first), "--seconds", str(given.seconds)]
            options += ["--levels", level, "--threads", str(threads), "--results", str(given.results)]
            options += ["--small-only"] * given.small_only
            environment = {**os.environ, **LEVELS.get(level, {}), "OMP_NUM_THREADS": str(threads)}
            command = [sys.executable, __file__, "--inside", *options]
            subprocess.run(command, env=environment, check=True)
    if given.page:
        known = {level: words for level, words in said.items() if level not in lacking}
        given.page.write_text(page(read(given.results), lacking, known))


if __name__ == "__main__":
    main()
