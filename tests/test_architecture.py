"""Imports go downward only, and the data folder knows no torch."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "dpo_pack"

# Top to bottom; a module imports from its own line or a lower one.
LAYERS = (
    {"__main__"},
    {"cli"},
    {"cache_cli"},
    {"report_html"},
    {"doctor", "merge", "report", "report_style", "cache_exchange", "evaluation_tables"},
    {"train"},
    {"launch"},
    {"session_evaluation"},
    {"saving"},
    {"session"},
    {"identity", "describe"},
    {"monitoring"},
    {"online"},
    {"evaluate"},
    {"memory_report"},
    {"prepare_reference", "prepare_batches"},
    {"prepare"},
    {"recipe_models"},
    {"proofs"},
    {"stock", "kernel_proof"},
    {"run_dir", "export", "trackers"},
    {"run_safety"},
    {"checkpoint"},
    {"checkpoint_writer", "selection", "state_tensors"},
    {"checkpoint_dir"},
    {"cache_tools", "import_checks"},
    {"nonfinite", "held_out", "start_guard"},
    {"offline"},
    {"sources", "metrics", "optim", "throughput", "health", "coupling", "moving_reference"},
    {"memory_advice"},
    {"reference_fill"},
    {"breakdown", "bootstrap", "collectives"},
    {"reference_progress", "reference_budget"},
    {"reference_pass"},
    {"reference_work"},
    {"reference"},
    {"fingerprint"},
    {"sharding"},
    {"strategy"},
    {"memory"},
    {"split_adamw", "memory_shape"},
    {"loading"},
    {"models", "losses"},
    {"lora", "compiling", "kernels"},
    {"model_shape"},
    {"last_layer"},
    {"model_config"},
    {"families"},
    {"logps", "layout", "divergences", "host_copies"},
    {"attention", "cpu_products", "head_logits"},
    {"reference_cache"},
    {"reference_parts"},
    {"key_index"},
    {"data"},
    {"hub"},
    {
        "recipe",
        "recipe_checkpoint",
        "recipe_checkpoint_checks",
        "recipe_checks",
        "recipe_errors",
        "recipe_online",
        "recipe_online_checks",
        "recipe_schema",
        "recipe_types",
        "recipe_yaml",
        "console",
        "endings",
        "interrupts",
        "placement",
        "process_starter",
        "rank_failures",
        "ranks",
        "seeding",
        "startup",
        "stop_signals",
    },
    {"cpu_features", "files", "host_memory"},
    {"errors"},
)
LEVELS = {module: level for level, modules in enumerate(LAYERS) for module in modules}


def module_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """(dotted name, whether it is imported when the module is) of everything a file imports."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    at_top = set(
        ast.walk(ast.Module([n for n in tree.body if isinstance(n, ast.Import | ast.ImportFrom)], []))
    )
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node in at_top) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module or "", node in at_top


FILES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_module_imports_only_from_its_own_layer_or_below(path: Path) -> None:
    own = module_of(path)
    if own == "__init__":
        return
    for name, _ in imports(path):
        parts = name.split(".")
        if parts[0] == "dpo_pack" and len(parts) > 1:
            assert LEVELS[parts[1]] >= LEVELS[own], f"{path.name} imports {name}, which is above it"


def test_data_never_imports_torch_or_transformers() -> None:
    for path in (PACKAGE / "data").glob("*.py"):
        for name, _ in imports(path):
            assert name.split(".")[0] not in {"torch", "transformers", "accelerate"}, f"{path.name}: {name}"


def test_what_the_command_line_imports_at_once_is_light() -> None:
    for own in ("cli", "cache_cli", "errors", "recipe", "recipe_schema"):
        for name, is_at_top in imports(PACKAGE / f"{own}.py"):
            heavy = {"torch", "transformers", "datasets", "accelerate", "numpy", "pyarrow"}
            assert not is_at_top or name.split(".")[0] not in heavy, f"{own}: {name}"


def test_every_module_has_a_layer_and_a_docstring() -> None:
    for path in FILES:
        assert module_of(path) in LEVELS or module_of(path) == "__init__", path
        assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))), path
