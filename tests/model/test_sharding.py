"""A model in shards or copies on two processes: the same weights, log-probs and gradients as on one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.family_errors import packs
from support.groups import CPU, make_row, random_groups
from support.marks import slow
from support.tiny_adapters import saved_adapter
from support.tiny_models import FAMILIES as TINY
from support.tiny_models import tiny_model
from support.two_ranks import run_on_ranks
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import dpo_pack.model.building as building
from dpo_pack.model.building import load_model
from dpo_pack.model.fast_layers import compile_layers
from dpo_pack.model.layout import Row
from dpo_pack.model.logps import compile_head
from dpo_pack.model.parallel import ALONE, Strategy, distribute_policy, full_state, is_sharded, shard_model
from dpo_pack.model.scorer import CompletionLogps, LoadedModel, Precision
from dpo_pack.proofs.start_up import compiling_obstacle
from dpo_pack.recipe.load import Recipe, parse_recipe
from dpo_pack.run.models import resolve_model
from dpo_pack.system import ranks
from dpo_pack.system.errors import UnsupportedModelError
from dpo_pack.training.optim import NonfiniteGuard, build_optimizer, clip_gradients

# peft reads an attribute that transformers has renamed.
pytestmark = pytest.mark.multiprocess
FLOAT32 = Precision(parameters=torch.float32, autocast=None)
GATHERED = Precision(parameters=torch.float32, autocast=None, gathered=torch.bfloat16)
BFLOAT16 = Precision(parameters=torch.bfloat16, autocast=None)
AUTOCAST = Precision(parameters=torch.float32, autocast=torch.bfloat16)
LORA = {"lora": {"r": 3, "alpha": 6}}
RECOMPUTED = {"gradient_checkpointing": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What is loaded, and how ranks divide it."""

    model: str = "llama"  # a directory of `models`
    section: dict[str, Any] = field(default_factory=dict)  # of the recipe: `model`
    fsdp2: dict[str, Any] | None = field(default_factory=dict)  # its options; None: ddp
    precision: Precision = FLOAT32


SETTINGS = {
    "shards": {
        "a model": Setting(),
        "an adapter": Setting(model="adapter"),
        "gradients that stay whole until the last row": Setting(fsdp2={"accumulate_unsharded": True}),
        "shards within nodes and copies between them": Setting(fsdp2={"mesh": (2, 1)}),
    },
    "copies": {name: Setting(model=name, fsdp2=None) for name in ("llama", "tied", "adapter")},
    "more shards": {
        "tied embeddings": Setting(model="tied"),
        "recomputed activations": Setting(section=RECOMPUTED),
        "recomputed activations but products": Setting(section={"gradient_checkpointing": "selective"}),
        "a new adapter": Setting(section=LORA),
    },
    "compiled": {
        "copies": Setting(section={"compile": True}, fsdp2=None),
        "shards": Setting(section={"compile": True}),
        "whole gradients": Setting(section={"compile": True}, fsdp2={"accumulate_unsharded": True}),
    },
    # One process adds up its rows' gradients in bf16.
    "gathered in bf16": {"a model": Setting(precision=GATHERED)},
    "in bf16": {name: Setting(model=name, precision=BFLOAT16) for name in ("llama", "adapter")},
}


