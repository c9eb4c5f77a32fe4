"""The high-level examples of llama-cpp-python's README, with import and file changed: each runs, or is
refused in one line that says what to do. The calls are theirs in shape, the texts are ours."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from latentkv import LatentKVError, Llama, LlamaPromptLookupDecoding

ASK = "Q: Which colours has the flag of France? A: "
JSON_ASK = [
    {"role": "system", "content": "You answer in JSON."},
    {"role": "user", "content": "Which team won the cup?"},
]
OPTIONS = {"n_threads": 1, "verbose": False}


@pytest.fixture(scope="module")
def chatml(plain_gguf: Path) -> Iterator[Llama]:
    with Llama(model_path=str(plain_gguf), chat_format="chatml", **OPTIONS) as llm:
        yield llm


def test_completion(plain_gguf: Path) -> None:
    llm = Llama(model_path=str(plain_gguf), seed=1337, n_ctx=2048, n_gpu_layers=-1, **OPTIONS)
    output = llm(ASK, max_tokens=32, stop=["Q:", "\n"], echo=True)
    assert output["object"] == "text_completion"
    assert output["id"].startswith("cmpl-")
    assert output["model"] == str(plain_gguf)
    assert isinstance(output["created"], int)
    choice = output["choices"][0]
    assert choice["text"].startswith(ASK)
    assert "Q:" not in choice["text"][len(ASK) :]
    assert choice["index"] == 0
    assert choice["logprobs"] is None
    assert choice["finish_reason"] in ("stop", "length")
    usage = output["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    again = llm.create_completion(ASK, max_tokens=32, stop=["Q:", "\n"], echo=True)
    assert again["choices"][0]["text"].startswith(ASK)


def test_from_the_hub(plain_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a local cache, laid out as huggingface_hub does."""
    constants = pytest.importorskip("huggingface_hub.constants")
    commit = "0" * 40
    repo = tmp_path / "models--some--Model-GGUF"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(commit)
    (repo / "snapshots" / commit).mkdir(parents=True)
    (repo / "snapshots" / commit / "model-q8_0.gguf").symlink_to(plain_gguf)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    llm = Llama.from_pretrained(
        repo_id="some/Model-GGUF", filename="*q8_0.gguf", cache_dir=str(tmp_path), **OPTIONS
    )
    assert llm.n_ctx() == 512


@pytest.mark.parametrize("name", ["llama-2", "gemma", "chatml"])
def test_chat_by_a_format_of_that_name(plain_gguf: Path, name: str) -> None:
    llm = Llama(model_path=str(plain_gguf), chat_format=name, **OPTIONS)
    answer = llm.create_chat_completion(
        messages=[
            {"role": "system", "content": "You describe pictures."},
            {"role": "user", "content": "Describe this one in detail please."},
        ]
    )
    choice = answer["choices"][0]
    assert answer["object"] == "chat.completion"
    assert choice["message"]["role"] == "assistant"
    assert isinstance(choice["message"]["content"], str)
    assert choice["finish_reason"] in ("stop", "length")


def test_chat_as_openai_objects(chatml: Llama) -> None:
    pytest.importorskip("openai")
    answer = chatml.create_chat_completion_openai_v1(messages=JSON_ASK, max_tokens=4)
    assert isinstance(answer.choices[0].message.content, str)


def test_json_mode(chatml: Llama) -> None:
    answer = chatml.create_chat_completion(
        messages=JSON_ASK, response_format={"type": "json_object"}, temperature=0.7, seed=3
    )
    choice = answer["choices"][0]
    if choice["finish_reason"] == "stop":
        assert isinstance(json.loads(choice["message"]["content"]), dict)
    else:  # the demo model may go on until the context is full
        assert choice["message"]["content"].lstrip().startswith("{")


