"""Other forms of a conversation, for a template that refuses it as it is given, or leaves a text of it out.

Each says the same, with roles in an order that more templates take. None depends on what is said later, so
that the prompt of a turn begins with the one of the turn before, and the cache keeps it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from latentkv.chat.messages import Message

Messages = list[dict[str, Any]]
_SYSTEM = ("system", "developer")
_SWITCH = re.compile("/(?:no_?)?think")  # which templates obey and leave out
_NO_QUESTION, _NO_ANSWER = {"role": "user", "content": ""}, {"role": "assistant", "content": ""}


def forms(messages: Messages) -> Iterator[Messages]:
    """The messages (plain_messages()) as given, then in other forms, the closest first."""
    with_ids = _with_ids(messages)
    apart = _one_call_each(with_ids)
    tried: list[Messages] = []
    for said in (messages, _without_thoughts(messages), with_ids, apart, _without_thoughts(apart)):
        for form in _in_other_roles(said):
            if form not in tried:
                tried.append(form)
                yield form


def _in_other_roles(messages: Messages) -> Iterator[Messages]:
    yield messages
    late = _late_as_user(messages)
    yield late
    joined = _joined(late)
    yield joined
    yield _with_turns(joined)
    yield _with_turns(_in_results(joined))
    asked = _joined([{**each, "role": "user"} if _is_system(each) else each for each in messages])
    yield _with_turns(asked)
    yield _with_turns(_in_results(asked))


def n_lost(messages: Sequence[Message], text: str) -> int:
    """How many messages a prompt leaves out, of those that every template should write as they are: the
    user's, the system's, and answers beside thoughts. So does a system message count that a template moves
    to the front, where it would change what the cache holds."""
    at = lost = 0
    for message in messages:
        said = max(_SWITCH.split(message["content"] or ""), key=len).strip()
        if message["role"] != "user" and not _is_system(message) and not _is_beside_thoughts(message, text):
            continue  # templates may leave out what stands beside calls, and write results as JSON
        found = text.find(said, at)
        if found >= 0:
            at = found + len(said)
        elif _is_system(message) or said not in text:
            lost += 1
    return lost


def _is_beside_thoughts(message: Mapping[str, Any], text: str) -> bool:
    """Calls count where the thoughts are left out too: some templates write these in place of the text."""
    thoughts = str(message.get("reasoning_content") or "") if message["role"] == "assistant" else ""
    return bool(thoughts) and (not message.get("tool_calls") or thoughts not in text)


def _is_system(message: Mapping[str, Any]) -> bool:
    return message["role"] in _SYSTEM


def _late_as_user(messages: Messages) -> Messages:
    """System messages after the first turn are the user's, where they stand; those before it are one."""
    begin = next((at for at, message in enumerate(messages) if not _is_system(message)), len(messages))
    late = [{**each, "role": "user"} if _is_system(each) else each for each in messages[begin:]]
    return _joined(messages[:begin]) + late


def _joined(messages: Messages) -> Messages:
    """Neighbours of one role are one message. Results of tools stay apart: each has its call."""
    whole: Messages = []
    for message in messages:
        last: Mapping[str, Any] = whole[-1] if whole else {"role": None}
        is_same = message["role"] == last["role"] or (_is_system(message) and _is_system(last))
        if not is_same or message["role"] == "tool":
            whole.append(message)
            continue
        both = {**message, **last}
        for key in ("content", "reasoning_content"):
            texts = [each[key] for each in (last, message) if each.get(key)]
            if texts:
                both[key] = "\n\n".join(texts)
        calls = [*last.get("tool_calls", ()), *message.get("tool_calls", ())]
        whole[-1] = both | ({"tool_calls": calls} if calls else {})
    return whole


def _with_turns(messages: Messages) -> Messages:
    """With an empty text where a template misses a turn: the user's before an answer that is the first, the
    assistant's between what tools say and what the user says."""
    whole: Messages = []
    for message in messages:
        before = whole[-1] if whole else {"role": "system"}
        if message["role"] == "assistant" and _is_system(before):
            whole.append(_NO_QUESTION)
        elif message["role"] == "user" and (before["role"] == "tool" or before.get("tool_calls")):
            whole.append(_NO_ANSWER)
        whole.append(message)
    return whole


def _in_results(messages: Messages) -> Messages:
    """What the user says right after a tool's result is part of that."""
    whole: Messages = []
    for message in messages:
        if message["role"] == "user" and whole and whole[-1]["role"] == "tool":
            texts = [each["content"] for each in (whole[-1], message) if each["content"]]
            whole[-1] = {**whole[-1], "content": "\n\n".join(texts)}
        else:
            whole.append(message)
    return whole


def _without_thoughts(messages: Messages) -> Messages:
    return [{key: each[key] for key in each if key != "reasoning_content"} for each in messages]


def _one_call_each(messages: Messages) -> Messages:
    """Calls of one message in a message each, with their results behind them. All of them have ids."""
    whole: Messages = []
    at = 0
    while at < len(messages):
        message = messages[at]
        at += 1
        calls = message.get("tool_calls", ())
        if len(calls) < 2:
            whole.append(message)
            continue
        end = next((i for i in range(at, len(messages)) if messages[i]["role"] != "tool"), len(messages))
        results, at = messages[at:end], end
        for number, call in enumerate(calls):
            before = message if number == 0 else {"role": "assistant", "content": None}
            whole.append({**before, "tool_calls": [call]})
            whole += [each for each in results if each["tool_call_id"] == call["id"]]
        known = [call["id"] for call in calls]
        whole += [each for each in results if each["tool_call_id"] not in known]
    return whole


def _with_ids(messages: Messages) -> Messages:
    """Calls with ids of nine letters and digits, as Mistral's templates want them, their results too."""
    whole: Messages = []
    unanswered: list[str] = []
    for at, message in enumerate(messages):
        message = dict(message)
        if calls := message.get("tool_calls"):
            ids = [_short(str(call.get("id", f"{at} {number}"))) for number, call in enumerate(calls)]
            message["tool_calls"] = [{**call, "id": each} for call, each in zip(calls, ids, strict=True)]
            unanswered = ids
        elif message["role"] == "tool":
            given = message.get("tool_call_id")
            known = unanswered.pop(0) if given is None and unanswered else _short(str(given))
            message["tool_call_id"] = known
            unanswered = [each for each in unanswered if each != known]
        whole.append(message)
    return whole


def _short(text: str) -> str:
    is_fit = len(text) == 9 and text.isascii() and text.isalnum()
    return text if is_fit else hashlib.sha256(text.encode()).hexdigest()[:9]
