// What no other kernel takes: kernels/direct.
#include "cuda/attn/cases.h"

namespace lkv::test {

namespace {

void direct_samples() {
    compare_samples({
        {"direct", 2, 1, 2, 1088, 1088, false, Format::q8, 20, 40},
        {"direct", 2, 4, 1, 64, 64, true, Format::q8, 3, 40, 1, 0, 192},
    });
}

void direct_one_row() {
    using enum Format;
    compare_one_rows(
        {
            {"turned channels that are no unit", "direct", 4, 16, {{{q8, 16}, {q8, 272}}}, 3, 60},
        },
        2317);
}

}  // namespace

Cases direct_cases() { return {{"samples", direct_samples}, {"one_row", direct_one_row}}; }

}  // namespace lkv::test
