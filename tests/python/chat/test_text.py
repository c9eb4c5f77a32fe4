"""Text that leaves a stream: whole characters, and never a part of a stop string."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from latentkv import LatentKVError
from latentkv.text import StopMatcher, Utf8Stream, stop_list

SHORT = st.text(alphabet="ab", min_size=1, max_size=4)


def push_all(matcher: StopMatcher, parts: list[str]) -> tuple[list[str], bool]:
    shown = []
    for part in parts:
        text, stopped = matcher.push(part)
        shown.append(text)
        if stopped:
            return shown, True
    return [*shown, matcher.flush()], False


@given(st.lists(st.text(alphabet="abc", max_size=3), max_size=20), st.lists(SHORT, min_size=1, max_size=3))
def test_stream_is_the_text_before_the_first_stop(parts: list[str], stops: list[str]) -> None:
    text = "".join(parts)
    ends = [text.find(stop) for stop in stops if stop in text]
    shown, stopped = push_all(StopMatcher(stops), parts)
    # A stop is reported as soon as it is complete, so a later-completed but earlier-starting one may lose.
    assert stopped == bool(ends)
    assert text.startswith("".join(shown))
    assert not any(stop in "".join(shown) for stop in stops)
    if len(stops) == 1 and ends:
        assert "".join(shown) == text[: ends[0]]
    if not ends:
        assert "".join(shown) == text


def test_partial_stop_is_held_back_until_decided() -> None:
    matcher = StopMatcher(["</end>"])
    assert matcher.push("ok </e") == ("ok ", False)
    assert matcher.push("x") == ("</ex", False)
    assert matcher.push("</en") == ("", False)
    assert matcher.push("d> never shown") == ("", True)


def test_held_text_appears_when_the_stream_ends() -> None:
    matcher = StopMatcher(["stop"])
    assert matcher.push("sto") == ("", False)
    assert matcher.flush() == "sto"


def test_empty_stop_is_refused() -> None:
    with pytest.raises(LatentKVError, match=r"^\[stop\] expected .* at least one character; got ''"):
        StopMatcher([""])


def test_empty_stops_of_a_call_are_left_out() -> None:
    assert [stop_list(stop) for stop in (None, "", [""], ["\n", ""], ("", "x"))] == [
        [],
        [],
        [],
        ["\n"],
        ["x"],
    ]


@given(st.text(max_size=30), st.randoms(use_true_random=False))
def test_utf8_in_any_cut_is_the_text(text: str, random: object) -> None:
    data = text.encode()
    stream, shown, at = Utf8Stream(), "", 0
    while at < len(data):
        step = random.randint(1, 3)  # type: ignore[attr-defined]
        part = stream.push(data[at : at + step])
        assert "\ufffd" not in part or "\ufffd" in text
        shown, at = shown + part, at + step
    assert shown + stream.flush() == text


def test_unfinished_and_invalid_bytes_are_marked() -> None:
    stream = Utf8Stream()
    assert stream.push("é".encode()[:1]) == ""
    assert stream.flush() == "\ufffd"
    assert Utf8Stream().push(b"a\xffb") == "a\ufffdb"


def test_stop_argument_forms() -> None:
    assert stop_list(None) == []
    assert stop_list("x") == ["x"]
    assert stop_list(("x", "y")) == ["x", "y"]