class Gathers(TorchDispatchMode):
    """Counts the bytes that this rank gives to collectives which gather one tensor."""

    bytes_sent = 0
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name() == "c10d::_allgather_base_":
            self.bytes_sent += args[1].nbytes
            self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of models. Nobody may write there."""
    directory = tmp_path_factory.mktemp("models")
    tiny_model("llama").save_pretrained(directory / "llama")
    tiny_model("llama", tie_word_embeddings=True).save_pretrained(directory / "tied")
    tiny_model("llama", intermediate_size=33).save_pretrained(directory / "uneven")
    saved_adapter(directory / "adapter", directory / "llama")
    return directory


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
    a, b, c, d, e = random_groups((9, 4, 6), (3, 1, 1), (17, 5, 2), (4, 8, 8), (12, 3, 7))
    return [make_row(groups, "shared" if packed else "padded") for groups in ([a, b], [c], [d, e])]


def backward(sums: Tensor) -> None:
    (sums * torch.linspace(-1.0, 1.0, len(sums))).sum().backward()


def gradients(loaded: LoadedModel) -> dict[str, Tensor]:
    grads = {name: p.grad for name, p in loaded.model.named_parameters() if p.grad is not None}
    return {name: g.full_tensor() if isinstance(g, DTensor) else g.clone() for name, g in grads.items()}


def loaded_policy(recipe: Recipe, precision: Precision, strategy: Strategy = ALONE) -> LoadedModel:
    facts = replace(resolve_model(recipe, CPU), precision=precision)
    return load_model(facts, device=CPU, strategy=strategy, adds_adapter=True)


def compare(
    recipe: Recipe, strategy: Strategy, rows: Sequence[Row], *, precision: Precision = FLOAT32
) -> tuple[float, float]:
    """(largest difference in a log-prob, norm of that in the gradient, relative) from one process.

    Rank 0 has the first two rows, rank 1 the third and an idle one. Two rounds, because DDP finds only in the
    second that a parameter had no gradient in the first. The one process never compiles.
    """
    plain = Precision(parameters=precision.gathered or precision.parameters, autocast=None)
    uncompiled = recipe.model.model_copy(update={"compile": False})
    alone = loaded_policy(recipe.model_copy(update={"model": uncompiled}), plain, strategy=ALONE)
    shared = loaded_policy(recipe, precision, strategy=strategy)
    assert shared.scorer.is_compiled == (recipe.model.compile is True)
    assert compiling_obstacle(shared.scorer, CPU) is None
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
                sums = policy.forward(rows[number]).sums
                error = max(error, float((sums - expected[number]).detach().abs().max()))
                backward(sums)
            if strategy.accumulate_unsharded and number == 0:
                assert all(parameter.grad is None for parameter in shared.scorer.parameters())
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
    optimizer = build_optimizer("adamw", policy, lr=1e-2, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)
    return [len(group["params"]) for group in optimizer.param_groups]


@pytest.mark.parametrize("kind", [list(SETTINGS)[0], *slow(*list(SETTINGS)[1:])])
def test_shards_and_copies_have_the_log_probs_and_gradients_of_one_process(
    kind: str, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one process does not compile."""
    monkeypatch.setattr(building, "compile_layers", partial(compile_layers, backend="aot_eager"))
    monkeypatch.setattr(building, "compile_head", partial(compile_head, backend="aot_eager"))

    def errors_of_all() -> dict[str, tuple[float, float]]:
        return {
            name: compare(
                recipe_of(models / setting.model, setting.section),
                strategy_of(setting.fsdp2),
                make_rows(),
                precision=setting.precision,
            )
            for name, setting in SETTINGS[kind].items()
        }

    for errors in run_on_ranks(errors_of_all):
        for name, (logp, gradient) in errors.items():
            assert logp < 1e-4 and gradient < (5e-3 if "bf16" in kind else 1e-5), (name, logp, gradient)


