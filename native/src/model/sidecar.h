// A sidecar: the factors and the plan of a latent cache in a small file of their own, beside the GGUF that they were
// made of, the base (docs/gguf.md, Sidecars).
#pragma once

#include <string>

#include "cache/spec/cache_spec.h"
#include "decoder/hparams.h"
#include "gguf/reader.h"

namespace lkv {

// The GGUF at `path`, and over it the sidecar at `latent_path`, unless that is empty.
// Errors: a sidecar that is none, is without its base or beside another one, or a base with a latent cache of its own.
GgufFile open_model_file(const std::string& path, const std::string& latent_path, bool use_mmap);

// The base's tensors as a file in one piece would hold them: packed Q, K and V of a layer with a latent lie apart, and
// projections that form A replaces and biases that a K `absorbed` does without are gone.
void fit_base_tensors(GgufFile& file, const HParams& hparams, const CacheSpec& spec);

}  // namespace lkv
