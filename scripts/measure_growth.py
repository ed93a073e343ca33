"""Measure what the start of a run costs as its data grow: docs/performance.md, "As the work grows".

    python scripts/measure_growth.py 20000 300000 [--package DIRECTORY ...] [--ranks 2] [--work DIRECTORY]

For each number of pairs and each directory that holds a `dpo_pack` (by default, the repository of this
script), it makes a token store of synthetic pairs (about 30 tokens each, two pairs a prompt) and a cache with
all reference log-probs, in the place of those that a tiny run has left. Then it times a `train` of one step.
The table has CPU seconds of the command with all its processes, those of rank 0 up to some of its lines, and
the largest sum of the processes' PSS (/proc/PID/smaps_rollup), also as bytes a pair and rank beyond those of
the first number of pairs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY / "tests"))

BATCH, PER_PROMPT = 100_000, 2  # pairs written at a time; pairs of a prompt
FRACTION = 0.0001  # of the pairs is held out
# Python runs this in each process of the command.
STAMPS = """
import os, resource
from rich.console import Console
def stamped(console, *objects, old=Console.print, **options):
    used = resource.getrusage(resource.RUSAGE_SELF)
    with open(f"{os.environ['GROWTH']}/stamps.{os.environ.get('RANK', '0')}", "a") as file:
        print(f"{used.ru_utime + used.ru_stime:.2f}", " ".join(map(str, objects))[:40], sep="\\t", file=file)
    old(console, *objects, **options)
Console.print = stamped
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("pairs", type=int, nargs="+")
    parser.add_argument("--package", type=Path, action="append")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--work", type=Path, help="keeps stores and caches here, for later calls")
    chosen = parser.parse_args()
    head = ("pairs", "ranks", "package", "CPU s", "PSS, MB", "bytes a pair and rank", "CPU s of rank 0 at")
    print("|", " | ".join(head), "|\n|" + "---|" * len(head))
    with tempfile.TemporaryDirectory() as temporary:
        first: dict[Path, tuple[int, int]] = {}
        for number in chosen.pairs:
            for package in chosen.package or [REPOSITORY]:
                directory = (chosen.work or Path(temporary)) / f"{package.resolve().name}-{number}"
                if not directory.exists():
                    fill(directory, package, number)
                seconds, peak, lines = measure(directory, package, chosen.ranks)
                pairs_before, peak_before = first.setdefault(package, (number, peak))
                more = (number - pairs_before) * chosen.ranks
                each = f"{(peak - peak_before) / more:.0f}" if more else ""
                cells = (f"{number:,}", chosen.ranks, package.name, f"{seconds:.1f}", f"{peak / 1e6:.0f}")
                print("|", " | ".join(map(str, (*cells, each, lines))), "|", flush=True)
                if chosen.work is None:
                    shutil.rmtree(directory)


def measure(directory: Path, package: Path, num_ranks: int) -> tuple[float, int, str]:
    """Returns the CPU seconds of a run, the peak of its processes' PSS in bytes, and rank 0's lines."""
    from record_runs import ENVIRONMENT

    shutil.rmtree(directory / "run", ignore_errors=True)
    stamps = directory / "stamps"
    shutil.rmtree(stamps, ignore_errors=True)
    stamps.mkdir()
    (stamps / "sitecustomize.py").write_text(STAMPS)
    options = [f"data.eval={{fraction: {FRACTION}}}", "train.max_steps=1", "train.eval_every_steps=null"]
    options += [f"distributed.num_processes={num_ranks}", "reference.path=model"]
    if "verify" in (package / "docs" / "recipe.md").read_text():
        options += ["export.verify=none"]
    environment = {**os.environ, **ENVIRONMENT, "DPO_PACK_CACHE": str(directory / "cache")}
    environment |= {"GROWTH": str(stamps), "PYTHONPATH": f"{stamps}:{package}"}
    command = [sys.executable, "-m", "dpo_pack", "train", "recipe.yaml", *options]
    before, peak = resource.getrusage(resource.RUSAGE_CHILDREN), 0
    with (directory / "output").open("w") as output:
        run = subprocess.Popen(command, cwd=directory, env=environment, stdout=output, stderr=output)
        while run.poll() is None:
            peak = max(peak, sum(map(pss, processes_below(run.pid))))
            time.sleep(0.4)
    if run.returncode != 0:
        raise SystemExit((directory / "output").read_text())
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    lines = [line.split("\t") for line in (stamps / "stamps.0").read_text().splitlines() if "\t" in line]
    told = {text.strip().split("  ")[0].split(":")[0]: cpu for cpu, text in reversed(lines)}
    reference = next((name for name in told if name.startswith("Reference")), "Reference")
    wanted = ("Data", "Proof", reference, "Training", "step 1/1")
    return seconds, peak, ", ".join(f"{told.get(name, '?')} {name}" for name in wanted)


def processes_below(pid: int) -> list[int]:
    """Returns a process and all that it has started, with what these have started."""
    found = [pid]
    for each in found:
        try:
            for task in Path(f"/proc/{each}/task").iterdir():
                found += map(int, (task / "children").read_text().split())
        except OSError:  # it has ended
            pass
    return found


