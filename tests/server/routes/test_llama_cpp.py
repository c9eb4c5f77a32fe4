"""llama.cpp's own routes: /completion and what it takes, /infill, /apply-template, slots, properties."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace
from typing import Any

import pytest

from latentkv.engine.lines import LineLimits, Lines
from latentkv.server.errors import Refused
from latentkv.server.llama_cpp.body import InfillBody
from latentkv.server.llama_cpp.infill import infill_prompt

PROMPT = "The clerk of the town wrote numbers into a book."
SAID = {"prompt": PROMPT, "n_predict": 12, "ignore_eos": True}


def ask(http: Any, path: str = "/completion", **body: Any) -> Any:
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def streamed(http: Any, **body: Any) -> list[dict[str, Any]]:
    with http.stream("POST", "/completion", json=body | {"stream": True}) as answer:
        lines = [line for line in answer.iter_lines() if line.startswith("data: ")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]  # no [DONE], as llama.cpp's server


def text_of(http: Any, **body: Any) -> str:
    text: str = ask(http, **SAID | body)["content"]
    return text


def test_an_answer_in_llama_cpps_shape(http: Any, openai: Any) -> None:
    got = ask(http, **SAID, return_tokens=True)
    want = openai.completions.create(
        model="demo", prompt=PROMPT, max_tokens=12, extra_body={"ignore_eos": True}
    )
    assert got["content"] == want.choices[0].text
    assert got["stop"] is True
    assert (got["stop_type"], got["stopping_word"], got["truncated"]) == ("limit", "", False)
    assert got["tokens_predicted"] == len(got["tokens"]) == 12
    assert got["tokens_evaluated"] == want.usage.prompt_tokens
    assert got["tokens_cached"] == want.usage.prompt_tokens + 11  # the last token is drawn, not computed
    assert got["generation_settings"]["n_predict"] == 12
    assert got["generation_settings"]["temperature"] == 0
    assert got["has_new_line"] is ("\n" in got["content"])
    assert got["model"] == "demo"
    assert got["id_slot"] in range(4)
    assert PROMPT in got["prompt"]
    assert got["timings"]["predicted_n"] == 11
    assert ask(http, **SAID)["tokens"] == []
    assert ask(http, "/completions", **SAID)["content"] == got["content"]


def test_a_stream_adds_up(http: Any) -> None:
    want = ask(http, **SAID, return_tokens=True, n_probs=2)
    *chunks, last = streamed(http, **SAID, n_probs=2)
    assert "".join(chunk["content"] for chunk in chunks) == want["content"]
    assert [token for chunk in chunks for token in chunk["tokens"]] == want["tokens"]
    assert all(chunk["stop"] is False and chunk["tokens_evaluated"] for chunk in chunks)
    scored = [each for chunk in chunks for each in chunk["completion_probabilities"]]
    assert [each["id"] for each in scored] == want["tokens"]
    assert (last["stop"], last["content"], last["stop_type"]) == (True, "", "limit")
    assert "completion_probabilities" not in last
    assert last["tokens_predicted"] == 12
    assert "timings" in streamed(http, **SAID, timings_per_token=True)[0]


def test_how_an_answer_ended(http: Any) -> None:
    text = text_of(http)
    word = text[6:9]
    cut = ask(http, **SAID, stop=["never met", word])
    assert cut["content"] == text[: text.index(word)]
    assert (cut["stop_type"], cut["stopping_word"]) == ("word", word)
    *_, last = streamed(http, **SAID, stop=[word])
    assert (last["stop_type"], last["stopping_word"]) == ("word", word)
    ended = ask(http, prompt=PROMPT, grammar='root ::= "yes"')
    assert (ended["content"], ended["stop_type"], ended["stopping_word"]) == ("yes", "eos", "")
    assert ended["tokens_cached"] == ended["tokens_evaluated"] + ended["tokens_predicted"]
    none = ask(http, **SAID | {"n_predict": 0})
    assert (none["content"], none["tokens_predicted"]) == ("", 0)
    full = ask(http, prompt=PROMPT * 100, n_predict=None, ignore_eos=True, n_keep=7)
    assert (full["stop_type"], full["truncated"]) == ("limit", True)


def test_prompts_of_every_shape(http: Any) -> None:
    tokens = http.post("/tokenize", json={"content": PROMPT, "add_special": True}).json()["tokens"]
    want = text_of(http)
    head, tail = tokens[:5], http.post("/detokenize", json={"tokens": tokens[5:]}).json()["content"]
    assert text_of(http, prompt=tokens) == want
    assert text_of(http, prompt={"prompt_string": PROMPT}) == want
    mixed = http.post("/tokenize", json={"content": [*head, tail]}).json()["tokens"]
    assert mixed[:5] == head
    assert ask(http, **SAID | {"prompt": [*head, tail]})["tokens_evaluated"] == len(mixed)
    several = ask(http, **SAID | {"prompt": [PROMPT, tokens, "Numbers"]})
    assert [each["index"] for each in several] == [0, 1, 2]
    assert several[0]["content"] == several[1]["content"] == want
    assert ask(http, **SAID | {"prompt": [PROMPT]})["content"] == want  # one prompt, one answer
    assert len(ask(http, **SAID, n_cmpl=2, temperature=1.0, seed=4)) == 2


def test_probabilities_are_of_the_logits_or_behind_the_samplers(http: Any, openai: Any) -> None:
    raw = ask(http, **SAID, n_probs=3)["completion_probabilities"]
    want = openai.completions.create(
        model="demo", prompt=PROMPT, max_tokens=12, logprobs=3, extra_body={"ignore_eos": True}
    )
    logprobs = want.choices[0].logprobs.token_logprobs
    assert [each["logprob"] for each in raw] == pytest.approx(logprobs, abs=1e-4)
    assert all(len(each["top_logprobs"]) == 3 for each in raw)
    assert all(each["top_logprobs"][0]["id"] == each["id"] for each in raw)  # greedy
    assert all(bytes(each["bytes"]).decode() == each["token"] for each in raw)
    (greedy, *_) = ask(http, **SAID, n_probs=3, post_sampling_probs=True)["completion_probabilities"]
    assert [each["prob"] for each in greedy["top_probs"]] == [1.0]
    drawn = ask(
        http,
        **SAID,
        n_probs=5,
        post_sampling_probs=True,
        temperature=1.5,
        top_k=3,
        top_p=1.0,
        min_p=0.0,
        seed=2,
    )
    for each in drawn["completion_probabilities"]:
        assert len(each["top_probs"]) == 3
        assert math.isclose(sum(rival["prob"] for rival in each["top_probs"]), 1, abs_tol=1e-5)
        assert each["prob"] in [rival["prob"] for rival in each["top_probs"]]


def test_schemas_and_biases(http: Any) -> None:
    schema = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
    assert json.loads(ask(http, prompt=PROMPT, json_schema=schema, n_predict=60)["content"])["city"]
    first = ask(http, **SAID, return_tokens=True)["tokens"][0]
    for bias in ([[first, False]], {str(first): False}, [[first, -1000]]):
        assert ask(http, **SAID, logit_bias=bias, return_tokens=True)["tokens"][0] != first
    (wanted,) = http.post("/tokenize", json={"content": "9"}).json()["tokens"][-1:]
    pushed = ask(http, **SAID | {"logit_bias": [["9", 1000]], "n_predict": 1, "return_tokens": True})
    assert pushed["tokens"] == [wanted]


def test_samplers_that_take_part(http: Any) -> None:
    hot = {"temperature": 5.0, "top_k": 1, "seed": 3}
    greedy = text_of(http)
    assert text_of(http, **hot, samplers=["top_k", "temperature"]) == greedy
    assert text_of(http, **hot, samplers="kt") == greedy
    assert text_of(http, **hot, samplers=["temperature"]) != greedy
    # temperature 0 takes part, or else nothing is greedy
    drawn = [text_of(http, samplers=["top_p"], top_p=1.0, seed=seed) for seed in range(3)]
    assert len(set(drawn)) > 1
    answer = http.post("/completion", json=SAID | {"samplers": ["temperature", "top_k"]})
    assert answer.status_code == 400
    assert "[samplers] expected each once, in the order penalties, dry" in answer.json()["error"]["message"]
    infilled = ask(http, **SAID, samplers=["top_k", "top_p", "infill"])
    assert infilled["generation_settings"]["samplers"][-2:] == ["infill", "temperature"]
    assert ask(http, **SAID, min_keep=2)["generation_settings"]["min_keep"] == 2


def test_the_cache_is_used_as_asked(http: Any) -> None:
    long = {"prompt": PROMPT * 4, "n_predict": 2}
    first = ask(http, **long, id_slot=2)
    assert first["id_slot"] == 2
    again = ask(http, **long, id_slot=2)
    assert again["timings"]["cache_n"] == first["tokens_evaluated"] - 1
    anew = ask(http, **long, cache_prompt=False)
    assert anew["timings"]["cache_n"] == 0
    assert anew["content"] == first["content"]
    held = http.get("/slots").json()[2]["n_cached"]
    assert http.post("/slots/2?action=erase").json() == {"id_slot": 2, "n_erased": held}
    assert http.get("/slots").json()[2]["n_cached"] == 0
    assert http.post("/slots/9?action=erase").status_code == 400
    assert http.post("/slots/2?action=save", json={"filename": "a"}).status_code == 501


def test_curls_default_type_is_read_as_json(http: Any) -> None:
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    got = http.post("/completion", content=json.dumps(SAID), headers=form)
    assert got.json()["content"] == text_of(http)


def test_fields_are_picked(http: Any) -> None:
    got = ask(
        http, **SAID, response_fields=["content", "generation_settings/n_predict", "timings/prompt_n", "no"]
    )
    assert set(got) == {"content", "generation_settings/n_predict", "timings/prompt_n"}
    assert got["generation_settings/n_predict"] == 12


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": [1, [2]]}, "prompt"),
        ({"prompt": [70000]}, "token ids"),
        ({"prompt": "x", "n_predict": -2}, "n_predict"),
        ({"prompt": "x", "samplers": ["cheese"]}, "samplers"),
        ({"prompt": "x", "lora": [{"id": 0, "scale": 1}]}, "lora"),
        ({"prompt": "x", "id_slot": 99}, "id_slot"),
        ({"prompt": "x", "logit_bias": [["a", True]]}, "logit_bias"),
        ({"prompt": "x", "logit_bias": [[70000, 1]]}, "logit_bias"),
        ({"prompt": "x", "json_schema": {}, "grammar": 'root ::= "a"'}, "json_schema"),
        ({"prompt": "x", "n_cache_reuse": 256}, "n_cache_reuse"),
        ({"prompt": "x", "return_progress": True}, "return_progress"),
        ({"prompt": "x", "samplers": "ki", "grammar": 'root ::= "a"'}, "infill"),
        ({"prompt": "x", "cheese": 1}, "cheese"),
    ],
)
def test_what_is_refused(http: Any, body: dict[str, Any], said: str) -> None:
    answer = http.post("/completion", json=body)
    assert answer.status_code == 400, answer.text
    assert said in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "path",
    [
        *("/rerank", "/reranking", "/v1/rerank"),
        *("/props", "/models/load", "/v1/audio/transcriptions"),
    ],
)
def test_routes_that_do_not_exist_say_why(http: Any, path: str) -> None:
    answer = http.post(path, json={"input": "x"})
    assert answer.status_code == 501
    assert path in answer.json()["error"]["message"]


def test_properties(http: Any) -> None:
    props = http.get("/props").json()
    assert props["default_generation_settings"]["params"]["temperature"] == 0
    assert props["default_generation_settings"]["n_ctx"] == 2048
    assert props["model_path"].endswith(".gguf")
    assert props["chat_template_caps"]["supports_tools"] is False
    assert http.get("/lora-adapters").json() == []
    assert http.post("/lora-adapters", json=[]).json() == {"success": True}
    assert http.post("/lora-adapters", json=[{"id": 0, "scale": 1}]).status_code == 400
    model = http.get("/v1/models").json()["data"][0]
    assert model["architecture"]["input_modalities"] == ["text"]
    assert model["meta"]["n_embd"] > 0
    text = http.get("/metrics").text
    for name in (
        "prompt_tokens_seconds",
        "predicted_tokens_seconds",
        "n_busy_slots_per_decode",
        "n_tokens_max",
    ):
        assert f"llamacpp:{name}" in text


def test_a_template_is_filled_in(http: Any) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Weather?"}]
    prompt = ask(http, "/apply-template", messages=messages)["prompt"]
    assert prompt.index("Be brief.") < prompt.index("Weather?")
    counted = ask(http, prompt=prompt, n_predict=0)["tokens_evaluated"]
    chat = ask(http, "/v1/chat/completions", messages=messages, max_tokens=1)
    assert chat["usage"]["prompt_tokens"] == counted


def test_a_model_that_fills_in_nothing_says_so(http: Any) -> None:
    answer = http.post("/infill", json={"input_prefix": "a", "input_suffix": "b"})
    assert answer.status_code == 501
    assert "prefix, suffix, middle" in answer.json()["error"]["message"]


class Letters:
    """A vocabulary of letters, marks below them."""

    n_vocab = 256

    def __init__(self, repo: int = 4, file: int = 5) -> None:
        self._marks = {"prefix": 1, "suffix": 2, "middle": 3, "repo": repo, "file": file, "bos": 6}

    def __getattr__(self, name: str) -> Any:
        return lambda: self._marks[name.removeprefix("token_")]

    def add_bos(self) -> bool:
        return True

    def tokenize(self, text: bytes, start: bool, special: bool) -> list[int]:
        return list(text)


def filled(model: Letters, n_ctx: int = 1000, n_batch: int = 400, **body: Any) -> str:
    serving: Any = SimpleNamespace(
        model=model,
        n_predict=-1,
        longest_piece=1,
        scheduler=SimpleNamespace(n_ctx_seq=n_ctx, n_batch=n_batch),
    )
    marks = {1: "<PRE>", 2: "<SUF>", 3: "<MID>", 4: "<REPO>", 5: "<FILE>", 6: "<BOS>"}
    return "".join(marks.get(token) or chr(token) for token in infill_prompt(serving, InfillBody(**body)))


def test_the_prompt_of_a_gap() -> None:
    gap = {"input_prefix": "def f(", "input_suffix": "return x", "prompt": "x"}
    whole = "<BOS><PRE>def f(x<SUF>return x<MID>"
    assert filled(Letters(-1, -1), **gap) == whole
    extra = [{"filename": "a.py", "text": "import b\n"}, {"text": "c"}]
    assert filled(Letters(), **gap, input_extra=extra) == (
        f"<REPO>myproject\n<FILE>a.py\nimport b\n<FILE>tmp\nc<FILE>filename\n{whole}"
    )
    assert filled(Letters(-1, -1), **gap, input_extra=extra[1:]) == f"\n\n--- snippet ---\n\nc{whole}"
    # what is nearest to the gap stays
    long = filled(Letters(), input_prefix="a" * 500 + "b" * 300, input_suffix="c" * 98 + "d" * 900)
    assert long == f"<REPO>myproject\n<FILE>filename\n<BOS><PRE>{'b' * 300}<SUF>{'c' * 98}<MID>"
    lacking = Letters()
    lacking._marks["suffix"] = -1
    with pytest.raises(Refused, match="without suffix token"):
        filled(lacking, **gap)


def test_answers_that_end_at_a_line() -> None:
    indented = Lines(LineLimits(indent=2))
    assert indented.push("x = 1\n  y", 0) is None
    assert indented.push(" = 2\n ", 0) is None
    assert indented.push("z = 3", 0) == 0  # one blank is too few
    assert Lines(LineLimits(indent=1)).push("a\n b\n\nc", 0) == 5
    late = Lines(LineLimits(seconds=1))
    assert late.push("a\n", 0.5) is None
    assert late.push("b", 2) is None
    assert late.push("c\nd", 2) == 3