@pytest.mark.slow
def test_shards_under_autocast_send_bf16_and_have_the_bits_of_whole_weights(models: Path) -> None:
    """Two processes compute the same rows; the mean of two equal gradients is each of them."""

    def bytes_sent(scorer: CompletionLogps, row: Row) -> int:
        """By this rank, for the weights of one forward pass."""
        with Gathers() as gathers, torch.no_grad():  # type: ignore[no-untyped-call]
            scorer(row)
        return int(gathers.bytes_sent)

    def on_a_rank() -> dict[str, tuple[bool, bool, int, int]]:
        told = {}
        sections: dict[str, dict[str, Any]] = {"all": {}, "new adapter": LORA, "recomputed": RECOMPUTED}
        for name, section in sections.items():
            recipe = recipe_of(models / "uneven", section)
            alone = loaded_policy(recipe, AUTOCAST)
            shared = loaded_policy(recipe, AUTOCAST, strategy_of({}))
            same_logps = True
            for row in make_rows()[:2] * 2:
                expected, found = alone.scorer(row).sums, shared.scorer(row).sums
                same_logps &= torch.equal(found, expected)
                backward(expected)
                backward(found)
            ours, theirs = gradients(shared), gradients(alone)
            same = ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in theirs)
            wide = loaded_policy(recipe, FLOAT32, strategy_of({}))
            row = make_rows()[0]
            num_cast = sum(
                -(-weight.shape[0] // 2) * weight.shape[1:].numel()
                for layer in alone.model.model.layers
                for module in layer.modules()
                if type(module) is torch.nn.Linear
                for weight in module.parameters(recurse=False)
            )
            saved = bytes_sent(wide.scorer, row) - bytes_sent(shared.scorer, row)
            told[name] = (same_logps, same, saved, 2 * num_cast)
        return told

    for told in run_on_ranks(on_a_rank):
        for name, (same_logps, same_gradients, saved, expected) in told.items():
            assert same_logps and same_gradients and saved == expected > 0, (name, told[name])


def _steps(loaded: LoadedModel, *, stays_gathered: bool, unsharded: bool) -> tuple[list[int], dict[str, Any]]:
    """How often each of two steps of three rows gathers, and the last step's log-probs and gradients.

    A pass without gradients comes before a step's rows, as that of a live reference.
    """
    strategy = strategy_of({"accumulate_unsharded": unsharded})
    policy = distribute_policy(loaded.scorer, strategy, stays_gathered=stays_gathered)
    counts, rows, found = [], make_rows(), {}
    for _ in range(2):
        loaded.scorer.zero_grad()
        with Gathers() as gathers, policy.step(rows):  # type: ignore[no-untyped-call]
            with torch.no_grad():
                found["before"] = loaded.scorer(rows[0]).sums
            for number, row in enumerate(rows):
                with policy.accumulating(is_last=number == 2):
                    found[f"row {number}"] = policy.forward(row).sums
                    backward(found[f"row {number}"])
            for shard in _shards(loaded.scorer):
                size = ranks.num_ranks() * shard.padded_sharded_param_size.numel() * shard.orig_dtype.itemsize
                assert _held(shard) == stays_gathered * size
        counts.append(gathers.count)
        assert_shards(loaded)
    return counts, found | gradients(loaded)


def assert_shards(loaded: LoadedModel) -> None:
    assert all(isinstance(parameter, DTensor) for parameter in loaded.scorer.parameters())
    assert all(_held(shard) == 0 for shard in _shards(loaded.scorer))


def _shards(scorer: Any) -> list[Any]:
    states: list[Any] = [
        module._get_fsdp_state() for module in scorer.modules() if isinstance(module, FSDPModule)
    ]
    groups: list[Any] = [state._fsdp_param_group for state in states]
    return [shard for group in groups for shard in group.fsdp_params]


def _held(shard: Any) -> int:
    """The bytes of a gathered weight, and of what was sent of it."""
    tensors = {*shard.all_gather_outputs, *getattr(shard, "_unsharded_inner_tensors", ())}
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


@pytest.mark.slow
@pytest.mark.parametrize("unsharded", [False, True], ids=["reduced each row", "reduced once"])
def test_shards_that_stay_are_gathered_once_a_step_with_the_same_bits(unsharded: bool, models: Path) -> None:
    def on_a_rank() -> None:
        sections: list[dict[str, Any]] = [{}, LORA, RECOMPUTED]
        for section in sections:
            recipe = recipe_of(models / "uneven", section)
            layerwise, once = (loaded_policy(recipe, AUTOCAST, strategy_of({})) for _ in range(2))
            before, expected = _steps(layerwise, stays_gathered=False, unsharded=unsharded)
            after, found = _steps(once, stays_gathered=True, unsharded=unsharded)
            num_layers = len(layerwise.scorer.model.get_decoder().layers)
            # The pass without gradients gathers each layer once, each of three rows twice.
            assert before == [(1 + 2 * 3) * num_layers + 4] * 2, before
            assert after == [num_layers + 1] * 2, after
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[key], expected[key]) for key in expected)
            # A signal between rows ends a step: what is saved then must be shards.
            policy = distribute_policy(once.scorer, strategy_of({}), stays_gathered=True)
            with pytest.raises(KeyboardInterrupt), policy.step([]):
                backward(policy.forward(make_rows()[0]).sums)
                raise KeyboardInterrupt
            assert_shards(once)

    run_on_ranks(on_a_rank)


