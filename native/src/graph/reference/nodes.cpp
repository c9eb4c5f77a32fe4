// Nodes of the reference expression, which reads the cache as matrices.
#include <algorithm>

#include "cache/evict/gumbel.h"
#include "graph/ggml_entry.h"

namespace lkv {
namespace {

void run_noise(ggml_tensor* dst, int ith, int nth, void* userdata) {
    const auto& node = *static_cast<const AttentionNode*>(userdata);
    const int64_t n_tokens = dst->ne[1];
    for (int64_t i = ith; i < n_tokens * dst->ne[2]; i += nth) {
        auto* const row =
            reinterpret_cast<float*>(static_cast<char*>(dst->data) + i * static_cast<int64_t>(dst->nb[1]));
        std::fill_n(row, dst->ne[0], 0.0F);
        const int32_t pos = node.batch->pos[static_cast<size_t>(i % n_tokens)];
        const uint64_t seed = noise_seed(node.layer, static_cast<int>(i / n_tokens), pos);
        int64_t at = 0;
        for (int r = 0; r < node.cache->placement().n_regions(); r++) {
            const Cells& cells = node.cache->placement().cells(r, node.row_layer);
            for (int slot = 0; slot < cells.end(); slot++, at++) {
                if (cells.used(slot)) row[at] = gumbel(seed, cells.pos(slot));
            }
        }
    }
}

template <bool full, bool value_side>
void run_read(ggml_tensor* dst, int ith, int nth, void* userdata) {
    const auto& node = *static_cast<const AttentionNode*>(userdata);
    const Rows& rows = node.cache->rows();
    int64_t out = 0;
    for (int r = 0; r < node.cache->placement().n_regions(); r++) {
        if (rows.is_full(r, node.row_layer) != full) continue;
        const RowLayout& layout = rows.layout(r, node.row_layer, value_side);
        const Cells& cells = node.cache->placement().cells(r, node.row_layer);
        for (int slot = 0; slot < cells.end(); slot++, out++) {
            if (out % nth != ith) {
                continue;
            }
            auto* const row =
                reinterpret_cast<float*>(static_cast<char*>(dst->data) + out * static_cast<int64_t>(dst->nb[1]));
            if (cells.used(slot)) {
                const int in_block = slot % token_block_slots;
                read_slot(layout, rows.row(r, node.row_layer, value_side, slot - in_block), in_block, row);
            } else {
                std::fill(row, row + layout.width, 0.0F);
            }
        }
    }
    // a layer that evicts may have fewer slots in use than another
    for (; out < dst->ne[1]; out++) {
        if (out % nth == ith) std::fill_n(static_cast<float*>(dst->data) + out * dst->ne[0], dst->ne[0], 0.0F);
    }
}

}  // namespace

ggml_tensor* mass_noise(ggml_context* ctx, AttentionNode& node, ggml_tensor* stored, int n_slots, int n_tokens,
                        int n_head) {
    return ggml_custom_4d(ctx, GGML_TYPE_F32, n_slots, n_tokens, n_head, 1, &stored, 1, run_noise, GGML_N_TASKS_MAX,
                          &node);
}

ggml_tensor* read_rows(ggml_context* ctx, AttentionNode& node, ggml_tensor* stored, bool full, bool value_side,
                       int n_slots) {
    const int r = full ? 0 : node.cache->placement().middle();
    const int width = node.cache->rows().layout(r, node.row_layer, value_side).width;
    const auto read = full ? (value_side ? run_read<true, true> : run_read<true, false>)
                           : (value_side ? run_read<false, true> : run_read<false, false>);
    return ggml_custom_4d(ctx, GGML_TYPE_F32, width, n_slots, 1, 1, &stored, 1, read, GGML_N_TASKS_MAX, &node);
}

}  // namespace lkv
