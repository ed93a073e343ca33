"""The `verdict` section of a recipe: what decides whether the new model is better than its start."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from annotated_types import Gt, Le
from pydantic import BeforeValidator, Field, Strict

from dpo_pack.recipe import types
from dpo_pack.recipe.data import SourceRecipe, as_sources
from dpo_pack.recipe.online import JudgeRecipe
from dpo_pack.system.hub import name_for_others

NO_EVIDENCE = (
    "no source of evidence: name judges (type function, reward_model or llm; --judge FILE.yaml), tasks of "
    "lm-eval (--tasks NAME,FILE.yaml) or a command of yours (--command 'CMD {model}')"
)


class VerdictSamplingRecipe(types.Section):
    """How both models write the answers that judges compare."""

    temperature: types.NonNegativeNumber = 0.0
    """Temperature of sampling; 0: the likeliest token."""
    top_p: Annotated[float, Gt(0), Le(1)] = 1.0
    """Sample only from the likeliest tokens that together have this probability."""
    top_k: types.Count | None = None
    """Sample only from this many likeliest tokens; null: all."""
    min_p: types.PartBelowOne = 0.0
    """Leave out tokens below this part of the likeliest token's probability."""
    stop: Annotated[tuple[types.Name, ...], Strict(False), "a list of texts"] = ()
    """Texts that end an answer, besides EOS."""


class VerdictRecipe(types.Section):
    """What compares the new model with its start when training has ended, see docs/verdict.md."""

    judges: Annotated[tuple[JudgeRecipe, ...], Strict(False), "a list as [{type: llm, ...}]"] = ()
    """Who compares the answers of both models; each judge is a source of evidence of its own."""
    tasks: Annotated[tuple[types.Name, ...], Strict(False), "a list of names and YAML files"] = ()
    """Tasks or groups of lm-eval, by name or as a YAML file; each is a source of its own."""
    command: types.Name | None = None
    """A command of yours, run once a model: prints {"id": ..., "score": ...} lines for the model {model}."""
    lm_eval: types.LocalPath | None = None
    """The command lm-eval of another environment; null: that of this one (dpo-pack[verdict])."""
    prompts: Annotated[
        tuple[SourceRecipe, ...],
        Strict(False),
        BeforeValidator(as_sources, json_schema_input_type=str | SourceRecipe | list[str | SourceRecipe]),
        "a path, a source (a mapping with a path) or a list of these",
    ] = ()
    """Prompts that judges compare answers to; empty: the held-out prompts. Never training prompts."""
    num_prompts: types.Count = 200
    """At most so many different prompts."""
    max_new_tokens: types.TokenCount = 512
    """Most tokens of an answer."""
    sampling: VerdictSamplingRecipe = Field(default_factory=VerdictSamplingRecipe)
    """How answers are drawn; both models get the same random numbers."""
    primary: types.Name | None = None
    """Name of the source that must be above the start for `better`; null: any of them."""

    @property
    def judge_names(self) -> list[str]:
        """The judges' different names: the function, the model's name, or the server's name of its model."""
        names: list[str] = []
        for judge in self.judges:
            own = judge.function or (name_for_others(judge.path) if judge.path else "")
            own = own or (judge.endpoint.model if judge.endpoint else "")
            names.append(own if own not in names else f"{own}, judge {len(names) + 1}")
        return names

    @property
    def task_names(self) -> list[str]:
        """The tasks' names; that of a file is its name without .yaml."""
        return [Path(task).stem if task.endswith(".yaml") else task for task in self.tasks]

    def broken_rules(self) -> Iterator[types.Problem]:
        names = [*self.judge_names, *self.task_names, *(["command"] if self.command else [])]
        if not names:
            yield "judges", NO_EVIDENCE
        for name in {name for name in names if names.count(name) > 1}:
            yield "tasks", f"two sources have the name '{name}'; leave one out"
        if self.primary is not None and self.primary not in names:
            yield "primary", f"no source has this name; the sources are {', '.join(names)}"
        for index, task in enumerate(self.tasks):
            if "," in task:
                yield f"tasks.{index}", "a name has no comma; write a list"
        for number, judge in enumerate(self.judges):
            if judge.is_changed("weight"):
                yield f"judges.{number}.weight", "each judge is a source of its own; leave it out"
        for number, source in enumerate(self.prompts):
            for key in ("weight", "share"):
                if source.is_changed(key):
                    yield f"prompts.{number}.{key}", f"only training sources are mixed by {key}; leave it out"
        if self.command is not None and "{model}" not in self.command:
            yield "command", "does not name the model; write {model} where its path belongs"
        if self.lm_eval is not None and not self.tasks:
            yield "lm_eval", "only verdict.tasks need it; leave it out"