def test_gradients_of_shards_gathered_in_bf16_are_added_up_over_ranks_in_fp32(models: Path) -> None:
    """A gradient of one row is in bf16 on its rank. The sum of two such gradients has more bits."""

    def check() -> None:
        strategy = strategy_of({})
        loaded = loaded_policy(recipe_of(models / "llama", {}), GATHERED, strategy=strategy)
        backward(distribute_policy(loaded.scorer, strategy).forward(make_rows()[ranks.rank()]).sums)
        summed = gradients(loaded).values()
        assert any((gradient.bfloat16() != gradient).any() for gradient in summed)

    run_on_ranks(check)


@pytest.mark.parametrize(
    ("model", "section"),
    [("tied", {}), pytest.param("llama", LORA, marks=pytest.mark.slow), ("adapter", {})],
    ids=["tied embeddings", "a new adapter", "an adapter"],
)
def test_only_the_first_rank_reads_weights_and_it_gets_them_back_from_the_shards(
    model: str, section: dict[str, Any], models: Path
) -> None:
    def check() -> None:
        devices: set[str] = set()

        def watched_shard(scorer: Any, *arguments: Any) -> None:
            devices.update(parameter.device.type for parameter in scorer.parameters())
            shard_model(scorer, *arguments)

        recipe = recipe_of(models / model, section)
        alone = loaded_policy(recipe, FLOAT32)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("dpo_pack.model.building.shard_model", watched_shard)
            if not ranks.is_first():
                reading = "transformers.AutoModelForCausalLM.from_pretrained"
                patch.setattr(reading, lambda *_, **__: pytest.fail("weights were read"))
            loaded = loaded_policy(recipe, FLOAT32, strategy=strategy_of({}))
        assert devices == {"cpu" if ranks.is_first() else "meta"}
        state, expected = full_state(loaded.model), alone.model.state_dict()
        assert state.keys() == (expected.keys() if ranks.is_first() else set())
        assert all(torch.equal(state[name], expected[name]) for name in state)
        head, embeddings = loaded.model.get_output_embeddings(), loaded.model.get_input_embeddings()
        assert (head.weight is embeddings.weight) == (model == "tied")
        assert all(isinstance(p, DTensor) for p in loaded.scorer.parameters())

    run_on_ranks(check)


def test_buffers_that_a_family_keeps_in_fp32_are_so_on_all_ranks(tmp_path: Path) -> None:
    model = tiny_model("deepseek_v3")
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.linspace(-0.1, 0.1, buffer.numel()))
    model.save_pretrained(tmp_path)

    def check() -> None:
        alone = loaded_policy(recipe_of(tmp_path, {}), BFLOAT16)
        shared = loaded_policy(recipe_of(tmp_path, {}), BFLOAT16, strategy=strategy_of({}))
        buffers, expected = dict(shared.model.named_buffers()), dict(alone.model.named_buffers())
        assert buffers.keys() == expected.keys()
        assert all(buffers[name].dtype == tensor.dtype for name, tensor in expected.items())
        assert all(map(torch.equal, buffers.values(), expected.values()))
        (bias,) = (name for name in buffers if name.endswith("e_score_correction_bias"))
        assert buffers[bias].dtype == torch.float32 and buffers[bias].any()
        row = make_rows()[0]
        assert torch.equal(shared.scorer(row).sums, alone.scorer(row).sums)

    run_on_ranks(check)


