"""Starts runs on random models and data at each level of the CPU: right ones, and with planted faults.

    python scripts/start_check.py --trials 200 --results results.jsonl

Each level has a process with one thread and one with two. A trial draws family, precision, sizes and pairs by
its number. What is in the file of results is not tried again. Prints the table of docs/dev/start-check.md.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path += [str(ROOT), str(ROOT / "tests")]  # the tiny models are in tests/

import numpy as np  # noqa: E402
import pytest  # noqa: E402
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

# The most that oneDNN may use, and ATen's level. oneDNN uses more than at the level before, or this
# CPU lacks it.
LEVELS = {"SSE41": "default", "AVX2": "avx2"}
LEVELS |= dict.fromkeys(("AVX512_CORE", "AVX512_CORE_BF16", "AVX512_CORE_AMX"), "avx512")
OTHER_KERNEL = "other kernel"  # the machine's own level, with a switch of kernels that needs no AVX-512
_SAYS = """
import torch
torch.nn.Conv2d(16, 32, 3)(torch.ones(2, 16, 32, 32))
print(torch._C._get_cpu_capability())
"""
FAMILIES = ("llama", "qwen3", "gemma2", "gpt_neox", "qwen3_moe", "qwen3_5_text")
PRECISIONS = {
    "float32": Precision(parameters=torch.float32, autocast=None),
    "bfloat16 autocast": Precision(parameters=torch.float32, autocast=torch.bfloat16),
    "bfloat16": Precision(parameters=torch.bfloat16, autocast=None),
}
VOCABULARY = 2048


def draw_kind(number: int) -> tuple[str, str, bool, np.random.Generator]:
    random = np.random.default_rng(number)
    precision = str(random.choice(list(PRECISIONS)))
    return FAMILIES[number % len(FAMILIES)], precision, bool(random.random() < 0.5), random


def save_drawn(directory: Path, family: str, is_large: bool, random: np.random.Generator) -> None:
    """A large model has a width of 512 or more, 16 layers or more, and largest logits of 16 to 32."""
    changes: dict[str, Any] = {"vocab_size": VOCABULARY, "tie_word_embeddings": False}
    if is_large:
        heads, layers = int(random.choice([8, 10])), int(random.integers(16, 19))
        changes |= {"hidden_size": 64 * heads, "intermediate_size": 96 * heads, "num_hidden_layers": layers}
        changes |= {"num_attention_heads": heads, "max_position_embeddings": 8192}
        changes |= {} if family == "gpt_neox" else {"num_key_value_heads": heads // 2, "head_dim": 64}
        local = {"gemma2": ["sliding_attention"], "qwen3_5_text": ["linear_attention"] * 3}.get(family, [])
        if local:
            changes["layer_types"] = ([*local, "full_attention"] * layers)[:layers]
        if family == "gemma2":
            changes |= {"sliding_window": 256, "final_logit_softcapping": 60.0, "query_pre_attn_scalar": 64}
            changes["attn_logit_softcapping"] = 50.0
    model = tiny_model(family, seed=int(random.integers(2**31)), **changes)
    with torch.no_grad():
        for name, weight in model.named_parameters() if is_large else ():
            if weight.ndim > 1 and "A_log" not in name:
                weight.div_(8.0)  # tiny_model's factor
        if is_large:
            ids = torch.from_numpy(random.integers(3, VOCABULARY, (1, 64)))
            largest = model(ids, use_cache=False).logits.abs().max()
            model.get_output_embeddings().weight.mul_(float(random.uniform(16, 32)) / largest)
    model.save_pretrained(directory)


def draw_pairs(is_large: bool, random: np.random.Generator) -> tuple[list[Any], int]:
    """Returns pairs, and how many the policy's row has; the reference's has all, half as many tokens more."""
    least, longest = (700, 300) if is_large else (60, 40)
    tokens, pairs, sizes = int(least * 4 ** random.random()), list[Any](), list[int]()
    while sum(sizes) < 1.5 * tokens:
        lengths = random.integers(1, longest, 3)
        pairs.append(tuple(random.integers(3, VOCABULARY, n).tolist() for n in lengths))
        sizes.append(int(lengths.sum()))
    return pairs, max(1, int(np.searchsorted(np.cumsum(sizes), tokens)))


Plant = Callable[[pytest.MonkeyPatch, CompletionLogps], object]


def dropout(patch: pytest.MonkeyPatch, scorer: CompletionLogps) -> None:
    embeddings: Any = scorer.model.get_input_embeddings()
    embed, drop = embeddings.forward, functools.partial(nn.functional.dropout, p=0.1, training=True)
    patch.setattr(embeddings, "forward", lambda ids: drop(embed(ids)))


def leak(patch: pytest.MonkeyPatch, scorer: CompletionLogps) -> None:
    """The first token of a row's third part gets half of what attention gives the token before it."""
    attend: Any = scorer.backend

    def leaky(query: Tensor, key: Tensor, value: Tensor, segments: Any, options: Any) -> Tensor:
        output: Tensor = attend(query, key, value, segments, options).clone()
        begin = sum(segments.query_lengths[:2])
        if begin < len(output):
            output[begin] = (output[begin] + output[begin - 1]) / 2
        return output

    patch.setattr(scorer, "backend", leaky)


