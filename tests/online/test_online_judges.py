"""Judges: what they return, what they refuse, what becomes of a prompt they fail on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import support.online_judges as online_judges
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from support.marks import slow
from support.refusals import refusal
from support.rows import said
from support.tiny_models import tiny_config, tiny_model
from support.tiny_online import online_recipe
from support.tiny_recipe import message_of
from support.tiny_tokenizer import tiny_tokenizer
from support.whole_runs import text
from transformers import AutoModelForSequenceClassification
from transformers.models.gemma3.modeling_gemma3 import Gemma3TextModel

from dpo_pack.data.tokenization import Prompt
from dpo_pack.data.values import Message
from dpo_pack.model.scorer import Precision
from dpo_pack.online.interface import Completion, Draw, Failure, Rollout, Scores
from dpo_pack.online.judges import FunctionJudge, LlmJudge, WeightedJudges
from dpo_pack.online.reward_model import RewardModelJudge, load_reward_model
from dpo_pack.recipe.online import EndpointRecipe, JudgeRecipe
from dpo_pack.recipe.schema import ModelRecipe
from dpo_pack.run.rollouts import build_judge
from dpo_pack.run.setup import check_recipe, prepare
from dpo_pack.system.errors import ModelError, RunError
from dpo_pack.system.process import load_function


def rollout(
    prompt: str,
    *texts: str,
    number: int = 0,
    messages: tuple[Message, ...] | None = None,
    tools: list[Any] | None = None,
) -> Rollout:
    tokenizer = tiny_tokenizer()

    def ids(text: str) -> np.ndarray:
        return np.array(tokenizer(text)["input_ids"], dtype=np.int32)

    return Rollout(
        draw=Draw(
            number=number,
            prompt_index=number,
            prompt=Prompt(
                ids=ids(prompt), text=prompt, messages=messages, row_number=number + 1, tools=tools
            ),
        ),
        completions=tuple(Completion(ids=ids(text), text=text, is_finished=True) for text in texts),
    )


TOOLS = [{"type": "function", "function": {"name": "weather", "description": "of a city"}}]
ROLLOUTS = (
    rollout("ask about the sky", " blue", " the sky is blue", " grey eel", number=0),
    rollout("ask about bread", " mix", " bake it", number=1),
    rollout("x", " one", " one two three four five six seven eight", number=2),
)


def function_judge(name: str, retries: int = 1) -> FunctionJudge:
    name = f"support.online_judges:{name}"
    return FunctionJudge(name=name, function=load_function(name, "online.judges.0.function"), retries=retries)


def test_a_function_gets_one_entry_a_completion_and_its_scores_come_back_by_prompt() -> None:
    scores = function_judge("count_e").score(ROLLOUTS)
    expected = [[c.text.count("e") - 0.01 * len(c.text) for c in r.completions] for r in ROLLOUTS]
    assert [s.tolist() for s in scores if not isinstance(s, Failure)] == expected


def test_messages_reach_a_function_as_messages() -> None:
    seen: list[object] = []

    def spy(*, prompts: list[object], completions: list[str]) -> list[float]:
        seen.extend(prompts)
        return [0.0] * len(completions)

    asked = rollout("<s>user\nhello</s>", "a", "b", messages=({"role": "user", "content": "hello"},))
    FunctionJudge(name="m:spy", function=spy, retries=0).score([asked, ROLLOUTS[1]])
    assert seen == [[{"role": "user", "content": "hello"}]] * 2 + ["ask about bread"] * 2


def test_a_function_that_raises_is_asked_again_then_prompt_by_prompt() -> None:
    online_judges.calls.clear()
    scores = function_judge("dislikes_bread", retries=2).score(ROLLOUTS)
    assert isinstance(scores[1], Failure) and "\n" not in scores[1].reason
    assert scores[1].reason == "support.online_judges:dislikes_bread: ValueError: no bread, please"
    assert not isinstance(scores[0], Failure) and not isinstance(scores[2], Failure)
    sizes = [len(call) for call in online_judges.calls]
    assert sizes == [7, 7, 7, 3, 2, 2, 2, 2]  # together three times, then each alone


def test_a_score_that_is_no_number_sets_only_its_prompt_aside() -> None:
    moons = [rollout("the moon", "a", "b"), rollout("half a moon", "c")]
    scores = function_judge("not_a_number").score([ROLLOUTS[1], moons[0], ROLLOUTS[0], moons[1]])
    assert [isinstance(result, Failure) for result in scores] == [False, True, False, True]
    assert [len(result) for result in scores if not isinstance(result, Failure)] == [2, 3]


@pytest.mark.parametrize("name", ["one_short", "words"])
def test_a_function_that_returns_the_wrong_thing_stops_the_run(name: str) -> None:
    with pytest.raises(RunError, match=rf"online\.judges: support\.online_judges:{name} .* 7 completions"):
        function_judge(name).score(ROLLOUTS)


@pytest.mark.parametrize(
    "name, message",
    [
        ("support.online_judges:nothing", "no attribute 'nothing'"),
        ("no_such_module_anywhere:score", "cannot import no_such_module_anywhere"),
        ("support.online_judges:number", "is int, not a function"),
    ],
)
def test_a_function_that_cannot_be_had_is_refused_by_recipe_key(name: str, message: str) -> None:
    said = message_of(lambda: load_function(name, "online.judges.1.function"))
    assert said.startswith("online.judges.1.function: ") and message in said


@dataclass(frozen=True, slots=True)
class Fixed:
    """Gives the same results whatever it is asked, and remembers what that was."""

    results: dict[int, list[float] | None]
    asked: list[int]

    def score(self, rollouts: Sequence[Rollout]) -> list[Scores | Failure]:
        self.asked.extend(r.draw.number for r in rollouts)
        found = [self.results[r.draw.number] for r in rollouts]
        return [Failure(reason="no") if scores is None else np.array(scores) for scores in found]


def test_scores_add_up_by_weight_and_a_failed_prompt_costs_no_more_judging() -> None:
    first = Fixed({0: [1, 2, 3], 1: None, 2: [0, 1]}, [])
    second = Fixed({0: [1, 0, 0], 1: [9, 9], 2: None}, [])
    scores = WeightedJudges(judges=((first, 2.0), (second, 0.5))).score(ROLLOUTS)
    assert not isinstance(scores[0], Failure) and scores[0].tolist() == [2.5, 4.0, 6.0]
    assert isinstance(scores[1], Failure) and isinstance(scores[2], Failure)
    assert second.asked == [0, 2]


def test_a_language_model_judges_all_that_a_prompt_says() -> None:
    calls = [{"function": {"name": "weather", "arguments": {"city": "Rome"}}}]
    messages: tuple[Message, ...] = (
        {"role": "user", "content": [{"type": "text", "text": "warm?"}, {"type": "text", "text": "wet?"}]},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "content": "21 degrees"},
    )
    settings = JudgeRecipe(type="llm", endpoint=EndpointRecipe(url="http://x", model="m"))
    judge = LlmJudge(endpoint=None, settings=settings, recipe_key="k")  # type: ignore[arg-type]
    one = rollout("warm?", " yes", " no", messages=messages, tools=TOOLS)
    asked = judge.body(one)["messages"][1]["content"]
    expected = f"tools: {json.dumps(TOOLS)}\n\n"
    expected += f"user: warm?\nwet?\n\nassistant: {json.dumps(calls)}\n\ntool: 21 degrees\n\n[Answer A]"
    assert expected in asked


# ------------------------------------------------------------------------------------------ reward models


def save_reward_model(
    directory: Path, family: str, *, num_labels: int = 1, chat: bool = False, **changes: Any
) -> Path:
    tokenizer = tiny_tokenizer(chat_template=chat)
    tokenizer.save_pretrained(directory)
    torch.manual_seed(3)
    config = tiny_config(family, vocab_size=len(tokenizer), num_labels=num_labels, **changes)
    model = AutoModelForSequenceClassification.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(8.0)
    model.save_pretrained(directory)
    return directory


def reward_model(
    path: Path, *, token_budget: int = 64, chat: bool = False, autocast: torch.dtype | None = None
) -> RewardModelJudge:
    judge, _ = load_reward_model(
        str(path),
        tiny_tokenizer(chat_template=chat),
        settings=ModelRecipe(path="policy"),
        precision=Precision(parameters=torch.float32, autocast=autocast),
        token_budget=token_budget,
        device=torch.device("cpu"),
        recipe_key="online.judges.0.path",
    )
    return judge


def alone(path: Path, texts: list[str], *, add_special_tokens: bool = True) -> list[float]:
    """Each text by transformers' own classifier and attention."""
    model = AutoModelForSequenceClassification.from_pretrained(path, attn_implementation="eager").eval()
    tokenizer = tiny_tokenizer()
    ids = tokenizer(texts, add_special_tokens=add_special_tokens)["input_ids"]
    with torch.no_grad():
        return [float(model(torch.tensor([sequence])).logits) for sequence in ids]