def test_trained_weights_of_two_types_are_refused_in_shards(tmp_path: Path) -> None:
    tiny_model("ernie4_5_moe").save_pretrained(tmp_path)

    def check() -> None:
        with pytest.raises(
            UnsupportedModelError, match=r"^model\.dtype: .*gate\.weight in float32 .*: float32"
        ):
            loaded_policy(recipe_of(tmp_path, {}), BFLOAT16, strategy=strategy_of({}))

    run_on_ranks(check)


@pytest.mark.slow
def test_an_adapter_is_trained_where_the_first_forward_was_its_base_s(models: Path) -> None:
    """As where proofs are remembered: the first forward is the reference's."""

    def check() -> None:
        recipe = recipe_of(models / "llama", LORA)
        loaded = loaded_policy(recipe, GATHERED, strategy=strategy_of({}))
        row = make_rows()[0]
        with loaded.as_reference(), torch.no_grad():
            loaded.scorer(row)
        backward(loaded.scorer(row).sums)
        assert any(grad.any() for grad in gradients(loaded).values())

    run_on_ranks(check)


@pytest.mark.parametrize(
    "fsdp2", [{}, *slow(None, {"mesh": (2, 1)})], ids=["shards", "copies", "shards within nodes"]
)
def test_what_is_not_finite_on_a_rank_stops_all_updates(fsdp2: dict[str, Any] | None, models: Path) -> None:
    """And a step after it is that of one process."""
    run_on_ranks(_take_steps_that_are_not_finite, models, fsdp2)


def _take_steps_that_are_not_finite(directory: Path, fsdp2: dict[str, Any] | None) -> None:
    recipe, strategy = recipe_of(directory / "llama", {}), strategy_of(fsdp2)
    models = [loaded_policy(recipe, FLOAT32, strategy=of) for of in (strategy, ALONE)]
    scorers = [loaded.scorer for loaded in models]
    optimizers = [
        build_optimizer("adamw", s, lr=1e-2, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1) for s in scorers
    ]
    guard = NonfiniteGuard(stops=False)
    row, pairs = make_rows()[0], np.zeros(0, dtype=np.int64)
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
            losses = torch.tensor([torch.inf] if is_poisoned and poison == "loss" else [])
            norms.append(clip_gradients(scorer, 0.5))
            if poison is None or scorer is scorers[0]:
                guard.skip_if_nonfinite(optimizer, losses, norms[-1], step=1, pairs=pairs)
                optimizer.step()
            optimizer.zero_grad()
            moved = [not torch.equal(p, old) for p, old in zip(scorer.parameters(), before, strict=True)]
            assert any(moved) == (poison is None)
        if poison != "gradient":
            torch.testing.assert_close(norms[0], norms[1])
    for ours, alone in zip(*(scorer.parameters() for scorer in scorers), strict=True):
        whole = ours.full_tensor() if isinstance(ours, DTensor) else ours
        torch.testing.assert_close(whole, alone, rtol=0, atol=1e-6)


def _check_families(directory: Path, families: list[str]) -> dict[str, dict[str, tuple[float, float]]]:
    errors: dict[str, dict[str, tuple[float, float]]] = {}
    for family in families:
        packed = packs(family)
        recipe = recipe_of(directory / family, {}, packed=packed)
        rows = make_rows(packed=packed)
        errors[family] = {
            "ddp": compare(recipe, strategy_of(None), rows),
            "fsdp2": compare(recipe, strategy_of({}), rows),
        }
    return errors


@pytest.mark.slow
# Of OPT's layers. The log-probs and gradients that are compared here would show the lost hook it warns of.
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")
def test_every_family_can_be_copied_and_sharded(tmp_path: Path) -> None:
    families = sorted(TINY.keys() & CONFIG_MAPPING.keys())  # an older transformers lacks the newest
    for family in families:
        tiny_model(family).save_pretrained(tmp_path / family)
    for errors in run_on_ranks(_check_families, tmp_path, families):
        wrong = {f: by_name for f, by_name in errors.items() if max(e[1] for e in by_name.values()) > 1e-4}
        assert not wrong
