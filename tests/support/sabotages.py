"""Ways to break packed rows on purpose, and the start-up proof that must notice each."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.llama.modeling_llama import LlamaAttention

from dpo_pack import proofs
from dpo_pack.model.attention import ATTENTION_NAME, AttentionBackend, row_attention, segments
from dpo_pack.model.attention.sdpa import sdpa_attention
from dpo_pack.model.attention.segments import (
    AttentionOptions,
    Gather,
    Node,
    RowSegments,
    make_gather,
    make_segments,
)
from dpo_pack.model.layout import Row, packed_row
from dpo_pack.model.logps import HeadTransform
from dpo_pack.model.recurrence import RecurrentCall, kernels
from dpo_pack.model.recurrence.kernels import PieceBatch, RowPieces
from dpo_pack.model.scorer import CompletionLogps

CPU = torch.device("cpu")
Break = Callable[[pytest.MonkeyPatch, CompletionLogps], None]


class Sabotage(NamedTuple):
    """One thing broken in the tiny model of a family; other proofs than the named one may fail too."""

    family: str
    proof: str
    break_it: Break
    hidden_in: tuple[str, ...] = ()  # precisions whose rounding is larger than what it changes


def no_gather(patch: pytest.MonkeyPatch, scorer: CompletionLogps) -> None:
    """Tails of their own, without the prompt that they share."""

    def without_prompt(groups: Any, device: torch.device, *, share_prompt: bool) -> Row:
        row = packed_row(groups, device, share_prompt=share_prompt)
        assert row.segments is not None
        own, lengths = row.segments, row.segments.query_lengths
        tree = {"nodes": own.nodes, "leaves": own.leaves}
        alone = make_segments(lengths, lengths, device, **tree, scored_positions=own.scored_positions)
        return replace(row, segments=alone)

    patch.setattr(proofs, "packed_row", without_prompt)


def no_beginning(patch: pytest.MonkeyPatch, scorer: CompletionLogps) -> None:
    """A pair that has its beginning from the pair before it does not see it."""

    def without_it(groups: Any, device: torch.device, *, share_prompt: bool) -> Row:
        row = packed_row(groups, device, share_prompt=share_prompt)
        assert row.segments is not None
        old, leaves = row.segments.nodes, row.segments.leaves
        has_tails = {node.parent for node in old}
        nodes = tuple(
            node._replace(parent=-1)
            if number in has_tails and node.parent >= 0 and sum(old[node.parent][:2]) != node.start
            else node
            for number, node in enumerate(old)
        )
        assert nodes != old
        keys = [sum(end - start for start, end in segments.node_runs(nodes, leaf)) for leaf in leaves]
        tree = {"nodes": nodes, "leaves": leaves, "kv_gather": row.segments.kv_gather}
        lengths, scored = row.segments.query_lengths, row.segments.scored_positions
        return replace(row, segments=make_segments(lengths, keys, device, **tree, scored_positions=scored))

    patch.setattr(proofs, "packed_row", without_it)


def change_paths(change: Callable[[tuple[Node, ...]], tuple[Node, ...]]) -> Break:
    """Keys of paths through other nodes."""
    runs = segments.node_runs

    def changed(nodes: tuple[Node, ...], last: int) -> list[tuple[int, int]]:
        return runs(change(nodes), last)

    return lambda patch, scorer: patch.setattr(segments, "node_runs", changed)


def moved(nodes: tuple[Node, ...]) -> tuple[Node, ...]:
    """Off by one: of what a path does not add, each key is its neighbour's."""
    return tuple(
        node._replace(start=node.start - 1) if node.parent < 0 and node.start else node for node in nodes
    )


def another_beginning(nodes: tuple[Node, ...]) -> tuple[Node, ...]:
    """The last tokens of the row in place of a beginning that two pairs have."""
    parents, end = {node.parent for node in nodes}, nodes[-1].start + nodes[-1].length
    return tuple(
        node._replace(start=end - node.length) if number in parents and node.length == 6 else node
        for number, node in enumerate(nodes)
    )


def shifted_position(patch: pytest.MonkeyPatch, scorer: CompletionLogps) -> None:
    """Positions of second tails start one too late."""

    def shifted(groups: Any, device: torch.device, *, share_prompt: bool) -> Row:
        row = packed_row(groups, device, share_prompt=share_prompt)
        assert row.segments is not None
        positions = row.position_ids.clone()
        first = 0
        for num_queries, num_keys in zip(row.segments.query_lengths, row.segments.key_lengths, strict=True):
            if num_queries != num_keys:
                positions[:, first : first + num_queries] += 1
            first += num_queries
        return replace(row, position_ids=positions)

    patch.setattr(proofs, "packed_row", shifted)


