"""What this machine can do: packages, devices, attention backends."""

from __future__ import annotations

import os
import platform
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import dpo_pack
from dpo_pack.attention import BACKENDS
from dpo_pack.attention.select import AttentionNeeds, backend_obstacle
from dpo_pack.run_dir import package_versions

# What nearly every model of today asks for.
_USUAL_MODEL = AttentionNeeds(
    head_dim=128,
    value_head_dim=128,
    has_window=False,
    has_softcap=False,
    has_sinks=False,
    has_custom_scale=False,
)


def describe_environment() -> dict[str, Any]:
    """Versions, devices with their memory in bytes, and for each attention backend what stands in its way."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    obstacles = {
        name: backend_obstacle(name, _USUAL_MODEL, device=device, dtype=dtype) for name in BACKENDS
    }
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
    table = Table("device", "name", "memory")
    for device in environment["devices"]:
        table.add_row(device["device"], device["name"], f"{device['memory_bytes'] / 2**30:,.1f} GiB")
    console.print(table)
    table = Table("attention backend", "usable here")
    for name, obstacle in environment["attention"].items():
        chosen = ", what auto picks" if name == environment["auto"] else ""
        table.add_row(name, f"no: {obstacle}" if obstacle else f"yes{chosen}")
    console.print(table)


def _devices() -> list[dict[str, Any]]:
    if torch.cuda.is_available():
        properties = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        return [
            {"device": f"cuda:{number}", "name": p.name, "memory_bytes": p.total_memory}
            for number, p in enumerate(properties)
        ]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    name = f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"
    return [{"device": "cpu", "name": name, "memory_bytes": memory}]
