"""Begins a run and goes on with it in the offline mode of each tracker, with the trackers' real packages.

    pip install --target DIRECTORY wandb trackio mlflow-skinny comet_ml swanlab
    python scripts/check_trackers.py DIRECTORY

These packages change what other libraries do when they are imported, so the development environment has none
of them, and the tests use stand-ins. Run this after a change of dpo_pack/training/trackers.py. Exit status 1
if a tracker fails, or sees two runs where there is one.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

KINDS = ("wandb", "trackio", "mlflow", "comet_ml", "swanlab")


def log_steps(kind: str, directory: Path, mlflow_run: str | None, *, goes_on: bool) -> None:
    """Sends three steps, or the two after them, to a tracker. Prints the id of MLflow's run."""
    from accelerate import Accelerator

    from dpo_pack.training.trackers import end_trackers, start_trackers, track

    accelerator = Accelerator(cpu=True, log_with=[kind])
    mlflow_run = start_trackers(
        accelerator,
        {"seed": 0, "optim": {"lr": 1e-3}},
        trackers=[kind],
        directory=directory / "trackers",
        name="run-7",
        run_id="abcd1234",
        goes_on=goes_on,
        mlflow_run=mlflow_run,
    )
    for step in (4, 5) if goes_on else (1, 2, 3):
        track(accelerator, {"step": step, "loss": 0.5 / step}, prefix="train/")
    track(accelerator, {"step": step, "loss": 0.4}, prefix="eval/")
    end_trackers(accelerator)
    print("version", version("mlflow-skinny" if kind == "mlflow" else kind))
    print("mlflow run", mlflow_run)


def runs_left(kind: str, directory: Path) -> set[str]:
    """Returns the ids of the runs that a tracker has left on disk."""
    if kind == "trackio":
        import sqlite3

        (database,) = directory.glob("trackio/*.db")
        with sqlite3.connect(database) as connection:
            return {name for (name,) in connection.execute("select distinct run_name from metrics")}
    pattern = {
        "wandb": r"offline-run-\d+_\d+-(\w+)$",
        "mlflow": r"mlruns/\d+/(\w{32})$",
        "comet_ml": r"comet/(\w{32})-\w+\.zip$",
        "swanlab": r"trackers/run-\w+-(\w{21})$",
    }[kind]
    found = (re.search(pattern, str(path)) for path in directory.rglob("*") if path.name != "latest-run")
    return {match[1] for match in found if match}


def check(kind: str, packages: str) -> str:
    """Returns what a tracker did, in a line that begins with "ok" if it saw one run."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        environment = os.environ | {
            "WANDB_MODE": "offline",
            "TRACKIO_DIR": str(directory / "trackio"),
            "MLFLOW_TRACKING_URI": f"file://{directory}/mlruns",
            "MLFLOW_ALLOW_FILE_STORE": "true",
            "COMET_START_ONLINE": "0",
            "COMET_API_KEY": "none",
            "COMET_OFFLINE_DIRECTORY": str(directory / "comet"),
            "SWANLAB_MODE": "offline",
            # After the environment's own packages, so that only missing packages come from this directory.
            "CHECKED_PACKAGES": packages,
        }
        said = ""
        for part in ("begin", "go-on"):
            arguments = [kind, name, *re.findall(r"mlflow run (\w{32})", said)]
            ended = subprocess.run(
                [sys.executable, __file__, part, *arguments], env=environment, capture_output=True, text=True
            )
            if ended.returncode:
                return f"failed: {ended.stderr.strip().splitlines()[-1]}"
            said = ended.stdout
        runs = runs_left(kind, directory)
        release = re.findall(r"^version (.*)$", said, re.MULTILINE)[0]
        return f"{'ok' if len(runs) == 1 else 'failed'}: {kind} {release}, runs {sorted(runs)}"


def main() -> None:
    """Checks each tracker, or does one part of a check in a process of its own."""
    if sys.argv[1] in ("begin", "go-on"):
        sys.path.append(os.environ["CHECKED_PACKAGES"])
        part, kind, directory, *mlflow_run = sys.argv[1:]
        log_steps(kind, Path(directory), mlflow_run[0] if mlflow_run else None, goes_on=part == "go-on")
        return
    results = [check(kind, sys.argv[1]) for kind in KINDS]
    print("\n".join(results))
    sys.exit(any(not result.startswith("ok") for result in results))


if __name__ == "__main__":
    main()