def change_mask(change: Callable[[int, int, int | None], tuple[int, int | None]]) -> Break:
    """The mask of other last queries, or of another window."""
    mask = RowSegments.mask

    def changed(
        segments: RowSegments, num_queries: int, num_keys: int, window: int | None, dtype: torch.dtype
    ) -> Tensor:
        offset, window = change(num_queries, num_keys, window)
        return mask(segments, num_queries, num_keys, window, dtype).roll(-offset, dims=1)

    return lambda patch, scorer: patch.setattr(RowSegments, "mask", changed)


# The first query sees the first key only, as torch's `is_causal` has it when lengths differ.
top_left_causal = change_mask(lambda queries, keys, window: (keys - queries, window))
wide_window = change_mask(lambda queries, keys, window: (0, window and window + 1))


def change_seam(**changes: Any) -> Break:
    def changed(*arguments: Any, **options: Any) -> Any:
        return row_attention(*arguments, **{**options, **changes})

    return lambda patch, scorer: AttentionInterface.register(ATTENTION_NAME, changed)


def change_backend(attention: Callable[..., Tensor]) -> Break:
    def replaced(patch: pytest.MonkeyPatch, scorer: CompletionLogps) -> None:
        scorer.backend = attention

    return replaced


def whole_row(
    query: Tensor, key: Tensor, value: Tensor, segments: RowSegments, options: AttentionOptions
) -> Tensor:
    """Ignores where sequences begin: causal over everything in the row."""
    one = replace(segments, query_lengths=(len(query),), key_lengths=(len(key),), kv_gather=None)
    return sdpa_attention(query, key, value, one, replace(options, window=None))


def later_keys(query: Tensor, key: Tensor, value: Tensor, *inputs: Any) -> Tensor:
    """Each token sees the next one too, and the first no longer."""
    return sdpa_attention(query, key.roll(-1, dims=0), value.roll(-1, dims=0), *inputs)


def change_options(change: Callable[[AttentionOptions], AttentionOptions]) -> AttentionBackend:
    return lambda query, key, value, segments, options: sdpa_attention(
        query, key, value, segments, change(options)
    )


without_softcap = change_options(lambda options: replace(options, softcap=None))
without_sinks = change_options(lambda options: replace(options, sinks=None))
wrong_scale = change_options(lambda options: replace(options, scale=options.scale * 1.01))


def wrong_backward(factor: float) -> Break:
    """Right forward; the keys' gradient is off by a factor."""

    def wrong(query: Tensor, key: Tensor, *inputs: Any) -> Tensor:
        if key.requires_grad:
            key = key.clone()
            key.register_hook(lambda grad: factor * grad)
        return sdpa_attention(query, key, *inputs)

    return change_backend(wrong)


def forgotten_transform(patch: pytest.MonkeyPatch, scorer: CompletionLogps) -> None:
    assert scorer.transform != HeadTransform()
    scorer.transform = HeadTransform()


def stock_path(patch: pytest.MonkeyPatch, scorer: CompletionLogps) -> None:
    """Our name leads to transformers' own sdpa, which knows nothing of rows."""
    AttentionInterface.register(ATTENTION_NAME, sdpa_attention_forward)


def keyword_eater(patch: pytest.MonkeyPatch, scorer: CompletionLogps) -> None:
    """A layer that does not pass our arguments on."""
    forward = LlamaAttention.forward

    def forgetful(module: LlamaAttention, *arguments: Any, row_segments: Any = None, **options: Any) -> Any:
        return forward(module, *arguments, **options)

    patch.setattr(LlamaAttention, "forward", forgetful)


def swapped_tails(patch: pytest.MonkeyPatch, scorer: CompletionLogps) -> None:
    """Chosen log-probs are called rejected's, and the reverse."""
    forward = scorer.forward

    def swapped(row: Row) -> Any:
        output = forward(row)
        return output._replace(sums=output.sums.view(-1, 2).flip(1).flatten())

    patch.setattr(scorer, "forward", swapped)


def answers_from_memory(patch: pytest.MonkeyPatch, scorer: CompletionLogps) -> None:
    """The same log-probs whatever the tokens: no leak could ever show."""
    forward, memory = scorer.forward, []

    def remembering(row: Row) -> Any:
        memory.append(forward(row))
        return memory[0]

    patch.setattr(scorer, "forward", remembering)


