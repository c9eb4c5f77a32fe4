"""Chat templates as Hugging Face writes them."""

from __future__ import annotations

import datetime

import pytest

from latentkv import LatentKVError
from latentkv.chat.formats import BUILT_IN, CHATML
from latentkv.chat.template import ChatTemplate

ASK = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]


def render(source: str, messages: list[dict[str, object]] | None = None, **options: object) -> str:
    return ChatTemplate(source, "<s>", "</s>").render(messages or ASK, **options)  # type: ignore[arg-type]


def test_chatml() -> None:
    assert render(CHATML) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert not render(CHATML, add_generation_prompt=False).endswith("assistant\n")


TALK = [*ASK, {"role": "assistant", "content": "So."}, {"role": "user", "content": "And?"}]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("llama-2", "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nWhy? [/INST] So. </s><s>[INST] And? [/INST]"),
        (
            "llama-3",
            "<s><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\nWhy?<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\nSo.<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\nAnd?<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
        (
            "gemma",
            "<s><start_of_turn>user\nBe brief.\n\nWhy?<end_of_turn>\n<start_of_turn>model\nSo.<end_of_turn>\n"
            "<start_of_turn>user\nAnd?<end_of_turn>\n<start_of_turn>model\n",
        ),
        ("mistral-instruct", "<s>[INST] Be brief.\n\nWhy? [/INST] So.</s>[INST] And? [/INST]"),
    ],
)
def test_formats_by_name(name: str, text: str) -> None:
    assert render(BUILT_IN[name][0], TALK) == text  # type: ignore[arg-type]
    alone = render(BUILT_IN[name][0], TALK[1:2])  # type: ignore[arg-type]
    assert "Why?" in alone
    assert "brief" not in alone
    assert "SYS" not in alone


def test_special_tokens_and_block_trimming() -> None:
    assert render(
        "{{ bos_token }}\n  {% for m in messages %}\n{{ m.role }}:{{ m.content }};{% endfor %}\n"
        "{{ eos_token }}"
    ) == ("<s>\nsystem:Be brief.;user:Why?;</s>")


def test_loop_controls_and_generation_blocks() -> None:
    body = "{{ m.content }}{% if loop.index == 2 %}{% break %}{% endif %}{{ m.role }}"
    assert render("{% for m in messages %}" + body + "{% endfor %}") == "Be brief.systemWhy?"
    marked = "one {% generation %}two {{ messages[0].content }}{% endgeneration %} three"
    assert render(marked, ASK[1:]) == "one two Why? three"


def test_tojson_escapes_no_html() -> None:
    assert (
        render("{{ x | tojson }}".replace("x", "messages[0].content"), [{"role": "user", "content": "<é>&"}])
        == '"<é>&"'
    )


def test_content_parts() -> None:
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    assert render("{{ messages[0].content }}", [{"role": "user", "content": parts}]) == "one two"
    with pytest.raises(
        LatentKVError, match=r"\[messages\] expected text parts only; got a part of type image_url"
    ):
        render("{{ messages }}", [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}])


def test_a_template_that_complains() -> None:
    with pytest.raises(
        LatentKVError, match=r"\[chat template\] expected messages that it accepts; got no system here"
    ):
        render("{{ raise_exception('no system here') }}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__() }}",
        "{% for i in range(10**9) %}x{% endfor %}",
        "{% for i in range(1000000000) %}x{% endfor %}",
        "{% for i in range(5, -1000000000, -1) %}x{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% macro f() %}{{ g() }}{% endmacro %}{% macro g() %}{{ f() }}{% endmacro %}{{ g() }}",
        "{{ " + "(" * 200 + "1" + ")" * 200 + " }}",
        "{{ " + "not " * 5000 + "1 }}",
        "{% if 1 %}" * 300 + "{% endif %}" * 300,
        "{% if 0 %}" + "{% elif 0 %}" * 300 + "{% endif %}",
        "{{ messages | no_such_filter }}",
    ],
)
def test_hostile_templates_end_in_one_line(source: str) -> None:
    with pytest.raises(LatentKVError, match=r"^\[chat template\] expected ") as error:
        render(source)
    assert "\n" not in str(error.value)


def test_long_ranges_that_fit() -> None:
    assert render("{{ range(100000) | length }} {{ range(3, 0, -1) | join }}") == "100000 321"
    assert render("{% macro f(n) %}{{ n }}{% if n %}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(20) }}") == (
        "".join(str(n) for n in range(20, -1, -1))
    )


def test_kwargs_reach_the_template() -> None:
    template = ChatTemplate("{{ mood }} {{ enable_thinking }}")
    options = {"mood": "calm", "enable_thinking": False}
    assert template.apply(ASK, chat_template_kwargs=options).text == "calm False"
    with pytest.raises(
        LatentKVError, match=r"\[chat_template_kwargs\] expected enable_thinking to be true or false"
    ):
        template.apply(ASK, chat_template_kwargs={"enable_thinking": "no"})


def test_a_date_that_stays() -> None:
    source = "{{ strftime_now('%Y-%m-%d') }} {{ date_string }}"
    assert ChatTemplate(source, now=lambda: datetime.datetime(2025, 1, 2)).render(ASK) == (
        "2025-01-02 02 Jan 2025"
    )
    assert ChatTemplate(source).render(ASK) > "2025-01-02"


def test_typed_content() -> None:
    """Templates that know content as a list of parts get one."""
    source = "{% for m in messages %}{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endfor %}"
    assert render(source) == "[Be brief.][Why?]"


def test_values_that_json_lacks() -> None:
    with pytest.raises(LatentKVError, match=r"\[messages\] expected values that JSON has"):
        ChatTemplate(CHATML).apply(ASK, chat_template_kwargs={"x": object()})


def test_invalid_jinja() -> None:
    with pytest.raises(LatentKVError, match=r"\[chat template\] expected valid Jinja; got "):
        ChatTemplate("{% if %}", "", "")
