"""The evaluation of a run's policy, before the first step, while it trains and at the end."""

from __future__ import annotations

import time
from typing import Any

from dpo_pack.evaluate import evaluate_sets
from dpo_pack.online.win_rate import WinRate, win_rate_sentence
from dpo_pack.saving import mark_place
from dpo_pack.selection import judge
from dpo_pack.session import Session
from dpo_pack.trackers import MetricsLog, track


def evaluate(session: Session, log: MetricsLog) -> None:
    """Metrics of every held-out set, into the log, the trackers and the state.

    A run that is stopped meanwhile still owes it.
    """
    prepared, state, begun = session.prepared, session.state, time.monotonic()
    poll = session.interruption.poll
    evaluation: dict[str, dict[str, Any]] = {}
    for held_out in evaluate_sets(
        prepared, state.policy, session.reference, session.objective, between_rows=poll
    ):
        evaluation[held_out.name] = held_out.record
        record = {"split": "eval", "source": held_out.name, "step": state.step, **held_out.record}
        log.write(record)
        track(prepared.accelerator, record)
        low, high = held_out.record["intervals"]["rewards/accuracies"]
        prepared.console.print(
            f"  held out ({held_out.name}) after step {state.step}: "
            f"reward accuracy {record['rewards/accuracies']:.3f} ({low:.3f} to {high:.3f}), "
            f"margin {record['rewards/margins']:.4f}, loss {record['loss']:.4f}"
        )
    for name, result in () if session.win_rate is None else win_rates(session, session.win_rate):
        evaluation[name] = result
        record = {"split": "eval", "source": name, "step": state.step, **result}
        log.write(record)
        track(prepared.accelerator, record)
        prepared.console.print(f"  held out ({name}) after step {state.step}: {win_rate_sentence(result)}")
    state.evaluation, state.owes_evaluation = evaluation, False
    if session.selection is not None and state.step > 0:
        state.standing = judge(state.standing, session.selection, evaluation, step=state.step)
    mark_place(session, log)
    session.eval_seconds += time.monotonic() - begun


def win_rates(session: Session, win_rate: WinRate) -> list[tuple[str, dict[str, Any]]]:
    """The policy's against itself as it started, by set of prompts; an evaluation may be left anywhere."""
    with session.interruption.lifted():
        return list(win_rate.evaluate())
