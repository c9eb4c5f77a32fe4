"""What an engine has done since its start."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Counters:
    """Tokens of prompts are counted when their answers end."""

    requests: int = 0
    prompt_tokens: int = 0  # computed
    cached_tokens: int = 0  # of prompts, found in the cache
    restored_tokens: int = 0  # of those, from the store
    predicted_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0  # of those
    prompt_seconds: float = 0.0
    predicted_seconds: float = 0.0
    steps: int = 0
    step_tokens: int = 0
    step_slots: int = 0
    longest: int = 0  # tokens of a prompt and its answer
