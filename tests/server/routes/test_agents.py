"""Agents: conversations with tools that go on from what the cache holds, whatever their template does to what
the model wrote."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from asking import TEXT, run, scheduler

from latentkv.chat.formats import CHATML_TOOLS
from latentkv.chat.memory import AnswerMemory
from latentkv.chat.prompt import ToolUse, chat_request
from latentkv.chat.template import ChatTemplate
from latentkv.engine.request import Request, Ticket
from latentkv.engine.scheduler import Scheduler
from latentkv.engine.store import PrefixStore
from latentkv.generate.chat import ChatShape
from latentkv.sampling.grammar import LlamaGrammar
from latentkv.sampling.options import SamplingOptions

sys.path.insert(0, str(Path(__file__).parents[2] / "python" / "chat"))
from chat_templates import THINKING

PATH = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
READ = {"type": "function", "function": {"name": "read", "description": "Reads.", "parameters": PATH}}
SYSTEM = {"role": "system", "content": TEXT[:1500]}


@pytest.fixture(scope="module")
def model(converted: Callable[..., Path]) -> Any:
    from latentkv import _core

    return _core.Model(str(converted("--method", "none", "--outtype", "f32")))


class Agent:
    """A conversation with a model that says what it is told."""

    def __init__(self, served: Scheduler, memory: AnswerMemory | None, source: str, task: str) -> None:
        self.served, self.memory = served, memory
        self.template = ChatTemplate(source, model=served.model)
        self.messages: list[dict[str, Any]] = [SYSTEM, {"role": "user", "content": task}]
        self.n_known = self.new = self.computed = 0

    def prompt(self) -> Any:
        use = ToolUse.of([READ], None)
        return chat_request(self.served.model, self.template, self.messages, use, memory=self.memory)

    def turn(self, said: str, more: Sequence[Mapping[str, Any]] = (), limit: int = -1) -> dict[str, Any]:
        """The model says `said`, in tokens of its own choice; `more` follows."""
        prompt = self.prompt()
        says = SamplingOptions(temperature=0, grammar=LlamaGrammar(f"root ::= {json.dumps(said)}"))
        ticket = Ticket(Request(prompt.tokens, says, limit, shown=prompt.shown))
        self.served.check(ticket)
        self.served.submit(ticket)
        while self.served.step():
            pass
        shape = ChatShape("m", prompt.parser, with_logprobs=False)
        message = shape.whole(list(ticket), ticket.progress)["choices"][0]["message"]
        if prompt.remember is not None:
            prompt.remember(message, ticket.progress.tokens, ticket.progress.end)
        self.new += len(prompt.tokens) - self.n_known
        self.computed += ticket.progress.timings.prompt_n
        self.n_known = len(prompt.tokens) + ticket.progress.completion_tokens
        self.messages += [message, *more]
        return dict(message)


def call(path: str, blank: str = "") -> str:
    """As no template writes it."""
    said = f'{{{blank}"name":"read","arguments":{{"path":{blank}{json.dumps(path)}}}}}'
    return f"<tool_call>\n{said}\n</tool_call>"


def result(message: Mapping[str, Any], text: str) -> list[dict[str, Any]]:
    return [{"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": text}]


def plays(agent: Agent, turns: int, begin: int = 0) -> None:
    for at in range(begin, begin + turns):
        message = agent.turn(call(f"src/file_{at}.py", " " * (at % 3)))
        agent.messages += result(message, TEXT[2000 + 100 * at : 2100 + 100 * at + 40 * (at % 4)])


CACHES = [
    {},
    {"kv": "q4", "sink": 4, "recent": 32},
    {"evict": "h2o", "keep_tokens": "400", "sink": 4, "recent": 0},
]


@pytest.mark.parametrize("cache", CACHES, ids=["no window", "window", "eviction"])
@pytest.mark.parametrize("template", [CHATML_TOOLS, THINKING], ids=["chatml", "thinking"])
def test_what_was_computed_is_not_computed_again(model: Any, cache: dict[str, Any], template: str) -> None:
    """Where templates put other blanks into calls, and tokens are not those of the text alone."""
    served = scheduler(model, 1, 4096, cache=cache)
    agent = Agent(served, AnswerMemory(), template, "Read all.")
    plays(agent, 10)
    assert agent.computed <= 1.02 * agent.new
    forgetful = Agent(
        scheduler(model, 1, 4096, cache=cache),
        None,
        template,
        "Read all.",
    )
    plays(forgetful, 4)
    assert forgetful.computed > 1.1 * forgetful.new


def test_two_agents_in_turn_in_one_sequence(model: Any) -> None:
    """Each loses its place to the other, and what both begin with is kept once."""
    store = PrefixStore("m", 256 << 20)
    served = scheduler(model, 1, 4096, store=store)
    memory = AnswerMemory()
    agents = [Agent(served, memory, CHATML_TOOLS, task) for task in ("Read all.", "Count lines.")]
    for turn in range(6):
        for agent in agents:
            plays(agent, 1, turn)
    shared = 400
    new = sum(agent.new for agent in agents) - shared
    assert sum(agent.computed for agent in agents) <= 1.1 * new + 2 * 128  # a short end is not kept
    assert served.counters.restored_tokens > 1000
    n_shared = store.unshared - store.ram_used
    assert n_shared >= 256 * len(served.session.seq_state_bytes(0)) / len(served.slots[0].tokens) * 0.9


def test_another_conversation_takes_no_ones_place(model: Any) -> None:
    """One that begins like a long one is lent its beginning, and the long one stays."""
    served = scheduler(model, 3, 4096)
    memory = AnswerMemory()
    first = Agent(served, memory, CHATML_TOOLS, "Read all.")
    plays(first, 5)
    second = Agent(served, memory, CHATML_TOOLS, "Count lines.")
    plays(second, 1)
    assert second.computed < 0.3 * second.new
    before = first.computed - first.new
    plays(first, 2, 5)
    assert first.computed - first.new == before


def test_a_message_that_the_client_has_changed_is_what_the_template_makes_of_it(model: Any) -> None:
    agent = Agent(scheduler(model, 1, 4096), AnswerMemory(), CHATML_TOOLS, "Read all.")
    message = agent.turn(call("a.py"))
    agent.messages += result(message, "nothing")
    kept = agent.prompt().tokens
    plain = Agent(agent.served, None, CHATML_TOOLS, "")
    plain.messages = agent.messages
    assert kept != plain.prompt().tokens
    text = lambda tokens: agent.served.model.detokenize(tokens, True).decode()  # noqa: E731
    assert call("a.py") in text(kept)
    assert call("a.py") not in text(plain.prompt().tokens)
    assert text(kept).replace(call("a.py"), "") == text(plain.prompt().tokens).replace(
        '\n<tool_call>\n{"name": "read", "arguments": {"path": "a.py"}}\n</tool_call>', ""
    )
    for changed in (
        {"content": "Hm."},
        {"tool_calls": [{**message["tool_calls"][0], "id": "call_other"}]},
        {
            "tool_calls": [
                {**message["tool_calls"][0], "function": {"name": "read", "arguments": '{"path": "b.py"}'}}
            ]
        },
    ):
        agent.messages[2] = {**message, **changed}
        plain.messages = agent.messages
        assert agent.prompt().tokens == plain.prompt().tokens
    # written in other words, the call is the same
    other = {"name": "read", "arguments": '{ "path" : "a.py" }'}
    agent.messages[2] = {"role": "assistant", "tool_calls": [{**message["tool_calls"][0], "function": other}]}
    assert agent.prompt().tokens == kept
    agent.messages[0] = {**SYSTEM, "content": "Another."}
    plain.messages = agent.messages
    assert agent.prompt().tokens == plain.prompt().tokens


def test_an_answer_that_was_cut_goes_on_from_its_tokens(model: Any) -> None:
    agent = Agent(scheduler(model, 1, 4096), AnswerMemory(), CHATML_TOOLS, "Tell.")
    agent.turn("The clerk of the town wrote numbers into a book.", limit=9)
    agent.messages.append({"role": "user", "content": "Go on."})
    agent.turn("Then he")
    assert agent.computed - agent.new <= 1  # the last token of an answer is computed with what follows


def test_thoughts_before_a_call_come_back_where_the_template_shows_them(model: Any) -> None:
    agent = Agent(scheduler(model, 1, 4096), AnswerMemory(), THINKING, "Read all.")
    message = agent.turn("<think>\nA file first.\n</think>\n\n" + call("a.py"))
    assert message.pop("reasoning_content") == "A file first.\n"
    agent.messages[2] = message  # OpenAI's clients send no thoughts
    agent.messages += result(message, "nothing")
    assert "A file first." in agent.served.model.detokenize(agent.prompt().tokens, True).decode()
    agent.turn("Done.")
    assert agent.computed == agent.new


def test_a_memory_outlives_its_process(model: Any, tmp_path: Path) -> None:
    agent = Agent(scheduler(model, 1, 4096), AnswerMemory(), CHATML_TOOLS, "Read all.")
    plays(agent, 2)
    wanted = agent.prompt().tokens
    assert agent.memory is not None
    agent.memory.save(tmp_path / "answers.json")
    agent.memory = AnswerMemory()
    assert agent.prompt().tokens != wanted
    agent.memory.load(tmp_path / "answers.json")
    assert agent.prompt().tokens == wanted
    (tmp_path / "answers.json").write_bytes(b'{"key": {"tokens": 5}}')
    agent.memory.load(tmp_path / "answers.json")  # damaged
    agent.memory.load(tmp_path / "none.json")
    assert agent.prompt().tokens == wanted


def test_a_memory_has_a_size(model: Any) -> None:
    memory = AnswerMemory(n_tokens=1500)
    agent = Agent(scheduler(model, 1, 4096), memory, CHATML_TOOLS, "Read all.")
    plays(agent, 6)
    assert 1 <= len(memory._known) <= 3
    assert sum(len(each.tokens) for each in memory._known.values()) == memory._n_tokens <= 1500
    assert run(agent.served) == []
