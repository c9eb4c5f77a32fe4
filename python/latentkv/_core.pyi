"""The native runtime: GGUF reader, one decoder block, the latent cache, ggml graph, libllama's samplers."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from latentkv.errors import LatentKVError

class Error(LatentKVError):
    """Bad input or state: one line, `[where] expected …; got …`."""

__version__: str

def build_info() -> dict[str, Any]:
    """{"ggml": "0.21.0", "compiler": ..., "cpu_features": [...], "cuda": False, "formats": [...]}"""

def gpu_memory() -> list[tuple[int, int]]:
    """Bytes of each GPU, free and in all; empty: this build has none, or finds no device."""

def set_log_level(level: int) -> None:
    """0 errors only, 1 warnings (default), 2 info, 3 debug. Messages go to standard error."""

def quantize(
    data: NDArray[np.float32], type: str, importance: NDArray[np.float32] | None = None
) -> NDArray[np.uint8]:
    """Rows [n_rows, n] to ggml blocks of `type` (q4_0, q4_k, ...) by ggml's own quantizers. importance [n]:
    weights of the columns' errors."""

def dequantize(data: NDArray[np.uint8], type: str) -> NDArray[np.float32]:
    """Rows [n_rows, row bytes] of ggml's blocks (or f16, bf16) to [n_rows, n]."""

def format_bytes(format: str, width: int) -> int:
    """Bytes of a token's segment of `width` channels, which are rounded up to whole units of the format (one
    of build_info's, or none). Formats n8 … n1: without the group's scales, and alone; in a group, neighbours
    of one format are one segment."""

def row_bytes(groups: Sequence[Sequence[tuple[str, int]]]) -> int:
    """Bytes of a token's row whose groups have these segments, (format, channels) each; channels are rounded
    up to whole units of the format."""

def stored_rows(
    groups: Sequence[Sequence[tuple[str, int]]], rows: NDArray[np.float32]
) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Rows [n, channels of all groups] as a cache stores them, [n, row bytes], and what it reads of these,
    [n, channels]; channels in segments of none are 0."""

LEFT_ALONE: int  # free bytes of a device that no plan takes
MOST_GUESSES: int  # n_guesses of a session
MTP_GUESSES: int  # of a model's own layers, at once
STATE_SLOTS: int  # states that recurrent layers hold of a sequence, beside those of guesses
DEMOTION_BATCH: int  # recent tokens that are compressed at once

def plan_bytes(
    layers: Sequence[tuple[Any, ...]],
    n_ctx: int,
    sink: int,
    recent: int,
    recent_ratio: float,
    sink_format: str,
    recent_format: str,
) -> dict[str, Any]:
    """Session.kv_bytes() of one sequence on a GPU. layers: ((KV heads, their width), sliding window or 0,
    channels of V's row that are of the key alone, K, V); K and V: (whether full rows, whether latents of form
    E, the segments of every group as in row_bytes()). No groups: of V, the layer has no rows; of K, they are
    in those of V."""

def content_hash(path: str) -> str:
    """64 hexadecimal digits that a sidecar knows its base by: docs/gguf.md, Sidecars."""

class GgufFile:
    """A GGUF, memory-mapped; path: of the file, or of any part of a split one. Raises Error for anything that
    is not well-formed and whole."""

    def __init__(self, path: str | bytes) -> None: ...
    def values(self) -> dict[str, tuple[int, int | None, Any]]:
        """By key: GGUF's type, of an array that of its items, the value; strings as bytes."""

    def tensors(self) -> list[tuple[str, tuple[int, ...], str, int]]:
        """Name, shape in NumPy's order, type (q4_k …) and bytes of each."""

    def raw(self, name: str) -> NDArray[np.uint8]:
        """A tensor's bytes in the file, [rows, bytes of a row]."""

