"""scripts/project_performance.py: computed costs against counting, and the page against the script."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from benchmarking.projection import (
    ALL_PASSES,
    Cluster,
    ablation,
    forward_parts,
    num_weights,
    project,
    sharing_gain,
)
from benchmarking.shapes import flops_shape
from benchmarking.workloads import MIXES
from project_performance import page

from dpo_pack.packing.flops import AttentionKind, ModelShape, causal_area, pair_flops
from dpo_pack.packing.lengths import PairLengths

PAGE = Path(__file__).resolve().parents[2] / "docs" / "benchmarks" / "projection.md"
SHAPE = ModelShape(
    token_weights=1e6,
    head_weights=50_000,
    attention=(AttentionKind(num_layers=2, width=16, window=None),),
    last_block_weights=2e5,
)


def pairs(*triples: tuple[int, int, int]) -> PairLengths:
    prompt, chosen, rejected = np.array(triples, dtype=np.int64).T
    return PairLengths(prompt=prompt, chosen=chosen, rejected=rejected, shared=prompt)


@pytest.mark.slow
def test_the_page_in_docs_is_what_the_script_writes() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(Cluster()), "run scripts/project_performance.py"


def test_parts_of_a_pair_add_up_to_its_flops() -> None:
    lengths = MIXES["tulu3"].draw(100, seed=0)
    parts = forward_parts(SHAPE, lengths)
    assert parts.total == pytest.approx(float(pair_flops(SHAPE, lengths, share_prompt=True, passes=1).mean()))
    assert parts.head == pytest.approx(2 * 50_000 * float(lengths.completion_tokens().mean()))
    assert 1.6e6 < parts.layers / float(lengths.row_tokens(share_prompt=True).mean()) < 2e6
    areas = sum(
        causal_area(n, None) for n in (lengths.prompt + lengths.chosen, lengths.prompt + lengths.rejected)
    )
    assert parts.attention == pytest.approx(64 * float((areas - causal_area(lengths.shared, None)).mean()))


def test_choices_cost_what_counting_says() -> None:
    lengths = pairs((10, 4, 6), (2, 3, 1))
    shape = ModelShape(token_weights=1.0, head_weights=10, attention=(), last_block_weights=0.5)
    costs = list(ablation(shape, lengths, default_microbatch=2).values())
    # tokens a pair: 4 x 16 / 2 in one batch, (2 x 16 + 2 x 5) / 2 alone, (30 + 8) / 2 packed, then 6 less
    padded_together, padded, packed, shared = 32.0, 21.0, 19.0, 13.0
    scored, unread = 7.0, 7.0  # the prompt's last token predicts two scored ones
    everywhere = [2 * tokens * 11 * ALL_PASSES for tokens in (padded_together, padded, packed, shared)]
    head = (2 * shared + 20 * scored) * ALL_PASSES
    last = head - 2 * 0.5 * unread * ALL_PASSES
    assert costs == pytest.approx([*everywhere, head, last, last * 3 / 4])


@pytest.mark.parametrize("ratio", [0.5, 1.0, 2.0])
def test_sharing_saves_the_tokens_that_the_formula_says(ratio: float) -> None:
    lengths = pairs((int(100 * ratio), 100, 100))
    tokens = [int(lengths.row_tokens(share_prompt=share)[0]) for share in (False, True)]
    assert sharing_gain(ratio) == pytest.approx(tokens[0] / tokens[1])


def test_shapes_have_the_weights_their_names_say() -> None:
    millions = {name: num_weights(name) / 1e6 for name in ("7m", "25m", "0.5b", "1.5b", "8b", "70b")}
    millions |= {name: num_weights(name) / 1e6 for name in ("qwen3_5-7m", "lfm2-7m")}
    assert millions == pytest.approx(
        {
            "qwen3_5-7m": 7.5,
            "lfm2-7m": 7.3,
            "7m": 7.3,
            "25m": 24.7,
            "0.5b": 494,
            "1.5b": 1543,
            "8b": 8030,
            "70b": 70550,
        },
        rel=0.02,
    )


def test_what_limits_a_projection_is_the_slower_of_computing_and_communicating() -> None:
    lengths = MIXES["hh-like"].draw(512, seed=0)

    def pairs_a_second(**changes: float) -> float:
        cluster = Cluster(**changes)  # type: ignore[arg-type]
        return project(
            SHAPE, lengths, cluster, num_weights=1e6, num_gpus=16, pairs_per_step=128
        ).pairs_per_second

    fast_network = {"network_bytes_a_second": 1e18}
    assert pairs_a_second(**fast_network, mfu=0.4) == pytest.approx(
        2 * pairs_a_second(**fast_network, mfu=0.2)
    )
    slow_network = {"network_bytes_a_second": 1.0}
    assert pairs_a_second(**slow_network, mfu=0.4) == pairs_a_second(**slow_network, mfu=0.2)


def test_one_gpu_computes_every_pair_s_flops_at_the_assumed_rate_and_moves_nothing() -> None:
    lengths, cluster = MIXES["hh-like"].draw(256, seed=0), Cluster()
    shape = flops_shape("tiny")
    alone = project(shape, lengths, cluster, num_weights=1e6, num_gpus=1, pairs_per_step=64)
    flops = 64 * float(pair_flops(shape, lengths, share_prompt=True, passes=ALL_PASSES).mean())
    assert alone.compute_seconds == pytest.approx(flops / (cluster.peak_flops * cluster.mfu))
    assert alone.communication_seconds == 0.0 and alone.imbalance == 1.0