def no_number(patch: pytest.MonkeyPatch, scorer: CompletionLogps) -> None:
    """One sequence's log-prob is NaN, whatever changes."""
    forward = scorer.forward
    last = [0.0] * 7 + [float("nan")]

    def with_one(row: Row) -> Any:
        output = forward(row)
        return output._replace(sums=output.sums + torch.tensor(last))

    patch.setattr(scorer, "forward", with_one)


def leak_by_a_hair(patch: pytest.MonkeyPatch, scorer: CompletionLogps) -> None:
    """A millionth of the row's mean value comes along with every token."""

    def leaky(query: Tensor, key: Tensor, value: Tensor, *inputs: Any) -> Tensor:
        return sdpa_attention(query, key, value, *inputs) + 1e-6 * value.mean()

    scorer.backend = leaky


# Recurrent layers, see dpo_pack/model/recurrence.


def change_recurrence(change: Callable[[RecurrentCall], Any], *names: str) -> Break:
    """What the layers' calls give, by name in KERNELS."""

    def changed(call: RecurrentCall) -> Any:
        return change(call) if call.name in names else call.run()

    return lambda patch, scorer: setattr(scorer, "recurrence", changed)


def on_whole_row(call: RecurrentCall) -> Any:
    """The family's own function, which knows nothing of sequences."""
    return call.stock(*call.arguments, **call.options)


def from_nothing(call: RecurrentCall) -> Any:
    """Tails begin without their group's shared part."""
    row = call.options["row_segments"]
    firsts = np.cumsum((0, *row.query_lengths[:-1])).tolist()
    nodes = tuple(Node(first, count, -1) for first, count in zip(firsts, row.query_lengths, strict=True))
    alone = replace(row, nodes=nodes, leaves=tuple(range(len(nodes))), kept={})
    return replace(call, options={**call.options, "row_segments": alone}).run()


def later_tokens(call: RecurrentCall) -> Any:
    """Each token gets the result of the next but one."""
    return call.run().roll(-2, dims=2)


def leak_of_the_row(call: RecurrentCall) -> Any:
    """A millionth of the row's mean value comes along with every token."""
    return call.run() + 1e-6 * call.arguments[0].mean()


def change_pieces(change: Callable[[RowPieces], RowPieces]) -> Break:
    make = kernels.row_pieces

    def changed(segments: RowSegments, *, padded: bool) -> RowPieces:
        return change(make(segments, padded=padded))

    return lambda patch, scorer: patch.setattr(kernels, "row_pieces", changed)


def from_another(level: int) -> Callable[[RowPieces], RowPieces]:
    """Each piece below this level starts from the final state of the piece before its own parent."""

    def change(made: RowPieces) -> RowPieces:
        to_next = list(made.to_next)
        parents, number = to_next[level].index.numpy(), to_next[level].size
        to_next[level] = make_gather((parents - 1) % number, number, CPU)
        return replace(made, to_next=to_next)

    return change


def without_gradient(made: RowPieces) -> RowPieces:
    """No gradient flows from a piece into its parent."""

    def cut(gather: Gather) -> Any:
        return lambda states: gather(states.detach())

    return replace(made, to_next=[cut(gather) for gather in made.to_next])


def pads_decay(made: RowPieces) -> RowPieces:
    """A state decays at the places of a batch that hold no token, as it would in a padded batch."""

    def decaying(take: Gather, states: Tensor) -> Tensor:
        taken = take(states)
        if states.min() < 0 < states.max():  # neither steps nor logarithms of decays
            return taken
        return torch.where(take(torch.ones_like(states)) == 0, states.sign().mean(), taken)

    def change(batch: PieceBatch) -> PieceBatch:
        take: Any = functools.partial(decaying, batch.take)
        return replace(batch, take=take)

    levels = [[change(batch) for batch in level] for level in made.levels]
    return replace(made, levels=levels)


def stock_layer(patch: pytest.MonkeyPatch, scorer: CompletionLogps) -> None:
    """One recurrent layer is as transformers wrote it."""
    wrapped = next(m for m in scorer.model.modules() if "forward" in vars(m))
    del vars(wrapped)["forward"]


_DELTA, _CONVOLUTION = "torch_chunk_gated_delta_rule", "causal_conv1d_fn"
_MAMBA2, _KIMI = "mamba2_chunk_scan", "chunk_kimi_delta_attention"


LOW = ("bfloat16 autocast", "float16 autocast", "bfloat16")


