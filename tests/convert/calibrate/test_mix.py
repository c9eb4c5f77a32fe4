"""Without --calib the text is a mix of kinds, the same every time, with parts that nothing was fitted to."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from latentkv_convert import cli
from latentkv_convert.calibrate.sample import Sample, encode
from latentkv_convert.calibrate.text import chats, mix
from latentkv_convert.source.checkpoint_source import CheckpointSource
from latentkv_convert.source.open_source import open_source

Tiny = Callable[..., Path]


@pytest.mark.parametrize("kind", mix.KINDS)
@pytest.mark.parametrize("part", mix.PARTS)
def test_every_kind_has_its_share(kind: str, part: str) -> None:
    text = mix.text(chats.plain, [kind], part)
    assert mix.KIND_CHARS[part] <= len(text) <= 1.05 * mix.KIND_CHARS[part]
    assert text == mix.text(chats.plain, [kind], part)


def test_kinds_take_turns() -> None:
    """So that windows that are spread evenly see all of them."""
    whole = mix.text(chats.plain)
    assert len(whole) > 0.98 * len(mix.KINDS) * mix.KIND_CHARS[mix.FITTED]
    for begin in range(0, len(whole) - 100_000, 50_000):
        part = whole[begin : begin + 50_000]
        assert "Assistant: " in part
        assert re.search(r"The number of the \w+ \w+ is \d+\.", part)
        assert re.search(r"^    def \w+\(self", part, re.MULTILINE)


def test_parts_have_nothing_in_common() -> None:
    for one, other in itertools.combinations(mix.PARTS, 2):
        assert not set(mix._chapters(one)) & set(mix._chapters(other))
        assert not set(mix.MODULES[one].split()) & set(mix.MODULES[other].split())


def test_every_module_and_most_chapters_are_met() -> None:
    """Statistics of one long module are those of no other."""
    asked = mix.text(chats.plain, ["chat"])
    assert all(f"of Python's module {name} do?" in asked for name in ("argparse", "heapq", "zipfile"))
    read = mix.text(chats.plain, ["prose"]) + mix.text(chats.plain, ["numbers"])
    met = [chapter for chapter in mix._chapters(mix.FITTED) if chapter.strip().splitlines()[0] in read]
    assert len(met) > 0.9 * len(mix._chapters(mix.FITTED))


def test_numbers_are_found_in_the_text_above() -> None:
    for piece in mix.KINDS["numbers"](chats.plain, mix.FITTED):
        hidden = dict(re.findall(r"The number of the (\w+ \w+) is (\d+)\.", piece))
        asked = dict(
            re.findall(r"^(?:Assistant: )?The (?:number of the )?(\w+ \w+): (\d+)$", piece, re.MULTILINE)
        )
        assert len(hidden) == 5
        assert hidden == asked


def test_chats_are_in_the_models_template(demo: Path) -> None:
    source = CheckpointSource(demo)
    text = mix.text(chats.renderer(source), ["chat"])
    assert text.startswith("<|im_start|>user\nWhat does `")
    assert "<|im_end|>\n<|im_start|>assistant\n" in text
    encoded = encode(text[:20_000], source)
    assert source.encode("<|im_start|>")[0] in encoded.ids
    sample = Sample.draw(encode(mix.text(chats.renderer(source)), source), 65536, 2048, 0)
    assert sample.tokens.size > 60_000
    assert len(sample.spare)


def test_a_gguf_has_the_same_chats_as_its_checkpoint(demo: Path, tmp_path: Path) -> None:
    out = tmp_path / "plain.gguf"
    assert cli.main([str(demo), "-o", str(out), "--method", "none", "--no-plot"]) == 0
    expected = mix.text(chats.renderer(CheckpointSource(demo)), ["chat"])
    assert mix.text(chats.renderer(open_source(out)), ["chat"]) == expected


def test_a_conversion_without_a_text(
    tiny: Tiny, calib: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also of a model without a template; a text of one's own wins."""
    words = [str(tiny()), "-o", str(tmp_path / "out.gguf"), "--kv-budget", "40%", "--no-plot"]
    words += ["--calib-window", "192", "--fisher-tokens", "768", "--recent", "32"]
    assert cli.main(words) == 0
    said = capsys.readouterr().err
    assert "measuring on the default text (prose, code, chat, numbers); --calib FILE" in said
    first = (tmp_path / "out.gguf").read_bytes()
    assert cli.main([*words, "--no-cache"]) == 0
    assert (tmp_path / "out.gguf").read_bytes() == first
    capsys.readouterr()
    assert cli.main([*words, "--calib", str(calib)]) == 0
    assert "measuring on" not in capsys.readouterr().err
    assert (tmp_path / "out.gguf").read_bytes() != first
