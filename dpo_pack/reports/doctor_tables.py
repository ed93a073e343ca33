"""What `dpopack doctor` shows: the machine, its attention backends, and proofs that rows are exact."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import asdict

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

import dpo_pack
from dpo_pack.model.attention import BACKENDS, AttentionNeeds, backend_obstacle
from dpo_pack.model.fast_layers import measure_products
from dpo_pack.proofs import ProofOutcome
from dpo_pack.reference.cache import default_cache_directory
from dpo_pack.system import ranks
from dpo_pack.system.errors import UnsupportedModelError
from dpo_pack.system.files import Json
from dpo_pack.system.machine import bfloat16_instructions, cpu_name, host_memory, package_versions


def environment(console: Console) -> Json:
    """Prints and returns versions, devices, for each attention backend why it cannot be used, or None;
    on a CPU also what products reach, which the cache then has."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    usual = AttentionNeeds(  # of nearly all present models
        head_dim=128, value_head_dim=128, has_window=False, has_softcap=False, has_sinks=False
    )
    obstacles = {name: backend_obstacle(name, usual, device=device, dtype=dtype) for name in BACKENDS}
    auto = next(name for name, obstacle in obstacles.items() if obstacle is None)
    gflops = None if ranks.uses_cuda() else measure_products(default_cache_directory())
    versions, devices = package_versions(), _devices()
    console.print(f"dpo-pack {dpo_pack.__version__} on {platform.platform()}")
    console.print(", ".join(f"{name} {version}" for name, version in versions.items()))
    memory = [(one["device"], one["name"], f"{one['memory_bytes'] / 2**30:,.1f} GiB") for one in devices]
    console.print(_table(("device", "name", "memory"), memory))
    if gflops is not None:
        fp32, bf16 = gflops.values()
        speeds = f"{fp32:,.1f} GFLOP/s in fp32, {bf16:,.1f} in bf16"
        console.print(f"CPU products: {speeds} ({bf16 / fp32:.2g} times)")
    usable = [
        (name, f"no: {obstacle}" if obstacle else f"yes{', auto picks it' if name == auto else ''}")
        for name, obstacle in obstacles.items()
    ]
    console.print(_table(("attention backend", "usable here"), usable))
    return {
        "dpo_pack": dpo_pack.__version__,
        "versions": versions,
        "platform": platform.platform(),
        "devices": devices,
        "cpu_gflops": gflops,
        "attention": obstacles,
        "auto": auto,
    }


def proofs(outcome: ProofOutcome, memory: Json, console: Console) -> Json:
    """Prints the proofs. Returns them with the `memory` of a step, and the `error` if one has failed."""
    rows = [
        (
            proof.name,
            "yes" if proof.passed else "NO",
            "\n".join(f"{name} {value:.3g}" for name, value in proof.numbers.items()),
            proof.bound,
        )
        for proof in outcome.proofs
    ]
    console.print(_table(("proof", "holds", "measured", "must keep"), rows))
    error = None
    try:
        outcome.raise_failure()
        console.print(f"{outcome.what.capitalize()} are exact on this model ({outcome.seconds:.1f} s)")
    except UnsupportedModelError as failure:
        error = str(failure)
    return {"memory": memory, "proofs": [asdict(proof) for proof in outcome.proofs], "error": error}


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(*columns, box=SIMPLE_HEAD)
    for row in rows:
        table.add_row(*row)
    return table


def _devices() -> list[Json]:
    if torch.cuda.is_available():
        properties = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        return [
            {"device": f"cuda:{number}", "name": p.name, "memory_bytes": p.total_memory}
            for number, p in enumerate(properties)
        ]
    num_threads, instructions = torch.get_num_threads(), bfloat16_instructions()
    name = f"{cpu_name()}, {num_threads} thread{'s' if num_threads > 1 else ''}"
    if instructions is not None:
        name += f", bf16 by {' and '.join(instructions)}" if instructions else ", no bf16 instructions"
    return [{"device": "cpu", "name": name, "memory_bytes": host_memory().total}]
