"""Chat templates: Jinja as Hugging Face writes it, rendered in a sandbox."""

from __future__ import annotations

import datetime
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from latentkv.errors import LatentKVError, expected

if TYPE_CHECKING:
    from latentkv import _core

Message = Mapping[str, Any]

CHATML = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BUILT_IN = {"chatml": CHATML}


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks an assistant's text for training masks; for inference its body is all there
    is."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


class ChatTemplate:
    """One compiled template. `stop` are texts that end a turn and that the vocabulary may not know as end
    tokens."""

    def __init__(
        self,
        source: str,
        bos_token: str,
        eos_token: str,
        stop: Sequence[str] = (),
        now: Callable[[], datetime.datetime] = datetime.datetime.now,
    ) -> None:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda pattern: now().strftime(pattern)
        self.source = source
        self.stop = list(stop)
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise expected("chat template", "valid Jinja", _one_line(error)) from error

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """The text to tokenize: special tokens parsed, nothing added. Template errors become
        LatentKVError."""
        plain = [{**message, "content": content_text(message.get("content"))} for message in messages]
        try:
            return self._template.render(
                messages=plain, add_generation_prompt=add_generation_prompt, tools=tools, **self._tokens
            )
        except LatentKVError:
            raise
        except (
            jinja2.TemplateError,
            TypeError,
            ValueError,
            LookupError,
            ArithmeticError,
            RecursionError,
        ) as error:
            raise expected("chat template", "messages that it accepts", _one_line(error)) from error


def content_text(content: Any) -> str:
    """A message's content as text; OpenAI's list of parts is joined, anything but text is refused."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, Sequence) or not all(isinstance(part, Mapping) for part in content):
        raise expected("messages", "content as text or a list of parts", type(content).__name__)
    kinds = {part.get("type") for part in content}
    if kinds - {"text"}:
        raise expected(
            "messages", "text parts only", f"a part of type {sorted(map(str, kinds - {'text'}))[0]}"
        )
    return "".join(part["text"] for part in content)


def require_built_in(name: str | None) -> None:
    """Refuses a `chat_format` that is no built-in template's name."""
    if name is not None and name not in BUILT_IN:
        raise expected(
            "chat_format",
            f"None (the file's own) or one of {', '.join(BUILT_IN)}",
            repr(name),
            "pass chat_template",
        )


def template_of(model: _core.Model, name: str | None = None, source: str | None = None) -> ChatTemplate:
    """The template to use: `source`, else the built-in `name`, else the file's, else ChatML with a
    warning."""
    require_built_in(name)
    bos, eos = (_special(model, token) for token in (model.token_bos(), model.token_eos()))
    if source is None and name is None:
        source = model.chat_template
        if source is None:
            print("warning: the file has no chat template; using ChatML", file=sys.stderr)
    if source is not None:
        return ChatTemplate(source, bos, eos)
    return ChatTemplate(BUILT_IN[name or "chatml"], bos, eos, stop=["<|im_end|>"])


def _special(model: _core.Model, token: int) -> str:
    return model.token_to_piece(token, True).decode("utf-8", errors="replace") if token >= 0 else ""


def _to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False, **options: Any) -> str:
    # Jinja's own tojson escapes HTML characters, which a prompt must not have.
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii, **options)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
