// The tables of a master file: the distortion of every segment in every row format. From them a plan for any byte budget is
// chosen when the file is opened.
#pragma once

#include <optional>
#include <span>
#include <vector>

#include "cache/formats.h"
#include "gguf/reader.h"

namespace lkv {

struct Master {
    std::vector<Format> formats;  // the candidates of every segment; `none` last
    int context = 0;              // tokens at which a share of the f16 cache is counted
    float drop_penalty = 1;       // a dropped segment counts this many times its distortion while formats are chosen
    std::vector<float> k;         // [segments of all layers and groups, formats] nats per token
    std::vector<float> v;
    std::vector<float> predicted;       // [n] ascending: summed distortion of plans that were measured,
    std::vector<float> kld;             // [n] and what they cost in nats per token
    std::vector<Format> exact_formats;  // row formats of exact tokens to choose from,
    std::vector<float> exact_kld;       // and what each costs beside that
};

// k_widths, v_widths: widths of the file's segments, in its order. Null if the file is no master.
// Errors: Error for a missing key, an array of another length, a number that is not finite or negative, an unknown format,
// candidates that do not end in `none`, or a width that one of them cannot take.
std::optional<Master> read_master(const GgufFile& file, std::span<const int> k_widths, std::span<const int> v_widths);

}  // namespace lkv
