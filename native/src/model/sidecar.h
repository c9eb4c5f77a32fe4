// A sidecar: a small file with the factors and the plan of a latent cache. It is opened with its base, the GGUF that it was
// made from (docs/gguf.md, Sidecars).
#pragma once

#include <string>

#include "cache/spec/cache_spec.h"
#include "decoder/hparams.h"
#include "gguf/reader.h"

namespace lkv {

// The GGUF at `path`, with the sidecar at `latent_path` joined to it unless that is empty.
// Errors: a file that is no sidecar, a sidecar alone or with another base, or a base that has a latent cache.
GgufFile open_model_file(const std::string& path, const std::string& latent_path, bool use_mmap);

// The base's tensors as a file in one piece would hold them: packed QKV of a layer with a latent is split, and projections
// that form A replaces and the K bias of `absorbed` are removed.
void fit_base_tensors(GgufFile& file, const HParams& hparams, const CacheSpec& spec);

}  // namespace lkv