def pss(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))


# ------------------------------------------------------------------------------------ synthetic data


def fill(directory: Path, package: Path, num_pairs: int) -> None:
    """Runs the package once on a few pairs; then puts many into its token store and its reference cache."""
    from record_runs import make_assets

    make_assets(directory, "llama")
    measure(directory, package, 1)
    script = [sys.executable, __file__, "write", str(directory), str(num_pairs)]
    subprocess.run(script, check=True, env={**os.environ, "PYTHONPATH": str(package)})


def write(directory: Path, num_pairs: int) -> None:
    """Writes the store and the parts with the package that Python finds."""
    import numpy as np

    from dpo_pack.data import store as stores
    from dpo_pack.reference.cache import ReferenceCache

    (store,) = (directory / "cache" / "tokens").iterdir()
    opened = stores.open_store(store)
    assert opened is not None
    summary = {**opened.summary, "rows_read": num_pairs, "pairs_kept": num_pairs}
    (namespace,) = (path for path in (directory / "cache" / "reference").iterdir() if path.is_dir())
    cache = ReferenceCache(directory / "cache", json.loads((namespace / "namespace.json").read_text()))
    shutil.rmtree(store)
    for part in namespace.glob("part-*"):
        part.unlink()
    random = np.random.default_rng(0)
    has_ranges = num_pairs > BATCH and hasattr(stores, "write_ranged_store")

    def batch(begin: int) -> Any:
        pairs = synthetic_pairs(random, 0 if has_ranges else begin, min(BATCH, num_pairs - begin))
        cache.append(values_of(pairs.records, random))
        return pairs

    begins, ranges = range(0, num_pairs, BATCH), []
    if not has_ranges:
        stores.write_store(store, map(batch, begins), lambda: summary)
        return
    for begin in begins:  # large sources have ranges, data/ranges.py
        path = store.with_name(stores.content_key([store.name, begin]))
        stores.write_store(path, [batch(begin)], lambda: {})
        written = stores.open_store(path)
        assert written is not None
        ranges.append(replace(written, rows_before=begin))
    stores.write_ranged_store(store, ranges, summary)


def synthetic_pairs(random: Any, begin: int, num_pairs: int) -> Any:
    import numpy as np

    from dpo_pack.data.store import RECORD_DTYPE, TokenStore

    prompts = [row.tobytes() for row in random.integers(3, 200, (-(-num_pairs // PER_PROMPT), 20), np.int32)]
    answers = random.integers(200, 380, (num_pairs, 2, 12), np.int32).tobytes()
    lengths = random.integers((8, 4, 4), (20, 12, 12), (num_pairs, 3), np.int32)
    lengths[:, 0] = lengths[:, 0][np.arange(num_pairs) // PER_PROMPT * PER_PROMPT]
    records = np.zeros(num_pairs, RECORD_DTYPE)
    tokens, keys = [], []
    for pair, (of_prompt, of_chosen, of_rejected) in enumerate(lengths.tolist()):
        at = 96 * pair
        prompt, chosen = prompts[pair // PER_PROMPT][: 4 * of_prompt], answers[at : at + 4 * of_chosen]
        rejected = answers[at + 48 : at + 48 + 4 * of_rejected]
        start = hashlib.blake2b(of_prompt.to_bytes(8, "little") + prompt, digest_size=16)
        for completion in (b"", chosen, rejected):
            key = start.copy()
            key.update(completion)
            keys.append(key.digest())
        tokens += [prompt, chosen, rejected]
    for position, name in enumerate(("prompt", "chosen", "rejected")):
        records[f"{name}_length"] = lengths[:, position]
        records[f"{name}_key"] = np.frombuffer(b"".join(keys[position::3]), np.uint8).reshape(-1, 16)
    records["whole_prompt_key"], records["shared_length"] = records["prompt_key"], lengths[:, 0]
    records["weight"], records["row_number"] = 1, np.arange(begin + 1, begin + num_pairs + 1)
    return TokenStore(tokens=np.frombuffer(b"".join(tokens), "<i4"), records=records)


def values_of(records: Any, random: Any) -> Any:
    """Returns the table of a part of the reference cache with both sequences of each pair."""
    import numpy as np
    import pyarrow as pa

    keys = np.stack((records["chosen_key"], records["rejected_key"]), axis=1)
    lengths = np.stack((records["chosen_length"], records["rejected_length"]), axis=1).ravel()
    of_keys = pa.FixedSizeBinaryArray.from_buffers(
        pa.binary(16), len(lengths), [None, pa.py_buffer(keys.tobytes())]
    )
    sums = random.uniform(-60, -20, len(lengths))
    return pa.table({"key": of_keys, "logps_sum": sums, "num_tokens": lengths})


if __name__ == "__main__":
    if sys.argv[1:2] == ["write"]:
        write(Path(sys.argv[2]), int(sys.argv[3]))
    else:
        main()
