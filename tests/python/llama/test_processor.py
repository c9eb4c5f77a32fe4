"""Which native module a processor gets: the greatest that it runs, or the one that LATENTKV_CPU names."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from latentkv import processor
from latentkv.errors import LatentKVError

OF_A_WHEEL = ["x86-64-v2", "x86-64-v3", "x86-64-v4-vnni"]
V2, V3, V4 = (processor.NEEDS[level] for level in OF_A_WHEEL)


@pytest.mark.parametrize(
    ("can", "level"),
    [
        (V2, "x86-64-v2"),
        (V3, "x86-64-v3"),
        (V4, "x86-64-v4-vnni"),
        (V4 - {"avx512_vnni"}, "x86-64-v3"),
        (V4 - {"fma"}, "x86-64-v2"),  # a hypervisor may hide anything
    ],
)
def test_the_greatest_level_that_runs_is_loaded(can: frozenset[str], level: str) -> None:
    assert processor.chosen(OF_A_WHEEL, can, None) == level


def test_a_lesser_level_can_be_asked_for() -> None:
    assert processor.chosen(OF_A_WHEEL, V4, "x86-64-v2") == "x86-64-v2"
    assert processor.usable(OF_A_WHEEL, V3) == ["x86-64-v3", "x86-64-v2"]


@pytest.mark.parametrize("asked", ["x86-64-v4-vnni", "avx9", ""])
def test_a_level_that_does_not_run_is_refused(asked: str) -> None:
    with pytest.raises(LatentKVError, match=r"\[LATENTKV_CPU\] expected x86-64-v3 or x86-64-v2"):
        processor.chosen(OF_A_WHEEL, V3, asked)


def test_a_processor_under_the_least_level_is_refused() -> None:
    with pytest.raises(LatentKVError, match="build from source"):
        processor.chosen(OF_A_WHEEL, V2 - {"popcnt"}, None)
    assert processor.chosen(["native"], frozenset(), None) == "native"


def test_features_are_those_of_proc(tmp_path: Path) -> None:
    x86 = tmp_path / "x86"
    x86.write_text(
        "processor\t: 0\nmodel name\t: A flags: thing\nflags\t\t: fpu avx2 fma\nflags\t\t: other\n"
    )
    arm = tmp_path / "arm"
    arm.write_text("processor\t: 0\nFeatures\t: fp asimd asimddp\n")
    assert processor.features(x86) == {"fpu", "avx2", "fma"}
    assert processor.features(arm) == {"fp", "asimd", "asimddp"}
    assert processor.features(tmp_path / "none") == frozenset()


def test_levels_are_those_that_the_build_makes() -> None:
    cmake = (Path(__file__).parents[3] / "native" / "levels.cmake").read_text(encoding="utf-8")
    lists = [names.split() for names in re.findall(r"set\(level_names (.+)\)", cmake)]
    assert ["native", *(name for names in lists for name in reversed(names))] == list(processor.NEEDS)


RUN = "import latentkv._core as core; print(core.__file__); core.build_info()"


def test_every_level_that_this_machine_has_loads() -> None:
    for level in processor.usable(processor.built(), processor.features()):
        environment = os.environ | {processor.VARIABLE: level}
        done = subprocess.run([sys.executable, "-c", RUN], capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        assert Path(done.stdout.strip()).parent.name == level


def test_a_command_refuses_a_level_in_one_line() -> None:
    command = [sys.executable, "-m", "latentkv", "bench", "model.gguf"]
    environment = os.environ | {processor.VARIABLE: "avx9"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 2
    assert done.stderr.startswith("error: [LATENTKV_CPU] expected ")
    assert done.stderr.count("\n") == 1