def test_json_schema_mode(chatml: Llama) -> None:
    answer = chatml.create_chat_completion(
        messages=JSON_ASK,
        response_format={
            "type": "json_object",
            "schema": {
                "type": "object",
                "properties": {"team_name": {"type": "string", "maxLength": 40}},
                "required": ["team_name"],
            },
        },
        temperature=0.7,
        seed=3,
    )
    choice = answer["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert list(json.loads(choice["message"]["content"])) == ["team_name"]


def test_function_calling(plain_gguf: Path) -> None:
    llm = Llama(model_path=str(plain_gguf), chat_format="chatml-function-calling", n_ctx=1024, **OPTIONS)
    detail = {
        "type": "object",
        "title": "UserDetail",
        "properties": {
            "name": {"title": "Name", "type": "string", "maxLength": 20},
            "age": {"title": "Age", "type": "integer", "maximum": 120, "minimum": 0},
        },
        "required": ["name", "age"],
    }
    answer = llm.create_chat_completion(
        messages=[
            {"role": "system", "content": "The assistant calls functions where that is needed."},
            {"role": "user", "content": "Extract Ann is 31 years old"},
        ],
        tools=[{"type": "function", "function": {"name": "UserDetail", "parameters": detail}}],
        tool_choice={"type": "function", "function": {"name": "UserDetail"}},
    )
    choice = answer["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert len(choice["message"]["tool_calls"]) == 1
    call = choice["message"]["tool_calls"][0]["function"]
    assert call["name"] == "UserDetail"
    assert set(json.loads(call["arguments"])) == {"name", "age"}


def test_speculative_decoding(plain_gguf: Path) -> None:
    llm = Llama(
        model_path=str(plain_gguf), draft_model=LlamaPromptLookupDecoding(num_pred_tokens=10), **OPTIONS
    )
    assert llm(ASK * 3, max_tokens=8)["choices"][0]["text"]


def test_a_larger_context(plain_gguf: Path) -> None:
    assert Llama(model_path=str(plain_gguf), n_ctx=2048, **OPTIONS).n_ctx() == 2048
    assert Llama(model_path=str(plain_gguf), **OPTIONS).n_ctx() == 512


def test_the_tokenizer(chatml: Llama) -> None:
    tokens = chatml.tokenize(ASK.encode(), add_bos=False)
    assert chatml.detokenize(tokens) == ASK.encode()
    assert chatml.tokenizer().tokenize(ASK.encode(), False) == tokens


@pytest.mark.parametrize(
    ("example", "message"),
    [
        (lambda path, **_: Llama(model_path=path, embedding=True), r"\[embedding\] expected False; got True"),
        (lambda llm, **_: llm.create_embedding("Hello"), r"\[embed\] expected a call that generates text"),
        (lambda llm, **_: llm.create_embedding(["a", "b"]), r"\[embed\] expected a call that generates text"),
        (
            lambda path, **_: Llama(model_path=path, chat_format="functionary-v2", tokenizer=object()),
            r"\[tokenizer\] expected None; got .*; the file's own tokenizer is used",
        ),
        (
            lambda path, **_: Llama(model_path=path, chat_format="functionary-v2"),
            r"\[chat_format\] expected None \(the file's own\) or one of chatml, .*got 'functionary-v2'",
        ),
        (
            lambda path, **_: Llama(model_path=path, chat_handler=object(), n_ctx=2048),
            r"\[chat_handler\] expected None; got .*; pass chat_template",
        ),
        (
            lambda llm, **_: llm.create_chat_completion(
                messages=[
                    {
                        "role": "user",
                        "content": [
                            {"type": "text", "text": "What is in it?"},
                            {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}},
                        ],
                    }
                ]
            ),
            r"\[messages\] expected text parts only; got a part of type image_url",
        ),
    ],
)
def test_what_is_refused(chatml: Llama, plain_gguf: Path, example: Callable[..., Any], message: str) -> None:
    with pytest.raises(LatentKVError, match=message) as refusal:
        example(llm=chatml, path=str(plain_gguf))
    assert "\n" not in str(refusal.value)
