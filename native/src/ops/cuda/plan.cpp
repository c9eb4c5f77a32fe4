#include "ops/cuda/plan.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <stdexcept>
#include <string>
#include <tuple>

#include "cache/formats.h"
#include "ops/cuda/shared_plan.h"

namespace lkv::cuda {

AttnArgs on_expanded_rows(const AttnArgs& args) {
    AttnArgs full = args;
    full.rebuild = 0;
    full.k_extras = 0;
    full.n_rot = 0;
    full.v_b = nullptr;
    full.v_rank_max = 0;
    full.q_width = args.head_dim;
    full.k_group = full.v_group = full.unit = 1;
    full.n_regions = 1;
    full.regions[0] = args.expanded;
    full.prefill = 1;
    full.kind = any_kind;
    full.k_blocks = full.v_blocks = (args.head_dim + 63) / 64;
    full.k_pitch = full.v_pitch = pitch_of(2 * args.head_dim);
    return full;
}

namespace {

void require(bool holds, const std::string& expected, const std::string& got) {
    if (!holds) throw std::invalid_argument("[cuda] expected " + expected + "; got " + got);
}

uint16_t offset16(int bytes) {
    require(bytes >= 0 && bytes < 1 << 16, "a K or V group of less than 65536 stored bytes", std::to_string(bytes));
    return static_cast<uint16_t>(bytes);
}

// Where chunk i of a segment keeps its codes and its scale, from the segment's first byte.
struct ChunkPlace {
    int codes;
    int affine;
    int odd;
};

ChunkPlace place(Format format, int i) {
    switch (format) {
        case Format::f16:
            return {32 * i, 0, 0};
        case Format::f32:
            return {64 * i, 0, 0};
        case Format::q8_0:
            return {i / 2 * Q8_0::block_bytes + Q8_0::codes_at + i % 2 * chunk_width, i / 2 * Q8_0::block_bytes, 0};
        case Format::q4_0:
            return {i / 2 * Q4_0::block_bytes + Q4_0::codes_at, i / 2 * Q4_0::block_bytes, i % 2};
        default:
            break;
    }
    return with_format(format, [i](auto f) -> ChunkPlace {
        using F = decltype(f);
        if constexpr (requires { typename F::Codes; }) {
            return {F::codes_at + i * F::Codes::chunk_bytes, F::scale_at, 0};
        } else {
            throw std::invalid_argument("[cuda] expected a format with bit planes; got another");
        }
    });
}

using ChunkIterator = std::vector<Chunk>::const_iterator;

// What all these chunks are, if they are the same and kernels have a path for it.
int kind_of(ChunkIterator begin, ChunkIterator end) {
    const int kind = begin == end ? any_kind : begin->kind;
    const bool has_path =
        kind == kind_f16_wide || kind == static_cast<int>(Format::q8) || kind == static_cast<int>(Format::q4);
    return has_path && std::all_of(begin, end, [=](const Chunk& chunk) { return chunk.kind == kind; }) ? kind
                                                                                                       : any_kind;
}

GroupTable group_table(const RowLayout& row, const GroupLayout& group, int blocks, std::vector<Chunk>& chunks) {
    GroupTable table{};
    table.access_bits = row.row_bytes % 16 == 0 ? 4 : 2;
    table.chunks = static_cast<uint32_t>(chunks.size());
    int begin = 0;
    int end = 0;
    if (group.n_segments > 0) {
        const SegmentLayout& first = row.segments[group.first_segment];
        const SegmentLayout& last = row.segments[group.first_segment + group.n_segments - 1];
        begin = first.offset;
        end = last.offset + format_bytes(static_cast<Format>(last.format), last.width);
    }
    const int access = 1 << table.access_bits;
    begin = begin / access * access;
    end = (end + access - 1) / access * access;
    table.first = static_cast<uint32_t>(begin);
    table.bytes = static_cast<uint32_t>(end - begin);
    while (access << table.across_bits < end - begin) table.across_bits++;

    int channel = 0;
    for (int s = group.first_segment; s < group.first_segment + group.n_segments; s++) {
        const SegmentLayout& segment = row.segments[s];
        const auto format = static_cast<Format>(segment.format);
        const bool last = s + 1 == group.first_segment + group.n_segments;
        require(last || segment.width % chunk_width == 0,
                "segments in multiples of 16 channels, the last of a group excepted", std::to_string(segment.width));
        for (int i = 0; i * chunk_width < segment.width; i++) {
            const ChunkPlace at = place(format, i);
            const int valid = std::min(chunk_width, segment.width - i * chunk_width);
            Chunk chunk{};
            chunk.kind = static_cast<uint8_t>(format);
            chunk.valid = static_cast<uint8_t>(valid);
            chunk.codes = offset16(segment.offset - begin + at.codes);
            chunk.affine = offset16(segment.offset - begin + at.affine);
            chunk.odd = static_cast<uint16_t>(at.odd);
            if (format == Format::f16 && valid < chunk_width) {
                chunk.kind = kind_f16_part;
            } else if (format == Format::f16 && access == 16 && chunk.codes % 16 == 0) {
                chunk.kind = kind_f16_wide;
            }
            chunks.push_back(chunk);
            channel += valid;
        }
    }
    require(channel <= 64 * blocks, "at most " + std::to_string(64 * blocks) + " channels in a group",
            std::to_string(channel));
    chunks.resize(table.chunks + static_cast<size_t>(4 * blocks));
    table.kind = static_cast<int16_t>(kind_of(chunks.begin() + table.chunks, chunks.end()));
    return table;
}

// Staged bytes of the widest group of each region.
std::vector<int> group_bytes(const LatentAttnParams& p, RowLayout RegionView::* side, int blocks) {
    std::vector<int> bytes;
    for (int r = 0; r < p.n_regions; r++) {
        std::vector<Chunk> chunks;
        const RowLayout& row = p.regions[r].*side;
        bytes.push_back(0);
        for (int g = 0; g < row.n_groups; g++) {
            bytes.back() =
                std::max(bytes.back(), static_cast<int>(group_table(row, row.groups[g], blocks, chunks).bytes));
        }
    }
    return bytes;
}

// What all chunks of all regions are, if they are the same and kernels have a path for it.
int common_kind(const LatentAttnParams& p, const AttnArgs& a) {
    std::vector<Chunk> all;
    for (int r = 0; r < p.n_regions; r++) {
        const std::vector<Chunk> of = region_tables(p.regions[r].k, p.regions[r].v, a.k_blocks, a.v_blocks).chunks;
        all.insert(all.end(), of.begin(), of.end());
    }
    return kind_of(all.begin(), all.end());
}

// The decode kernel's blocks of 64 channels come in ones, twos and fours: what a group has less is no chunk of its kind.
int decode_kind(const AttnArgs& a) {
    const int blocks = decode_blocks(a);
    const bool has_path = a.k_blocks == blocks && a.v_blocks == blocks && (blocks <= 2 || a.rebuild != 0);
    return has_path ? a.kind : any_kind;
}

// resident: thread blocks that the device runs at once
int decode_parts(const AttnArgs& a, int capacity, int resident) {
    const int tiles = std::max(1, capacity / (a.tile * a.least_tiles) + a.n_regions);
    return std::clamp(resident / (a.n_kv / a.unit), 1, std::min(tiles, 128));
}

// For so many positions on either side of one the planes that absorb.cuh takes are linear in the position: the fastest of them turns by
// no more than 0.08, which is off by 0.0016 at the ends; over all of them and the span the mean is below f16's own rounding. 0: for
// too few to be worth it, or the shape is not one for it.
int absorbed_span(const LatentAttnParams& p, const AttnArgs& a) {
    const int rep = a.n_head / a.n_kv;
    // a head's query rows r have the columns r and r ^ 4 of eight
    const bool has_columns = a.n_tokens * rep * a.unit <= 4 || (a.n_tokens == 1 && rep <= 4);
    const bool has_sets = a.unit == 2 || column_sets(decode_blocks(a)) == 2;
    if (a.k_extras != 0 || a.n_rot != a.head_dim || a.head_dim != 16 * product_tiles || !has_columns || !has_sets)
        return 0;
    constexpr float most = 0.08f;
    constexpr int least_span = 256;
    constexpr int most_span = 1 << 20;
    const float fastest = *std::max_element(p.rope_freqs + 8 * rebuilt_tiles, p.rope_freqs + a.n_rot / 2);
    int span = most_span;
    while (span >= least_span && static_cast<float>(span) * fastest > most) span /= 2;
    return span >= least_span ? span : 0;
}

// Whether the specialized kernel takes this shape of a rebuilt K. Two KV heads that share their latents have them decoded once.
bool plan_specialized(const LatentAttnParams& p, int capacity, const Device& device, AttnArgs& a) {
    const int rows = a.n_tokens * (a.n_head / a.n_kv);
    if (!device.specialized || a.rebuild == 0 || rows > decode_rows || !has_specialized_shape(a.k_blocks, a.v_blocks)) {
        return false;
    }
    AttnArgs plan = a;
    plan.kind = decode_kind(a);
    plan.specialized = 1;
    plan.tile = specialized_tile;
    plan.least_tiles = 1;
    const int shared_by = std::gcd(a.k_group, a.v_group);
    const int blocks = decode_blocks(a);
    for (const auto& [unit, buffers] : {std::pair{2, 8}, {2, 4}, {2, 2}, {1, 8}, {1, 4}, {1, 2}, {2, 1}}) {
        if (shared_by % unit != 0 || rows * unit > decode_rows) continue;
        if (buffers < least_latent_buffers(blocks, unit, false) || buffers > std::max(4, 2 * tiles_at_once(blocks)))
            continue;
        plan.unit = unit;
        plan.stages = buffers;
        plan.absorbed_span = absorbed_span(p, plan);
        plan.pair = device.pairs && plan.absorbed_span != 0 && blocks == 4 && unit == 2 &&
                            shared_by % (2 * unit) == 0 && buffers >= least_latent_buffers(blocks, unit, true)
                        ? 1
                        : 0;
        // a thread block takes a whole multiprocessor; some are left to the rehearsal beside which the real one starts
        const int items = plan.n_kv / unit;
        const int at_once = device.n_multiprocessors - rehearsed_items(plan);
        plan.n_split = decode_parts(plan, capacity, at_once);
        // one more part begins when the rehearsal ends
        plan.late_parts = plan.n_split == at_once / items && (plan.n_split + 1) * items <= device.n_multiprocessors;
        plan.n_split += plan.late_parts;
        if (SpecializedPlan(plan).total(plan) > device.shared_bytes - specialized_fixed) continue;
        // A short cache in many parts, unless their thread blocks fill the device, where the next kernel starts late: 256 slots took
        // 13.2 us in 8 thread blocks and 10.6 in 16, but 9.3 in 64 and 11.3 in 128.
        plan.least_tiles = plan.n_split >= 16 ? 1 : 2;
        a = plan;
        return true;
    }
    return false;
}

// Whether the decode kernel takes this shape, and with which tiles. Two thread blocks a multiprocessor where they fit.
bool plan_decode(int capacity, const Device& device, AttnArgs& a) {
    const int rows = a.n_tokens * a.unit * (a.n_head / a.n_kv);
    const int blocks = std::max(a.k_blocks, a.v_blocks);
    if (rows > decode_rows || blocks > 4) return false;
    a.kind = decode_kind(a);
    const int k_pitch = a.k_pitch;
    if (decode_reads_k_in_place(a.rebuild != 0, blocks, a.kind)) a.k_pitch = 0;
    struct Choice {
        int tile, stages, warps, resident;
    };
    // K rebuild from 64 channels: sixteen warps share one set of tables where they fit
    constexpr Choice choices[] = {{32, 2, 16, 1}, {32, 1, 16, 1}, {16, 2, 16, 1}, {16, 1, 16, 1}, {32, 3, 8, 2},
                                  {32, 2, 8, 2},  {16, 3, 8, 2},  {16, 2, 8, 2},  {32, 3, 8, 1},  {16, 4, 8, 1},
                                  {16, 3, 8, 1},  {16, 2, 8, 1},  {16, 1, 8, 1}};
    for (const Choice& choice : choices) {
        if (choice.warps > n_warps && (a.rebuild == 0 || blocks > 1)) continue;
        if (choice.stages == 1 && a.rebuild == 0) continue;  // a direct K is copied a tile ahead
        // registers of one thread block fill the multiprocessor
        if (choice.resident == 2 && blocks > (a.rebuild != 0 ? 1 : 2)) continue;
        if (choice.tile == 32 && a.rebuild != 0 && blocks > 2) continue;
        a.tile = choice.tile;
        a.stages = choice.stages;
        a.decode = choice.warps;
        const int room = device.shared_bytes / choice.resident - 1024 * (choice.resident - 1) - decode_static_bytes;
        if (DecodePlan(a).total(a) > room) continue;
        a.least_tiles = 2 * n_warps;
        a.n_split = decode_parts(a, capacity, device.n_multiprocessors * choice.resident);
        return true;
    }
    a.decode = 0;
    a.k_pitch = k_pitch;
    return false;
}

// Bytes from row to row of the wide kernel's tiles, of the region with the largest. Rows of one group that start on no 16 bytes
// lie as in memory: copied by 16 bytes, not by 4.
int wide_pitch(const LatentAttnParams& p, RowLayout RegionView::* side, int blocks, bool pair) {
    int pitch = 16;
    for (int r = 0; r < p.n_regions; r++) {
        const RowLayout& row = p.regions[r].*side;
        const auto bytes = static_cast<uint32_t>(row.row_bytes);
        for (int g = 0; g < row.n_groups; g++) {
            std::vector<Chunk> chunks;
            const GroupTable table = group_table(row, row.groups[g], blocks, chunks);
            if (pair && wide_halves(table, chunks.data(), 4 * blocks)) {
                const int middle = (blocks + 1) / 2 * 4;
                pitch = std::max({pitch, WideHalf(table, bytes, chunks.data(), 0, middle).pitch,
                                  WideHalf(table, bytes, chunks.data(), middle, 4 * blocks).pitch});
            } else {
                pitch = std::max(pitch,
                                 copied_whole(bytes, table) ? row.row_bytes : pitch_of(static_cast<int>(table.bytes)));
            }
        }
    }
    return pitch;
}

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

// Whether all rows of a side are what the MLA kernel reads.
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

// Whether the MLA kernel takes this shape, and with which tiles.
bool plan_mla(const LatentAttnParams& p, const Device& device, AttnArgs& a) {
    const int rows = a.n_tokens * a.unit * (a.n_head / a.n_kv);
    if (p.v_b == nullptr || a.n_tokens > most_mla_tokens || a.v_blocks > most_units / 2 ||
        (a.rebuild == 0 && a.k_blocks > most_units / 2)) {
        return false;
    }
    MlaPlan plan{};
    plan.rows = rows <= 8 ? 8 : (rows <= 16 ? 16 : 32);
    plan.k_units = a.rebuild != 0 ? a.unit * a.head_dim / unit_channels : 2 * a.k_blocks;
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
    for (plan.tile = most_tile; plan.tile >= least_tile; plan.tile /= 2) {
        if (MlaLayout(plan, p.n_regions).total() > device.shared_bytes - mla_fixed) continue;
        a.mla = plan;
        // A thread block takes a whole multiprocessor; those that the rehearsal holds are left to it: 8B at 14 %, 299, 269, 243 tokens/s at
        // depth 0, 4096, 16384 with a part for every multiprocessor and merging behind the rehearsal, 305, 273, 244 without merging,
        // 309, 276, 255 with six parts less
        const int row_blocks = (rows + plan.rows - 1) / plan.rows;
        const int at_once = device.n_multiprocessors / row_blocks - rehearsed_items(a) * rehearsed_parts(a);
        a.n_split = std::clamp(at_once / (a.n_kv / a.unit), 1, most_parts);
        return true;
    }
    return false;
}

// Whether the wide kernel takes this shape, and with which tiles.
bool plan_wide(const LatentAttnParams& p, int capacity, const Device& device, AttnArgs& a) {
    const int rows = a.n_tokens * a.unit * (a.n_head / a.n_kv);
    if (a.rebuild != 0 || rows > 32) return false;
    const int k_pitch = a.k_pitch;
    const int v_pitch = a.v_pitch;
    a.pair = a.v_blocks > n_wide_warps && device.pairs ? 1 : 0;
    a.k_pitch = wide_pitch(p, &RegionView::k, a.k_blocks, a.pair != 0);
    a.v_pitch = wide_pitch(p, &RegionView::v, a.v_blocks, a.pair != 0);
    a.wide = a.pair == 0 && (rows <= 16 || a.v_blocks > n_wide_warps) ? 16 : 32;
    for (const auto& [tile, stages] :
         {std::pair{128, 2}, {128, 1}, {64, 2}, {64, 1}, {32, 2}, {32, 1}, {16, 2}, {16, 1}}) {
        if (a.pair != 0 && tile > pair_tile) continue;
        a.tile = tile;
        a.stages = stages;
        // of a pair half the warps fetch V meanwhile: q8 rows of 2048 channels take 217 us a layer at 65536 slots, else 226
        for (const int columns : {a.pair != 0 ? least_k_columns(tile) : most_k_columns, least_k_columns(tile)}) {
            a.k_columns = columns;
            if (WidePlan(a, a.wide).total > device.shared_bytes - wide_fixed) continue;
            const int blocks = a.n_kv / a.unit * (a.pair != 0 ? 2 : (rows + a.wide - 1) / a.wide);
            const int tiles = std::max(1, capacity / std::min(tile, least_wide_tile) + a.n_regions);
            // a short cache's parts are shared by two thread blocks
            a.n_split = std::clamp(device.n_multiprocessors / blocks, 1, std::min(2 * tiles, most_parts));
            return true;
        }
    }
    a.wide = 0;
    a.pair = 0;
    a.k_pitch = k_pitch;
    a.v_pitch = v_pitch;
    return false;
}

// Whether the prefill kernel takes this shape, and with what in shared memory; `a` is spoilt where it does not. Fewer rows would
// leave its warps idle.
// k_pitch, v_pitch: of the region with the smallest rows, the compressed one; exact windows beside it are a few tiles, read
// where they lie instead of making every stage four times as large.
bool plan_prefill(int capacity, const Device& device, int k_pitch, int v_pitch, AttnArgs& a, bool any_rows = false) {
    const int rows = a.n_tokens * a.unit * (a.n_head / a.n_kv);
    if (a.rebuild != 0) return false;
    const int channels = 64 * a.k_blocks;
    for (const int wc : {1, 2, 4}) {
        if ((!any_rows && rows <= 64 / wc) || 64 * a.v_blocks > prefill_channels[wc] ||
            (wc == 1 && channels > prefill_channels[1])) {
            continue;
        }
        a.prefill = wc;
        a.tile = prefill_tile(wc);
        a.k_pitch = k_pitch;
        a.v_pitch = v_pitch;
        for (const auto& [buffers, stages] : {std::pair{2, 3}, {2, 2}, {2, 1}, {1, 3}, {1, 2}, {1, 1}, {1, 0}}) {
            if ((wc > 1 && buffers > 1) || (wc == 1 && stages == 0)) continue;
            a.buffers = buffers;
            a.stages = stages;
            if (PrefillPlan(a).total(a) > device.shared_bytes) continue;
            const int blocks = a.n_kv / a.unit * ((rows + 128 / wc - 1) / (128 / wc));
            const int tiles = std::max(1, capacity / a.tile);
            a.n_split = std::clamp(device.n_multiprocessors / blocks, 1, std::min(tiles, 128));
            return true;
        }
    }
    return false;
}

// Whether a chunk of the context is expanded to full rows of f16 before it is attended to.
bool plan_expand(const LatentAttnParams& p, int capacity, const Device& device, AttnArgs& a) {
    constexpr int most_bytes = 32 << 20;
    static_assert(most_expanded_head <= prefill_channels[1]);
    if (a.rebuild == 0 || a.head_dim > most_expanded_head) return false;
    AttnArgs plan = a;
    const int row_bytes = a.n_kv * a.head_dim * 2;
    plan.expand = std::min(std::clamp(most_bytes / (2 * row_bytes) / expand_slots * expand_slots, 1024, 8192),
                           round_up(capacity + expand_tile * p.n_regions, expand_slots));
    plan.expand = std::max(plan.expand, round_up(a.n_tokens, expand_slots));  // the batch's own rows
    plan.tile = expand_tile;
    plan.expand_units = side_has_units(p, &RegionView::k, a.k_blocks) && side_has_units(p, &RegionView::v, a.v_blocks)
                            ? (device.specialized ? 2 : 1)
                            : 0;
    AttnArgs full = on_expanded_rows(plan);
    if (!plan_prefill(plan.expand, device, full.k_pitch, full.v_pitch, full, true) || full.prefill != 1) return false;
    plan.buffers = full.buffers;
    plan.stages = full.stages;
    plan.n_split = full.n_split;
    a = plan;
    return true;
}

// Whether K alone is expanded, for the MLA kernel: of as many KV heads at once as it has units for.
bool plan_expand_keys(const LatentAttnParams& p, int capacity, const Device& device, AttnArgs& a) {
    constexpr int most_bytes = 32 << 20;
    if (a.rebuild == 0 || a.head_dim % unit_channels != 0 || a.head_dim > most_expanded_head) return false;
    AttnArgs plan = a;
    for (int n = 1; n <= a.v_group && n * a.head_dim <= most_units * unit_channels; n++) {
        if (a.v_group % n == 0) plan.unit = n;
    }
    if (!plan_mla(p, device, plan)) return false;
    plan.expand = std::min(most_bytes / (a.n_kv * a.head_dim * 2) / expand_slots * expand_slots,
                           round_up(capacity + expand_tile * p.n_regions, expand_slots));
    plan.expand_units = side_has_units(p, &RegionView::k, a.k_blocks) ? (device.specialized ? 2 : 1) : 0;
    a = plan;
    return true;
}

int row_blocks(const AttnArgs& a, int rows) { return (a.n_tokens * a.unit * (a.n_head / a.n_kv) + rows - 1) / rows; }

}  // namespace

int side_blocks(const LatentAttnParams& params, RowLayout RegionView::* side) {
    int kept = 1;
    for (int r = 0; r < params.n_regions; r++) {
        const RowLayout& row = params.regions[r].*side;
        for (int g = 0; g < row.n_groups; g++) kept = std::max(kept, row.groups[g].kept);
    }
    require(kept <= max_group_width, "at most " + std::to_string(max_group_width) + " stored channels in a group",
            std::to_string(kept));
    return (kept + 63) / 64;
}

RegionTables region_tables(const RowLayout& k, const RowLayout& v, int k_blocks, int v_blocks) {
    RegionTables tables;
    for (int g = 0; g < k.n_groups; g++) {
        tables.k_groups.push_back(group_table(k, k.groups[g], k_blocks, tables.chunks));
    }
    for (int g = 0; g < v.n_groups; g++) {
        tables.v_groups.push_back(group_table(v, v.groups[g], v_blocks, tables.chunks));
    }
    return tables;
}

RegionTables expanded_tables(int n_kv, int head_dim) {
    const RowPlan rows = RowPlan::uniform(n_kv, head_dim, Format::f16);
    const int blocks = (head_dim + 63) / 64;
    return region_tables(rows.view(), rows.view(), blocks, blocks);
}

Instance choose_instance(const AttnArgs& args) {
    const int q_blocks = args.rebuild != 0 ? (args.head_dim + 63) / 64 : args.k_blocks;
    const int per_warp = (std::max(q_blocks, args.v_blocks) + 7) / 8;
    const int rows = args.n_tokens * args.unit * (args.n_head / args.n_kv);
    Instance best{16, per_warp <= 1 ? 1 : (per_warp <= 2 ? 2 : 4)};
    for (const Instance& i : instances) {
        if (i.blocks == best.blocks && i.rows > best.rows && i.rows / 2 < rows) best = i;
    }
    return best;
}

void plan_attention(const LatentAttnParams& p, int capacity, const Device& device, AttnArgs& a) {
    require(p.head_dim % 8 == 0 && p.head_dim <= 256, "a head_dim that is a multiple of 8 and at most 256",
            std::to_string(p.head_dim));
    a.n_tokens = p.n_tokens;
    a.q_width = p.q_width;
    a.n_head = p.n_head;
    a.n_kv = p.n_kv;
    a.head_dim = p.head_dim;
    a.k_group = p.k_group;
    a.v_group = p.v_group;
    a.window = p.window;
    a.scale = p.scale;
    a.k_norm_eps = p.k_norm_eps;
    a.rope_mscale = p.rope_mscale;
    a.n_rot = p.rope_freqs != nullptr ? p.n_rot : 0;
    a.rope_neox = p.rope_neox ? 1 : 0;
    a.k_rank_max = p.k_rank_max;
    a.v_rank_max = p.v_rank_max;
    a.n_regions = p.n_regions;
    const bool rebuild = p.k_b != nullptr;
    a.rebuild = rebuild ? 1 : 0;
    a.k_extras = rebuild && (p.k_bias != nullptr || p.k_norm != nullptr) ? 1 : 0;
    a.unit = rebuild ? 1 : std::gcd(p.k_group, p.v_group);
    a.k_blocks = side_blocks(p, &RegionView::k);
    a.v_blocks = side_blocks(p, &RegionView::v);
    const std::vector<int> k_bytes = group_bytes(p, &RegionView::k, a.k_blocks);
    const std::vector<int> v_bytes = group_bytes(p, &RegionView::v, a.v_blocks);
    a.k_pitch = pitch_of(*std::max_element(k_bytes.begin(), k_bytes.end()));
    a.v_pitch = pitch_of(*std::max_element(v_bytes.begin(), v_bytes.end()));
    a.least_tiles = 1;
    a.specialized = 0;
    a.late_parts = 0;
    a.absorbed_span = 0;
    a.decode = 0;
    a.wide = 0;
    a.mla = MlaPlan{};
    a.pair = 0;
    a.prefill = 0;
    a.expand = 0;
    a.expand_units = 0;
    a.kind = common_kind(p, a);
    if (plan_specialized(p, capacity, device, a)) return;
    if (plan_decode(capacity, device, a)) return;
    if (a.rebuild == 0 && plan_mla(p, device, a)) return;
    if (plan_expand_keys(p, capacity, device, a)) return;
    if (plan_wide(p, capacity, device, a)) return;
    if (plan_expand(p, capacity, device, a)) return;
    AttnArgs prefill = a;
    if (plan_prefill(capacity, device, pitch_of(*std::min_element(k_bytes.begin(), k_bytes.end())),
                     pitch_of(*std::min_element(v_bytes.begin(), v_bytes.end())), prefill)) {
        a = prefill;
        return;
    }
    const Instance instance = choose_instance(a);

    // Enough bytes in flight, and room for a second thread block where registers allow one.
    const int target =
        instance.rows == 16 && instance.blocks == 1 ? device.shared_bytes / 2 - 2048 : device.shared_bytes;
    const auto fits = [&](int tile, int stages, int limit) {
        a.tile = tile;
        a.stages = stages;
        return SharedPlan(a, instance.rows).total(a, instance.rows) <= limit;
    };
    const auto choose = [&](int limit) {
        for (const int tile : {128, 64, 32, 16}) {
            // rebuilt tiles wait for their products, not for memory; 64 rows fill the tensor cores' tiles
            if (tile > (rebuild ? 64 : max_tile(instance.rows))) continue;
            for (const int stages : {4, 3, 2}) {
                if (fits(tile, stages, limit)) return true;
            }
        }
        return fits(16, 1, limit);
    };
    require(choose(target) || choose(device.shared_bytes),
            "K and V rows of a group that leave room in " + std::to_string(device.shared_bytes) +
                " bytes of shared memory; choose a quantized --kv",
            std::to_string(a.k_pitch) + " and " + std::to_string(a.v_pitch) + " bytes");

    const int blocks = a.n_kv / a.unit * row_blocks(a, instance.rows);
    const int resident = device.n_multiprocessors * (instance.rows == 16 && instance.blocks == 1 ? 2 : 1);
    const int tiles = std::max(1, capacity / a.tile);
    a.n_split = std::clamp(resident / blocks, 1, std::min(tiles, 128));
}

size_t parts_floats(const AttnArgs& a) {
    const size_t rows =
        static_cast<size_t>(a.n_tokens) * static_cast<size_t>(a.n_head) * static_cast<size_t>(a.v_blocks);
    if (a.mla.rows != 0) {  // parts in f16, and results of 64 channels where there are no clusters
        return rows * (static_cast<size_t>(a.n_split) * 32 + static_cast<size_t>(a.head_dim));
    }
    return rows * (static_cast<size_t>(a.n_split) * 64 +
                   static_cast<size_t>(a.wide != 0 || merges_apart(a) ? a.head_dim : 64));
}

size_t partial_floats(const AttnArgs& a) {
    if (a.expand == 0) return parts_floats(a);
    const ExpandedRows rows(a);
    if (a.mla.rows != 0) return parts_floats(a) + static_cast<size_t>(rows.v) / sizeof(float);
    return parts_floats(on_expanded_rows(a)) + static_cast<size_t>(rows.total) / sizeof(float);
}

size_t partial_ml_floats(const AttnArgs& a) {
    return static_cast<size_t>(a.n_split) * static_cast<size_t>(a.n_tokens) * static_cast<size_t>(a.n_head) * 2;
}

std::vector<int> dims_in_order(int head_dim) {
    std::vector<int> dims(static_cast<size_t>(head_dim));
    std::iota(dims.begin(), dims.end(), 0);
    return dims;
}

std::vector<int> dims_by_plane(int head_dim, int n_rot, bool neox) {
    std::vector<int> dims;
    for (int i = 0; i < 16 * plane_tiles(head_dim, n_rot); i++) dims.push_back(plane_dim(head_dim, n_rot, neox, i));
    return dims;
}

namespace {

// B [n_kv, rank, head_dim] as words of operand b.
struct KeyFactor {
    const float* k_b;
    int rank;
    int head_dim;
    const std::vector<int>& dims;

