"""Costs of pairs by formula, and what they come to on machines we have not run on: no timing, no weights."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from benchmarking.kinds import (
    ATTENTION,
    HEAD_PRODUCTS,
    HEAD_STATISTICS,
    MATRIX_PRODUCTS,
    OPTIMIZER,
    OTHER_OPERATORS,
)
from benchmarking.shapes import SHAPES, flops_shape
from dpo_pack.packing.flops import (
    ADAPTER_PASSES,
    TRAINING_PASSES,
    ModelShape,
    padded_flops,
    pair_flops,
    sequence_flops,
    unread_positions,
)
from dpo_pack.packing.lengths import IntArray, PairLengths
from dpo_pack.packing.plan import PlanSettings

# Policy forward and backward, and the reference's forward.
ALL_PASSES = TRAINING_PASSES + 1.0
GIGA, TERA = 1e9, 1e12


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """A machine that was not measured: data-sheet figures and an assumed utilisation."""

    peak_flops: float = 989.4 * TERA  # bf16, dense: H100 and H200 SXM
    mfu: float = 0.40
    gpus_a_node: int = 8
    node_bytes_a_second: float = 450 * GIGA  # a GPU's NVLink, each way
    network_bytes_a_second: float = 50 * GIGA  # a GPU's 400 Gb/s adapter, each way
    gpu_gib: float = 131.0  # H200; an H100 has 75

    def bytes_a_second(self, num_gpus: int) -> float:
        """What a collective over so many GPUs is limited by."""
        return self.node_bytes_a_second if num_gpus <= self.gpus_a_node else self.network_bytes_a_second


# A sharded forward and backward of one row: bf16 weights gathered for each, fp32 gradients scattered.
GATHERED_BYTES = 2 + 2 + 4
# fp32 weight and gradient and the two moments of AdamW.
TRAINED_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Projection:
    """A step of training on several GPUs. Seconds are of one GPU, the slowest."""

    num_gpus: int
    pairs_per_step: int
    rows_a_gpu: float  # mean over the steps
    imbalance: float  # the slowest GPU's FLOPs over the mean's, over all steps
    state_gib: float  # weights, gradients and optimizer on each GPU
    compute_seconds: float
    communication_seconds: float
    pairs_per_second: float  # communication hidden behind computation as far as it fits


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """FLOPs of one forward pass over a pair, by where they are spent; means over the pairs."""

    layers: float
    head: float
    attention: float

    @property
    def total(self) -> float:
        return self.layers + self.head + self.attention


def forward_parts(shape: ModelShape, lengths: PairLengths) -> Parts:
    """Of packed pairs with their prompts once."""
    tokens = lengths.row_tokens(share_prompt=True).astype(np.float64)
    scored = lengths.completion_tokens().astype(np.float64)
    unread = unread_positions(lengths, share_prompt=True)
    areas, none = [np.zeros(len(tokens)) for _ in shape.attention], np.zeros(len(tokens))
    layers = sequence_flops(shape, tokens=tokens, scored_tokens=none, areas=areas, unread_positions=unread)
    head = sequence_flops(shape, tokens=none, scored_tokens=scored, areas=areas)
    total = pair_flops(shape, lengths, share_prompt=True, passes=1.0)
    return Parts(
        layers=float(layers.mean()),
        head=float(head.mean()),
        attention=float((total - layers - head).mean()),
    )


def ablation(shape: ModelShape, lengths: PairLengths, *, default_microbatch: int = 8) -> dict[str, float]:
    """Mean FLOPs of a pair, reference included, as one choice after another is made. Pairs in their order."""
    everywhere = replace(shape, last_block_weights=0.0)
    tokens, mean = {}, {}
    for is_shared in (False, True):
        tokens[is_shared] = float(lengths.row_tokens(share_prompt=is_shared).mean())
        mean[is_shared] = float(
            pair_flops(everywhere, lengths, share_prompt=is_shared, passes=ALL_PASSES).mean()
        )
    scored = float(lengths.completion_tokens().mean())
    a_position = 2.0 * shape.head_weights * ALL_PASSES
    everything = float(pair_flops(shape, lengths, share_prompt=True, passes=ALL_PASSES).mean())
    return {
        f"padded, micro-batch {default_microbatch}": _padded(shape, lengths, default_microbatch),
        "padded, micro-batch 1": _padded(shape, lengths, 1),
        "packed: no padding": mean[False] + (tokens[False] - scored) * a_position,
        "prompts once": mean[True] + (tokens[True] - scored) * a_position,
        "head at completions only": mean[True],
        "last feed-forward block at completions only": everything,
        "reference cached from an earlier run": everything * TRAINING_PASSES / ALL_PASSES,
    }


def _padded(shape: ModelShape, lengths: PairLengths, microbatch: int) -> float:
    """Mean FLOPs of a pair in right-padded micro-batches, every position through the head."""
    longest = lengths.prompt.astype(np.int64) + np.maximum(lengths.chosen, lengths.rejected)
    whole = len(longest) // microbatch * microbatch
    batches: IntArray = longest[:whole].reshape(-1, microbatch).max(axis=1)
    sequences = np.full(len(batches), 2 * microbatch)
    return padded_flops(shape, batches, sequences, passes=ALL_PASSES) / whole


def sharing_gain(ratio: float) -> float:
    """Tokens without sharing over tokens with it, for prompts `ratio` times as long as each completion."""
    return (2 * ratio + 2) / (ratio + 2)


def project(
    shape: ModelShape,
    lengths: PairLengths,
    cluster: Cluster,
    *,
    num_weights: float,
    num_gpus: int,
    pairs_per_step: int,
    token_budget: int = 8192,
) -> Projection:
    """Fully sharded training (FSDP2) on so many GPUs, reference pass included in the compute."""
    row_tokens = lengths.row_tokens(share_prompt=True)
    settings = PlanSettings(
        token_budget=token_budget, pairs_per_step=pairs_per_step, algorithm="best_fit_decreasing"
    )
    plan = settings.plan(
        row_tokens,
        order=np.arange(len(row_tokens)),
        num_ranks=num_gpus,
        row_costs=pair_flops(shape, lengths, share_prompt=True),
        equal_rows=True,
    )
    steps = [plan.pack_step(step) for step in range(len(plan)) if plan.is_full(step)]
    costs = np.array([[sum(plan.cost_of(row) for row in rows) for rows in ranks] for ranks in steps])
    imbalance = float(costs.max(axis=1).sum() / costs.mean(axis=1).sum())
    rows_a_gpu = float(np.mean([len(ranks[0]) for ranks in steps]))
    pair = float(pair_flops(shape, lengths, share_prompt=True, passes=ALL_PASSES).mean())
    compute = pair * pairs_per_step / num_gpus * imbalance / (cluster.peak_flops * cluster.mfu)
    moved = GATHERED_BYTES * num_weights * (num_gpus - 1) / num_gpus * rows_a_gpu
    communication = moved / cluster.bytes_a_second(num_gpus)
    return Projection(
        num_gpus=num_gpus,
        pairs_per_step=pairs_per_step,
        rows_a_gpu=rows_a_gpu,
        imbalance=imbalance,
        state_gib=TRAINED_BYTES * num_weights / num_gpus / 2**30,
        compute_seconds=compute,
        communication_seconds=communication,
        pairs_per_second=pairs_per_step / max(compute, communication),
    )


# Bytes a logit that the head moves in bf16, forward and backward. One by one: operations on logits, counted
# by tests/model/test_logps.py, and the two products' bf16 logits written and their gradient read twice.
# Compiled: logits written twice and read three times, their gradient written once and read twice.
BYTES_A_LOGIT = {"one by one": 86 + 8, "compiled": 16}
# A chunk's product written and read in bf16, and added to the fp32 gradient of the head.
GRADIENT_BYTES_A_WEIGHT = 2 + 2 + 4 + 4


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadOnGpu:
    """A GPU's bandwidth, and what its products reach; assumed."""

    bytes_a_second: float = 4.0 * TERA
    head_flops: float = 500.0 * TERA
    layer_flops: float = 400.0 * TERA

    def products(self, shape: ModelShape, num_scored: int) -> float:
        """Seconds of the head's four products, of which the logits' is made twice."""
        return 4 * 2 * num_scored * shape.head_weights / self.head_flops

    def passes(self, num_logits: float, how: str) -> float:
        """Seconds of moving the logits."""
        return num_logits * BYTES_A_LOGIT[how] / self.bytes_a_second

    def gradient(self, shape: ModelShape, num_chunks: int) -> float:
        """Seconds of adding every chunk's part to the head's gradient."""
        return num_chunks * GRADIENT_BYTES_A_WEIGHT * shape.head_weights / self.bytes_a_second

    def layers(self, shape: ModelShape, num_tokens: int) -> float:
        """Seconds of the layers' products, attention left out."""
        return TRAINING_PASSES * 2 * num_tokens * shape.token_weights / self.layer_flops


