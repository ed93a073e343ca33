"""Every rollout of a run on disk: a directory of Parquet parts, one a phase, whole or absent.

A row is a prompt with its completions and scores. `prompt_ids`, `chosen_ids` and `rejected_ids` are the
tokens of its pair (of several, the first), null where it made none, so that the directory is a source of
`data.train` as well (format `tokenized`; `data.on_bad_row: skip` leaves out rows without a pair).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from dpo_pack.files import written_aside
from dpo_pack.online.phases import Outcome

_IDS = pa.list_(pa.int32())
SCHEMA = pa.schema(
    [
        ("step", pa.int64()),  # optimizer steps the policy had taken
        ("draw", pa.int64()),  # number of the prompt's draw in the run, from 0
        ("row_number", pa.int64()),  # of the prompt in its source, from 1
        ("prompt", pa.string()),
        ("completions", pa.list_(pa.string())),
        ("scores", pa.list_(pa.float64())),  # after the missing-EOS penalty; null where the judge failed
        ("is_finished", pa.list_(pa.bool_())),
        ("failure", pa.string()),
        ("completion_ids", pa.list_(_IDS)),
        ("prompt_ids", _IDS),
        ("chosen_ids", _IDS),
        ("rejected_ids", _IDS),
    ]
)


class RolloutLog:
    """The parts of one run. A part that is written again replaces the old one."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def write(self, phase: int, step: int, outcomes: Sequence[Outcome]) -> None:
        """The rollouts of phase number `phase`, from 0. Raises CacheError when the disk refuses."""
        table = pa.Table.from_pylist([_row(step, outcome) for outcome in outcomes], schema=SCHEMA)
        with written_aside(self._part(phase)) as temporary:
            pq.write_table(table, temporary, write_page_checksum=True)

    def drop_from(self, phase: int) -> None:
        """Forget phases from `phase` on: a run that goes on from before them makes them anew."""
        for part in self.directory.glob("part-*.parquet"):
            if int(part.stem.removeprefix("part-")) >= phase:
                part.unlink()

    def _part(self, phase: int) -> Path:
        return self.directory / f"part-{phase:06d}.parquet"


def _row(step: int, outcome: Outcome) -> dict[str, Any]:
    draw, rollout, pairing = outcome.draw, outcome.rollout, outcome.pairing
    completions = () if rollout is None else rollout.completions
    chosen, rejected = pairing.pairs[0] if pairing is not None and pairing.pairs else (None, None)
    return {
        "step": step,
        "draw": draw.number,
        "row_number": draw.prompt.row_number,
        "prompt": draw.prompt.text,
        "completions": [completion.text for completion in completions],
        "scores": None if pairing is None else pairing.scores.tolist(),
        "is_finished": [completion.is_finished for completion in completions],
        "failure": outcome.failure,
        "completion_ids": [completion.ids.tolist() for completion in completions],
        "prompt_ids": draw.prompt.ids.tolist(),
        "chosen_ids": None if chosen is None else completions[chosen].ids.tolist(),
        "rejected_ids": None if rejected is None else completions[rejected].ids.tolist(),
    }
