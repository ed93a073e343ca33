"""Shows what this machine can do, and proves that packed rows are exact on a recipe's model."""

from __future__ import annotations

import platform
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

import dpo_pack
from dpo_pack.model.attention import BACKENDS, AttentionNeeds, backend_obstacle
from dpo_pack.proofs.rows import ProofOutcome
from dpo_pack.system.machine import bfloat16_instructions, cpu_name, host_memory, package_versions


def describe_environment() -> dict[str, Any]:
    """Returns versions, devices, and for each attention backend why it cannot be used here (None: it can)."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    usual = AttentionNeeds(  # of nearly all present models
        head_dim=128,
        value_head_dim=128,
        has_window=False,
        has_softcap=False,
        has_sinks=False,
    )
    obstacles = {name: backend_obstacle(name, usual, device=device, dtype=dtype) for name in BACKENDS}
    return {
        "dpo_pack": dpo_pack.__version__,
        "versions": package_versions(),
        "platform": platform.platform(),
        "devices": _devices(),
        "attention": obstacles,
        "auto": next(name for name, obstacle in obstacles.items() if obstacle is None),
    }


def render_environment(environment: dict[str, Any], console: Console) -> None:
    console.print(f"dpo-pack {environment['dpo_pack']} on {environment['platform']}")
    console.print(", ".join(f"{name} {version}" for name, version in environment["versions"].items()))
    table = Table("device", "name", "memory", box=SIMPLE_HEAD)
    for device in environment["devices"]:
        table.add_row(device["device"], device["name"], f"{device['memory_bytes'] / 2**30:,.1f} GiB")
    console.print(table)
    table = Table("attention backend", "usable here", box=SIMPLE_HEAD)
    for name, obstacle in environment["attention"].items():
        chosen = ", auto picks it" if name == environment["auto"] else ""
        table.add_row(name, f"no: {obstacle}" if obstacle else f"yes{chosen}")
    console.print(table)


def render_proofs(outcome: ProofOutcome, console: Console) -> None:
    table = Table("proof", "holds", "measured", "must keep", box=SIMPLE_HEAD)
    for proof in outcome.proofs:
        numbers = Text("\n".join(f"{name} {value:.3g}" for name, value in proof.numbers.items()))
        table.add_row(proof.name, "yes" if proof.passed else "NO", numbers, proof.bound)
    console.print(table)
    if all(proof.passed for proof in outcome.proofs):
        console.print(f"{outcome.what.capitalize()} are exact on this model ({outcome.seconds:.1f} s)")


def _devices() -> list[dict[str, Any]]:
    if torch.cuda.is_available():
        properties = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        return [
            {"device": f"cuda:{number}", "name": p.name, "memory_bytes": p.total_memory}
            for number, p in enumerate(properties)
        ]
    num_threads = torch.get_num_threads()
    name = f"{cpu_name()}, {num_threads} thread{'s' if num_threads > 1 else ''}"
    instructions = bfloat16_instructions()
    if instructions is not None:
        name += f", bf16 by {' and '.join(instructions)}" if instructions else ", no bf16 instructions"
    return [{"device": "cpu", "name": name, "memory_bytes": host_memory().total}]