def test_each_judge_of_a_recipe_is_one_of_its_type_with_its_weight(tmp_path: Path) -> None:
    server = {"url": "http://localhost:1/v1", "model": "judge"}
    judges: list[dict[str, Any]] = [
        {"type": "function", "function": "support.online_judges:count_e"},
        {"type": "reward_model", "path": str(save_reward_model(tmp_path / "judge", "llama")), "weight": 2},
        {"type": "llm", "endpoint": server, "weight": 0.5},
    ]
    types = set(get_args(JudgeRecipe.model_fields["type"].annotation))
    assert {judge["type"] for judge in judges} == types, "make_judge, run/rollouts.py, and here"
    page = Path("docs/online.md").read_text(encoding="utf-8")
    assert all(f"| `{name}` |" in page for name in types), "a row in docs/online.md"
    recipe = online_recipe(tmp_path / "assets", tmp_path / "run", judges=judges)
    combined = build_judge(prepare(recipe, Console(quiet=True), takes_prompts=True))
    assert isinstance(combined, WeightedJudges)
    kinds = [(type(judge), weight) for judge, weight in combined.judges]
    assert kinds == [(FunctionJudge, 1.0), (RewardModelJudge, 2.0), (LlmJudge, 0.5)]


@pytest.mark.parametrize(
    ("family", "token_budget", "changes"),
    [
        ("llama", 1, {}),
        ("llama", 4096, {"pad_token_id": None}),
        ("llama", 4096, {"pad_token_id": 2}),  # the token that ends each sequence
        ("gpt2", 100, {}),
        ("gpt_oss", 4096, {}),
        ("qwen3_next", 4096, {}),  # with gated delta nets
        *slow(("gemma2", 4096, {}), ("mistral", 100, {}), ("qwen3_moe", 4096, {}), ("exaone4", 4096, {})),
    ],
)
def test_scores_equal_each_sequence_alone(
    family: str, token_budget: int, changes: dict[str, Any], tmp_path: Path
) -> None:
    path = save_reward_model(tmp_path, family, **changes)
    judged = (*ROLLOUTS, rollout("same", " thing", " thing", number=3))
    for each, scores in zip(judged, reward_model(path, token_budget=token_budget).score(judged), strict=True):
        texts = [each.draw.prompt.text + c.text + "</s>" for c in each.completions]
        assert scores == pytest.approx(alone(path, texts), abs=1e-5)
    assert len(set(alone(path, texts))) == 1 and reward_model(path).score([]) == []


