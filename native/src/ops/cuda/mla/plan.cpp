#include "ops/cuda/mla/plan.h"

#include <algorithm>
#include <tuple>

#include "ops/cuda/planners.h"
#include "ops/cuda/rows/tables.h"
#include "ops/cuda/shared_plan.h"

namespace lkv::cuda {

namespace {

// Whether all of a group's rows are what the MLA kernel reads: units of 32 channels within a segment, all of f16 rows or none.
bool has_units(ChunkIterator begin, ChunkIterator end, bool& f16) {
    const auto taken = [](uint8_t kind) {
        return kind == kind_f16_wide || kind == static_cast<uint8_t>(Format::q8) ||
               kind == static_cast<uint8_t>(Format::q4) || kind == static_cast<uint8_t>(Format::q2) ||
               kind == static_cast<uint8_t>(Format::q1);
    };
    f16 = begin != end && begin->kind == kind_f16_wide;
    for (ChunkIterator chunk = begin; chunk != end; chunk += 2) {
        if (chunk->kind == kind_none) continue;
        const ChunkIterator other = chunk + 1;
        if (!taken(chunk->kind) || (chunk->kind == kind_f16_wide) != f16 || other->kind != chunk->kind ||
            other->affine != chunk->affine) {
            return false;
        }
    }
    return true;
}

}  // namespace

bool side_has_units(const LatentAttnParams& p, RowLayout RegionView::* side, int blocks) {
    if (blocks > most_units / 2) return false;
    for (int r = 0; r < p.n_regions; r++) {
        const RowLayout& row = p.regions[r].*side;
        for (int g = 0; g < row.n_groups; g++) {
            std::vector<Chunk> chunks;
            group_table(row, row.groups[g], blocks, chunks);
            bool f16 = false;
            if (!has_units(chunks.begin(), chunks.end(), f16)) return false;
        }
    }
    return true;
}

bool plan_mla_rows(const LatentAttnParams& p, const Device& device, AttnArgs& a) {
    const bool apart = a.own.counts != nullptr && a.rebuild == 0 && p.n_regions == 1;
    const int rows = (apart ? 1 : a.n_tokens) * a.unit * (a.n_head / a.n_kv);
    if (p.v_b == nullptr || a.n_tokens > most_mla_tokens || a.v_blocks > most_units / 2 ||
        (a.rebuild == 0 && a.k_blocks > most_units / 2)) {
        return false;
    }
    MlaPlan plan{};
    plan.apart = apart ? 1 : 0;
    plan.rows = rows <= 8 ? 8 : (rows <= 16 ? 16 : 32);
    const bool scores = a.rebuild != 0 && a.expand_by == ExpandBy::scores;
    plan.k_units = scores ? 0 : (a.rebuild != 0 ? a.unit * a.head_dim / unit_channels : 2 * a.k_blocks);
    for (int r = 0; r < p.n_regions; r++) {
        for (const auto& [side, blocks, pitch] : {std::tuple{&RegionView::k, a.k_blocks, &MlaPlan::k_pitch},
                                                  std::tuple{&RegionView::v, a.v_blocks, &MlaPlan::v_pitch}}) {
            if (a.rebuild != 0 && pitch == &MlaPlan::k_pitch) continue;  // full rows are read where they lie
            const RowLayout& row = p.regions[r].*side;
            for (int g = 0; g < row.n_groups; g++) {
                std::vector<Chunk> chunks;
                const GroupTable table = group_table(row, row.groups[g], blocks, chunks);
                bool f16 = false;
                if (!has_units(chunks.begin(), chunks.end(), f16)) return false;
                if (f16) {
                    plan.small_tiles |= 1 << r;
                } else {
                    plan.*pitch = std::max(plan.*pitch,
                                           mla_pitch(table.bytes, table.first, static_cast<uint32_t>(row.row_bytes)));
                }
            }
        }
    }
    if (scores) plan.k_pitch = plan.v_pitch;
    for (plan.tile = most_tile; plan.tile >= least_tile; plan.tile /= 2) {
        if (MlaLayout(plan, p.n_regions).total() > device.shared_bytes - mla_fixed) continue;
        a.mla = plan;
        // A thread block takes a whole multiprocessor; those that the rehearsal holds are left to it: 8B at 14 %, 299, 269, 243 tokens/s at
        // depth 0, 4096, 16384 with a part for every multiprocessor and merging behind the rehearsal, 305, 273, 244 without merging,
        // 309, 276, 255 with six parts less. What another kernel holds at first goes to late parts.
        const int row_blocks = (rows + plan.rows - 1) / plan.rows;
        const int items = a.n_kv / a.unit;
        const int others = std::max(rehearsed_items(a) * rehearsed_parts(a), a.beside);
        const auto parts = [&](int multiprocessors) {
            return std::clamp(multiprocessors / row_blocks / items, 1, most_parts);
        };
        if (apart) {  // of all tokens, see ApartShares; beside full rows the last ones wait
            a.n_split = parts(device.n_multiprocessors);
            return true;
        }
        const int early = parts(device.n_multiprocessors - others);
        a.n_split = a.beside > 0 && a.rebuild == 0 ? parts(device.n_multiprocessors) : early;
        a.mla.late_parts = a.n_split - early;
        return true;
    }
    return false;
}

bool plan_mla(const LatentAttnParams& p, int, const Device& device, AttnArgs& a) {
    return a.rebuild == 0 && plan_mla_rows(p, device, a);
}

}  // namespace lkv::cuda
