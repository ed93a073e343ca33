"""Measure what the docs say of single settings, on this machine's CPU.

python scripts/measure_settings.py products         fp32 through MKL and oneDNN, bf16: docs/dev/performance.md
python scripts/measure_settings.py head-chunks      tokens of a chunk of the output head: model/logps.py
python scripts/measure_settings.py gradient-sums    rows adding up in bf16: docs/memory.md
python scripts/measure_settings.py checkpoints      written while training goes on: docs/running.md
python scripts/measure_settings.py threads          that wait for each other, GOMP_SPINCOUNT: docs/running.md
"""

from __future__ import annotations

import copy
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import typer
from benchmarking.contenders import Setting, ours, trl
from benchmarking.process import measure, save_model
from benchmarking.shapes import shape_config
from benchmarking.workloads import make_workload
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from dpo_pack.model.fast_layers import times_transposed
from dpo_pack.model.logps import (
    HEAD_BOUNDS,
    HeadPasses,
    HeadTransform,
    WantedStatistics,
    compile_head,
    token_logps,
)
from dpo_pack.run.checkpoint import checkpoint_content
from dpo_pack.run.checkpoint_files import CheckpointWriter
from dpo_pack.run.state import Identity, Place, TrainState
from dpo_pack.system.machine import keep_freed_memory

app = typer.Typer(add_completion=False, rich_markup_mode=None, help=__doc__)

# Tokens, features in, features out: layers of the benchmark's 7M and 25M models, chunks of their heads.
SHAPES = ((4096, 256, 688), (256, 256, 8192), (4096, 384, 1024), (256, 384, 32000))
NUM_LAYERS = 16
HEADS = ((256, 8192), (384, 32000), (896, 151936))  # hidden size, vocabulary


@app.command()
@torch.no_grad()
def products() -> None:
    """GFLOP/s of a linear layer's three products, of operands that no cache holds any more, medians."""
    keep_freed_memory()
    print("| tokens x in x out | product | torch (MKL) | oneDNN | torch, bf16 |\n|---|---|---|---|---|")
    for tokens, inputs, outputs in SHAPES:
        layers = [
            (torch.randn(tokens, inputs), torch.randn(outputs, inputs), torch.randn(tokens, outputs))
            for _ in range(NUM_LAYERS)
        ]
        for name, pairs in (
            ("features @ weight.T", [(features, weight) for features, weight, _ in layers]),
            ("grad @ weight", [(grad, weight.T) for _, weight, grad in layers]),
            ("grad.T @ features", [(grad.T, features.T) for features, _, grad in layers]),
        ):
            low = [(left.bfloat16(), right.bfloat16()) for left, right in pairs]
            seconds = (
                _median_seconds(_times_transposed_by_torch, pairs),
                _median_seconds(times_transposed, pairs),
                _median_seconds(_times_transposed_by_torch, low),
            )
            rates = " | ".join(f"{2e-9 * tokens * inputs * outputs / each:.0f}" for each in seconds)
            print(f"| {tokens} x {inputs} x {outputs} | {name} | {rates} |")


@app.command("head-passes")
def head_passes(num_tokens: int = 1024, repeats: int = 9, backend: str = "inductor") -> None:
    """What compiled passes over the logits buy: milliseconds of the trained head, forward and backward."""
    keep_freed_memory()
    print("| hidden x vocabulary | products | milliseconds | compiled | times as fast, turn by turn |")
    print("|---|---|---|---|---|")
    for hidden_size, vocabulary in HEADS:
        head = _random_head(num_tokens, hidden_size, vocabulary)
        for dtype in (torch.float32, torch.bfloat16):
            seconds: dict[str, list[float]] = {"plain": [], "compiled": []}
            contenders = {"plain": HeadPasses(), "compiled": compile_head(backend=backend)}
            for _ in range(2 + repeats):  # the first two compile
                for name, passes in contenders.items():
                    settings = {"compute_dtype": dtype, "bounds": HEAD_BOUNDS["cpu"], "passes": passes}
                    seconds[name].append(_head_seconds(head, wanted=WantedStatistics(), **settings))
            plain, compiled = (each[2:] for each in seconds.values())
            ratios = sorted(one / other for one, other in zip(plain, compiled, strict=True))
            print(
                f"| {hidden_size} x {vocabulary} | {str(dtype).removeprefix('torch.')} | "
                f"{1e3 * statistics.median(plain):.0f} | {1e3 * statistics.median(compiled):.0f} | "
                f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}) |"
            )


