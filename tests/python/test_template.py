"""Chat templates as Hugging Face writes them."""

from __future__ import annotations

import pytest

from latentkv import LatentKVError
from latentkv.template import CHATML, ChatTemplate

ASK = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]


def render(source: str, messages: list[dict[str, object]] | None = None, **options: object) -> str:
    return ChatTemplate(source, "<s>", "</s>").render(messages or ASK, **options)  # type: ignore[arg-type]


def test_chatml() -> None:
    assert render(CHATML) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert not render(CHATML, add_generation_prompt=False).endswith("assistant\n")


def test_special_tokens_and_block_trimming() -> None:
    assert render(
        "{{ bos_token }}\n  {% for m in messages %}\n{{ m.role }};{% endfor %}\n{{ eos_token }}"
    ) == ("<s>\nsystem;user;</s>")


def test_loop_controls_and_generation_blocks() -> None:
    source = "{% for m in messages %}{% if loop.index == 2 %}{% break %}{% endif %}{{ m.role }}{% endfor %}"
    assert render(source) == "system"
    assert render("a{% generation %}b{{ messages[0].role }}{% endgeneration %}c") == "absystemc"


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
        render("", [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}])


def test_a_template_that_complains() -> None:
    with pytest.raises(
        LatentKVError, match=r"\[chat template\] expected messages that it accepts; got no system here"
    ):
        render("{{ raise_exception('no system here') }}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% for i in range(10**9) %}x{% endfor %}",
        "{{ messages[9].role }}",
        "{{ 1 // 0 }}",
    ],
)
def test_hostile_templates_end_in_one_line(source: str) -> None:
    with pytest.raises(LatentKVError) as error:
        render(source)
    assert "\n" not in str(error.value)


def test_invalid_jinja() -> None:
    with pytest.raises(LatentKVError, match=r"\[chat template\] expected valid Jinja; got "):
        ChatTemplate("{% if %}", "", "")
