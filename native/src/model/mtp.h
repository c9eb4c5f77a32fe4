// Multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2): the file's layers after the decoder's own. The first of them is a
// decoder of one layer by itself: it reads a token and the hidden state of the token before it, and guesses the one that follows.
#pragma once

#include "decoder/hparams.h"

namespace lkv {

// A guess attends to so many tokens: what is older it knows from the hidden states, which have attended to all.
constexpr int mtp_window = 4096;

// Guesses at once: one layer, trained for the next token, is seldom right about later ones.
constexpr int mtp_guesses = 3;

// file: the model's own, or one that has such layers for it. Errors: Error for a file without them or of another model, and for a model
// whose layers do not all attend alike.
HParams mtp_hparams(const HParams& whole, const GgufFile& file);

}  // namespace lkv
