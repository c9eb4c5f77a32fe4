"""Chat in the terminal, or answer one prompt (-p, -f or piped text)."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from latentkv import ranges
from latentkv.cli import _options as options
from latentkv.cli._sampling import add_sampling, add_thoughts, note_thoughts, sampling_options
from latentkv.console.arguments import Parser, number, number_or_auto
from latentkv.console.reading import read_stream, read_text
from latentkv.errors import expected
from latentkv.text import utf8

_EPILOG = """examples:
  latentkv chat model.gguf -c 65536 --kv small
  latentkv chat model.gguf -p "Name three rivers." -n 64 --temp 0
  latentkv chat model.gguf -sys "Answer in one sentence." < question.txt

The answer goes to standard output, everything else to standard error. In a conversation, /help lists the
commands. Alt-Enter, or a backslash at the end of a line, adds a line. Ctrl-C stops an answer; Ctrl-D (or
Ctrl-C twice at the prompt) exits. Input is kept in ~/.local/state/latentkv/chat_history."""


_COLOR = {"auto": "auto", "always": "always", "never": "never", "on": "always", "off": "never"}


def main(argv: Sequence[str]) -> int:
    args = options.parse(_parser(), argv)
    prompt = _one_shot_prompt(args)
    _require_sense(args, prompt)
    system = _read(args.system_file, "-sysf") or args.system
    template, most = options.template(args), options.drafts(args)
    sampling = sampling_options(args)
    from latentkv import Llama
    from latentkv.cli._console import Console
    from latentkv.cli._conversation import Conversation
    from latentkv.drafts.adaptive import AdaptiveLookup
    from latentkv.drafts.worth import on_gpu
    from latentkv.sampling.options import SamplingOptions

    n_ctx = args.ctx_size
    if n_ctx is None:
        n_ctx = options.file_context(args)
    fit = options.fitted(args, n_ctx, replace(options.cache_options(args), n_batch=options.batch_size(args)))
    llama = Llama(
        args.model,
        latent_path=args.latent or None,
        n_ctx=fit.n_ctx,
        **options.placement(args, fit),
        last_n_tokens_size=args.repeat_last_n,
        chat_template=template,
        **fit.options,
    )
    if isinstance(own := llama.draft_model, AdaptiveLookup):  # --spec-type draft-mtp
        own.num_pred_tokens = min(most, own.num_pred_tokens)
    else:
        if args.model_draft and llama.session.is_recurrent:
            raise expected("-md", "serve for a model with recurrent layers", "chat")
        model = options.drafter(args, fit, llama.model, llama.session)
        if most and not llama.session.is_recurrent and llama.session.evict == "none":
            llama.draft_model = AdaptiveLookup(most, on_gpu(llama.session), model)
    sampling.setdefault("temperature", llama.recommended.get("temperature", SamplingOptions.temperature))
    note_thoughts(args.reasoning_budget, lambda: llama.chat_template)
    console = Console(color=_COLOR[args.color], quiet=args.quiet)
    if llama.n_ctx() > llama.model.n_ctx_train:
        console.warn(
            f"note: the model was trained for {llama.model.n_ctx_train} tokens, -c is {llama.n_ctx()}"
        )
    conversation = Conversation(
        llama,
        console,
        system=system,
        max_tokens=max(-1, args.n_predict),
        stop=args.reverse_prompt,
        seed=args.seed,
        sampling=sampling,
        template=args.chat_template_kwargs,
        thoughts={
            "reasoning_budget_tokens": args.reasoning_budget,
            "reasoning_budget_message": args.reasoning_budget_message,
        },
    )
    with llama:
        if prompt is None:
            from latentkv.cli._repl import Repl

            return Repl(conversation, console).run()
        return conversation.complete(prompt) if args.raw else conversation.answer_once(prompt)


def _require_sense(args: argparse.Namespace, prompt: str | None) -> None:
    """Refuses options of which one would not count."""
    if args.system and args.system_file is not None:
        raise expected("-sys, -sysf", "one of them", "both")
    if args.reasoning_budget_message is not None and args.reasoning_budget < 0:
        raise expected("--reasoning-budget-message", "--reasoning-budget beside it", "none")
    if not args.raw:
        return
    if prompt is None:
        raise expected("--raw", "a prompt (-p, -f or piped text)", "a conversation")
    of_templates = {
        "-sys": args.system,
        "-sysf": args.system_file,
        "--chat-template-file": args.chat_template_file,
        "--chat-template-kwargs": args.chat_template_kwargs,
        "--reasoning-budget": args.reasoning_budget >= 0,
    }
    for name, value in of_templates.items():
        if value:
            raise expected("--raw", f"no {name} beside it, as plain text has no template", "both")


def _one_shot_prompt(args: argparse.Namespace) -> str | None:
    """The text of -p, -f or a pipe; None for a conversation."""
    if args.prompt is not None and args.file is not None:
        raise expected("-p, -f", "one of them", "both")
    if args.prompt is not None:
        prompt = args.prompt
    elif args.file is not None:
        prompt = _read(args.file, "-f")
    elif not sys.stdin.isatty():
        prompt = read_stream(sys.stdin.buffer, "prompt").rstrip("\n")
    else:
        return None
    if not prompt:
        raise expected("prompt", "some text from -p, -f or the pipe", "nothing")
    utf8(prompt, "prompt")
    return str(prompt)


def _object(text: str) -> dict[str, Any]:
    """An argparse type: a JSON object."""
    try:
        found = json.loads(text)
    except json.JSONDecodeError:
        found = None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"expected a JSON object; got {text}")
    return found


def _read(path: str | None, option: str) -> str | None:
    return None if path is None else read_text(path, option).rstrip("\n")


def _parser() -> argparse.ArgumentParser:
    parser = Parser("latentkv chat", description=__doc__, epilog=_EPILOG)
    options.add_model(parser)
    parser.add_argument("-p", "--prompt", metavar="TEXT", help="answer this and exit")
    parser.add_argument("-f", "--file", metavar="PATH", help="answer the text of this file and exit")
    parser.add_argument("-sys", "--system", default="", metavar="TEXT", help="system message")
    parser.add_argument("-sysf", "--system-file", metavar="PATH", help="system message from a file")
    parser.add_argument(
        "--raw", "--no-template", action="store_true", help="continue the prompt as plain text"
    )
    parser.add_argument(
        "--chat-template-file", metavar="PATH", help="a Jinja template instead of the file's own"
    )
    parser.add_argument(
        "--chat-template-kwargs",
        type=_object,
        default={},
        metavar="JSON",
        help="further variables of the template, as '{\"enable_thinking\": false}'",
    )
    parser.add_argument(
        "-c",
        "--ctx-size",
        type=number_or_auto(ranges.N_CTX),
        metavar="N",
        help=f"context in tokens (default: {options.DEFAULT_CONTEXT}, or less if trained on less; 0 = as "
        "trained; auto = what fits, at most as trained)",
    )
    parser.add_argument(
        "-n",
        "--n-predict",
        type=number(ranges.Range(1, special={-1: "until the context is full", -2: "the same"})),
        default=-1,
        metavar="N",
        help="at most N tokens per answer (default: -1, until the context is full)",
    )
    parser.add_argument(
        "-r",
        "--reverse-prompt",
        action="append",
        default=[],
        metavar="TEXT",
        help="end the answer at this text (repeatable)",
    )
    parser.add_argument(
        "-b",
        "--batch-size",
        type=number(ranges.N_BATCH),
        default=2048,
        metavar="N",
        help="tokens of a prompt per native call (default: 2048)",
    )
    parser.add_argument(
        "--color",
        nargs="?",
        choices=list(_COLOR),
        default="auto",
        const="always",
        metavar="WHEN",
        help="auto (default), always or never",
    )
    parser.add_argument("-q", "--quiet", action="store_true", help="no line of statistics after an answer")
    options.add_cache(parser)
    options.add_compute(parser)
    options.add_drafts(parser.add_argument_group("guesses"))
    add_thoughts(parser)
    add_sampling(parser)
    return parser