SABOTAGES: dict[str, Sabotage] = {
    "no gather": Sabotage("llama", "equivalence", no_gather),
    "no beginning": Sabotage("llama", "equivalence", no_beginning),
    "wrong path": Sabotage("llama", "equivalence", change_paths(moved)),
    "path through another prompt": Sabotage("llama", "equivalence", change_paths(another_beginning)),
    "shifted rotary position": Sabotage("llama", "equivalence", shifted_position, hidden_in=("bfloat16",)),
    "shifted learned position": Sabotage("gpt2", "equivalence", shifted_position),
    "swapped tails": Sabotage("llama", "equivalence", swapped_tails),
    "sinks forgotten": Sabotage("gpt_oss", "equivalence", change_backend(without_sinks)),
    "softcap forgotten, by a kernel": Sabotage("gemma2", "functions", change_backend(without_softcap)),
    "sinks forgotten, by a kernel": Sabotage("gpt_oss", "functions", change_backend(without_sinks)),
    "wrong scale, by a kernel": Sabotage("llama", "functions", change_backend(wrong_scale)),
    "top-left causal mask": Sabotage("llama", "functions", top_left_causal),
    "window too wide, by a kernel": Sabotage("mistral", "functions", wide_window),
    "slightly wrong backward": Sabotage("llama", "functions", wrong_backward(0.999), hidden_in=LOW),
    "wrong backward": Sabotage("llama", "functions", wrong_backward(0.9)),
    "backward of NaN": Sabotage("llama", "functions", wrong_backward(float("nan"))),
    "row's metadata ignored, by a kernel": Sabotage("llama", "functions", change_backend(whole_row)),
    "row's metadata ignored": Sabotage("llama", "isolation", change_backend(whole_row)),
    "a small leak": Sabotage("llama", "isolation", leak_by_a_hair, hidden_in=LOW),
    "a log-prob that is no number": Sabotage("llama", "isolation", no_number),
    "later keys seen": Sabotage("llama", "isolation", change_backend(later_keys)),
    "an answer from memory": Sabotage("llama", "isolation", answers_from_memory),
    "window too wide in the seam": Sabotage("mistral", "wiring", change_seam(sliding_window=8)),
    "window forgotten in the seam": Sabotage("mistral", "wiring", change_seam(sliding_window=None)),
    "window on global layers": Sabotage("gemma2", "wiring", change_seam(sliding_window=7)),
    "softcap forgotten in the seam": Sabotage("gemma2", "wiring", change_seam(softcap=None)),
    "sinks forgotten in the seam": Sabotage("gpt_oss", "wiring", change_seam(s_aux=None)),
    "stock path": Sabotage("llama", "wiring", stock_path),
    "a layer drops our arguments": Sabotage("llama", "wiring", keyword_eater),
    **{
        f"{what}, {family}": Sabotage(family, proof, break_it)
        for family, name in {"qwen3_5_text": _DELTA, "bamba": _MAMBA2, "kimi_linear": _KIMI}.items()
        for what, proof, break_it in [
            ("state leaks into the next sequence", "isolation", change_recurrence(on_whole_row, name)),
            ("tail starts from zero", "functions", change_recurrence(from_nothing, name)),
            ("forks from another beginning", "functions", change_pieces(from_another(0))),
            ("tail forks from another prompt", "functions", change_pieces(from_another(1))),
            ("no gradient into the shared part", "functions", change_pieces(without_gradient)),
            ("pads decay the state", "functions", change_pieces(pads_decay)),
            ("convolution across a boundary", "isolation", change_recurrence(on_whole_row, _CONVOLUTION)),
        ]
        if (what, name) != ("pads decay the state", _KIMI)  # its kernel gets no pads
    },
    **{
        f"{what}, {family}": Sabotage(family, proof, break_it, hidden_in=hidden)
        for family in ("lfm2", "falcon_h1")
        for what, proof, break_it, hidden in [
            ("convolution across a boundary", "isolation", change_recurrence(on_whole_row, _CONVOLUTION), ()),
            ("convolution without history", "functions", change_recurrence(from_nothing, _CONVOLUTION), ()),
            ("convolution sees later tokens", "isolation", change_recurrence(later_tokens, _CONVOLUTION), ()),
            ("a small leak", "isolation", change_recurrence(leak_of_the_row, _CONVOLUTION), LOW),
            ("a recurrent layer bypasses the seam", "wiring", stock_layer, ()),
        ]
    },
    "logit softcap forgotten": Sabotage("nanochat", "equivalence", forgotten_transform),
    "logit scale forgotten": Sabotage("cohere", "equivalence", forgotten_transform),
    "logit divisor forgotten": Sabotage("granite", "equivalence", forgotten_transform),
}
