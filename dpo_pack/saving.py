"""Where a run can go on, what it saves of itself there, and which of its weights were best."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from dpo_pack import ranks
from dpo_pack.checkpoint import Place, checkpoint_content, load_policy
from dpo_pack.checkpoint_dir import checkpoint_path
from dpo_pack.errors import CacheError, RunError
from dpo_pack.export import export_model
from dpo_pack.files import sync
from dpo_pack.monitoring import report_nonfinite
from dpo_pack.run_dir import damage_of
from dpo_pack.session import Session, totals
from dpo_pack.trackers import MetricsLog


def mark_place(session: Session, log: MetricsLog) -> None:
    """From here the run can go on: state, metrics and source of batches belong together."""
    session.place = Place(
        step=session.state.step, metrics_offset=log.offset, source=session.source.state_dict()
    )


def is_checkpoint_due(session: Session) -> bool:
    """After so many steps, or because this step's evaluation is among the best."""
    settings, state = session.prepared.recipe.checkpoint, session.state
    is_in_turn = settings.every_steps is not None and state.step % settings.every_steps == 0
    return state.step > 0 and (is_in_turn or state.step in state.standing.best_steps[: settings.keep_best])


def checkpoint(session: Session) -> None:
    """Save the full state, so that the run can go on from its place as if it had never stopped."""
    prepared, settings = session.prepared, session.prepared.recipe.checkpoint
    if ranks.is_first():
        sync(session.run.metrics)  # the checkpoint counts on what it holds
    content = checkpoint_content(
        session.state, session.place, session.identity, keep=settings.keep, num_best=settings.keep_best
    )

    def export(directory: Path) -> None:
        export_model(
            session.policy,
            prepared.tokenizer,
            directory,
            recipe=prepared.recipe,
            totals=totals(session),
            evaluation=session.state.evaluation,
        )

    path = session.writer.write(content, export=export if settings.export else None)
    session.saved = session.place
    prepared.console.print(f"  {'saving' if session.writer.is_busy else 'saved'} {path}")


def save_on_the_way_out(session: Session) -> None:
    """Save the last place of a run that is interrupted; the step under way is as if it had not begun."""
    state, console = session.state, session.prepared.console
    state.optimizer.zero_grad(set_to_none=True)
    report_nonfinite(session.guard, session.prepared, session.run.root)
    if state.step == 0:
        console.print("  nothing is trained yet, so there is nothing to save")
    elif session.saved is session.place:
        console.print(f"  step {state.step} is saved already")
    else:
        checkpoint(session)


def save_what_is_done(session: Session) -> None:
    """For a run that an error ends: save its last place, unless the parameters are past it already."""
    if session.state.step != session.place.step:
        return
    try:
        save_on_the_way_out(session)
    except CacheError as refused:  # the error that ends the run is the one to tell
        session.prepared.console.print(f"  Warning: {refused}")


def best_evaluation(session: Session) -> dict[str, Any] | None:
    """For run.json: which step was best by the recipe's metric, and its checkpoint, if that is kept."""
    selection, standing = session.selection, session.state.standing
    if selection is None or not standing.best:
        return None
    step, value = standing.best[0]
    path = checkpoint_path(session.run.checkpoints, step)
    return {
        "step": step,
        "metric": selection.metric,
        "eval_set": selection.eval_set,
        "value": value,
        "checkpoint": str(path) if path.is_dir() else None,
    }


def stop_sentence(session: Session) -> str | None:
    """Why the run ends before its last step; None when it does not."""
    selection, standing = session.selection, session.state.standing
    if selection is None or not selection.stops(standing):
        return None
    best = f"; best is {standing.best[0][1]:.4g} after step {standing.best[0][0]}" if standing.best else ""
    return (
        f"Stopped early after step {session.state.step}: {selection.metric} of {selection.eval_set} has not "
        f"improved in {standing.num_since_improvement} evaluations{best}"
    )


def require_best(session: Session) -> None:
    """Raise RunError, on every rank, where `load_best` would find no weights, while the run can be saved."""
    remedy = "set it to false, and the same command leaves the last weights"
    standing = session.state.standing
    if not standing.best:
        raise RunError(f"checkpoint.load_best: no evaluation gave a finite metric; {remedy}")
    path = checkpoint_path(session.run.checkpoints, standing.best_steps[0])
    session.writer.wait()  # it may be the one on its way
    damage = damage_of(path)
    if damage is not None:
        raise RunError(f"checkpoint.load_best: {path} is damaged: {damage}; {remedy}")


def load_best(session: Session) -> None:
    """Give the policy the weights of the best evaluation, which `require_best` has looked at."""
    path = checkpoint_path(session.run.checkpoints, session.state.standing.best_steps[0])
    session.state.evaluation = load_policy(path, session.state.policy)


def forget_lost_bests(session: Session) -> None:
    """Of a run that goes on: best evaluations whose checkpoints are not here can be bettered, not loaded.

    They are in another directory, or were not kept, or went when later ones were better.
    """
    standing = session.state.standing
    kept = ranks.first_says(
        tuple(
            (step, value)
            for step, value in standing.best
            if checkpoint_path(session.run.checkpoints, step).is_dir()
        )
    )
    if session.prepared.recipe.checkpoint.keep_best > 0 and kept != standing.best:
        lost = ", ".join(str(step) for step in standing.best_steps if step not in dict(kept))
        session.prepared.console.print(
            f"Note: the best evaluations were after step {lost}, of which {session.run.checkpoints} has no "
            "checkpoint; the best of those to come are kept"
        )
        session.state.standing = replace(standing, best=kept)
