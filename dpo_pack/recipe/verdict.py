"""The `verdict` section of a recipe: what decides whether the new model is better than its start."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field, Strict

from dpo_pack.recipe import types
from dpo_pack.recipe.data import SELECTING_KEYS, SourceRecipe
from dpo_pack.recipe.online import JudgeRecipe, SamplingSection
from dpo_pack.recipe.text import show
from dpo_pack.system.hub import name_for_others

NO_EVIDENCE = (
    "no source of evidence: name judges of type function, reward_model or llm (--judge FILE.yaml), tasks of "
    "lm-eval (--tasks NAME,FILE.yaml) or a command of yours (--command 'CMD {model}')"
)


class VerdictSamplingRecipe(SamplingSection):
    """How both models write the answers that judges compare."""

    temperature: types.NonNegativeNumber = 0.0
    """Temperature of sampling; 0: the likeliest token."""


class VerdictRecipe(types.Section):
    """What compares the new model with its start, see docs/verdict.md."""

    judges: Annotated[tuple[JudgeRecipe, ...], Strict(False), "a list as [{type: llm, ...}]"] = ()
    """Who compares the answers of both models; each judge is a source of evidence."""
    tasks: Annotated[tuple[types.PathText, ...], Strict(False), "a list of names and YAML files"] = ()
    """Tasks or groups of lm-eval, by name or as a YAML file; each is a source of evidence."""
    command: (
        Annotated[str, types.NamesOnly, AfterValidator(lambda text: shlex.split(text) and text)] | None
    ) = None
    """A command of yours, run on each model in place of {model}; prints JSON lines with id and score."""
    lm_eval: types.LocalPath | None = None
    """The file lm-eval of another environment; null: that of this one, dpo-pack[verdict]."""
    prompts: Annotated[
        SourceRecipe | None,
        BeforeValidator(
            lambda value: {"path": value} if isinstance(value, str) else value,
            json_schema_input_type=str | SourceRecipe | None,
        ),
        "a path, a source (a mapping with a path) or null",
    ] = None
    """Prompts that judges compare answers to; null: the held-out prompts. Never training prompts."""
    num_prompts: types.Count = 200
    """At most so many different prompts."""
    max_new_tokens: types.TokenCount = 512
    """Most tokens of an answer."""
    sampling: VerdictSamplingRecipe = Field(default_factory=VerdictSamplingRecipe)
    """How answers are drawn; both models get the same random numbers."""
    primary: types.Name | None = None
    """Name of the source of evidence without which neither better nor worse is said; null: any will do."""

    @property
    def judge_names(self) -> list[str]:
        """The function, the model's name, or the server's name of its model."""
        own = (
            judge.function or judge.path or (judge.endpoint and judge.endpoint.model) for judge in self.judges
        )
        return [name_for_others(str(name)) for name in own]

    @property
    def task_names(self) -> list[str]:
        """The tasks' names; of a file, its own without .yaml."""
        return [Path(task).stem if task.endswith(".yaml") else task for task in self.tasks]

    @property
    def inputs(self) -> dict[str, str | None]:
        """The paths and hub ids that the section names, by the recipe's keys."""
        return {
            "verdict.lm_eval": str(self.lm_eval) if self.lm_eval else None,
            "verdict.prompts.path": self.prompts.path if self.prompts else None,
            **{f"verdict.judges.{number}.path": judge.path for number, judge in enumerate(self.judges)},
            **{f"verdict.tasks.{n}": task for n, task in enumerate(self.tasks) if task.endswith(".yaml")},
        }

    def broken_rules(self) -> Iterator[types.Problem]:
        names = [*self.judge_names, *self.task_names, *(["command"] if self.command else [])]
        if not names:
            yield "judges", NO_EVIDENCE
        if len(set(names)) < len(names):
            yield "tasks", f"two sources have one name; leave one out ({', '.join(names)})"
        if self.primary is not None and self.primary not in names:
            yield "primary", f"no source has this name; they are {', '.join(names)}"
        if self.command is not None and "{model}" not in self.command:
            yield "command", "does not name the model; write {model} where its path belongs"
        for number, task in enumerate(self.tasks):
            if not (task.endswith(".yaml") or re.fullmatch(r"[\w.-]+", task)):  # lm-eval splits and reads it
                yield f"tasks.{number}", f"{show(task)} is neither the name of one task nor a YAML file"
        for number, judge in enumerate(self.judges):
            if judge.is_changed("weight"):
                yield f"judges.{number}.weight", "each judge is a source of its own; leave it out"
        for key in ("weight", "share", *SELECTING_KEYS):
            if self.prompts is not None and self.prompts.is_changed(key):
                yield f"prompts.{key}", f"only training sources have {key}; leave it out"
