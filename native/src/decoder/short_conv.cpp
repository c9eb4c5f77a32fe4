#include "decoder/short_conv.h"

#include "decoder/number.h"

namespace lkv {

ShortConvSizes read_short_conv(const GgufFile& file, const std::string& architecture, int n_embd) {
    return {number_within(file, architecture + ".shortconv.l_cache", 2, 16), n_embd};
}

}  // namespace lkv
