"""`cache_salt` in requests of the three interfaces, and --isolate: what one asked tells another nothing."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from latentkv.server.access.salts import Salts

TEXT = "The clerk of the town wrote numbers into a book. " * 12
CHAT = [{"role": "user", "content": TEXT}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": CHAT, "max_tokens": 1},
    "/v1/completions": {"prompt": TEXT, "max_tokens": 1},
    "/v1/responses": {"input": TEXT, "max_output_tokens": 1},
    "/v1/messages": {"messages": CHAT, "max_tokens": 1},
    "/completion": {"prompt": TEXT, "n_predict": 1},
}


def n_cached(told: dict[str, Any]) -> int:
    """What an answer says of it, in the words of its interface."""
    usage = told.get("usage", {})
    for name in ("prompt_tokens_details", "input_tokens_details"):
        if name in usage:
            found = usage[name]["cached_tokens"]
            assert told.get("timings", {}).get("cache_n", found) == found
            return int(found)
    return int(usage["cache_read_input_tokens"] if usage else told["timings"]["cache_n"])


def asks(address: str, path: str, salt: str | None = None, key: str = "none") -> int:
    text = f"Asked of {path}. {TEXT}"  # of no other
    body = json.loads(json.dumps(BODIES[path]).replace(TEXT, text))
    body |= {} if salt is None else {"cache_salt": salt}
    answer = httpx.post(address + path, json=body, headers={"Authorization": f"Bearer {key}"}, timeout=60)
    assert answer.status_code == 200, answer.text
    return n_cached(answer.json())


@pytest.mark.parametrize("path", BODIES)
def test_a_salt_in_a_request(server: str, path: str) -> None:
    before = asks(server, path)
    assert asks(server, path) > 100 > before
    assert asks(server, path, f"mine of {path}") == 0
    assert asks(server, path, f"mine of {path}") > 100
    assert asks(server, path, f"others of {path}") == 0
    assert asks(server, path) > 100


@pytest.mark.parametrize("path", [*BODIES, "/v1/messages/count_tokens", "/infill", "/apply-template"])
@pytest.mark.parametrize(
    ("salt", "said"),
    [
        (5, "[cache_salt] expected a valid string; got 5"),
        (["a"], "[cache_salt] expected a valid string; got ['a']"),
        ({}, "[cache_salt] expected a valid string; got {}"),
        (True, "[cache_salt] expected a valid string; got True"),
        ("", "[cache_salt] expected at least 1 character; got 0"),
        ("x" * 1025, "[cache_salt] expected at most 1024 characters; got 1025"),
    ],
    ids=["number", "list", "object", "truth", "empty", "long"],
)
def test_what_is_no_salt_is_refused_in_one_line(http: Any, path: str, salt: Any, said: str) -> None:
    plain = {"/infill": {"input_prefix": "x", "input_suffix": "y"}, "/apply-template": {"messages": CHAT}}
    body = BODIES.get(path) or plain.get(path) or {"messages": CHAT}
    answer = http.post(path, json=body | {"cache_salt": salt})
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, said)


def test_half_a_character_is_no_salt(http: Any) -> None:
    body = b'{"prompt": "x", "max_tokens": 1, "cache_salt": "\\ud800"}'
    answer = http.post("/v1/completions", content=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("[cache_salt] expected")


@pytest.fixture(scope="module")
def isolated(
    serve: Callable[..., Any], converted: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Path]]:
    folder = tmp_path_factory.mktemp("isolated")
    plain = converted("--method", "none", "--outtype", "f32")
    options = ("-c", "1024", "--parallel", "1", "--kv", "f32", "--temp", "0", "--cache-ram", "0")
    keys = ("--api-key", "alice", "--api-key", "bob", "--isolate", "--cache-dir", str(folder))
    with serve(plain, *options, *keys) as address:
        yield address, folder


@pytest.mark.parametrize("path", BODIES)
def test_each_key_has_beginnings_of_its_own(isolated: tuple[str, Path], path: str) -> None:
    """Of one sequence: whoever had it comes back from a file."""
    address, _ = isolated
    assert asks(address, path, key="alice") < 50  # what the template begins with
    assert asks(address, path, key="alice") > 100
    assert asks(address, path, "hers", key="bob") == 0
    asks(address, path, key="bob")
    assert asks(address, path, "hers", key="alice") == 0  # a salt is of a key, not of all that know it
    assert asks(address, path, key="alice") > 100


def test_nothing_in_the_folder_tells_a_key(isolated: tuple[str, Path]) -> None:
    address, folder = isolated
    asks(address, "/v1/completions", "pepper", key="alice")
    asks(address, "/v1/completions", key="bob")
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "lock"]
    assert {path.suffix for path in files} >= {".state", ""}
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    found = b"".join(path.name.encode() + path.read_bytes() for path in files)
    assert not [word for word in (b"alice", b"bob", b"pepper") if word in found]


def test_a_key_is_asked_for(
    serve: Callable[..., Any], converted: Callable[..., Path], capfd: pytest.CaptureFixture[str]
) -> None:
    from latentkv.cli import main

    assert main(["serve", str(converted("--method", "none", "--outtype", "f32")), "--isolate"]) != 0
    said = "[--isolate] expected --api-key or --api-key-file beside it; got none"
    assert said in capfd.readouterr().err


def test_salts_stay_those_of_their_folder(tmp_path: Path) -> None:
    one, same = Salts(tmp_path, isolates=True), Salts(tmp_path, isolates=True)
    assert one.of("alice", None) == same.of("alice", None) != ""
    assert one.of("alice", None) != Salts(isolates=True).of("alice", None)  # of another secret
    assert one.of("ab", "c") != one.of("a", "bc")
    assert Salts(tmp_path).of("alice", None) == ""
    assert Salts(tmp_path).of("alice", "x") == same.of("", "x")
    (tmp_path / "secret").write_bytes(b"short")
    assert Salts(tmp_path, isolates=True).of("alice", None) != one.of("alice", None)
    assert len((tmp_path / "secret").read_bytes()) == 32
