"""What the machine is: bfloat16 on a CPU, by its flags and as a person is told, and versions of packages."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from rich.console import Console
from support.tiny_run import tiny_run

from dpo_pack.commands.doctor import describe_environment, render_environment
from dpo_pack.recipe.load import load_recipe
from dpo_pack.system.machine import bfloat16_instructions, is_intel, package_versions
from dpo_pack.trainer import train


@pytest.mark.parametrize(
    ("line", "instructions"),
    [
        ("flags\t\t: fpu avx2 avx512f avx512_bf16 amx_bf16 amx_tile", ("AVX512-BF16", "AMX")),
        ("flags\t\t: fpu avx2 avx512f", ()),
        ("Features\t: fp asimd bf16 i8mm", ("Arm BF16",)),
        ("vendor_id\t: unknown", None),
    ],
)
def test_the_flags_say_how_bfloat16_is_multiplied(
    line: str, instructions: tuple[str, ...] | None, tmp_path: Path
) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\nmodel name\t: Some CPU\n{line}\n")
    assert bfloat16_instructions(cpuinfo) == instructions


@pytest.mark.parametrize(("maker", "intel"), [("GenuineIntel", True), ("AuthenticAMD", False)])
def test_the_maker_is_known(maker: str, intel: bool, tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\nvendor_id\t: {maker}\nmodel name\t: GenuineIntel or so\n")
    assert is_intel(cpuinfo) == intel


def test_versions_are_read_once_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = package_versions()
    assert versions["torch"] == torch.__version__
    monkeypatch.setattr("importlib.metadata.version", lambda package: pytest.fail("read again"))
    assert package_versions() == versions


def test_of_a_system_without_such_a_file_nothing_is_known(tmp_path: Path) -> None:
    assert not is_intel(tmp_path / "cpuinfo")
    assert bfloat16_instructions(tmp_path / "cpuinfo") is None


@pytest.mark.parametrize(
    ("instructions", "told"), [((), "no bf16 instructions"), (("AMX",), "bf16 by AMX"), (None, "thread")]
)
def test_doctor_tells_of_it(
    instructions: tuple[str, ...] | None, told: str, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("dpo_pack.commands.doctor.bfloat16_instructions", lambda: instructions)
    render_environment(describe_environment(), console)
    assert told in console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize(("autocast", "instructions", "warns"), [
    ("bfloat16", (), True), ("bfloat16", ("AMX",), False),
    pytest.param("bfloat16", None, False, marks=pytest.mark.slow),
    pytest.param("none", (), False, marks=pytest.mark.slow),
])  # fmt: skip
def test_a_run_says_when_bfloat16_is_the_slower_choice(
    autocast: str,
    instructions: tuple[str, ...] | None,
    warns: bool,
    tmp_path: Path,
    console: Console,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("dpo_pack.run.log.bfloat16_instructions", lambda: instructions)
    train(load_recipe(tiny_run(tmp_path), [f"model.autocast={autocast}"]), console, dry_run=True)
    told = console.file.getvalue()  # type: ignore[attr-defined]
    assert ("no instructions for bfloat16" in told) == warns
