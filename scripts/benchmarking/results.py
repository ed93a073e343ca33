"""What has been measured, on disk after every measurement, so that an interrupted benchmark goes on."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarking.contenders import Measurement
from dpo_pack.system.files import write_json_atomically


@dataclass(slots=True)
class Results:
    """`OUTPUT.json`: the setting, and an entry for each thing that was measured."""

    path: Path
    content: dict[str, Any]
    after_put: Callable[[], object] = lambda: None

    @classmethod
    def open(cls, path: Path, setting: dict[str, Any]) -> Results:
        """What is there, if it is of the same setting; exits when it is of another."""
        if not path.is_file():
            return cls(path, {"setting": setting, "entries": {}})
        content = json.loads(path.read_text(encoding="utf-8"))
        found = content.get("setting", {})
        if found != setting:
            changed = [key for key in {**setting, **found} if found.get(key) != setting.get(key)]
            raise SystemExit(
                f"--output: {path} holds measurements of another setting ({', '.join(changed)} differ); "
                "give another --output, or remove it to measure anew"
            )
        return cls(path, content)

    @property
    def entries(self) -> dict[str, Any]:
        entries: dict[str, Any] = self.content["entries"]
        return entries

    def put(self, key: str, value: Any) -> None:
        """Keep an entry, at once."""
        self.entries[key] = value
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_json_atomically(self.path, self.content)
        self.after_put()

    def measurement(self, key: str) -> Measurement:
        return Measurement(**self.entries[key])


# How far two computations of the same steps may be apart: loss in nats, the others relative. fp32: sums in
# another order. bf16: roundings of 2^-9 each, which differ with the shapes of products.
TOLERANCES = {
    "fp32": {"loss": 1e-4, "grad_norm": 5e-4, "logps": 2e-6},
    "bf16": {"loss": 2e-2, "grad_norm": 5e-2, "logps": 5e-3},
}


def largest_differences(
    ours: Measurement, theirs: Measurement, *, first_step_only: bool = False
) -> dict[str, float]:
    """The largest of all steps: `loss` (nats), `grad_norm` and `logps` (relative).

    `first_step_only`: of the first step's log-probs, where nothing is trained yet. Adapters begin at random
    values that depend on a library's order of drawing.
    """
    last = 1 if first_step_only else None

    def relative(name: str) -> float:
        left, right = (np.array(getattr(side, name)[:last]) for side in (ours, theirs))
        return float(np.abs(left / right - 1).max())

    found = {"logps": max(relative("chosen_logps"), relative("rejected_logps"))}
    if not first_step_only:
        found["loss"] = float(np.abs(np.array(ours.losses) - np.array(theirs.losses)).max())
        found["grad_norm"] = relative("grad_norms")
    return found


def other_work(found: dict[str, float], limits: dict[str, float], *, who: str) -> list[str]:
    """What shows that two contenders did not do the same, a line each; empty: their times can be compared."""
    return [
        f"{who} does not do the same work: {name} differs by {difference:.3g}, "
        f"at most {limits[name]:.3g} is rounding"
        for name, difference in found.items()
        if not difference <= limits[name]  # with `not`, because NaN is no agreement
    ]


def machine() -> dict[str, Any]:
    """Versions, devices and commit."""
    import dpo_pack
    from dpo_pack.system.machine import cpu_name, git_commit

    return {**dpo_pack.doctor(quiet=True), "git_commit": git_commit(), "processor": cpu_name()}


def hardware(machine: dict[str, Any]) -> str:
    """Devices in words, and the processor where it is none of them."""
    devices = [device["name"] for device in machine["devices"]]
    is_named = any(name.startswith(machine["processor"]) for name in devices)
    return ", ".join(devices if is_named else [machine["processor"], *devices])
