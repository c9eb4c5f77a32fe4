#include "ops/cuda/rows/tables.h"

#include <algorithm>
#include <stdexcept>

#include "cache/formats.h"
#include "ops/cuda/problem.h"

namespace lkv::cuda {

namespace {

uint16_t offset16(int bytes) {
    require(bytes >= 0 && bytes < 1 << 16, "a K or V group of less than 65536 stored bytes", std::to_string(bytes));
    return static_cast<uint16_t>(bytes);
}

// Where chunk i of a segment keeps its codes, from the segment's first byte, and its scale, from its scales'.
struct ChunkPlace {
    int codes;
    int affine;
    int odd;
};

ChunkPlace place(Format format, int i, int width) {
    if (format_in_token_blocks(format)) return {0, width, i * chunk_width};
    switch (format) {
        case Format::f16:
        case Format::bf16:
        case Format::f32:
            return {format_bytes(format, chunk_width) * i, 0, 0};
        case Format::q8_0:
            return {i / 2 * Q8_0::block_bytes + Q8_0::codes_at + i % 2 * chunk_width, i / 2 * Q8_0::block_bytes, 0};
        case Format::q4_0:
            return {i / 2 * Q4_0::block_bytes + Q4_0::codes_at, i / 2 * Q4_0::block_bytes, i % 2};
        default:
            break;
    }
    return with_format(format, [i](auto f) -> ChunkPlace {
        using F = decltype(f);
        if constexpr (is_scaled_by_group<F>) {
            return {i * F::Codes::chunk_bytes, F::scale_at, 0};
        } else if constexpr (requires { typename F::Codes; }) {
            return {F::codes_at + i * F::Codes::chunk_bytes, F::scale_at, 0};
        } else if constexpr (requires { F::block_bytes; }) {  // of llama.cpp's other types, read block by block
            return {i / 2 * F::block_bytes, 0, i % 2};
        } else {
            throw std::invalid_argument("[cuda] expected a format with bit planes or blocks; got another");
        }
    });
}

}  // namespace

void require(bool holds, const std::string& expected, const std::string& got) {
    if (!holds) throw std::invalid_argument("[cuda] expected " + expected + "; got " + got);
}

bool is_one_row(const LatentAttnParams& p) {
    return !p.rebuilds() && p.n_regions > 0 &&
           std::all_of(p.regions, p.regions + p.n_regions, [](const RegionView& of) {
               return of.k.n_groups == 1 && of.k.segments != nullptr && of.k.segments == of.v.segments;
           });
}

int kind_of(ChunkIterator begin, ChunkIterator end) {
    using enum Format;
    constexpr Format formats[] = {q8_0, q4_0, q8, q6, q4, q3, q2, c4, c3, c2};
    const int kind = begin == end ? any_kind : begin->kind;
    const bool has_path = kind == kind_f16_wide || std::ranges::count(formats, static_cast<Format>(kind)) > 0;
    if (!has_path || !std::all_of(begin, end, [=](const Chunk& chunk) { return chunk.kind == kind; })) return any_kind;
    // two blocks of ggml's side by side, the first on a word
    const bool stock = kind == static_cast<int>(q8_0) || kind == static_cast<int>(q4_0);
    for (ChunkIterator chunk = begin; stock && chunk != end; chunk += 4) {
        if (chunk->affine % 4 != 0 || chunk[2].affine - chunk->affine != chunk[2].codes - chunk->codes ||
            chunk[2].affine - chunk->affine != format_bytes(static_cast<Format>(kind), 64) / 2) {
            return any_kind;
        }
    }
    return kind;
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
        begin = first.scales;
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
            const ChunkPlace at = place(format, i, segment.width);
            const int valid = std::min(chunk_width, segment.width - i * chunk_width);
            Chunk chunk{};
            chunk.kind = static_cast<uint8_t>(format);
            chunk.valid = static_cast<uint8_t>(valid);
            chunk.codes = offset16(segment.offset - begin + at.codes);
            chunk.affine = offset16(format_in_token_blocks(format) ? at.affine : segment.scales - begin + at.affine);
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

std::vector<int> group_bytes(const LatentAttnParams& p, RowLayout RegionView::* side, int blocks) {
    std::vector<int> bytes(static_cast<size_t>(p.n_regions));
    for_groups(p, side, blocks, [&](int r, const RowLayout&, const GroupTable& table, const auto&) {
        int& widest = bytes[static_cast<size_t>(r)];
        widest = std::max(widest, static_cast<int>(table.bytes));
    });
    return bytes;
}

int widest_pitch(const LatentAttnParams& p, RowLayout RegionView::* side, int blocks) {
    const std::vector<int> bytes = group_bytes(p, side, blocks);
    return pitch_of(*std::max_element(bytes.begin(), bytes.end()));
}

int common_kind(const LatentAttnParams& p, int k_blocks, int v_blocks) {
    std::vector<Chunk> all;
    for (int r = 0; r < p.n_regions; r++) {
        const std::vector<Chunk> of = region_tables(p.regions[r].k, p.regions[r].v, k_blocks, v_blocks).chunks;
        all.insert(all.end(), of.begin(), of.end());
    }
    return kind_of(all.begin(), all.end());
}

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

RegionTables whole_tables(int n_kv, int head_dim) {
    const RowPlan rows = RowPlan::uniform(n_kv, head_dim, Format::f16);
    const int blocks = (head_dim + 63) / 64;
    return region_tables(rows.view(), rows.view(), blocks, blocks);
}

}  // namespace lkv::cuda