def shift(patch: pytest.MonkeyPatch, scorer: CompletionLogps) -> None:
    """What stands behind a shared prompt stands one position too late."""
    forward = scorer.forward

    def shifted(row: Row) -> Any:
        assert row.segments is not None
        lengths = torch.tensor(row.segments.query_lengths)
        is_behind = lengths != torch.tensor(row.segments.key_lengths)
        return forward(replace(row, position_ids=row.position_ids + is_behind.repeat_interleave(lengths)))

    patch.setattr(scorer, "forward", shifted)


def revision(patch: pytest.MonkeyPatch, scorer: CompletionLogps) -> None:
    """Another one: each weight differs by 10 % of its matrix' standard deviation."""
    for name, weight in scorer.model.named_parameters():
        if weight.ndim > 1 and ".lora_" not in name:
            noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(len(name)))
            changed = weight.detach() + 0.1 * weight.detach().float().std() * noise
            patch.setattr(weight, "data", changed.to(weight.dtype))


def adapter(patch: pytest.MonkeyPatch, scorer: CompletionLogps) -> None:
    """As it is after one step at a learning rate of 1e-4."""
    for name, weight in scorer.model.named_parameters():
        if ".lora_B." in name:
            patch.setattr(weight, "data", weight.data + 1e-4)


def run_trial(number: int, directory: Path) -> dict[str, Any]:
    """Returns what was drawn, why the right start was refused, if it was, and which faults were missed."""
    family, precision, is_large, random = draw_kind(number)
    save_drawn(directory / "model", family, is_large, random)
    pairs, num_in_row = draw_pairs(is_large, random)
    lora = LoraRecipe.model_validate({"r": 4, "alpha": 8})
    facts = facts_of(directory / "model", precision=PRECISIONS[precision], lora=lora)
    facts.namespace  # noqa: B018  # hashed before the weights are read, as in a run
    scorer = load_model(facts, device=CPU, adds_adapter=True).scorer
    table = make_table(pairs)
    builder = RowBuilder(table=table, reference=None, is_packed=True, share_prompt=True, device=CPU)

    @torch.no_grad()
    def cached() -> RowBuilder:
        sums = scorer(builder.build(np.arange(len(pairs))).row).sums
        return replace(builder, reference=sums.view(-1, 2).numpy())

    def refusal(reference: RowBuilder, *, proves: bool = True) -> str:
        try:
            check_start(scorer, facts, reference, np.arange(num_in_row))
        except RunError as error:
            return str(error)
        return ", ".join(proof.name for proof in prove(scorer, CPU) if not proof.passed) if proves else ""

    def planted(fault: Plant, what: Callable[[], Any]) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            fault(patch, scorer)
            return what()

    right = cached()
    line: dict[str, Any] = {"number": number, "family": family, "precision": precision, "is_large": is_large}
    line |= {"tokens": builder.sizes().of_row(np.arange(num_in_row)).tokens, "refused": refusal(right)}
    found = {each.__name__: planted(each, lambda: refusal(right)) for each in (dropout, leak, shift)}
    found["revision"] = refusal(planted(revision, cached), proves=False)
    found["adapter"] = planted(adapter, lambda: refusal(right, proves=False))
    if precision == "float32":
        found["adapter in the reference"] = refusal(planted(adapter, cached), proves=False)
    return {**line, "planted": len(found), "missed": [name for name, message in found.items() if not message]}