    // Tile t of eight dimensions, step s of 64-channel block b: lane 4g + c has dimension g, channels of pair s or s + 4 of chunk c.
    uint32_t word(int head, int b, size_t t, int s, int lane, int of) const {
        const int channel = 64 * b + 16 * (lane % 4) + pair_channel(s + 4 * of);
        const int d = dim(8 * t + static_cast<size_t>(lane / 4));
        return at(head, channel, d) | static_cast<uint32_t>(at(head, channel + 2, d)) << 16;
    }
    // The same 8 x 8 transposed: lane 4g + c has dimensions 2c and 2c + 1, the channel that lanes c = g / 2 have first or second.
    uint32_t transposed(int head, int b, size_t t, int s, int lane, int of) const {
        const int g = lane / 4;
        const int channel = 64 * b + 16 * (g / 2) + pair_channel(s + 4 * of) + g % 2 * 2;
        const size_t place = 8 * t + 2 * static_cast<size_t>(lane % 4);
        return at(head, channel, dim(place)) | static_cast<uint32_t>(at(head, channel, dim(place + 1))) << 16;
    }

private:
    int dim(size_t place) const { return place < dims.size() ? dims[place] : -1; }
    uint16_t at(int head, int channel, int d) const {
        return channel < rank && d >= 0 ? half_saturate(k_b[(ptrdiff_t{head} * rank + channel) * head_dim + d])
                                        : uint16_t{0};
    }
};

}  // namespace

std::vector<uint32_t> pack_k_b(const float* k_b, int n_kv, int rank, int head_dim, int blocks,
                               const std::vector<int>& dims) {
    const KeyFactor factor{k_b, rank, head_dim, dims};
    std::vector<uint32_t> out;
    out.reserve(static_cast<size_t>(n_kv) * static_cast<size_t>(blocks) * 64 * dims.size() / 2);
    for (int j = 0; j < n_kv; j++) {
        for (int b = 0; b < blocks; b++) {
            for (size_t t = 0; t < dims.size() / 8; t++) {
                for (int s = 0; s < 4; s++) {
                    for (int lane = 0; lane < 32; lane++) {
                        for (int of = 0; of < 2; of++) out.push_back(factor.word(j, b, t, s, lane, of));
                    }
                }
            }
        }
    }
    return out;
}

std::vector<uint32_t> pack_k_b_cores(const float* k_b, int n_kv, int rank, int head_dim, int blocks,
                                     const std::vector<int>& dims) {
    const KeyFactor factor{k_b, rank, head_dim, dims};
    constexpr size_t batch = 2 * product_tiles;  // tiles of eight dimensions
    const size_t batches = (dims.size() / 8 + batch - 1) / batch;
    std::vector<uint32_t> out;
    out.reserve(static_cast<size_t>(n_kv) * static_cast<size_t>(blocks) * batches * batch * 256);
    for (int j = 0; j < n_kv; j++) {
        for (size_t d = 0; d < batches; d++) {
            for (int step = 0; step < 4 * blocks; step++) {
                for (size_t t = batch * d; t < batch * (d + 1); t++) {
                    for (int of = 0; of < 2; of++) {
                        for (int lane = 0; lane < 32; lane++) {
                            out.push_back(factor.word(j, step / 4, t, step % 4, lane, of));
                        }
                    }
                }
            }
        }
    }
    if (dims.size() != 16 * product_tiles) return out;
    for (int j = 0; j < n_kv; j++) {
        for (int step = 0; step < 4 * blocks; step++) {
            for (size_t t = 2 * rebuilt_tiles; t < batch; t += 2) {
                for (int lane = 0; lane < 32; lane++) {
                    for (int i = 0; i < 4; i++) {
                        out.push_back(
                            factor.transposed(j, step / 4, t + static_cast<size_t>(i) / 2, step % 4, lane, i % 2));
                    }
                }
            }
        }
    }
    return out;
}

std::vector<uint16_t> pack_rows(const float* b, size_t n) {
    std::vector<uint16_t> out(n);
    std::transform(b, b + n, out.begin(), half_saturate);
    return out;
}

std::vector<uint64_t> pack_phases(const float* freqs, int n_planes) {
    std::vector<uint64_t> out;
    for (int i = 0; i < n_planes; i++) {
        const double turns = double{freqs[i]} * 0.15915494309189533577;  // 1/2π
        out.push_back(static_cast<uint64_t>(std::ldexp(turns - std::floor(turns), 64)));
    }
    return out;
}

std::vector<uint16_t> pack_angles(const std::vector<uint64_t>& phases, int n_tiles) {
    const auto pitch = static_cast<size_t>(angle_pitch(n_tiles)) * 4;
    std::vector<uint16_t> out(wide_angle_span * pitch);
    for (size_t position = 0; position < wide_angle_span; position++) {
        for (size_t plane = 0; plane < static_cast<size_t>(8 * n_tiles); plane++) {
            const uint64_t phase = plane < phases.size() ? phases[plane] : 0;
            const double angle = std::ldexp(static_cast<double>(position * phase), -63) * 3.14159265358979323846;
            uint16_t* const to = out.data() + position * pitch + plane / 2 * 4 + plane % 2;
            to[0] = half_saturate(static_cast<float>(std::cos(angle)));
            to[2] = half_saturate(static_cast<float>(std::sin(angle)));
        }
    }
    return out;
}

}  // namespace lkv::cuda
