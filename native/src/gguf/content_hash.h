// The hash by which a sidecar recognizes its base. It covers the decoder, not the vocabulary, chat template and other keys.
#pragma once

#include <string>

#include "gguf/reader.h"

namespace lkv {

// SHA-256 in hexadecimal digits over hyperparameters, tensor names, types and shapes, and a sample of every tensor's
// bytes (docs/gguf.md, Sidecars): 32 KiB of each, so that a file of any size is hashed in a fraction of a second.
// Errors: no general.architecture.
std::string content_hash(const GgufFile& file);

}  // namespace lkv
