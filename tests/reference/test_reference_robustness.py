"""The reference cache among kills, other processes, many sequences and models that must be gone again."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
import tracemalloc
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from support.processor import slowness
from support.reference_pairs import NAMESPACE, all_sums, random_keys
from support.refusals import refusal
from support.tiny_run import NUM_PAIRS, tiny_run
from support.tiny_tokenizer import tiny_tokenizer
from transformers import LlamaForCausalLM

from dpo_pack.recipe.load import load_recipe
from dpo_pack.reference.cache import FrozenReference, ReferenceCache, sequence_table
from dpo_pack.run.pairs import prepare_reference
from dpo_pack.run.setup import prepare
from dpo_pack.system.console import make_console
from dpo_pack.system.errors import CacheError
from dpo_pack.system.machine import release_memory


def test_no_log_prob_of_changed_tokens_is_kept_and_the_next_run_writes_the_tokens_again(
    tmp_path: Path,
) -> None:
    recipe = load_recipe(tiny_run(tmp_path))
    console = make_console(quiet=True)
    prepared = prepare(recipe, console)
    expected = prepare_reference(prepared)
    sums = all_sums(expected.cache, prepared.tables)
    for part in expected.cache.directory.glob("part-*"):
        part.unlink()
    for change in (1, 1 << 20):  # another token, and none of the vocabulary
        directory = prepared.data.train.parts[0].directory
        assert directory is not None
        tokens = np.fromfile(directory / "tokens.bin", dtype=np.int32)
        tokens[len(tokens) // 2] ^= change
        tokens.tofile(directory / "tokens.bin")
        damaged = prepare(recipe, console)
        assert damaged.data.report["rows_tokenized"] == 0
        assert "is damaged" in refusal(partial(prepare_reference, damaged), CacheError)
        prepared = prepare(recipe, console)
        assert prepared.data.report["rows_tokenized"] == NUM_PAIRS
    again = prepare_reference(prepared)
    assert all_sums(again.cache, prepared.tables).tobytes() == sums.tobytes()


def test_a_padding_token_that_the_model_does_not_embed_pads_no_row(tmp_path: Path) -> None:
    recipe = tiny_run(tmp_path)
    prepared = prepare(load_recipe(recipe), make_console(quiet=True))
    sums = all_sums(prepare_reference(prepared).cache, prepared.tables)
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"pad_token": "<a token more>"})
    tokenizer.save_pretrained(tmp_path / "model")
    settings = ["packing.mode=padded", f"reference.cache_dir={tmp_path / 'other'}"]
    prepared = prepare(load_recipe(recipe, settings), make_console(quiet=True))
    padded = prepare_reference(prepared)
    np.testing.assert_allclose(all_sums(padded.cache, prepared.tables), sums, rtol=1e-5)


_PRECOMPUTE = """
import sys
from dpo_pack.commands.main import main
sys.argv = ["dpopack", "precompute-ref", *sys.argv[1:]]
main()
"""


@pytest.mark.slow
@pytest.mark.multiprocess
def test_two_jobs_that_fill_one_cache_at_once_leave_all_of_it(tmp_path: Path) -> None:
    recipe = tiny_run(tmp_path)
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    other = ["data.train=${recipe_dir}/heldout.jsonl", "data.eval=[]", "output_dir=${recipe_dir}/other"]
    jobs = [
        subprocess.Popen([sys.executable, "-c", _PRECOMPUTE, str(recipe), *overrides], env=env)
        for overrides in ([], other)
    ]
    assert [job.wait(timeout=300) for job in jobs] == [0, 0]
    assert prepare_reference(prepare(load_recipe(recipe), make_console(quiet=True))).num_computed == 0


def models_in_memory() -> int:
    models = [it for it in gc.get_objects() if type(it) is LlamaForCausalLM]
    return sum(next(model.parameters()).device.type != "meta" for model in models)


def test_the_reference_s_memory_is_gone_after_its_pass(tmp_path: Path) -> None:
    prepared, before = prepare(load_recipe(tiny_run(tmp_path)), make_console(quiet=True)), models_in_memory()
    assert prepare_reference(prepared).num_computed > 0
    release_memory()
    assert models_in_memory() <= before


@pytest.mark.slow
@pytest.mark.alone
def test_a_run_of_a_million_pairs_reads_its_values_in_seconds_and_in_its_own_memory(tmp_path: Path) -> None:
    """A cache of four million sequences, of which the run uses two."""
    num_parts, per_part = 40, 100_000
    cache = ReferenceCache(tmp_path, NAMESPACE)
    for part in range(num_parts):
        keys = random_keys(per_part, seed=part)
        cache.append(
            sequence_table(keys, -np.arange(1.0, per_part + 1) - part, np.ones(per_part, dtype=np.int64))
        )
    wanted = np.concatenate([random_keys(per_part, seed=part) for part in range(0, num_parts, 2)])
    wanted = wanted[np.random.default_rng(0).permutation(len(wanted))]
    begun = time.process_time()
    sums = cache.lookup(wanted)
    seconds = time.process_time() - begun
    tracemalloc.start()
    cache.lookup(wanted)
    peak_bytes = tracemalloc.get_traced_memory()[1] + pa.default_memory_pool().max_memory()
    tracemalloc.stop()
    assert np.isfinite(sums).all() and len(sums) == 2_000_000
    assert np.isnan(cache.lookup(random_keys(10, seed=-1 % 10_000))).all()
    frozen = FrozenReference(keys=wanted, sums=sums)
    assert len(frozen.fingerprint()) == 32
    print(f"lookup of 2M sequences among 4M: {seconds:.1f} CPU s, {peak_bytes / 2**20:.0f} MiB at the peak")
    # Keys and values are 48 MB. Sorting takes a few times that; the size of the cache adds nothing.
    assert seconds < 30 * slowness() and peak_bytes < 500 * 2**20
