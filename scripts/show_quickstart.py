"""Show an answer to a held-out question before and after training. Fails if too little was learned."""

import argparse
import json
import sys
from pathlib import Path

PREFERENCES = {  # held-out set -> what the trained model does
    "tone": "prefers a courteous answer to a dismissive one",
    "topic": "prefers an answer to the question over an answer to another one",
}
EXPECTED_ACCURACY = 0.9
NEXT = """\
Or another loss (the reference log-probs are cached, so none is computed again), or a recipe of your own:
  {dpopack} train configs/quickstart.yaml loss.type=ipo output_dir={root}/ipo
  {dpopack} recipe --defaults > my-recipe.yaml"""


def show_answers(root: Path, accuracies: dict[str, float]) -> None:
    samples = list(map(json.loads, (root / "samples.jsonl").read_text(encoding="utf-8").splitlines()))
    print("\nThe held-out questions are about towns that training never named. What was learned:")
    for name, preference in PREFERENCES.items():
        of_set = [sample for sample in samples if sample["source"] == name]
        answers = {sample["model"]: sample["completion"] for sample in of_set}
        question = of_set[-1]["prompt"].rpartition("<|user|>")[2].partition("</s>")[0]
        print(f"\n  {name}: {preference}, in {accuracies[name]:.1%} of the pairs\n    question  {question}")
        print(f"    before    {answers['start']}\n    after     {answers['policy']}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", type=Path, nargs="?", default=Path("runs/quickstart"))
    parser.add_argument("--dpopack", default="dpopack", help="how the hints call dpopack")
    arguments = parser.parse_args()
    info = json.loads((arguments.root / "run" / "run.json").read_text(encoding="utf-8"))
    learned = {name: info["evaluation"][name]["rewards/accuracies"] for name in PREFERENCES}
    show_answers(arguments.root / "run", learned)
    print("\n" + NEXT.format(dpopack=arguments.dpopack, root=arguments.root))
    if min(learned.values()) <= EXPECTED_ACCURACY:
        sys.exit(f"error: not above {EXPECTED_ACCURACY} on every held-out set, as this run should be")
