"""Say what the quickstart's run learned and where things are. Fails when it learned too little."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path("runs/quickstart")
PREFERENCES = {
    "tone": "a courteous answer to a dismissive one",
    "topic": "an answer to the question to an answer to another",
}
EXPECTED_ACCURACY = 0.9


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def accuracies(metrics: list[dict[str, Any]], source: str) -> tuple[float, float]:
    """Held-out reward accuracy before the first step and after the last."""
    values = [line["rewards/accuracies"] for line in metrics if line.get("source") == source]
    return values[0], values[-1]


def show_pair(row: dict[str, Any]) -> None:
    for name, messages in (("prompt", row["prompt"]), ("chosen", row["chosen"]), ("rejected", row["rejected"])):
        print(f"    {name:9} {messages[-1]['content']}")


def show(root: Path, dpopack: str) -> bool:
    """Prints the summary; whether every preference was learned."""
    run, assets = root / "run", root / "assets"
    metrics = read_lines(run / "metrics.jsonl")
    packing = json.loads((run / "packing_report.json").read_text(encoding="utf-8"))["statistics"]
    padded = packing["padded"][0]["tokens"]
    seconds = json.loads((run / "run.json").read_text(encoding="utf-8"))["totals"]["train_seconds"]
    print("\nWhat it learned, on held-out pairs about towns it was never trained on (reward accuracy, before -> after):")
    results = {source: accuracies(metrics, source) for source in PREFERENCES}
    for source, (before, after) in results.items():
        print(f"\n  {source}: to prefer {PREFERENCES[source]}: {before:.2f} -> {after:.2f}. For instance")
        show_pair(read_lines(assets / f"heldout_{source}.jsonl")[0])
    print(
        f"\nTraining took {seconds:.0f} s. It computed {packing['computed_tokens']:,} tokens; the same sequences, each by "
        f"itself with its own prompt, have {padded:,}."
        "\nBefore training every margin is zero, and a tie counts half. The model started from random weights: it has "
        "\nlearned to tell answers apart, not to write them."
        "\n\nWhere things are:"
        f"\n  {run / 'model'}            the trained model; transformers loads it"
        f"\n  {run / 'metrics.jsonl'}    every logged step and evaluation"
        f"\n  {run / 'packing_report.json'}, data_report.json, run.json, recipe.yaml beside it"
        f"\n  {assets}               the pairs, tokenizer and initial model"
        "\n\nNext, with reference log-probs from the cache:"
        f"\n  {dpopack} train configs/quickstart.yaml loss.type=ipo output_dir={root / 'ipo'}"
        f"\n  {dpopack} inspect-packing configs/quickstart.yaml"
        f"\n  {dpopack} recipe --defaults > my-recipe.yaml"
    )
    return all(after > EXPECTED_ACCURACY for _, after in results.values())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, default=ROOT)
    parser.add_argument("--dpopack", default="dpopack", help="how to call dpopack in the hints")
    arguments = parser.parse_args()
    if not show(arguments.root, arguments.dpopack):
        sys.exit(f"error: a held-out accuracy is not above {EXPECTED_ACCURACY}, which this run should reach")
