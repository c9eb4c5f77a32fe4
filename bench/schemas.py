"""Whether answers to JSON schemas parse and fit them: a real model, every schema with several questions,
greedy and sampled.

python bench/schemas.py model.gguf [-n TOKENS] [--temp T] [--seeds N] [--save NAME]

It wants `pip install fastjsonschema`. Every answer counts that ends by itself, is JSON, and is valid by a
validator that is not llama.cpp's.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import record
from command import arguments

Schema = dict[str, Any]

SYSTEM = "You answer in JSON."


@dataclass(frozen=True)
class Form:
    """`schema` None: any JSON object (response_format json_object alone)."""

    name: str
    schema: Schema | None
    questions: list[str]


FORMS = [Form(**form) for form in json.loads((record.ROOT / "bench/inputs/forms.json").read_text("utf-8"))]
COLUMNS = [
    record.Column("form", "schema"),
    record.Column("sampling", "sampling"),
    record.Column("answers", "answers"),
    record.Column("ended", "ended by themselves"),
    record.Column("parsed", "are JSON"),
    record.Column("valid", "fit the schema"),
    record.Column("tokens", "tokens, most"),
]


def response_format(schema: Schema | None) -> dict[str, Any]:
    return {"type": "json_object"} if schema is None else {"type": "json_object", "schema": schema}


def answers(llm: Any, form: Form, sampling: dict[str, Any], n_predict: int) -> Iterator[dict[str, Any]]:
    import fastjsonschema

    valid = fastjsonschema.compile(form.schema or {"type": "object"})
    for question in form.questions:
        out = llm.create_chat_completion(
            [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}],
            response_format=response_format(form.schema),
            max_tokens=n_predict,
            **sampling,
        )
        choice = out["choices"][0]
        text = choice["message"]["content"] or ""
        row = {"question": question, "text": text, "finish_reason": choice["finish_reason"], "error": ""}
        row["tokens"] = out["usage"]["completion_tokens"]
        try:
            valid(json.loads(text))
        except (ValueError, fastjsonschema.JsonSchemaException) as error:
            row["error"] = f"{type(error).__name__}: {error}"
        yield row


def measured(llm: Any, args: argparse.Namespace) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    samplings = {"greedy": [{"temperature": 0.0}]}
    samplings[f"temperature {args.temp:g}"] = [
        {"temperature": args.temp, "seed": seed} for seed in range(args.seeds)
    ]
    rows, failed = [], []
    for form in FORMS:
        for name, options in samplings.items():
            found = [row for each in options for row in answers(llm, form, each, args.n_predict)]
            bad = [row for row in found if row["error"] or row["finish_reason"] != "stop"]
            failed += [{"form": form.name, "sampling": name, **row} for row in bad]
            rows.append(
                {
                    "form": form.name,
                    "sampling": name,
                    "answers": len(found),
                    "ended": sum(row["finish_reason"] == "stop" for row in found),
                    "parsed": sum("JSONDecodeError" not in row["error"] for row in found),
                    "valid": sum(not row["error"] for row in found),
                    "tokens": max(row["tokens"] for row in found),
                }
            )
            print(rows[-1], flush=True)
    return rows, failed


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("model", metavar="FILE")
    parser.add_argument("-n", "--n-predict", type=int, default=512, help="tokens of an answer (default: 512)")
    parser.add_argument("--temp", type=float, default=0.8, help="of the sampled answers (default: 0.8)")
    parser.add_argument("--seeds", type=int, default=1, help="sampled answers of a question (default: 1)")
    parser.add_argument("-t", "--threads", type=int, default=1)
    parser.add_argument("--save", metavar="NAME", help="writes bench/results/NAME.json")
    args = parser.parse_args()
    from latentkv import Llama

    with Llama(args.model, n_ctx=args.n_predict + 512, n_threads=args.threads) as llm:
        rows, failed = measured(llm, args)
        name = llm.metadata.get("general.name")
    for row in failed:
        print(
            f"{row['form']}, {row['sampling']}, {row['question']!r}: {row['finish_reason']}, ",
            row["error"][:80],
        )
        print(f"  … {row['text'][-160:]!r}")
    if args.save:
        record.save(
            record.RESULTS / f"{args.save}.json",
            command=shlex.join(["python", "bench/schemas.py", *sys.argv[1:]]),
            columns=COLUMNS,
            rows=rows,
            note=f"{name}, system message {SYSTEM!r}, at most {args.n_predict} tokens an answer",
            failed=failed,
        )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