@app.command("head-chunks")
def head_chunks(num_tokens: int = 2048, repeats: int = 5) -> None:
    """GFLOP/s of the head's useful products, forward and backward, by the tokens of a chunk, medians."""
    keep_freed_memory()
    tokens_of_chunk = (64, 128, 256, 512, 1024)
    print(" | ".join(("| hidden x vocabulary", *map(str, tokens_of_chunk))) + " |")
    print("|---" * (1 + len(tokens_of_chunk)) + "|")
    for hidden_size, vocabulary in HEADS:
        head = _random_head(num_tokens, hidden_size, vocabulary)
        seconds: dict[int, list[float]] = {tokens: [] for tokens in tokens_of_chunk}
        for _ in range(1 + repeats):  # in turns, so that a slow moment of the machine slows all of them
            for tokens in tokens_of_chunk:
                bounds = replace(HEAD_BOUNDS["cpu"], chunk_tokens=tokens, chunk_bytes=2**40)
                settings = {"compute_dtype": torch.float32, "bounds": bounds}
                seconds[tokens].append(
                    _head_seconds(head, wanted=WantedStatistics(metrics=False), **settings)
                )
        work = 3 * 2e-9 * num_tokens * hidden_size * vocabulary
        rates = " | ".join(f"{work / statistics.median(each[1:]):.0f}" for each in seconds.values())
        print(f"| {hidden_size} x {vocabulary} | {rates} |")


def _random_head(num_tokens: int, hidden_size: int, vocabulary: int) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, the head's weight and targets."""
    hidden = torch.randn(num_tokens, hidden_size, requires_grad=True)
    weight = (0.02 * torch.randn(vocabulary, hidden_size)).requires_grad_()
    return hidden, weight, torch.randint(vocabulary, (num_tokens,))


def _head_seconds(head: tuple[Tensor, Tensor, Tensor], **settings: Any) -> float:
    """Of log-probs and their gradients."""
    hidden, weight, targets = head
    begun = time.perf_counter()
    logps, _ = token_logps(hidden, weight, None, targets, transform=HeadTransform(), **settings)
    logps.sum().backward()
    hidden.grad = weight.grad = None
    return time.perf_counter() - begun


def _times_transposed_by_torch(left: Tensor, right: Tensor) -> Tensor:
    return left @ right.T


def _median_seconds(
    product: Callable[[Tensor, Tensor], Tensor], pairs: Sequence[tuple[Tensor, Tensor]]
) -> float:
    """Of one product, over three rounds through `pairs` after one that is not counted."""
    seconds = []
    for left, right in [*pairs] * 4:
        begun = time.perf_counter()
        product(left, right)
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds[len(pairs) :])


@app.command("gradient-sums")
def gradient_sums(num_rows: int = 128) -> None:
    """Relative error of a step's gradient, of a Llama of 5M parameters, against fp32 throughout."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=2048,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
    )
    low = LlamaForCausalLM(config).bfloat16()
    exact = copy.deepcopy(low).float()
    frequencies = 1 / torch.arange(1, 2049.0)
    rows = [torch.multinomial(frequencies, 256, replacement=True).view(2, 128) for _ in range(num_rows)]
    print("| rows in a step | bf16 autocast, sum in fp32 | bf16 parameters, sum in fp32 | in bf16 |")
    print("|---|---|---|---|")
    for count in (number for number in (1, 8, 32, 128) if number <= num_rows):
        truth = _gradient(exact, rows[:count], torch.float32)
        sums = (
            _gradient(exact, rows[:count], torch.float32, autocasts=True),
            _gradient(low, rows[:count], torch.float32),
            _gradient(low, rows[:count], torch.bfloat16),
        )
        errors = " | ".join(f"{float((each - truth).norm() / truth.norm()):.2%}" for each in sums)
        print(f"| {count} | {errors} |")


def _gradient(
    model: LlamaForCausalLM, rows: Sequence[Tensor], sum_dtype: torch.dtype, *, autocasts: bool = False
) -> Tensor:
    """The whole gradient of DPO's loss over `rows`, [2, L] chosen and rejected each, added up row by row."""
    sums = [torch.zeros_like(parameter, dtype=sum_dtype) for parameter in model.parameters()]
    for row in rows:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocasts):
            logits = model(input_ids=row).logits[:, :-1]
        logps = logits.float().log_softmax(-1).gather(2, row[:, 1:, None]).squeeze(2)[:, 64:].sum(1)
        margin = 0.1 * (logps[0] - logps[1])
        loss = -nn.functional.logsigmoid(margin - margin.detach()) / len(rows)  # the policy is its reference
        grads = torch.autograd.grad(loss, list(model.parameters()))
        for total, grad in zip(sums, grads, strict=True):
            total += grad
    return torch.cat([total.float().flatten() for total in sums])


