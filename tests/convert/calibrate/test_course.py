"""What a conversion says before and while it computes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from conftest import DEMO
from latentkv.console import whole
from latentkv.plan import kv_budget
from latentkv_convert import calibrate, cli, course, pipeline
from latentkv_convert.calibrate import speed
from latentkv_convert.plan import unmeasured
from latentkv_convert.recipe import Recipe
from latentkv_convert.source.checkpoint_source import CheckpointSource

Tiny = Callable[..., Path]
SMALL = ["--calib-window", "192", "--fisher-tokens", "768", "--recent", "32", "--no-plot"]
STAGES = [
    "reading the text",
    "measuring keys and values",
    "measuring what the answer depends on",
    "choosing ranks and bits",
    "checking the choice",
    "writing",
]


def words(tiny: Tiny, calib: Path, out: Path, budget: str) -> list[str]:
    return [str(tiny()), "-o", str(out), "--calib", str(calib), "--kv-budget", budget, *SMALL]


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is said at every step, without waiting for the clock."""
    seen: list[str] = []
    show = whole.Part._show

    def said(part: whole.Part) -> None:
        show(part)
        seen.append(part._whole.line())

    monkeypatch.setattr(whole.Part, "_show", said)
    return seen


@pytest.fixture
def shares(monkeypatch: pytest.MonkeyPatch, lines: list[str]) -> list[float]:
    """The share of the whole that is done at every step."""
    seen: list[float] = []
    show = whole.Part._show

    def said(part: whole.Part) -> None:
        show(part)
        seen.append(part._whole.share())

    monkeypatch.setattr(whole.Part, "_show", said)
    return seen


def test_stages_come_in_order_and_the_whole_only_grows(
    tiny: Tiny, calib: Path, tmp_path: Path, lines: list[str], shares: list[float]
) -> None:
    assert cli.main(words(tiny, calib, tmp_path / "out.gguf", "40%")) == 0
    found = [re.match(r"stage (\d) of 6, ([a-z ]+): ", line) for line in lines]
    assert all(found), lines
    order = list(dict.fromkeys((int(match[1]), match[2]) for match in found if match))
    assert order == list(enumerate(STAGES, 1))[1:]
    assert shares == sorted(shares)
    assert shares[0] < 0.5
    assert shares[-1] >= 0.99


def test_statistics_of_the_cache_are_not_counted(
    tiny: Tiny, calib: Path, tmp_path: Path, lines: list[str]
) -> None:
    assert cli.main(words(tiny, calib, tmp_path / "out.gguf", "40%")) == 0
    lines.clear()
    assert cli.main(words(tiny, calib, tmp_path / "out.gguf", "60%")) == 0
    assert "stage 4 of 6, choosing ranks and bits" in lines[0]


def test_how_long_it_takes_is_said_before_the_text_is_read(
    tiny: Tiny,
    calib: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """By what this machine did for less than two seconds: of one that is busy with something else it says
    more."""

    class Begun(Exception):
        pass

    def begun(*_: object) -> None:
        raise Begun

    monkeypatch.setattr(pipeline, "_WORTH", 0.0)
    monkeypatch.setattr(calibrate, "encode", begun)
    command = words(tiny, calib, tmp_path / "out.gguf", "60%")
    said: list[float] = []
    seconds = speed._seconds
    for slower in (1, 8):
        capsys.readouterr()
        with monkeypatch.context() as patch:
            patch.setattr(speed, "_seconds", lambda *given, by=slower: by * seconds(*given))
            with pytest.raises(Begun):
                cli.main(command)
        first = capsys.readouterr().err.splitlines()[0]
        match = re.fullmatch(
            r"this takes about ([\d.]+) (s|min|h) on this machine, as fast as it was just now", first
        )
        assert match, first
        said.append(float(match[1]) * {"s": 1, "min": 60, "h": 3600}[match[2]])
    assert 0 < said[0] < said[1]


def test_a_second_of_work_costs_what_it_is_expected_to() -> None:
    """The stages of a plan in proportion to the work that they are of."""
    source = CheckpointSource(DEMO)
    recipe = Recipe(DEMO, Path("out"), "waterfill", {"quick": False})

    def of(machine: course.Speed) -> float:
        return sum(seconds for _, seconds in course.steps(recipe, source, ("copies",), 4, 1, machine))

    default = course.Speed()
    slow = course.Speed({kind: speed / 2 for kind, speed in default.product.items()}, 2e-9, 9e-9, 5e-9, 6e-9)
    assert of(slow) == pytest.approx(2 * of(default), rel=0.1)


def test_a_budget_that_nobody_measured_is_said_to_be_so_first(
    tiny: Tiny,
    calib: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Begun(Exception):
        pass

    def begun(*_: object) -> None:
        raise Begun

    monkeypatch.setattr(unmeasured, "LEAST", 0.45)  # 2 % of this model's cache are less than its bookkeeping
    monkeypatch.setattr(calibrate, "encode", begun)
    command = words(tiny, calib, tmp_path / "out.gguf", "40%")
    capsys.readouterr()
    with pytest.raises(Begun):
        cli.main(command)
    first = capsys.readouterr().err.splitlines()[0]
    expected = "45% or more, the least whose quality was ever measured; got 40%; "
    assert first.startswith(f"warning: [--kv-budget] expected {expected}")


@pytest.mark.parametrize(
    ("budget", "got"),
    [("2%", "2%"), ("8.4%", "8.4%"), ("8.5%", ""), ("1MiB@4096", "3.1%"), ("8MiB@4096", "")],
)
def test_bytes_are_as_much_of_a_share(budget: str, got: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Of the demo model's f16 cache, 32 MiB at 4096 tokens."""
    source = CheckpointSource(DEMO)
    recipe = Recipe(DEMO, Path("out"), "waterfill", {"kv_budget": kv_budget.parse(budget), "recent": 128})
    unmeasured.warn_of_budget(recipe, source.spec)
    said = capsys.readouterr().err
    assert (f"; got {got}; " in said) if got else not said


def test_a_method_without_a_budget_is_no_warning(capsys: pytest.CaptureFixture[str]) -> None:
    unmeasured.warn_of_budget(Recipe(DEMO, Path("out"), "palu"), CheckpointSource(DEMO).spec)
    assert not capsys.readouterr().err


def test_the_least_measured_share_is_the_least_of_the_published_tables() -> None:
    found = json.loads(
        (DEMO.parents[1] / "bench" / "results" / "ladder-smollm2.json").read_text(encoding="utf-8")
    )
    shares = [float(x) for x in re.findall(r"(\d+(?:\.\d+)?) ?%", json.dumps(found["rows"]))]
    assert min(shares) == 100 * unmeasured.LEAST
