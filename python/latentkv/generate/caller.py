"""What an answer needs of a `Llama`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from latentkv.chat.template import ChatTemplate
from latentkv.sampling.speculative import DraftModel
from latentkv.session.evaluator import Evaluator

if TYPE_CHECKING:
    from latentkv import _core


class Caller(Protocol):
    """A model with its vocabulary and template, an evaluator of its cache, and what calls fall back on."""

    evaluator: Evaluator
    model_path: str
    last_n_tokens_size: int  # tokens that penalties see, where a call does not say
    recommended: Mapping[str, Any]  # sampling options, where a call does not say
    draft_model: DraftModel | None
    spm_infill: bool

    @property
    def model(self) -> _core.Model: ...
    @property
    def chat_template(self) -> ChatTemplate: ...
    @property
    def seed(self) -> int: ...
    def n_ctx(self) -> int: ...
    def pooling_type(self) -> int: ...
    def recall(self, prompt: Sequence[int]) -> None: ...
    def remember(self) -> None: ...
