"""Measures `dpopack audit` on pairs of which a fifth is swapped: how well p_wrong finds them, beside length;
whether training on the pairs that it selects beats training on as many random ones.

    python scripts/measure_audit.py quickstart             # the quickstart's model and pairs; docs/audit.md
    python scripts/measure_audit.py FILE --model PATH --pairs 2000 --lr 2e-5   # any pairs, an adapter

The label of a held-out pair is never swapped. Everything is written below --directory.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import pyarrow.parquet as pq  # noqa: E402
from make_quickstart import KINDS, make_quickstart  # noqa: E402

import dpo_pack  # noqa: E402
from dpo_pack.audits.certainty import auroc  # noqa: E402

SWAPPED = 0.2


def write_swapped(rows: list[dict[str, Any]], path: Path) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Writes the rows, a part of them with exchanged answers; returns which."""
    wrong = set(random.Random(1).sample(range(len(rows)), int(SWAPPED * len(rows))))
    with path.open("w", encoding="utf-8") as file:
        for number, row in enumerate(rows):
            sides = {"chosen": row["rejected"], "rejected": row["chosen"]} if number in wrong else {}
            file.write(json.dumps({**row, **sides}) + "\n")
    return np.array([number in wrong for number in range(len(rows))])


def audit(recipe: dict[str, Any], wrong: np.ndarray[Any, Any], lr: float | None, folds: int) -> Path:
    """Audits the recipe and prints how well its columns find the swapped pairs."""
    path: Path = dpo_pack.audit(recipe, folds=folds, lr=lr)
    found = pq.read_table(path)
    is_wrong = wrong[found["row"].to_numpy() - 1]
    gaps = found["length_gap"].to_numpy().astype(np.float64)
    scores = {"p_wrong": found["p_wrong"].to_numpy(), "-length_gap": -gaps, "|length_gap|": np.abs(gaps)}
    scores["-reference_margin"] = -found["reference_margin"].to_numpy()
    for name, values in scores.items():
        print(f"AUROC of {name}: {auroc(values, is_wrong):.3f}", flush=True)
    explained = found["longer_explains"].to_numpy(zero_copy_only=False)
    print(f"longer_explains: {explained.sum()} pairs, of them swapped {is_wrong[explained].sum()}")
    return path


def compare_selections(recipe: dict[str, Any], path: Path, seeds: int) -> None:
    """Trains on the pairs that p_wrong selects and on as many random ones; prints what they reach."""
    (source,) = recipe["data"]["train"]
    below = float((pq.read_table(path)["p_wrong"].to_numpy() < 0.5).mean())
    selections: dict[str, tuple[dict[str, Any], float]] = {
        "smallest half": ({"part": 0.5, "order": "smallest"}, 0.5),
        "below 0.5": ({"below": 0.5}, below),
    }
    for seed in range(seeds):
        for name, (selection, part) in selections.items():
            chosen = {"selected": selection, "random": {"part": part, "order": "random"}}
            for kind, keep in chosen.items():
                data = {**source, "keep": {"from": str(path), "by": "p_wrong", **keep}}
                own = {**recipe, "seed": seed, "data": {**recipe["data"], "train": [data]}}
                own["output_dir"] = f"{recipe['output_dir']}-{name.replace(' ', '-')}-{kind}-{seed}"
                results = dpo_pack.train(own, quiet=True, overwrite=True).evaluation
                reached = (
                    f"{eval_set} accuracy {of['rewards/accuracies']:.3f}, loss {of['loss']:.3f}"
                    for eval_set, of in results.items()
                )
                print(f"Seed {seed}, {name}, {part:.1%} {kind}: {'; '.join(reached)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("pairs_file", metavar="quickstart|FILE")
    parser.add_argument("--model", help="of FILE")
    parser.add_argument("--pairs", type=int, default=2000)
    parser.add_argument("--folds", type=int, default=2)
    parser.add_argument("--lr", type=float)
    parser.add_argument("--max-length", type=int, default=512)
    parser.add_argument("--seeds", type=int, default=3, help="of the quickstart's trainings; 0: none")
    parser.add_argument("--directory", type=Path, default=Path("runs/measure_audit"))
    options = parser.parse_args()
    root = options.directory.resolve()
    root.mkdir(parents=True, exist_ok=True)
    recipe: dict[str, Any] = {
        "output_dir": str(root / "run"),
        "reference": {"cache_dir": str(root / "cache")},
        "data": {"train": [{"path": str(root / "pairs.jsonl")}], "max_length": options.max_length},
        "logging": {"samples": None},
        "export": {"verify": "none"},
    }
    if options.pairs_file == "quickstart":
        if not (root / "assets" / "train.jsonl").exists():
            make_quickstart(root / "assets")
        lines = (root / "assets" / "train.jsonl").read_text(encoding="utf-8").splitlines()
        recipe["data"]["eval"] = [
            {"name": k, "path": str(root / "assets" / f"heldout_{k}.jsonl")} for k in KINDS
        ]
        recipe |= {"packing": {"token_budget": 4096, "pairs_per_step": 32}, "optim": {"lr": 2e-4}}
        recipe["model"] = {"path": str(root / "assets" / "model"), "dtype": "float32", "autocast": "none"}
    else:
        opened = gzip.open if options.pairs_file.endswith(".gz") else open
        with opened(options.pairs_file, "rt", encoding="utf-8") as file:
            lines = file.read().splitlines()
        recipe |= {"model": {"path": options.model}, "packing": {"pairs_per_step": 32}}
        recipe["data"]["on_bad_row"], options.seeds = "skip", 0
    rows = [json.loads(line) for line in lines[: options.pairs]]
    path = audit(recipe, write_swapped(rows, root / "pairs.jsonl"), options.lr, options.folds)
    compare_selections(recipe, path, options.seeds)


if __name__ == "__main__":
    main()