def test_a_conversation_is_rendered_by_the_reward_model_s_own_template(tmp_path: Path) -> None:
    path = save_reward_model(tmp_path, "llama", chat=True)
    asked = rollout("unused", "fine", "bad", messages=({"role": "user", "content": "how are you"},))
    (scores,) = reward_model(path, chat=True).score([asked])
    texts = [f"<s>user\nhow are you</s>\n<s>assistant\n{text}</s>\n" for text in ("fine", "bad")]
    assert scores == pytest.approx(alone(path, texts, add_special_tokens=False), abs=1e-5)


def test_a_reward_model_gets_the_tools_and_all_that_was_said(tmp_path: Path) -> None:
    path = save_reward_model(tmp_path, "llama", chat=True)
    asked = rollout("unused", "fine", messages=(said("user", "warm?"),), tools=TOOLS)
    judge = reward_model(path, chat=True)
    text = f"<s>tools\n{json.dumps(TOOLS)}</s>\n<s>user\nwarm?</s>\n<s>assistant\nfine</s>\n"
    assert judge._conversations(asked) == [text]
    judge = reward_model(path, chat=True)
    judge.tokenizer.chat_template = "{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}"
    hidden = rollout("unused", "fine", messages=(said("system", "be brief"), said("user", "warm?")))
    of_tools, of_system, fine = judge.score([asked, hidden, ROLLOUTS[0]])
    assert not isinstance(fine, Failure) and np.isfinite(fine).all()
    assert isinstance(of_tools, Failure) and "does not write the tools" in of_tools.reason
    assert isinstance(of_system, Failure) and "does not write the content of message 1" in of_system.reason


def test_a_reward_model_without_chat_template_that_reads_conversations_is_told(
    tmp_path: Path, console: Console
) -> None:
    path = save_reward_model(tmp_path / "judge", "llama")
    judges = [{"type": "reward_model", "path": str(path)}]
    recipe = online_recipe(tmp_path / "assets", tmp_path / "run", judges=judges)
    setup = prepare(recipe, console, takes_prompts=True)
    words = "Warning: online.judges.0.path: its tokenizer has no chat template"
    build_judge(setup)
    assert words not in text(console)
    asked = replace(setup.data.prompts[0], messages=(said("user", "warm?"),))
    build_judge(replace(setup, data=replace(setup.data, prompts=(asked,))))
    assert words in text(console)


