"""bench/needles.py: both ways of asking, on a model that finds numbers in short texts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_numbers_are_found(plain_gguf: Path, tmp_path: Path) -> None:
    data = tmp_path / "needles.jsonl"
    text = (ROOT / "models/demo/sample-val.txt").read_text(encoding="utf-8")
    samples = []
    for i, (word, number) in enumerate(
        [("gerbil", "8073504"), ("pyrostat", "0814602"), ("sneeze", "2848057")]
    ):
        before, after = text[i * 500 : i * 500 + 400], text[i * 500 + 400 : i * 500 + 900]
        prompt = (
            f"Read the text and remember the numbers.\n\n{before} The magic number for {word} is {number}."
            f" {after}\n\nWhat is the magic number for {word}?"
        )
        samples.append({"prompt": prompt, "answer": number, "length": 300, "needles": 1})
    samples.append(samples[0] | {"answer": "1111111"})  # and one that is not there
    data.write_text("".join(json.dumps(sample) + "\n" for sample in samples), encoding="utf-8")
    for way in ([], ["--forced"]):
        command = [
            sys.executable,
            str(ROOT / "bench/needles.py"),
            str(plain_gguf),
            "--data",
            str(data),
            "-t",
            "1",
        ]
        done = subprocess.run(
            [*command, "--kv", "f16,q8_0", *way], capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
        results = json.loads(done.stdout)["results"]
        assert [row["kv"] for row in results] == ["f16", "q8_0"]
        assert all(2 <= row["hits"] <= 3 and row["samples"] == 4 for row in results)
        assert results[0]["kv_bytes_per_token"] > results[1]["kv_bytes_per_token"]