def run_level(given: argparse.Namespace) -> None:
    """Runs in a process whose environment has the level."""
    (level,), (threads,), begun = given.levels, given.threads, time.monotonic()
    torch.set_num_threads(threads)
    done = {(line["level"], line["threads"], line["number"]) for line in read(given.results)}
    for number in range(given.first, given.first + given.trials):
        is_left_out = given.small_only and draw_kind(number)[2]
        if is_left_out or (level, threads, number) in done or time.monotonic() - begun > given.seconds:
            continue
        kernel = OtherKernel(1600 if number % 2 else 100) if level == OTHER_KERNEL else nullcontext()
        with TemporaryDirectory() as directory, kernel:
            line = run_trial(number, Path(directory))
        with given.results.open("a") as file:
            file.write(json.dumps({"level": level, "threads": threads, **line}) + "\n")


def read(results: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []


def environment(level: str, threads: int = 1) -> dict[str, str]:
    levels = {"ONEDNN_MAX_CPU_ISA": level, "ATEN_CPU_CAPABILITY": LEVELS[level]} if level in LEVELS else {}
    return {**os.environ, **levels, "OMP_NUM_THREADS": str(threads), "HF_HUB_DISABLE_PROGRESS_BARS": "1"}


def instructions(level: str) -> tuple[str, str]:
    """Returns what oneDNN and ATen say that they use. ATen says AVX-512 also where there is none."""
    settings, command = {**environment(level), "ONEDNN_VERBOSE": "1"}, [sys.executable, "-c", _SAYS]
    text = subprocess.run(command, env=settings, capture_output=True, text=True, check=True).stdout
    return text.partition("cpu,isa:")[2].split("\n")[0].strip(), text.split()[-1]


def print_table(lines: list[dict[str, Any]]) -> None:
    versions = ", ".join(f"{name} {version}" for name, version in package_versions().items())
    print(f"{cpu_name()}; {versions}\n")
    print(
        "| level | threads | trials | large | right ones refused | faults found |\n|---|---|---|---|---|---|"
    )
    for level, threads in sorted({(line["level"], line["threads"]) for line in lines}):
        here = [line for line in lines if (line["level"], line["threads"]) == (level, threads)]
        num_large, num_refused = (sum(bool(line[key]) for line in here) for key in ("is_large", "refused"))
        planted, missed = sum(line["planted"] for line in here), sum(len(line["missed"]) for line in here)
        cells = (level, threads, len(here), num_large, num_refused, f"{planted - missed} of {planted}")
        print(f"| {' | '.join(map(str, cells))} |")
    for line in lines:
        if line["refused"] or line["missed"]:
            print(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=200, help="of each level and number of threads")
    parser.add_argument("--first", type=int, default=0, help="the number of the first trial")
    parser.add_argument("--seconds", type=float, default=math.inf, help="of each: no trial begins later")
    parser.add_argument("--levels", nargs="*", default=[*LEVELS, OTHER_KERNEL])
    parser.add_argument("--threads", nargs="*", type=int, default=[1, 2])
    parser.add_argument("--results", type=Path, default=Path("start-check.jsonl"))
    parser.add_argument("--small-only", action="store_true", help="no large models: where bf16 is slow")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.inside:
        run_level(given)
        return
    known = set[str]()
    for level in filter(LEVELS.__contains__, [*given.levels]):
        of_onednn, of_aten = instructions(level)
        print(
            f"{level}: " + (f"{of_onednn}; ATen {of_aten}" if of_onednn not in known else "not on this CPU")
        )
        if of_onednn in known:
            given.levels.remove(level)
        known.add(of_onednn)
    for level in given.levels:
        for threads in given.threads:
            command = [sys.executable, *sys.argv, "--inside", "--levels", level, "--threads", str(threads)]
            subprocess.run(command, env=environment(level, threads), check=True)
    print_table(read(given.results))


if __name__ == "__main__":
    main()
