"""A model in shards or copies on two processes: the same weights, log-probs and gradients as on one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.loss_options import loss_options
from support.tiny_adapters import saved_adapter
from support.tiny_models import FAMILIES as TINY
from support.tiny_models import VOCABULARY, tiny_model
from support.two_ranks import run_on_ranks
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from dpo_pack.losses import LOSSES, Objective, PairLogps, ScoredPairs, weighted_losses
from dpo_pack.model.families import FAMILIES
from dpo_pack.model.layout import Group, Row, layout_row, packed_row, padded_row
from dpo_pack.model.parallel import ALONE, Strategy, distribute_policy, full_state, is_sharded, shard_model
from dpo_pack.model.scorer import CompletionLogps, LoadedModel, Precision
from dpo_pack.proofs.start_up import prove
from dpo_pack.recipe.load import Recipe, parse_recipe
from dpo_pack.run.models import load_weights, new_adapter, resolve_policy
from dpo_pack.system import ranks
from dpo_pack.system.errors import UnsupportedModelError
from dpo_pack.training.coupling import row_tangents
from dpo_pack.training.metrics import PairValues
from dpo_pack.training.nonfinite import NonfiniteGuard, skip_update_if
from dpo_pack.training.optim import adamw, clip_gradients

# peft reads an attribute that transformers has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
CPU = torch.device("cpu")
FLOAT32 = Precision(parameters=torch.float32, autocast=None)
GATHERED = Precision(parameters=torch.float32, autocast=None, gathered=torch.bfloat16)
BFLOAT16 = Precision(parameters=torch.bfloat16, autocast=None)
LORA = {"lora": {"r": 3, "alpha": 6}}
# name -> (model directory, `model` section, options of fsdp2; None: ddp)
SETTINGS: dict[str, tuple[str, dict[str, Any], dict[str, Any] | None]] = {
    "ddp": ("llama", {}, None),
    "ddp, tied": ("tied", {}, None),
    "ddp, adapter": ("adapter", {}, None),
    "shards": ("llama", {}, {}),
    "shards, tied": ("tied", {}, {}),
    "shards, checkpointed": ("llama", {"gradient_checkpointing": True}, {}),
    "shards, new adapter": ("llama", LORA, {}),
    "shards, adapter": ("adapter", {}, {}),
    "shards, unsharded gradients": ("llama", {}, {"accumulate_unsharded": True}),
    "hybrid": ("llama", {}, {"mesh": (2, 1)}),
}


def strategy_of(options: dict[str, Any] | None) -> Strategy:
    if options is None:
        return Strategy(name="ddp", reason="a test")
    shape = options.get("mesh", (2,))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    return Strategy(name="fsdp2", reason="a test", **{**options, "mesh": mesh})


def recipe_of(path: Path, section: dict[str, Any], *, packed: bool = True) -> Recipe:
    return parse_recipe(
        {
            "output_dir": "unused",
            "model": {"path": str(path), **section},
            "data": {"train": "unused.jsonl"},
            "packing": {"mode": "packed" if packed else "padded"},
        }
    )


def make_rows(*, packed: bool = True) -> list[Row]:
    random = np.random.default_rng(0)

    def group(context: int, chosen: int, rejected: int) -> Group:
        contents = [random.integers(3, VOCABULARY, count) for count in (context, chosen, rejected)]
        return Group(context=contents[0], completions=tuple(contents[1:]))

    rows = [[group(9, 4, 6), group(3, 1, 1)], [group(17, 5, 2)], [group(4, 8, 8), group(12, 3, 7)]]
    if packed:
        return [packed_row(layout_row(groups, share_prompt=True), CPU) for groups in rows]
    return [padded_row(groups, device=CPU) for groups in rows]


def backward(sums: Tensor) -> None:
    (sums * torch.linspace(-1.0, 1.0, len(sums))).sum().backward()


def gradients(loaded: LoadedModel) -> dict[str, Tensor]:
    grads = {name: p.grad for name, p in loaded.model.named_parameters() if p.grad is not None}
    return {name: g.full_tensor() if isinstance(g, DTensor) else g.clone() for name, g in grads.items()}


def loaded_policy(recipe: Recipe, precision: Precision, strategy: Strategy = ALONE) -> LoadedModel:
    facts = resolve_policy(recipe, precision)
    return load_weights(recipe, facts, device=CPU, strategy=strategy, adapter=new_adapter(recipe))


def compare(
    recipe: Recipe, strategy: Strategy, rows: Sequence[Row], *, precision: Precision = FLOAT32
) -> tuple[float, float]:
    """(largest difference in a log-prob, norm of that in the gradient, relative) from one process.

    Rank 0 has the first two rows, rank 1 the third and an idle one. Two rounds, because DDP finds only in the
    second that a parameter had no gradient in the first.
    """
    plain = Precision(parameters=precision.gathered or precision.parameters, autocast=None)
    alone = loaded_policy(recipe, plain, strategy=ALONE)
    shared = loaded_policy(recipe, precision, strategy=strategy)
    assert is_sharded(shared.model) == strategy.shards
    expected = []
    for row in rows:
        expected.append(alone.scorer(row).sums)
        backward(expected[-1] / ranks.num_ranks())
    policy = distribute_policy(shared.scorer, strategy)
    mine = [0, 1] if ranks.is_first() else [2]
    for _ in range(2):
        shared.scorer.zero_grad(set_to_none=not policy.keeps_gradients)
        error = 0.0
        for number in mine:
            with policy.accumulating(is_last=number == 1):
                sums = policy(rows[number]).sums
                error = max(error, float((sums - expected[number]).detach().abs().max()))
                backward(sums)
        if not ranks.is_first():
            with policy.accumulating(is_last=True):
                policy.idle(rows[0])
    ours, theirs = gradients(shared), gradients(alone)
    assert ours.keys() == theirs.keys() and num_decayed(shared.scorer) == num_decayed(alone.scorer)
    difference = torch.cat([(ours[name].double() - theirs[name]).flatten() for name in theirs])
    whole = torch.cat([grad.flatten().double() for grad in theirs.values()])
    return error, float(difference.norm() / whole.norm())


def num_decayed(policy: CompletionLogps) -> list[int]:
    """How many parameters each group of the optimizer has: those that decay, and those that do not."""
    optimizer = adamw(policy, lr=1e-2, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)
    return [len(group["params"]) for group in optimizer.param_groups]


def write_models(directory: Path) -> None:
    for family in ("deepseek_v3", "ernie4_5_moe"):
        model = tiny_model(family)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.linspace(-0.1, 0.1, buffer.numel()))
        model.save_pretrained(directory / family)
    tiny_model("llama").save_pretrained(directory / "llama")
    tiny_model("llama", tie_word_embeddings=True).save_pretrained(directory / "tied")
    saved_adapter(directory / "adapter", directory / "llama")


def _check_settings(directory: Path) -> dict[str, tuple[float, float]]:
    errors = {}
    for name, (model, section, options) in SETTINGS.items():
        errors[name] = compare(recipe_of(directory / model, section), strategy_of(options), make_rows())
    recipe = recipe_of(directory / "llama", {})
    errors["gathered in bf16"] = compare(recipe, strategy_of({}), make_rows(), precision=GATHERED)
    errors["in bf16"] = compare(recipe, strategy_of({}), make_rows(), precision=BFLOAT16)
    adapted = recipe_of(directory / "adapter", {})
    errors["adapter of bf16"] = compare(adapted, strategy_of({}), make_rows(), precision=BFLOAT16)
    _check_loading(directory)
    _check_types(directory)
    _check_first_pass_of_a_reference(directory)
    _check_gradients_stay_in_buckets(recipe)
    for options in (None, {}, {"mesh": (2, 1)}):
        _check_nonfinite(recipe, strategy_of(options))
    _check_coupling()
    return errors


def _check_loading(directory: Path) -> None:
    """Only rank 0 reads weights, a model has the same everywhere, and rank 0 gets them back."""
    devices: set[str] = set()

    def watched_shard(scorer: Any, *arguments: Any) -> None:
        devices.update(parameter.device.type for parameter in scorer.parameters())
        shard_model(scorer, *arguments)

    strategy = strategy_of({})
    models: list[tuple[str, dict[str, Any]]] = [("tied", {}), ("llama", LORA), ("adapter", {})]
    for model, section in models:
        recipe = recipe_of(directory / model, section)
        alone = loaded_policy(recipe, FLOAT32)
        devices.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("dpo_pack.run.models.shard_model", watched_shard)
            if not ranks.is_first():
                reading = "transformers.AutoModelForCausalLM.from_pretrained"
                patch.setattr(reading, lambda *_, **__: pytest.fail("weights were read"))
            loaded = loaded_policy(recipe, FLOAT32, strategy=strategy)
        assert devices == {"cpu" if ranks.is_first() else "meta"}
        state, expected = full_state(loaded.model), alone.model.state_dict()
        assert state.keys() == (expected.keys() if ranks.is_first() else set())
        assert all(torch.equal(state[name], expected[name]) for name in state)
        head, embeddings = loaded.model.get_output_embeddings(), loaded.model.get_input_embeddings()
        assert (head.weight is embeddings.weight) == (model == "tied")
        proofs = prove(loaded.scorer, CPU)
        assert len(proofs) == 6 and all(proof.passed for proof in proofs)
        assert all(isinstance(p, DTensor) for p in loaded.scorer.parameters())


def _check_types(directory: Path) -> None:
    """Buffers that a family keeps in fp32 are so on all ranks; trained weights of two types are refused."""
    recipe, strategy = recipe_of(directory / "deepseek_v3", {}), strategy_of({})
    alone = loaded_policy(recipe, BFLOAT16)
    shared = loaded_policy(recipe, BFLOAT16, strategy=strategy)
    buffers, expected = dict(shared.model.named_buffers()), dict(alone.model.named_buffers())
    assert buffers.keys() == expected.keys()
    assert all(buffers[name].dtype == tensor.dtype for name, tensor in expected.items())
    assert all(map(torch.equal, buffers.values(), expected.values()))
    (bias,) = (name for name in buffers if name.endswith("e_score_correction_bias"))
    assert buffers[bias].dtype == torch.float32 and buffers[bias].any()
    row = make_rows()[0]
    assert torch.equal(shared.scorer(row).sums, alone.scorer(row).sums)
    recipe = recipe_of(directory / "ernie4_5_moe", {})
    with pytest.raises(UnsupportedModelError, match=r"^model\.dtype: .*gate\.weight in float32 .*: float32"):
        loaded_policy(recipe, BFLOAT16, strategy=strategy)


def _check_first_pass_of_a_reference(directory: Path) -> None:
    """Where proofs are remembered, the first forward is the base's: its adapter is trained all the same."""
    recipe = recipe_of(directory / "llama", LORA)
    loaded = loaded_policy(recipe, GATHERED, strategy=strategy_of({}))
    row = make_rows()[0]
    with loaded.as_reference(), torch.no_grad():
        loaded.scorer(row)
    backward(loaded.scorer(row).sums)
    assert any(grad.any() for grad in gradients(loaded).values())