# What attention reaches of the peak of square products, forward and backward: 350 and 280 of 700 TFLOP/s,
# modelled for an H100.
ATTENTION_OF_PEAK = (0.5, 0.4)


def roofline(
    shape: ModelShape,
    lengths: PairLengths,
    bytes_by_kind: dict[str, float],
    *,
    peak_flops: float,
    bytes_a_second: float,
    lora: bool,
) -> dict[str, float]:
    """Seconds that training steps on these packed pairs take at the least, by kind of operation.

    Products and attention by their FLOPs, the other kinds by the bytes that they move.
    """
    parts, num_pairs = forward_parts(shape, lengths), len(lengths.prompt)
    products = num_pairs * (ADAPTER_PASSES if lora else TRAINING_PASSES) / peak_flops
    forward, backward = (share * peak_flops for share in ATTENTION_OF_PEAK)
    moving = (HEAD_STATISTICS, OTHER_OPERATORS, OPTIMIZER)
    return {
        MATRIX_PRODUCTS: products * parts.layers,
        HEAD_PRODUCTS: products * parts.head,
        ATTENTION: num_pairs * parts.attention * (1 / forward + 2 / backward),
        **{kind: bytes_by_kind[kind] / bytes_a_second for kind in moving},
    }


def num_weights(name: str) -> float:
    """All weights of a shape that is dense and not tied: layers, head and embedding."""
    shape = flops_shape(name)
    tied = bool(SHAPES[name].get("tie_word_embeddings", False))
    return shape.token_weights + shape.head_weights * (1 if tied else 2)
