// What a sampler's options become: libllama's samplers in llama.cpp's default order (sampler.h), or a refusal.
#pragma once

#include "tokens/sampler.h"

namespace lkv {

// Errors: Error `[sampler] …` for an option out of range, or two that exclude each other.
void check_options(const SamplerOptions& options, int32_t n_vocab, bool has_grammar);

SamplerHandle new_chain(const SamplerOptions& options, int32_t n_vocab, uint32_t seed, const Vocab* vocab);

// How many of the largest logits decide what the chain picks; 0: any may.
size_t deciding_logits(const SamplerOptions& options, int32_t n_vocab, const Vocab* vocab);

}  // namespace lkv
