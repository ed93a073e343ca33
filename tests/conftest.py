"""Fixtures every test file may use."""

from __future__ import annotations

import gc
import io
import itertools
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

pytest.register_assert_rewrite("support")  # a failed assert there shows its values, too

if TYPE_CHECKING:
    from rich.console import Console
    from support.dpopack import Dpopack, Outcome

# Heavy packages are imported in functions: the process that only hands tests out needs none of them.

# Scripts that tests start find tests/support as tests do.
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
)

NO_DEVICE, NO_CUDA_BUILD = "no CUDA device", "no CUDA build of torch"
_REMEDIES = {
    NO_DEVICE: "run 'pytest -m gpu' on a machine with a GPU",
    NO_CUDA_BUILD: "run scripts/test_cuda_build.sh after each change of dpo_pack/model",
}

_cache_numbers = itertools.count()


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("dist", "no") != "no" and not hasattr(config, "workerinput"):
        return  # the process that hands tests out
    import torch
    from hypothesis import settings

    settings.register_profile("default", deadline=None)  # shared machines stall
    settings.load_profile("default")
    torch.set_num_threads(1)  # tests run tiny models: more threads only wait for each other
    vars(os)["fsync"] = lambda descriptor: None  # what a test writes need not survive the loss of power


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """Conformance numbers and real pairs that live beside the repository, where somebody has put them."""
    directory = Path(__file__).resolve().parents[2] / "shared"
    if not directory.is_dir():
        pytest.skip(f"no {directory}: conformance numbers and real data are not part of this repository")
    return directory


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a tiny random Llama, without a tokenizer. Nobody may write there."""
    from support.tiny_models import tiny_model

    path = tmp_path_factory.mktemp("model")
    tiny_model("llama").save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, its data and a recipe. Nobody may write there. Its cache has all log-probs: a run of
    fewer steps computes fewer, in other rows, and later runs would differ in their last bits."""
    from rich.console import Console
    from support.tiny_run import tiny_run
    from support.whole_runs import whole_run

    from dpo_pack.run.pairs import prepare_reference
    from dpo_pack.run.setup import prepare

    directory = tiny_run(tmp_path_factory.mktemp("assets")).parent
    prepare_reference(prepare(whole_run(directory, directory / "run"), Console(quiet=True)))
    return directory


@pytest.fixture
def recipe(assets: Path, tmp_path: Path) -> Path:
    """A copy of the recipe with all that it needs and no cache, to be spoilt."""
    without_cache = shutil.ignore_patterns("cache")  # other tests of the session fill it
    return Path(shutil.copytree(assets, tmp_path / "job", ignore=without_cache)) / "recipe.yaml"


@pytest.fixture(scope="session")
def straight(assets: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing interrupted. Nobody may write there."""
    from rich.console import Console
    from support.whole_runs import whole_run

    from dpo_pack.trainer import train

    run = tmp_path_factory.mktemp("straight") / "run"
    train(whole_run(assets, run), Console(quiet=True))
    return run


@pytest.fixture
def console() -> Console:
    """A console whose text a test can read with `console.file.getvalue()`."""
    from rich.console import Console

    return Console(file=io.StringIO(), width=200, highlight=False, soft_wrap=True, markup=False)


@pytest.fixture
def dpopack(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Dpopack:
    """Runs a command in this process; what C code and other libraries print is captured as well."""
    from support.dpopack import Outcome

    from dpo_pack.commands.main import main

    def run(*arguments: str | Path) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["dpopack", *map(str, arguments)])
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        assert isinstance(ended.value.code, int)
        return Outcome(ended.value.code, *capfd.readouterr())

    return run


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Nothing was compiled before, and what a test has replaced is back afterwards."""
    import torch
    from torch._dynamo.utils import counters

    from dpo_pack.model.attention import register_attention

    torch._dynamo.reset()
    counters.clear()
    with torch._dynamo.config.patch(recompile_limit=8, optimize_ddp=True, suppress_errors=False):
        yield
    register_attention()


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Never the user's cache, and never the network."""
    cache = tmp_path_factory.getbasetemp() / "caches" / str(next(_cache_numbers))
    monkeypatch.setenv("DPO_PACK_CACHE", str(cache))  # made by those that write there
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # which was read before


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch
    from support.tiny_models import FAMILIES
    from transformers import __version__ as transformers_version
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason=NO_DEVICE))
        if item.get_closest_marker("cuda_build") and not torch.backends.cuda.is_built():
            item.add_marker(pytest.mark.skip(reason=NO_CUDA_BUILD))
        callspec = getattr(item, "callspec", None)
        family = callspec.params.get("family") if callspec else None
        if family in FAMILIES and family not in CONFIG_MAPPING:
            item.add_marker(pytest.mark.skip(reason=f"transformers {transformers_version} has no {family}"))


def pytest_collection_finish() -> None:
    """What is imported stays: the garbage collector need not look through it again, and again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000)  # by default it looks after 700 new objects: a twentieth of the time of tests


def pytest_unconfigure(config: pytest.Config) -> None:
    """The last lines say which tests have not run: a skip that nobody sees is no test."""
    reporter = config.pluginmanager.getplugin("terminalreporter")
    if reporter is None or hasattr(config, "workerinput"):
        return
    skipped = [str(report.longrepr) for report in reporter.getreports("skipped")]
    for reason, remedy in _REMEDIES.items():
        number = sum(reason in text for text in skipped)
        if number:
            reporter.write_line(f"NOT RUN: {number} tests, {reason}; {remedy}")
