"""/v1/embeddings with OpenAI's client, llama.cpp's routes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from asking import TEXT

TEXTS = ["The clerk of the town wrote numbers into a book.", "A bridge", TEXT[3000:4500]]


def ask(http: Any, path: str = "/v1/embeddings", **body: Any) -> Any:
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def rows(http: Any, text: Any) -> Any:
    """Of each token, as llama.cpp's server has them where nothing is pooled: not normalized."""
    return np.array(ask(http, "/embedding", content=text)[0]["embedding"])


def unit(vector: Any) -> Any:
    return vector / np.linalg.norm(vector)


def test_openais_client(openai: Any, http: Any) -> None:
    got = openai.embeddings.create(model="demo", input=TEXTS)  # base64
    floats = openai.embeddings.create(model="demo", input=TEXTS, encoding_format="float", user="me")
    assert [each.index for each in got.data] == [0, 1, 2]
    assert (got.object, got.data[0].object, got.model) == ("list", "embedding", "demo")
    assert [each.embedding for each in got.data] == [each.embedding for each in floats.data]
    lengths = [len(rows(http, text)) for text in TEXTS]
    assert got.usage.prompt_tokens == got.usage.total_tokens == sum(lengths)
    for each, text in zip(got.data, TEXTS, strict=True):
        assert np.allclose(each.embedding, unit(rows(http, text).mean(axis=0)), atol=1e-6)


def test_token_ids_are_a_text_too(openai: Any, http: Any) -> None:
    ids = [ask(http, "/tokenize", content=text, add_special=True)["tokens"] for text in TEXTS]
    want = [each.embedding for each in openai.embeddings.create(model="demo", input=TEXTS).data]
    found = openai.embeddings.create(model="demo", input=ids).data
    assert np.allclose([each.embedding for each in found], want, atol=1e-5)
    alone = openai.embeddings.create(model="demo", input=ids[0]).data
    assert np.allclose(alone[0].embedding, want[0], atol=1e-5)
    assert len(alone) == 1


def test_llama_cpps_shape(http: Any) -> None:
    found = ask(http, "/embeddings", input=TEXTS[:2])
    assert [each["index"] for each in found] == [0, 1]
    assert [len(each["embedding"]) for each in found] == [len(rows(http, text)) for text in TEXTS[:2]]
    assert ask(http, content=TEXTS[0]) == ask(http, "/embedding", content=TEXTS[0])  # as llama.cpp's


@pytest.mark.parametrize(
    ("norm", "size"),
    [
        (1, lambda v: np.abs(v).sum()),
        (2, np.linalg.norm),
        (3, lambda v: (np.abs(v) ** 3).sum() ** (1 / 3)),
        (0, lambda v: np.abs(v).max() / 32760),
    ],
)
def test_norms(http: Any, norm: int, size: Callable[[Any], float]) -> None:
    raw = np.array(ask(http, input="A bridge", embd_normalize=-1)["data"][0]["embedding"])
    got = np.array(ask(http, input="A bridge", embd_normalize=norm)["data"][0]["embedding"])
    assert np.allclose(raw, rows(http, "A bridge").mean(axis=0), atol=1e-5)
    assert np.allclose(got, raw / size(raw), rtol=1e-5)
    assert size(got) == pytest.approx(1, rel=1e-5)


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ({"input": ""}, 400, "at least one token"),
        ({"input": ["a", ""]}, 400, "at least one token"),
        ({"input": []}, 400, "an empty list"),
        ({}, 400, "[input] expected a text"),
        ({"input": 5}, 400, "int"),
        ({"input": [[1], [70000]]}, 400, "token ids below"),
        ({"input": [1, [2]]}, 400, "[input]"),
        ({"input": ["a"] * 2049}, 400, "at most 2048"),
        ({"input": ["a", "word " * 5000]}, 400, "at most 2047 tokens"),
        ({"input": "a", "dimensions": 16}, 400, "[dimensions] expected 256, the model's"),
        ({"input": "a", "encoding_format": "int8"}, 400, "encoding_format"),
        ({"input": "a", "embd_normalize": -2}, 400, "embd_normalize"),
        ({"input": "a", "embd_normalize": 10**30}, 400, "embd_normalize"),
        ({"input": "a", "pooling": "mean"}, 400, "pooling"),
    ],
)
def test_what_is_refused(http: Any, body: dict[str, Any], status: int, said: str) -> None:
    for path in ("/v1/embeddings", "/embedding"):
        answer = http.post(path, json=body)
        assert answer.status_code == status, answer.text
        assert said in answer.json()["error"]["message"]


@pytest.mark.parametrize(("pooling", "of"), [("last", lambda r: r[-1]), ("cls", lambda r: r[0])])
def test_pooling_of_the_command_line(
    pooling: str, of: Callable[[Any], Any], http: Any, serve: Any, converted: Callable[..., Path]
) -> None:
    import httpx

    plain = converted("--method", "none", "--outtype", "f32")
    options = ("-c", "1024", "--kv", "f32", "--pooling", pooling, "--embd-normalize", "-1", "--embeddings")
    with serve(plain, *options) as address, httpx.Client(base_url=address, timeout=60) as other:
        want = of(rows(http, TEXTS[0]))
        assert np.allclose(ask(other, input=TEXTS[0])["data"][0]["embedding"], want, atol=1e-4)
        assert np.allclose(rows(other, TEXTS[0]), [want], atol=1e-4)


def test_without_pooling_openais_route_says_so(serve: Any, converted: Callable[..., Path]) -> None:
    import httpx

    with serve(
        converted("--method", "none", "--outtype", "f32"), "-c", "256", "--pooling", "none"
    ) as address:
        refused = httpx.post(f"{address}/v1/embeddings", json={"input": "a"})
    assert refused.status_code == 400
    assert "--pooling mean" in refused.json()["error"]["message"]
