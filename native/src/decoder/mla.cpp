#include "decoder/mla.h"

#include "base/error.h"
#include "decoder/number.h"

namespace lkv {

MlaSizes read_mla(const GgufFile& file, const std::string& architecture) {
    const std::string dot = architecture + ".";
    const std::string of_attention = dot + "attention.";
    MlaSizes sizes;
    if (file.find_u32(of_attention + "kv_lora_rank").value_or(0) == 0) return sizes;
    const auto need = [&](const std::string& key, int64_t low, int64_t high) {
        return number_within(file, key, low, high);
    };
    const bool older =
        !file.has(of_attention + "key_length_mla");  // where these lengths are a head's own, and factors are joined
    const std::string length = older ? "_length" : "_length_mla";
    sizes.kv_rank = need(of_attention + "kv_lora_rank", 1, 4096);
    if (file.has(of_attention + "q_lora_rank")) sizes.q_rank = need(of_attention + "q_lora_rank", 0, 1 << 16);
    sizes.n_rot = need(dot + "rope.dimension_count", 2, 4096);
    if (sizes.n_rot % 2 != 0) fail(dot + "rope.dimension_count", "expected an even number; got ", sizes.n_rot);
    sizes.n_key = need(of_attention + "key" + length, sizes.n_rot + 1, 8192) - sizes.n_rot;
    sizes.n_value = need(of_attention + "value" + length, 1, 8192);
    if (older) return sizes;
    const auto expect = [&](const char* name, int64_t expected) {
        const int64_t value = file.find_u32(of_attention + name).value_or(static_cast<uint32_t>(expected));
        if (value != expected) fail(of_attention + name, "expected ", expected, "; got ", value);
    };
    expect("key_length", sizes.row());
    expect("value_length", sizes.kv_rank);
    expect("head_count_kv", 1);
    return sizes;
}

}  // namespace lkv