def _check_gradients_stay_in_buckets(recipe: Recipe) -> None:
    """From the first row on; in the second round DDP makes its buckets anew.

    Before the fourth they are dropped, as where an optimizer that is not fused must leave a step out.
    """
    strategy = strategy_of(None)
    loaded = loaded_policy(recipe, FLOAT32, strategy=strategy)
    policy, rows = distribute_policy(loaded.scorer, strategy), make_rows()
    assert policy.keeps_gradients

    def places() -> list[int]:
        return [p.grad.data_ptr() for p in loaded.scorer.parameters() if p.grad is not None]

    before, found = places(), []
    for number in range(4):
        for row, is_last in zip(rows[:2], (False, True), strict=True):
            with policy.accumulating(is_last=is_last):
                backward(policy(row).sums)
        assert places() == before or number in (1, 3)
        before = places()
        found.append(gradients(loaded))
        assert found[-1].keys() == found[0].keys() and len(before) == len(list(loaded.scorer.parameters()))
        assert all(torch.equal(grad, found[0][name]) for name, grad in found[-1].items())
        loaded.scorer.zero_grad(set_to_none=number == 2)


def _check_nonfinite(recipe: Recipe, strategy: Strategy) -> None:
    """What is not finite on one rank stops the update on all, and a step after it is that of one process."""
    models = [loaded_policy(recipe, FLOAT32, strategy=of) for of in (strategy, ALONE)]
    scorers = [loaded.scorer for loaded in models]
    optimizers = [adamw(s, lr=1e-2, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1) for s in scorers]
    guard = NonfiniteGuard(stops=False, device=CPU)
    row, values = make_rows()[0], PairValues.none(CPU)
    pairs = np.zeros(0, dtype=np.int64)
    for poison in ("loss", "gradient", None):
        norms = []
        for scorer, optimizer in zip(scorers, optimizers, strict=True):
            backward(scorer(row).sums)
            before = [p.detach().clone() for p in scorer.parameters()]
            is_poisoned = poison is not None and scorer is scorers[0] and not ranks.is_first()
            if is_poisoned and poison == "gradient":
                grad = next(scorer.parameters()).grad
                assert grad is not None
                (grad.to_local() if isinstance(grad, DTensor) else grad)[-1] = torch.nan
            losses = [torch.inf] if is_poisoned and poison == "loss" else []
            table = values.table.new_tensor(losses)[:, None].expand(-1, values.table.shape[1])
            norms.append(clip_gradients(scorer, 0.5))
            if poison is None or scorer is scorers[0]:
                must_skip = guard.check(1, PairValues(table=table), norms[-1], pairs)
                skip_update_if(must_skip, optimizer)
                optimizer.step()
            optimizer.zero_grad()
            moved = [not torch.equal(p, old) for p, old in zip(scorer.parameters(), before, strict=True)]
            assert any(moved) == (poison is None)
        if poison != "gradient":
            torch.testing.assert_close(norms[0], norms[1])
    for ours, alone in zip(*(scorer.parameters() for scorer in scorers), strict=True):
        whole = ours.full_tensor() if isinstance(ours, DTensor) else ours
        torch.testing.assert_close(whole, alone, rtol=0, atol=1e-6)


