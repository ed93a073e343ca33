"""Say what the quickstart's held-out pairs prefer. Fails if too little was learned."""

import argparse
import json
import sys
from pathlib import Path

PREFERENCES = {  # held-out set -> what its pairs prefer
    "tone": "a courteous answer to a dismissive one",
    "topic": "an answer to the question to an answer to another one",
}
EXPECTED_ACCURACY = 0.9
NEXT = """\
Or another loss (the reference log-probs are cached, so none is computed again), or a recipe of your own:
  {dpopack} train configs/quickstart.yaml loss.type=ipo output_dir={root}/ipo
  {dpopack} recipe --defaults > my-recipe.yaml"""


def show_preferences(assets: Path, accuracies: dict[str, float]) -> None:
    print("\nThe held-out questions are about towns that training never named. What the pairs prefer:")
    for name, preference in PREFERENCES.items():
        with (assets / f"heldout_{name}.jsonl").open(encoding="utf-8") as lines:
            row = json.loads(next(lines))
        print(f"\n  {name} ({accuracies[name]:.2f} of pairs right): {preference}, as in")
        for column in ("prompt", "chosen", "rejected"):
            print(f"    {column:9} {row[column][-1]['content']}")
    print("\nThe model began with random weights. It learned to tell such answers apart, not to write them,")
    print("so its samples are no sentences.")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", type=Path, nargs="?", default=Path("runs/quickstart"))
    parser.add_argument("--dpopack", default="dpopack", help="how the hints call dpopack")
    arguments = parser.parse_args()
    info = json.loads((arguments.root / "run" / "run.json").read_text(encoding="utf-8"))
    learned = {name: info["evaluation"][name]["rewards/accuracies"] for name in PREFERENCES}
    show_preferences(arguments.root / "assets", learned)
    print("\n" + NEXT.format(dpopack=arguments.dpopack, root=arguments.root))
    if min(learned.values()) <= EXPECTED_ACCURACY:
        sys.exit(f"error: not above {EXPECTED_ACCURACY} on every held-out set, as this run should be")
