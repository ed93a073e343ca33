"""Makes tests/fixtures/golden.json, or with --release the run and the cache in tests/fixtures/release.

    python scripts/make_golden_values.py
    python scripts/make_golden_values.py --release

golden.json has token ids, log-probs and plans. Values that have changed are written only if their version is
raised; --new-transformers also takes log-probs that changed because transformers did.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from transformers import logging

ROOT = Path(__file__).resolve().parent.parent
sys.path += [str(ROOT), str(ROOT / "tests")]

from support.golden import GOLDEN, KINDS, LOGP_BOUND, plain_log_probs, read_golden  # noqa: E402
from support.release import RELEASE, make_release  # noqa: E402


def write_golden(*, new_transformers: bool = False) -> None:
    """Writes golden.json. Exits with a sentence if values have changed and their version has not."""
    written: dict[str, Any] = read_golden() if GOLDEN.is_file() else {}
    made: dict[str, Any] = {}
    for kind, golden in KINDS.items():
        values = golden.values()
        if kind == "log_probs":
            for family, sums in values.items():
                plain = plain_log_probs(family)
                assert np.allclose(sums, plain, rtol=0, atol=LOGP_BOUND), f"{family}: not the plain model's"
        is_excused = new_transformers and kind == "log_probs"
        if kind in written and written[kind]["version"] == golden.version and not is_excused:
            complaint = golden.complaint(written[kind])
            if complaint:
                raise SystemExit(complaint)
            values = written[kind]["values"]  # new ones would differ by this CPU's rounding
        made[kind] = {"version": golden.version, "values": values}
    lines = []
    for kind, entry in made.items():
        text = ",\n".join(f"   {json.dumps(name)}: {json.dumps(v)}" for name, v in entry["values"].items())
        lines.append(f' "{kind}": {{\n  "version": {entry["version"]},\n  "values": {{\n{text}\n  }}\n }}')
    GOLDEN.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def write_release() -> None:
    """Replaces the run and the cache of the release before by those of this one."""
    with TemporaryDirectory() as scratch:
        made = Path(scratch) / "release"
        made.mkdir()
        make_release(made)
        shutil.rmtree(RELEASE, ignore_errors=True)
        shutil.copytree(made, RELEASE)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--release", action="store_true")
    parser.add_argument("--new-transformers", action="store_true")
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    if arguments.release:
        write_release()
    else:
        write_golden(new_transformers=arguments.new_transformers)