def _check_coupling() -> None:
    """A rank without rows takes part in what couples the pairs of all."""
    objective = Objective(terms=((LOSSES["aot"], 1.0),), options=loss_options(beta=0.3, label_smoothing=0.1))
    logps = -20 * torch.rand(5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    tokens = torch.ones(5, dtype=torch.int64)
    policy, reference = (
        PairLogps(
            chosen=logps[:, side], rejected=logps[:, side + 1], chosen_tokens=tokens, rejected_tokens=tokens
        )
        for side in (0, 2)
    )
    pairs = ScoredPairs(policy=policy, reference=reference, pair_weights=torch.ones(5, dtype=torch.float64))
    rows = [pairs] if ranks.is_first() else []
    tangents = row_tangents(objective, rows, mean_chosen_tokens=1.0, device=CPU)
    assert len(tangents) == len(rows)
    if tangents:
        expected = weighted_losses(objective, pairs, mean_chosen_tokens=1.0)
        torch.testing.assert_close(tangents[0].values, expected)


@pytest.mark.multiprocess
def test_copies_and_shards_have_the_log_probs_and_gradients_of_one_process(tmp_path: Path) -> None:
    write_models(tmp_path)
    for errors in run_on_ranks(_check_settings, tmp_path):
        assert len(errors) == len(SETTINGS) + 3
        for name, (logp, gradient) in errors.items():
            # One process adds up its rows' gradients in bf16.
            assert logp < 1e-4 and gradient < (5e-3 if "bf16" in name else 1e-5), (name, logp, gradient)


def _check_families(directory: Path, families: list[str]) -> dict[str, dict[str, tuple[float, float]]]:
    errors: dict[str, dict[str, tuple[float, float]]] = {}
    for family in families:
        packed = FAMILIES[family].packs
        recipe = recipe_of(directory / family, {}, packed=packed)
        rows = make_rows(packed=packed)
        errors[family] = {
            "ddp": compare(recipe, strategy_of(None), rows),
            "fsdp2": compare(recipe, strategy_of({}), rows),
        }
    return errors


@pytest.mark.slow
@pytest.mark.multiprocess
def test_every_family_can_be_copied_and_sharded(tmp_path: Path) -> None:
    families = sorted(TINY.keys() & CONFIG_MAPPING.keys())  # an older transformers lacks the newest
    for family in families:
        tiny_model(family).save_pretrained(tmp_path / family)
    for errors in run_on_ranks(_check_families, tmp_path, families):
        wrong = {f: by_name for f, by_name in errors.items() if max(e[1] for e in by_name.values()) > 1e-4}
        assert not wrong
