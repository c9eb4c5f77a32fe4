"""The calls of `Llama` in the shapes of OpenAI's API: completions, chats, embeddings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from latentkv.chat.messages import Message
from latentkv.chat.prompt import chat_request
from latentkv.chat.thoughts import ThoughtLimit, thinking_kwargs
from latentkv.chat.tools import ToolUse
from latentkv.generate.answer import AnswerOptions
from latentkv.generate.caller import Caller
from latentkv.generate.chat import chat
from latentkv.generate.completion import complete
from latentkv.generate.embedding import embedded, vectors_of
from latentkv.generate.processors import LogitsProcessor, StoppingCriteria
from latentkv.sampling.grammar import LlamaGrammar
from latentkv.sampling.options import SamplingOptions
from latentkv.text import stop_list


class OpenAICalls:
    """What `Llama` answers to, of what a Caller has: arguments become options here, and the answer is made by
    the other files of this folder."""

    def create_completion(
        self: Caller,
        prompt: str | Sequence[int],
        suffix: str | None = None,
        max_tokens: int | None = 16,
        temperature: float | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        typical_p: float = 1.0,
        logprobs: int | None = None,
        echo: bool = False,
        stop: str | Sequence[str] | None = None,
        frequency_penalty: float = 0.0,
        presence_penalty: float = 0.0,
        repeat_penalty: float | None = None,
        top_k: int | None = None,
        stream: bool = False,
        seed: int | None = None,
        tfs_z: float = 1.0,
        mirostat_mode: int | None = None,
        mirostat_tau: float | None = None,
        mirostat_eta: float | None = None,
        model: str | None = None,
        stopping_criteria: StoppingCriteria | None = None,
        logits_processor: LogitsProcessor | None = None,
        grammar: LlamaGrammar | str | None = None,
        logit_bias: Mapping[int, float] | Mapping[str, float] | None = None,
        **server: Any,
    ) -> Any:
        """Continues `prompt`, or fills the gap between it and `suffix`, where the vocabulary has tokens for
        that.

        `max_tokens` None or below 1: until the context is full. `seed` None: the object's; -1: a new one. A
        call repeated with its seed gives the same text; after other calls, and where `recent` tokens are kept
        exact, reset() first makes that exact (a reused prefix may differ in the last bits). `logprobs` counts
        rivals per token and needs no logits_all here. `server`: sampling options under llama.cpp's server's
        names (dry_multiplier, xtc_probability, top_n_sigma, …: sampling/options.py). Returns a dict (`id`,
        `object`, `created`, `model`, `choices`, `usage`); with `stream`, an iterator of such dicts whose
        texts add up to the same, `finish_reason` in the last one. Raises LatentKVError when the prompt does
        not fit.
        """
        options = SamplingOptions.of_call("create_completion", locals(), self)
        how = AnswerOptions(max_tokens, stop_list(stop), logprobs, logits_processor, stopping_criteria)
        return complete(self, prompt, suffix, options, how, echo=echo, stream=stream, name=model)

    __call__ = create_completion

    def create_chat_completion(
        self: Caller,
        messages: Sequence[Message],
        functions: Sequence[Mapping[str, Any]] | None = None,
        function_call: str | Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        min_p: float | None = None,
        typical_p: float = 1.0,
        stream: bool = False,
        stop: str | Sequence[str] | None = None,
        seed: int | None = None,
        response_format: Mapping[str, Any] | None = None,
        max_tokens: int | None = None,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        repeat_penalty: float | None = None,
        tfs_z: float = 1.0,
        mirostat_mode: int | None = None,
        mirostat_tau: float | None = None,
        mirostat_eta: float | None = None,
        model: str | None = None,
        logits_processor: LogitsProcessor | None = None,
        grammar: LlamaGrammar | str | None = None,
        logit_bias: Mapping[int, float] | Mapping[str, float] | None = None,
        logprobs: bool | None = None,
        top_logprobs: int | None = None,
        *,
        parallel_tool_calls: bool | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        continue_final_message: bool | str = False,
        reasoning_format: str = "auto",
        reasoning_budget_tokens: int | None = None,
        reasoning_budget_message: str | None = None,
        **server: Any,
    ) -> Any:
        """Answers `messages` ({"role", "content"}), through the template in use.

        `max_tokens` None or below 1: until the context is full. `tools` are handed to the template; a call
        that the model writes comes back as the message's `tool_calls`, with the finish_reason "tool_calls".
        `tool_choice` "auto" constrains a call once it has begun, "required" and a named function ({"type":
        "function", "function": {"name"}}) force one, "none" hides the tools; `functions` and
        `function_call` are the same in OpenAI's older shape. `response_format` constrains the answer to a
        JSON object or a schema. What a model thinks before it answers is the message's `reasoning_content`
        (`reasoning_format` "none" leaves it in the text); after `reasoning_budget_tokens` of it (None, -1: as
        many as it likes; 0: none) comes `reasoning_budget_message`, a line that ends the thought.
        `chat_template_kwargs` are variables of the template, as {"enable_thinking": False}.
        `continue_final_message` goes on with a last assistant's message, which the answer does not repeat.
        `server` as in create_completion. Returns a dict, or with `stream` an iterator of chunks: the role
        first, then the deltas, `finish_reason` in the last.
        """
        use = ToolUse.of(tools, tool_choice, functions, function_call)
        prompt = chat_request(
            self.model,
            self.chat_template,
            messages,
            use,
            LlamaGrammar.of(grammar),
            response_format,
            parallel_tool_calls=parallel_tool_calls,
            chat_template_kwargs=thinking_kwargs(chat_template_kwargs, reasoning_budget_tokens),
            continue_final_message=continue_final_message or None,
            reasoning_format=reasoning_format,
        )
        call = "create_chat_completion"
        options = SamplingOptions.of_call(call, locals() | {"grammar": prompt.grammar}, self)
        rivals = (top_logprobs or 0) if logprobs or top_logprobs else None
        stops = stop_list(stop) + prompt.stop
        thoughts = ThoughtLimit.of(prompt.thoughts, reasoning_budget_tokens, reasoning_budget_message)
        shown = prompt.shown
        how = AnswerOptions(max_tokens, stops, rivals, logits_processor, shown=shown, thoughts=thoughts)
        return chat(self, prompt, options, how, as_function=use.as_function, stream=stream, name=model)

    def embed(
        self: Caller,
        input: str | Sequence[str],
        normalize: bool = False,
        truncate: bool = True,
        return_count: bool = False,
    ) -> Any:
        """The embedding of a text, or of each of several: a vector [n_embd], or where `pooling_type` is none
        a vector for every token.

        They are made of the hidden states after the last norm. The text passes through the cache, whatever
        its row formats, and what the cache held before is forgotten. `normalize` divides each vector by its
        Euclidean norm. A text longer than `n_ctx` is cut there, or raises LatentKVError with `truncate`
        False. `return_count` returns a pair: the embeddings, and the number of tokens.
        """
        texts = [input] if isinstance(input, str) else list(input)
        found, n_tokens = vectors_of(self, texts, normalize=normalize, truncate=truncate)
        vectors = found[0] if isinstance(input, str) else found
        return (vectors, n_tokens) if return_count else vectors

    def create_embedding(
        self: Caller, input: str | Sequence[str], model: str | None = None
    ) -> dict[str, Any]:
        """Embeddings in the shape of OpenAI's call, not normalized, as llama-cpp-python has them. `input`: a
        text or several, as embed() takes them; `model`: the name that the answer bears (None: the file's
        path)."""
        texts = [input] if isinstance(input, str) else list(input)
        return embedded(*vectors_of(self, texts), model or self.model_path)
