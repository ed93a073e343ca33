"""The `online` section: what it accepts, what it refuses and how it says so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.tiny_recipe import SMALLEST, changed_keys, load, message_of

from dpo_pack.recipe.load import check_environment, dump_recipe
from dpo_pack.system.errors import RecipeError

ONLINE = (
    SMALLEST + "train: {max_steps: 9}\nonline: {judges: [{type: function, function: 'my.judges:score'}]}\n"
)
SERVER = "{url: 'http://localhost:8000/v1', model: m}"


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("train.max_steps=null", "train.max_steps"),
        ("train.epochs=2", "train.epochs"),
        ("data.truncation=completion_right", "data.truncation"),
        ("checkpoint={metric: loss, keep_best: 1}", "checkpoint.keep_best"),
        ("online.max_new_tokens=2048", "online.max_new_tokens"),
        ("online.temperature=0", "online.temperature"),
        ("data.train.0.keep={from: f}", "data.train.0.keep"),
        ("data.train.0.min_margin=0", "data.train.0.min_margin"),
        ("online.judges=[]", "online.judges"),
        ("online.judges=[{type: function}]", "online.judges.0.function"),
        ("online.judges=[{type: llm}]", "online.judges.0.endpoint"),
        ("online.judges.0.function=score", "online.judges.0.function"),
        ("online.judges.0.instructions=Be nice.", "online.judges.0.instructions"),
        ("online.judges.0.temperature=0.5", "online.judges.0.temperature"),
        (f"online.judges=[{{type: llm, verdict: 'A|B', endpoint: {SERVER}}}]", "online.judges.0.verdict"),
        (f"online.judges=[{{type: llm, verdict: '(A', endpoint: {SERVER}}}]", "online.judges.0.verdict"),
        ("online.generator.type=http", "online.generator.endpoint"),
        (f"online.generator.endpoint={SERVER}", "online.generator.endpoint"),
        (
            "online.generator={type: http, endpoint: {url: 'localhost', model: m}}",
            "online.generator.endpoint.url",
        ),
        (
            f"online.generator={{type: http, token_budget: 9, endpoint: {SERVER}}}",
            "online.generator.token_budget",
        ),
        ("online.generator.gpu_memory_utilization=0.5", "online.generator.gpu_memory_utilization"),
        (
            "online={generator: {type: vllm}, temperature: 2.5, judges: [{type: reward_model, path: a/b}]}",
            "online.temperature",
        ),
        (
            "online.generator={type: vllm, gpu_memory_utilization: 1.0}",
            "online.generator.gpu_memory_utilization",
        ),
        ("online.generator.type=vllm, distributed={num_processes: 2}", "distributed.num_processes"),
        ("online.generator.type=vllm, distributed={strategy: fsdp2}", "distributed.strategy"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(override: str, key: str) -> None:
    with pytest.raises(RecipeError, match=rf"^{re.escape(key)}: .*\Z"):
        load(*re.split(r", (?=[a-z_.]+=)", override), text=ONLINE)


SECRET_SERVERS = [
    "url: 'https://bob:s3cret@h/v1'", "url: 'https://s3cret@h/v1'", "url: 'ftp://bob:s3cret@h'",
    "url: 'https://h/v1?api_key=s3cret'", "api_key_env: sk-s3cret", "api_key_env: hf_s3CRETs3cret",
    *(
        f"extra_body: {fields}"
        for fields in (
            "{api_key: s3cret}", "{a: [{b: {clientSecret: s3cret}}]}", "{Authorization: s3cret}",
            "{hf_token: s3cret}", "{password: 's3cret'}", "{X-API-Key: s3cret}", "{auth: {user: s3cret}}",
            "{headers: ['Bearer s3cret']}", "{hook: 'https://bob:s3cret@h'}", "{keys: {api_keys: [s3cret]}}",
            "{properties: {key: s3cret}}", "s3cret", "['s3cret']",
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize("more", SECRET_SERVERS)
@pytest.mark.parametrize(
    "place", ["generator={type: http, endpoint: %s}", "judges=[{type: llm, endpoint: %s}]"]
)
def test_a_key_in_place_of_its_variable_is_refused_and_not_repeated(place: str, more: str) -> None:
    url = "" if more.startswith("url") else "url: 'http://h/v1', "
    message = message_of(lambda: load(f"online.{place % f'{{{url}{more}, model: m}}'}", text=ONLINE))
    assert "3cret" not in message and "endpoint." in message
    assert "environment variable" in message or "api_key_env" in message or "must be a mapping" in message
    around = message_of(lambda: load(f"online.judges={{endpoint: {{{url}{more}}}}}", text=ONLINE))
    assert "3cret" not in around


def test_what_is_for_a_server_stays_in_the_recipe_and_words_like_token_are_no_keys() -> None:
    fields = """{max_tokens: 1, stop_token_ids: [7], eos_token: zebra, prompt_cache_key: zebra,
    use_auth: true, template: {tokenizer: zebra}, guided_json: {properties: {key: {type: zebra}}}}"""
    server = f"{{url: 'http://zebra:1/v1', model: served, api_key_env: ZEBRA, extra_body: {fields}}}"
    of_both = (
        f"{{judges: [{{type: llm, endpoint: {server}}}], generator: {{type: http, endpoint: {server}}}}}"
    )
    recipe = load(f"online={of_both}", text=ONLINE)
    assert dump_recipe(recipe).lower().count("zebra") == 2 * 6
    assert "zebra" not in (card := dump_recipe(recipe, for_others=True).lower())
    assert card.count("model: served") == 2


def test_a_bound_that_a_server_s_weights_must_exceed_is_refused() -> None:
    served = f"online.generator={{type: http, endpoint: {SERVER}}}"
    load(served, "online.max_staleness_steps=8", text=ONLINE)  # 8 in the last of the 9 steps
    load("online.max_staleness_steps=0", text=ONLINE)
    with pytest.raises(RecipeError, match=r"^online\.max_staleness_steps: "):
        load(served, "online.max_staleness_steps=7", text=ONLINE)


def http(url: str) -> str:
    return f"online.generator={{type: http, endpoint: {{url: '{url}', model: m}}}}"


def judged(model: str = "m", url: str = "http://one:1/v1", *, more: str = "", of_judge: str = "") -> str:
    return f"online.judges=[{{type: llm, endpoint: {{url: '{url}', model: {model}{more}}}{of_judge}}}]"


VLLM, SMALLER = (f"online.generator={{type: vllm{more}}}" for more in ("", ", gpu_memory_utilization: 0.2"))


@pytest.mark.parametrize(
    ("begun", "now", "changed"),
    [
        ([http("http://one:1/v1")], [http("http://other:1/v1"), "online.offload_reference=true"], []),
        ([VLLM], [SMALLER], []),
        ([], [VLLM], ["generator.type"]),
        ([judged()], [judged(url="http://two:2/v1", more=", api_key_env: K, retries: 9")], []),
        ([judged()], [judged(of_judge=", max_new_tokens: 9")], []),
        ([judged()], [judged(of_judge=", temperature: null")], ["judges.0.temperature"]),
        ([judged()], [judged(of_judge=", verdict: 'Winner: (.)'")], ["judges.0.verdict"]),
        ([judged()], [judged("other")], ["judges.0.endpoint.model"]),
        ([], ["online.judges.0.function=a.b:c", "online.top_p=0.9"], ["top_p", "judges.0.function"]),
    ],
)
def test_a_run_goes_on_with_another_server_and_batch_but_not_with_another_judge(
    begun: list[str], now: list[str], changed: list[str]
) -> None:
    found = changed_keys(load(*begun, text=ONLINE), load(*now, text=ONLINE))
    assert found == [f"online.{key}" for key in changed]
    assert changed_keys(load(text=ONLINE), load("train.max_steps=9"))[0].startswith("online")


def test_a_reward_model_that_is_not_there_is_found_before_anything_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "pairs.jsonl").touch()
    judges = "online.judges=[{type: reward_model, path: ./no/such/model}]"
    with pytest.raises(RecipeError, match=r"online\.judges\.0\.path: no such file"):
        check_environment(load(judges, f"data.train={tmp_path}/pairs.jsonl", text=ONLINE))