class Model:
    """Weights and vocabulary of one GGUF, memory-mapped; shared by any number of sessions. latent_path: a
    sidecar of it."""

    def __init__(
        self,
        path: str | bytes,
        *,
        latent_path: str = "",
        n_gpu_layers: int = 0,
        tensor_split: Sequence[float] = (),
        main_gpu: int = 0,
        split_mode: str = "layer",
        use_mmap: bool = True,
        use_mlock: bool = False,
        vocab_only: bool = False,
        describe_only: bool = False,
        weights: str = "stored",
    ) -> None:
        """tensor_split: the GPUs' shares of the layers that go to GPUs, empty = by free memory; split_mode
        "none": main_gpu has all. describe_only: sizes and forecasts alone, and with n_gpu_layers those of
        GPUs, which need not be there: of one, or of as many as are named. Weights stay in the file; no
        session runs on it. use_mlock: weights of the CPU stay in memory, as far as ulimit -l allows; a
        warning says where it does not. weights: the type that memory holds those in that are multiplied by:
        as "stored" in the file, or "f32" or "f16", with which products round less."""
    @property
    def metadata(self) -> Mapping[str, Any]:
        """Every GGUF key (arrays as lists; tokenizer arrays longer than 64 entries as their length)."""
    @property
    def weights(self) -> str:
        """What was asked for."""
    @property
    def n_vocab(self) -> int: ...
    @property
    def n_ctx_train(self) -> int: ...
    @property
    def n_embd(self) -> int: ...
    @property
    def n_layer(self) -> int: ...
    @property
    def n_mtp(self) -> int:
        """Layers behind those n_layer, which guess further tokens: they are left alone."""
    @property
    def n_head(self) -> int: ...
    @property
    def n_head_kv(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def n_params(self) -> int: ...
    @property
    def size_bytes(self) -> int: ...
    @property
    def factor_bytes(self) -> int:
        """Bytes of the factors, which a plain file does not have (docs/gguf.md, Tensors)."""
    @property
    def fingerprint(self) -> str:
        """16 hexadecimal digits of what the weights say, a sidecar's too: states belong to them."""
    @property
    def is_plain(self) -> bool:
        """Every layer is full/full: stock and our row formats, no latent."""
    @property
    def has_rope(self) -> bool:
        """Keys and queries are turned by their position: only distances matter."""
    @property
    def layers(self) -> list[dict[str, Any]]:
        """Per layer {"mixer": "attention" or "delta_net", which has no rows, "key_only": first channels of
        V's rows that are the key's alone (MLA), else 0, "k": t, "v": t}; t = {"path", "form": "a" or "e",
        "group", "ranks": [...], "segments": [[widths], ...], "formats": [[...], ...] or None, "energy": float
        or None}."""
    @property
    def master(self) -> dict[str, Any] | None:
        """None, or what another plan is chosen from: {"formats": [n_formats], "context", "drop_penalty",
        "predicted": [n], "kld": [n], "k": s, "v": s}; s = {"segments": their number per layer and group,
        "bytes": int64 [segments, n_formats] per token, "distortion": float64, same shape, nats per token}."""
    @property
    def regions(self) -> dict[str, Any]:
        """Defaults the file asks for: {"sink": 0, "recent": 0, "recent_ratio": 0.0, "sink_format": "f16",
        "recent_format": "f16", "prefill": "eager"}."""
    @property
    def chat_template(self) -> str | None: ...
    def kv_bytes(self, n_ctx: int, **options: Any) -> dict[str, Any]:
        """Bytes of a cache before allocating; options: the others of plan.options.SessionOptions. Same keys
        as Session.kv_bytes(), plus "n_ubatch": the longest ubatch where there is memory for it; "sink",
        "recent", "recent_ratio": the exact tokens; "warnings": the lines that such a session logs."""
    def forecast(self, n_ctx: int, free: Sequence[int] | None = None, **options: Any) -> dict[str, Any]:
        """Bytes of a session before allocating: those of kv_bytes(), plus "weights" (on a GPU without the
        token table, unless it is the output too), "compute" and "prefill": what a prompt of n_ctx tokens
        takes beside them while it is prefilled lazily, 0 when eager. "runs": [{"gpu", "layers", "weights",
        "cache", "compute"}], what of these each device has, bookkeeping aside; "gpu" None is the host. free:
        bytes of each GPU, by which "n_ubatch" is chosen; None: enough."""
    # vocabulary (libllama)
    def tokenize(self, text: bytes, add_special: bool = True, parse_special: bool = False) -> list[int]: ...
    def detokenize(self, tokens: Sequence[int], special: bool = False) -> bytes: ...
    def token_to_piece(self, token: int, special: bool = False) -> bytes: ...
    def token_bos(self) -> int: ...
    def token_eos(self) -> int: ...
    def token_nl(self) -> int: ...
    def token_prefix(self) -> int:
        """Fill in the middle: before the text in front of the gap; -1 where the vocabulary has none."""
    def token_suffix(self) -> int: ...
    def token_middle(self) -> int: ...
    def token_repo(self) -> int:
        """Before the name of a repository, as token_file() before that of a file; -1 likewise."""
    def token_file(self) -> int: ...
    def is_eog(self, token: int) -> bool: ...
    def add_bos(self) -> bool: ...
    def find_token(self, text: str) -> int:
        """Id of an exact vocabulary entry, or -1."""

class Session:
    """One KV cache and compute graph on a model. Not thread-safe; release of the GIL during decode()."""

    def __init__(self, model: Model, **options: Any) -> None:
        """options: those of plan.options.SessionOptions, but kv_budget and the presets of kv. TypeError for
        another name or a value of another type; Error for one out of its range, for options that exclude each
        other, and, with require_fused, where attention would not run fused on the device that the model was
        asked to run on."""
    @property
    def n_ctx(self) -> int: ...
    @property
    def n_ubatch(self) -> int: ...
    @property
    def n_seq_max(self) -> int: ...
    def n_recent(self, length: int) -> int:
        """How many of its latest tokens a sequence of `length` tokens keeps out of the compressed region."""
    @property
    def can_rotate(self) -> bool:
        """Whether full K or V are quantized row by row: what kv_rotate is about."""
    @property
    def prefill(self) -> str:
        """ "lazy" or "eager"."""
    @property
    def evict(self) -> str:
        """The policy by which each layer gives up tokens, or "none"."""
    @property
    def rewinds(self) -> bool:
        """Whether a sequence can go on from a part of its tokens. Not with lazy prefill, by which a prompt is
        exact from its first token or not at all, nor under eviction, where all of them chose what stayed."""
    @property
    def implementations(self) -> dict[str, str]:
        """What ran where and why: {"latent_attn": "fused cpu", ...}."""
    def decode(
        self,
        tokens: Sequence[int],
        *,
        pos: Sequence[int] | None = None,
        seq: Sequence[int] | None = None,
        output: str | Sequence[bool] = "last",
        take: Callable[[NDArray[np.float32]], object] | None = None,
        guessed: Sequence[bool] = (),
        states: bool = False,
    ) -> NDArray[np.float32]:
        """Runs tokens through model and cache, in ubatches. Returns logits [n_outputs, n_vocab] float32.

        pos None: continue each sequence; seq None: sequence 0.
        output "last" (of the batch), "all", "none" or one bool per token.
        take: is called with the logits [n, n_vocab] of each ubatch that has some, in place of returning them.
        states: hidden states behind the last norm, [n_outputs, n_embd], in place of logits.
        guessed: flags, one a token or none; the last tokens of sequences may be guesses that seq_rm may take
        back: no token leaves the recent window on their account.
        Raises Error when the cache is full, before anything runs (require_room)."""
    def interrupt(self) -> None:
        """Async-signal-safe: the running decode() raises KeyboardInterrupt. Of the ubatch that a CPU computes
        nothing stays; a GPU, and eviction, end theirs first."""
    @property
    def window(self) -> int:
        """The longest window of layers that hold their window only, in tokens; 0: all hold the context."""
    # sequences (llama.cpp semantics; p0/p1 half-open, -1 = open end; seq -1 = all in seq_rm)
    def clear(self) -> None: ...
    def leave(self) -> None: ...  # in a child of fork(): its memory stays as it is
    # False, and nothing has changed: layers with a sliding window have no rows of what comes into sight
    # again, tokens were evicted that it would have kept, or recurrent layers have no snapshot to go back to
    def seq_rm(self, seq: int, p0: int = -1, p1: int = -1) -> bool: ...
    def seq_cp(self, src: int, dst: int, p0: int = -1, p1: int = -1) -> None: ...
    def seq_keep(self, seq: int) -> None: ...
    def seq_resumable(self, seq: int, limit: int) -> int:
        """How many first tokens of a sequence, at most `limit`, it can go on from: where layers are recurrent
        those before a snapshot, else all."""
    @property
    def is_recurrent(self) -> bool:
        """Whether some layers have one state a sequence in place of rows: it moves back to snapshots only."""
    def seq_add(self, seq: int, p0: int, p1: int, delta: int) -> None:
        """Context shift. Free and lossless where K is `rebuild`; refused with the reason elsewhere."""
    def seq_pos_min(self, seq: int) -> int: ...
    def seq_pos_max(self, seq: int) -> int: ...
    @property
    def guess_cost(self) -> float:
        """What one guess of the model's own layers takes, in tokens of the model; 0: the session has none."""
    def guess(self, seq: int, token: int, most: int, sure: float = 0.0) -> list[int]:
        """Tokens that may follow `token`, which comes next in the sequence, `most` at most: the likeliest
        ones, up to the first that is less likely than `sure`. Nothing where the latest tokens were not
        computed here, as after a state was restored. With mtp=True."""
    def rows_read(self) -> int:
        """Compressed rows that decoded tokens have read by choice, of all layers (kv_read)."""

    def n_cells_visited(self) -> int:
        """Cells that all calls so far have looked at: host work that may grow with the context. For tests."""
    def require_room(self, n: int) -> None:
        """Raises Error where n more tokens do not fit: "[context] expected at most 32 cells; got 40; raise -c
        / n_ctx"."""
    def n_cells_used(self) -> int:
        """Cells that no new token can take: those of tokens, and what is left of broken blocks."""
    # bytes
    def kv_bytes(self) -> dict[str, Any]:
        """Allocated bytes: {"total", "guesses": of layers that guess, "k", "v", "cells", "states": of
        recurrent layers, "snapshots": copies of states, as many as there are now, "snapshots_most",
        "per_token": float, "f16_per_token": float, "f16_total": of f16's rows and cells for the whole
        context, "share": of f16's bytes per token, float, "n_cells": tokens of the context, "cell_bytes": of
        one cell, "regions": [{"name", "slots", "used", "k", "v"}], "layer_slots": [int], "all_exact",
        "exact_at": [int]}; used: slots that hold a token, under eviction in the layer that has most, and of
        recent more than slots where it grows; layer_slots: of every layer those of its compressed rows,
        fewer where it has a sliding window or evicts; per_token: of the context, at n_ctx; all_exact: tokens
        up to which all of a single sequence are exact, exact_at: how many are at a quarter, a half and all
        of the context."""
    def compute_bytes(self) -> int: ...
    def prefill_bytes(self) -> int:
        """The most that a lazy prefill has taken so far, freed since: one layer's exact rows and the hidden
        states."""
    # state
    def state_bytes(self) -> bytes:
        """All sequences; what they share is in it once. Files of states are LlamaState's."""
    def set_state(self, data: bytes, accept: str = "same") -> str:
        """Replaces all of the cache, in the slots of the one that was saved. accept: which rows of other
        formats, budgets or exact windows are taken and coded anew: none; "any" of the same weights. Returns
        what was lost, "" where nothing was, and logs it for "any". Raises Error for others, or too few
        slots; the cache is empty then."""
    def seq_state_bytes(self, seq: int) -> bytes:
        """One sequence alone, in the same form."""
    def seq_state_parts(self, seq: int, cuts: Sequence[int]) -> list[bytes]:
        """The same in parts: tokens between each two of these positions, and from the last on. Those before
        the first are left out. Raises Error under eviction, but for the whole, [0]."""
    def seq_settled(self, seq: int) -> int:
        """The position before which rows stay as they are, whatever follows: so far parts of the sequence
        are those of any other that begins with the same tokens. Under eviction 0."""
    def set_seq_state(self, seq: int, data: bytes | Sequence[bytes], accept: str = "same") -> str:
        """Replaces a sequence by the one of a state, or of all its parts, in any slots that are free. "finer"
        takes rows of other formats that are as fine as this session's or finer, in the same exact windows.
        Else as set_state; the sequence is empty after an error."""

class TokenMatcher(Protocol):
    """What a Sampler asks. What its methods raise becomes an Error with the same text."""

    def allows(self, token: int) -> bool: ...
    def allowed(self) -> bytes:
        """A bit for each token that may come, the first tokens in the lowest bits."""
    def accept(self, token: int) -> None: ...
    def reset(self) -> None: ...
    def clone(self) -> TokenMatcher: ...

class Sampler:
    """A chain of libllama samplers over one logits row."""

    def __init__(self, model: Model, *, matcher: TokenMatcher | None = None, **options: Any) -> None:
        """options: those of sampling.options.SamplingOptions, but grammar. temperature <= 0 is greedy. The
        order is llama.cpp's default chain. min_keep: what typical_p, top_p, min_p and XTC leave at least.
        infill: llama.cpp's sampler of that name, before temperature.

        matcher: what the answer has to match."""
    def sample(self, logits: NDArray[np.float32]) -> int:
        """A token, drawn as if the matcher had no say; one that it refuses is drawn again from
        those that it allows. Mirostat draws from those at once."""
    def accept(self, token: int, in_grammar: bool = True) -> None:
        """in_grammar False: a prompt token, which penalties see and the matcher does not."""
    def candidates(self, n: int) -> list[tuple[int, float]]:
        """The n likeliest tokens that the last sample() drew from, behind all samplers, and their
        probabilities; likeliest first."""
    def reset(self) -> None:
        """Back to the state after construction, random numbers included."""
    def clone(self) -> Sampler:
        """Another sampler in the same state."""
    @property
    def seed(self) -> int: ...

def next_tokens(
    samplers: Sequence[Sampler], logits: NDArray[np.float32], rows: Sequence[int]
) -> list[tuple[int, bytes, bool] | str]:
    """sample() and accept() of each sampler, on its row of logits [n, n_vocab]: the token, its piece, and
    whether it ends a generation; or, in its place, why it could not be drawn."""

class ChatTemplates:
    """A chat template, by llama.cpp's code: conversations to prompts, and what reads the answers."""

    def __init__(
        self, model: Model | None, source: str = "", *, bos_token: str = "", eos_token: str = ""
    ) -> None:
        """source: Jinja; "" = the model's own, ChatML where it has none. bos_token, eos_token: for a source
        without a model. Errors: "[chat template] expected …"."""
    @property
    def source(self) -> str: ...
    @property
    def capabilities(self) -> dict[str, bool]:
        """supports_tools, supports_tool_calls, supports_parallel_tool_calls, supports_system_role,
        supports_string_content, supports_typed_content, supports_preserve_reasoning,
        supports_reasoning_effort, supports_object_arguments."""
    @property
    def supports_thinking(self) -> bool:
        """Its models think before they answer."""
    def apply(self, request: str) -> dict[str, Any]:
        """request: a JSON object with "messages" (OpenAI's) and, where wanted, "tools", "tool_choice"
        ("auto", "none", "required"), "parallel_tool_calls" (the template's), "json_schema", "grammar",
        "add_generation_prompt" (true), "continue_final_message" (true, "content", "reasoning_content": go
        on with the last message, an assistant's), "enable_thinking" (true), "chat_template_kwargs",
        "reasoning_format" ("auto", "none", "deepseek", "deepseek-legacy").

        Returns {"prompt": text to tokenize with special tokens parsed and those added that the vocabulary
        adds, "format", "grammar": GBNF or "", "grammar_lazy", "grammar_triggers": [{"type", "value",
        "token"}], "grammar_from_generation_prompt": the grammar describes the text from "generation_prompt"
        on, with which the prompt ends, "preserved_tokens": texts of special tokens that the answer has to
        show, "additional_stops", "generation_prompt", "supports_thinking", "thinking_start_tag",
        "thinking_end_tags", "parser": ChatParser}. Errors: Error "[where] expected …"."""

class ChatParser:
    """Reads answers to one prompt."""

    def parse(self, text: str, is_partial: bool) -> str:
        """The message as JSON: {"role", "content", "reasoning_content", "tool_calls"}, the last two where
        there are any. is_partial: the text may go on. Errors: Error "[chat] expected …" for a text that
        does not fit."""
    def stream(self) -> ChatStream:
        """Reads one answer as it grows."""

class ChatStream:
    def push(self, text: str, is_partial: bool = True) -> list[str]:
        """Appends text; a JSON list of OpenAI's deltas. An empty text with is_partial False ends the
        answer."""
    @property
    def message(self) -> str:
        """The message so far, as JSON, without what the prompt began."""
    @property
    def has_tool_calls(self) -> bool: ...