class _NoSource:
    """What a checkpoint asks of a source of batches."""

    num_steps = 0
    steps_fingerprint = ""

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def prepare_next(self) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


@app.command()
def checkpoints(num_parameters: int = 25_000_000, repeats: int = 6) -> None:
    """Seconds that training waits for a checkpoint, and those of steps meanwhile, medians."""
    torch.manual_seed(0)
    policy: Any = nn.ParameterList(nn.Parameter(torch.randn(num_parameters // 24, 1)) for _ in range(24))
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-4, fused=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    state = TrainState(scorer=policy, optimizer=optimizer, scheduler=scheduler, source=_NoSource())
    identity = Identity(fingerprints={}, versions={}, ranks="", judged_by="")
    place = Place(step=0, metrics_offset=0, source={})

    def step() -> float:
        begun = time.perf_counter()
        sum((parameter.square() * 3 + parameter.exp()).mean() for parameter in policy.parameters()).backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - begun

    alone = statistics.median([step() for _ in range(8)])
    print(f"{num_parameters:,} parameters, steps of {alone:.2f} s")
    for in_background in (False, True):
        waits, slow_steps = [], []
        with (
            tempfile.TemporaryDirectory() as directory,
            CheckpointWriter(Path(directory), in_background=in_background) as writer,
        ):
            for _ in range(repeats):
                state.step += 1
                content = checkpoint_content(state, place, identity, keep=1, num_best=0)
                begun = time.perf_counter()
                writer.write(content)
                waits.append(time.perf_counter() - begun)
                slow_steps += [step() for _ in range(3)] if in_background else []
                writer.wait()
        meanwhile = f", next three steps {statistics.median(slow_steps):.2f} s each" if slow_steps else ""
        print(f"asynchronous: {in_background}: training waits {statistics.median(waits):.2f} s{meanwhile}")


@app.command()
def threads(num_pairs: int = 64, repeats: int = 3, busy: int = 2, model: str = "7m") -> None:
    """GOMP_SPINCOUNT in both trainers, alone and beside busy processes, in turns: pairs/s and CPU seconds."""
    print("| trainer | busy processes | turn | default: pairs/s, CPU s | 10000: pairs/s, CPU s |")
    print("|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as directory:
        pairs, weights = Path(directory, "pairs"), Path(directory, "model")
        vocabulary = shape_config(model).vocab_size
        workload = make_workload("hh-like", pairs, num_pairs=num_pairs, vocabulary=vocabulary, hh_pairs=None)
        save_model(model, weights, parameters="float32", device="cpu")
        setting = Setting(
            workload=str(pairs),
            model=str(weights),
            num_pairs=num_pairs,
            pairs_per_step=num_pairs // 4,
            max_length=workload.max_length,
            device="cpu",
            parameters="float32",
            lora=False,
            gradient_checkpointing=False,
            warmup_steps=1,
        )
        for num_busy, contender in itertools.product((0, busy), (ours(8192), trl(1, precompute=True))):
            others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(num_busy)]
            try:
                for turn in range(repeats):
                    cells = []
                    for spin in ({}, {"GOMP_SPINCOUNT": "10000"}):
                        os.environ.pop("GOMP_SPINCOUNT", None)
                        os.environ.update(spin)
                        (run,) = measure([contender], setting)
                        cells.append(f"{1 / run.seconds_a_pair(warmup_steps=1):.2f}, {run.cpu_seconds:.1f}")
                    print(f"| {contender.name} | {num_busy} | {turn + 1} | {' | '.join(cells)} |", flush=True)
            finally:
                for other in others:
                    other.kill()
                    other.wait()


if __name__ == "__main__":
    app()
