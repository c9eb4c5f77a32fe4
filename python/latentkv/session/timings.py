"""How long the last call took, in the words of llama.cpp's server."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Timings:
    """Tokens and seconds of one prompt and its answer; sampling included, the caller's own time excluded."""

    cached_n: int = 0  # prompt tokens found in the cache
    prompt_n: int = 0  # prompt tokens computed
    prompt_s: float = 0.0
    predicted_n: int = 0  # answer tokens computed (the last one sampled is not)
    predicted_s: float = 0.0
    draft_n: int = 0  # tokens that were guessed
    draft_n_accepted: int = 0  # and came true

    def as_dict(self) -> dict[str, float]:
        return {
            "cached_n": self.cached_n,
            "cache_n": self.cached_n,
            "prompt_n": self.prompt_n,
            "prompt_ms": 1e3 * self.prompt_s,
            "prompt_per_token_ms": 1e3 * self.prompt_s / self.prompt_n if self.prompt_n else 0.0,
            "prompt_per_second": self.prompt_n / self.prompt_s if self.prompt_s else 0.0,
            "predicted_n": self.predicted_n,
            "predicted_ms": 1e3 * self.predicted_s,
            "predicted_per_token_ms": 1e3 * self.predicted_s / self.predicted_n if self.predicted_n else 0.0,
            "predicted_per_second": self.predicted_n / self.predicted_s if self.predicted_s else 0.0,
        } | ({"draft_n": self.draft_n, "draft_n_accepted": self.draft_n_accepted} if self.draft_n else {})
