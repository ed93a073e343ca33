"""Stands in for lm-eval's command: writes the files of a real run of it, see tests/fixtures/lm_eval/.

A model of this name, SCORES in its directory, gets these scores of the metric acc, one for each item.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

REAL_FILES = Path(__file__).resolve().parents[1] / "fixtures" / "lm_eval"
SCORES, CALLS = "scores.json", "calls.jsonl"


def write_stand_in(directory: Path) -> Path:
    """Returns a program for `verdict.lm_eval`. It adds its arguments to CALLS in `directory`."""
    program = directory / "lm-eval"
    program.write_text(
        f"#!{sys.executable}\nimport sys\nsys.path.insert(0, {str(Path(__file__).parents[1])!r})\n"
        f"from support.lm_eval_stand_in import main\nmain({str(directory)!r})\n"
    )
    program.chmod(0o755)
    return program


def main(directory: str) -> None:
    words = sys.argv[1:]
    with Path(directory, CALLS).open("a") as file:
        file.write(json.dumps(words) + "\n")
    option = dict(zip(words, words[1:], strict=False))
    arguments = json.loads(option["--model_args"])
    if option["--tasks"] == "broken":
        sys.exit("ValueError: Tasks not found: broken.")
    assert (
        Path(arguments["tokenizer"], "tokenizer.json").is_file()
        and not Path(option["--output_path"]).exists()
    )
    target = Path(option["--output_path"], arguments["pretrained"].replace("/", "__"))
    target.mkdir(parents=True)
    scores = json.loads(Path(arguments.get("peft", arguments["pretrained"]), SCORES).read_text())
    for real in REAL_FILES.iterdir():
        lines = (
            [json.loads(line) for line in real.read_text().splitlines()] if real.suffix == ".jsonl" else []
        )
        for line in lines:
            line |= {"acc": scores[line["doc_id"]]} if "acc" in line else {}
        text = "".join(json.dumps(line) + "\n" for line in lines) or real.read_text()
        if "free_facts" not in real.name or option["--tasks"] == "both":
            (target / real.name).write_text(text)
