"""How a text is cut and scored for perplexity."""

from __future__ import annotations

import numpy as np
import pytest

from latentkv import LatentKVError
from latentkv.measure.windows import llama, plain


def test_llama_scores_the_second_half() -> None:
    windows = llama(range(1000, 1035), 16, bos=None)
    assert windows.tokens.shape == (2, 16)  # 35 tokens: three are left over
    assert windows.first == 8
    # logits 8 … 14 predict tokens 9 … 15
    assert windows.scored == 7
    assert windows.tokens[1, 0] == 1016


def test_llama_replaces_the_first_token_by_bos() -> None:
    windows = llama(range(1000, 1032), 16, bos=1)
    assert windows.tokens[:, 0].tolist() == [1, 1]
    assert windows.tokens[:, 1].tolist() == [1001, 1017]


def test_plain_scores_all_but_the_first() -> None:
    windows = plain(range(32), 16, bos=1)
    assert windows.scored == 15
    np.testing.assert_array_equal(windows.tokens.ravel(), np.arange(32))


def test_a_text_shorter_than_a_window_is_refused() -> None:
    with pytest.raises(
        LatentKVError, match=r"\[text\] expected at least one window of 64 tokens; got 10 tokens; lower -c"
    ):
        plain(range(10), 64, None)