def test_a_reward_model_whose_config_says_quantised_and_whose_weights_are_not_is_refused(
    tmp_path: Path,
) -> None:
    path = save_reward_model(tmp_path / "judge", "llama")
    file, settings = path / "config.json", {"quant_method": "bitsandbytes", "load_in_4bit": True}
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": settings}))
    judges = [{"type": "reward_model", "path": str(path)}]
    recipe = online_recipe(tmp_path / "assets", tmp_path / "run", judges=judges)
    setup = prepare(recipe, Console(quiet=True), takes_prompts=True)
    told = [refusal(lambda: build_judge(setup), ModelError), *check_recipe(recipe)[1]]
    assert len(told) == 2 and told[0] == told[1]
    assert told[0].startswith("online.judges.0.path: ") and told[0].endswith(
        "; remove quantization_config from it"
    )


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [8.0] * 4,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    ("family", "changes", "positions"),
    [
        ("llama", {}, 256),
        # Its positions depend on the longest sequence: nothing longer meets the others.
        ("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 64}, 64),
    ],
)
def test_what_is_too_long_for_the_reward_model_is_set_aside(
    family: str, changes: dict[str, Any], positions: int, tmp_path: Path
) -> None:
    judge = reward_model(save_reward_model(tmp_path, family, **changes), token_budget=4096)
    long, short = judge.score([rollout("x " * positions, "a", "b"), ROLLOUTS[0]])
    assert isinstance(long, Failure) and f"the model has {positions} positions" in long.reason
    sequences = judge._sequences(ROLLOUTS[0])
    assert not isinstance(sequences, Failure)
    longest = max(map(len, sequences))
    for most, fits in ((longest - 1, False), (longest, True)):
        assert isinstance(replace(judge, max_tokens=most)._sequences(ROLLOUTS[0]), list) == fits
    assert short == pytest.approx(judge.score([ROLLOUTS[0]])[0], abs=1e-6)


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_a_reward_model_whose_scores_depend_on_padding_is_refused(
    autocast: torch.dtype | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_reward_model(tmp_path, "gemma3_text", use_bidirectional_attention=True)
    assert reward_model(path, autocast=autocast).score(ROLLOUTS)
    forward = Gemma3TextModel.forward
    without_mask = lambda *inputs, attention_mask=None, **others: forward(*inputs, **others)  # noqa: E731
    monkeypatch.setattr(Gemma3TextModel, "forward", without_mask)
    with pytest.raises(ModelError, match=r"^online\.judges\.0\.path: .*padding changes a score by"):
        reward_model(path, autocast=autocast)


def test_a_classifier_of_several_classes_and_a_language_model_are_no_reward_models(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"online\.judges\.0\.path: .* has 2 outputs.*num_labels: 1"):
        reward_model(save_reward_model(tmp_path / "two", "llama", num_labels=2))
    path = save_reward_model(tmp_path / "one", "llama")
    tiny_model("llama", vocab_size=len(tiny_tokenizer()), num_labels=1).save_pretrained(path)
    with pytest.raises(ModelError, match=r"lacks score\.weight"):
        reward_model(path)


def test_the_weights_say_how_many_outputs_a_reward_model_has(tmp_path: Path) -> None:
    """Published configs lack num_labels, or have the labels of another task."""
    expected = reward_model(save_reward_model(tmp_path, "llama")).score(ROLLOUTS)
    file = tmp_path / "config.json"
    config = {k: v for k, v in json.loads(file.read_text()).items() if k not in ("id2label", "label2id")}
    for labels in ({}, {"num_labels": 3}, {"id2label": {"0": "bad", "1": "good"}}):
        file.write_text(json.dumps({**config, **labels}))
        scores = reward_model(tmp_path).score(ROLLOUTS)
        assert [list(s) for s in scores] == [list(s) for s in expected]  # type: ignore[arg-type]
    file.write_text(json.dumps({**config, "intermediate_size": 7}))
    with pytest.raises(ModelError, match=r"online\.judges\.0\.path: .*other shapes than config\.json says"):
        reward_model(tmp_path)


def test_a_layer_of_a_reward_model_that_its_config_does_not_name_is_told(tmp_path: Path) -> None:
    file = save_reward_model(tmp_path, "llama") / "model.safetensors"
    head, more = {"lm_head.weight": torch.zeros(3)}, {"model.layers.2.mlp.up_proj.weight": torch.zeros(3)}
    save_file({**load_file(file), **head}, file, metadata={"format": "pt"})
    reward_model(tmp_path)
    save_file({**load_file(file), **more}, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"does not use 1 tensors .*first: model\.layers\.2"):
        reward_model(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"online\.judges\.0\.path: .* is an adapter; merge it"):
        reward_model(tmp_path)
