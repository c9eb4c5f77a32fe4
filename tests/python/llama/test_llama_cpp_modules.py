"""Imports of llama-cpp-python's tutorials, with latentkv for llama_cpp."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

import latentkv

HELLO: list[Any] = [{"role": "user", "content": "Hello"}]


def test_a_draft_model(plain_gguf: Path) -> None:
    from latentkv import Llama
    from latentkv.llama_speculative import LlamaPromptLookupDecoding

    guesses = LlamaPromptLookupDecoding(num_pred_tokens=2)
    asked: dict[str, Any] = {"prompt": "a b a b a b", "max_tokens": 8, "temperature": 0.0}
    texts = []
    for draft in (guesses, None):
        with Llama(str(plain_gguf), n_threads=1, draft_model=draft) as llm:
            texts.append(llm.create_completion(**asked)["choices"][0]["text"])
    assert texts[0] == texts[1]


def test_grammars(plain_gguf: Path) -> None:
    import json

    from latentkv import Llama
    from latentkv.llama_grammar import JSON_GBNF, LIST_GBNF, LlamaGrammar

    with Llama(str(plain_gguf), n_threads=1) as llm:
        answer = llm("{", max_tokens=60, grammar=LlamaGrammar.from_string(LIST_GBNF), seed=1)
        assert answer["choices"][0]["text"].startswith("- ")
        matcher = LlamaGrammar.from_string(JSON_GBNF).matcher(llm.model)
        text = json.dumps({"a": [1, -2.5e3, True, None, "x\\n\u00e9"], "b": {}})
        for token in llm.tokenize(text.encode(), add_bos=False):
            assert matcher.allows(token), token
            matcher.accept(token)
        assert matcher.allows(llm.token_eos())


def test_caches(plain_gguf: Path, tmp_path: Path) -> None:
    from latentkv import Llama
    from latentkv.llama_cache import LlamaCache, LlamaDiskCache, LlamaRAMCache

    assert LlamaCache is LlamaRAMCache
    for cache in (LlamaRAMCache(capacity_bytes=1 << 24), LlamaDiskCache(str(tmp_path))):
        with Llama(str(plain_gguf), n_threads=1) as llm:
            llm.set_cache(cache)
            llm("The cache holds", max_tokens=2)
        assert cache.cache_size > 0


def test_formatters_write_what_the_templates_write() -> None:
    from latentkv.llama_chat_format import ChatFormatterResponse, Jinja2ChatFormatter, format_chatml

    written = format_chatml(messages=HELLO)
    assert isinstance(written, ChatFormatterResponse)
    assert written.prompt == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    assert written.stop == "<|im_end|>"
    template = (
        "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}: {{ m['content'] }}]{% endfor %}{{ mood }}"
    )
    formatter = Jinja2ChatFormatter(template, eos_token="</s>", bos_token="<s>", stop_token_ids=[7])
    found = formatter(messages=HELLO, mood="gay")
    assert (found.prompt, found.stop) == ("<s>[user: Hello]gay", ["</s>"])
    assert found.stopping_criteria is not None
    import numpy as np

    ends = [found.stopping_criteria(np.array([1, last], np.intc), np.zeros(9, np.float32)) for last in (6, 7)]
    assert ends == [False, True]


def test_types_are_those_of_answers(plain_gguf: Path) -> None:
    from latentkv import Llama, llama_types

    def fits(kind: Any, value: dict[str, Any]) -> bool:
        return kind.__required_keys__ <= set(value) <= kind.__required_keys__ | kind.__optional_keys__

    with Llama(str(plain_gguf), n_threads=1) as llm:
        text = llm("a", max_tokens=2, logprobs=1)
        assert fits(llama_types.CreateCompletionResponse, text)
        assert fits(llama_types.CompletionChoice, text["choices"][0])
        assert fits(llama_types.CompletionLogprobs, text["choices"][0]["logprobs"])
        chat = llm.create_chat_completion(HELLO, max_tokens=2)
        assert fits(llama_types.CreateChatCompletionResponse, chat)
        assert fits(llama_types.ChatCompletionResponseChoice, chat["choices"][0])
        assert fits(llama_types.ChatCompletionResponseMessage, chat["choices"][0]["message"])
        assert fits(llama_types.CompletionUsage, chat["usage"])
        for chunk in llm.create_chat_completion(HELLO, max_tokens=2, stream=True):
            assert fits(llama_types.CreateChatCompletionStreamResponse, chunk)
            assert fits(llama_types.ChatCompletionStreamResponseChoice, chunk["choices"][0])
        vectors = llm.create_embedding("a")
        assert fits(llama_types.CreateEmbeddingResponse, vectors)
        assert fits(llama_types.Embedding, vectors["data"][0])


@pytest.mark.parametrize(
    ("module", "name", "instead"),
    [
        ("llama_chat_format", "Llava15ChatHandler", "images are not run here"),
        ("llama_chat_format", "format_vicuna", "Jinja2ChatFormatter takes any template"),
        ("llama_chat_format", "register_chat_format", "pass chat_template"),
        ("llama_grammar", "json_schema_to_gbnf", "use LlamaGrammar.from_json_schema"),
        ("llama_cache", "LlamaTrieCache", "use LlamaRAMCache"),
    ],
)
def test_what_is_not_here_says_what_to_use(module: str, name: str, instead: str) -> None:
    with pytest.raises(ImportError) as caught:
        exec(f"from latentkv.{module} import {name}")
    assert isinstance(caught.value, latentkv.LatentKVError)
    assert str(caught.value).startswith(f"[{module}] expected a name that latentkv has; got {name}; ")
    assert instead in str(caught.value)
    with pytest.raises(ImportError, match="cannot import name 'nonsense'"):
        exec(f"from latentkv.{module} import nonsense")
    assert not hasattr(importlib.import_module(f"latentkv.{module}"), "nonsense")
