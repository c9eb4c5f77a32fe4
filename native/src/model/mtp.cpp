#include "model/mtp.h"

#include "base/error.h"

namespace lkv {

namespace {

// The number of the first such layer in the file, which may have that one alone.
int first_block(const HParams& whole, const GgufFile& file) {
    const std::string_view of = file.get_string("general.architecture");
    if (of != whole.architecture) fail("mtp", "expected a file of the ", whole.architecture, " architecture; got ", of);
    const std::string dot = whole.architecture + ".";
    const uint32_t n = file.find_u32(dot + "nextn_predict_layers").value_or(0);
    const uint32_t n_block = file.get_u32(dot + "block_count");
    if (n == 0 || n >= n_block || n_block > 4096) {
        fail("mtp", "expected a file with layers that guess further tokens (nextn_predict_layers); got ",
             n == 0 ? "one without" : "all of its layers", "; use -md, or a file that has kept them");
    }
    return static_cast<int>(n_block - n);
}

}  // namespace

HParams mtp_hparams(const HParams& whole, const GgufFile& file) {
    int like = -1;  // a layer that attends
    for (int il = 0; il < whole.n_layer; il++) {
        if (!whole.attends(il)) continue;
        if (whole.block.layers[static_cast<size_t>(il)].window > 0 || whole.shares_rows() || whole.n_embd_layer > 0) {
            fail("mtp", "expected a model whose layers attend to all tokens, with K and V of their own; got another");
        }
        like = il;
    }
    const auto last = static_cast<size_t>(like);
    HParams h = whole;
    h.first_block = first_block(whole, file);
    h.n_layer = 1;
    h.n_mtp = 0;
    h.reads_states = true;
    h.heads = {whole.heads[last]};
    h.block.layers = {whole.block.layers[last]};
    h.block.layers.front().window = mtp_window;
    if (!h.block.xielu.empty()) h.block.xielu = {whole.block.xielu[last]};
    if (!h.n_ffs.empty()) h.n_ffs = {whole.n_ffs.back()};
    h.n_dense_layers = 0;
    h.recurrence.reset();
    return h;
}

}  // namespace lkv
