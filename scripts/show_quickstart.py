"""Say what the quickstart's run learned and where things are. Fails when it learned too little."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

PREFERENCES = {  # held-out set -> what its pairs prefer
    "tone": "a courteous answer to a dismissive one",
    "topic": "an answer to the question to an answer to another one",
}
EXPECTED_ACCURACY = 0.9
NEXT = """\
Next (the reference log-probs are cached, so none is computed again):
  {dpopack} train configs/quickstart.yaml loss.type=ipo output_dir={root}/ipo
  {dpopack} inspect-packing configs/quickstart.yaml
  {dpopack} recipe --defaults > my-recipe.yaml"""


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def heldout_accuracies(run: Path) -> dict[str, tuple[float, float]]:
    """Reward accuracy of each held-out set before the first step and after the last."""
    lines = [line for line in read_lines(run / "metrics.jsonl") if line["split"] == "eval"]
    accuracies = {}
    for name in PREFERENCES:
        values = [line["rewards/accuracies"] for line in lines if line["source"] == name]
        accuracies[name] = (values[0], values[-1])
    return accuracies


def show_learned(root: Path, accuracies: dict[str, tuple[float, float]]) -> None:
    print("\nHeld-out reward accuracy, on questions about towns that training never named:")
    for name, (before, after) in accuracies.items():
        row = read_lines(root / "assets" / f"heldout_{name}.jsonl")[0]
        print(f"\n  {name}: {before:.2f} before, {after:.2f} after. It prefers {PREFERENCES[name]}, as in")
        for column in ("prompt", "chosen", "rejected"):
            print(f"    {column:9} {row[column][-1]['content']}")
    print("\nBefore training every margin is 0, and a tie counts half. The model began with random weights:")
    print("it has learned to tell such answers apart, not to write them.")


def show_cost(run: Path) -> None:
    seconds = read_json(run / "run.json")["totals"]["train_seconds"]
    packing = read_json(run / "packing_report.json")["statistics"]
    padded = next(batches for batches in packing["padded"] if batches["microbatch_pairs"] == 8)
    print(f"\nTraining took {seconds:.0f} s and computed {packing['computed_tokens']:,} tokens.")
    print(f"Padded batches of 8 pairs, each prompt computed twice, would have been {padded['tokens']:,}.")


def show_places(root: Path) -> None:
    places = {
        "run/model": "the trained model, as transformers loads it",
        "run/metrics.jsonl": "a line for each logged step and evaluation",
        "run": "the resolved recipe; reports on data, packing and the run",
        "assets": "the pairs, the tokenizer and the model it began with",
    }
    print("\nWhere things are:")
    for place, content in places.items():
        print(f"  {root / place!s:36} {content}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", type=Path, nargs="?", default=Path("runs/quickstart"))
    parser.add_argument("--dpopack", default="dpopack", help="how the hints call dpopack")
    arguments = parser.parse_args()
    learned = heldout_accuracies(arguments.root / "run")
    show_learned(arguments.root, learned)
    show_cost(arguments.root / "run")
    show_places(arguments.root)
    print("\n" + NEXT.format(dpopack=arguments.dpopack, root=arguments.root))
    if not all(after > EXPECTED_ACCURACY for _, after in learned.values()):
        sys.exit(f"error: not above {EXPECTED_ACCURACY} on every held-out set, as this run should be")
