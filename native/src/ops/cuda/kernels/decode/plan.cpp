#include "ops/cuda/kernels/decode/layout.h"

#include <algorithm>
#include <span>

#include "cache/formats.h"
#include "ops/cuda/pack.h"
#include "ops/cuda/rows/tables.h"

namespace lkv::cuda {

namespace {

// Blocks of 64 channels come in ones, twos and fours: what a group has less is no chunk of its kind.
int decode_kind(const Problem& a) {
    const int blocks = decode_blocks(a);
    const bool has_path = a.k_blocks == blocks && a.v_blocks == blocks &&
                          (is_stock_kind(a.kind) ? a.rebuild == 0 : blocks <= 2 || a.rebuild != 0);
    return has_path ? a.kind : any_kind;
}

// Whether tokens read their own slots alone.
bool reads_apart(const Problem& a) { return a.own.ends != nullptr && a.rebuild == 0; }

// Parts of the sequence. resident: thread blocks that the device runs at once
int decode_parts(const CutProblem& a, int capacity, int resident) {
    const int tiles = std::max(1, capacity / (a.tile * a.least_tiles) + a.n_regions);
    const int row_blocks = (rows_of(a) + decode_rows - 1) / decode_rows;
    return std::clamp(resident / (a.n_kv / a.unit * row_blocks), 1, std::min(tiles, 128));
}

// The same of all tokens between them, and of one of them at most.
void share_out_parts(CutProblem& a, int resident) {
    const int row_blocks = (rows_of(a) / a.n_tokens + decode_rows - 1) / decode_rows;
    a.apart = std::clamp(resident / (a.n_kv / a.unit * row_blocks), 1, 128);
    a.n_split = most_parts_of_token(a.apart, a.n_tokens);
}

// A head's dimensions as plane_dim orders them (-1: none).
std::vector<int> dims_by_plane(int head_dim, int n_rot, bool neox) {
    std::vector<int> dims;
    for (int i = 0; i < 16 * plane_tiles(head_dim, n_rot); i++) dims.push_back(plane_dim(head_dim, n_rot, neox, i));
    return dims;
}

// Whether one loop may copy K and V, a group's row by at most as many threads as a warp has.
bool lie_alike(const LatentAttnParams& p, const Problem& a) {
    for (int r = 0; r < p.n_regions; r++) {
        const RegionView& region = p.regions[r];
        if (p.k_group != p.v_group || region.k.row_bytes != region.v.row_bytes) return false;
        for (int g = 0; g < region.k.n_groups; g++) {
            std::vector<Chunk> chunks;
            const GroupTable k = group_table(region.k, region.k.groups[g], a.k_blocks, chunks);
            const GroupTable v = group_table(region.v, region.v.groups[g], a.v_blocks, chunks);
            if (k.access_bits != 4 || k.first != v.first || k.bytes != v.bytes || k.bytes == 0 || k.bytes > 32 * 16) {
                return false;
            }
        }
    }
    return true;
}

DecodeArgs args_of(const Plan& plan) { return {plan, plan.as<DecodePlan>(), plan.packed}; }

struct Choice {
    int tile, stages, warps, resident;
    int least_tiles = 2 * n_warps;
};

// Tile, stages and warps of the first choice that fits, `resident` thread blocks a multiprocessor.
bool choose(const Request& request, std::span<const Choice> choices, const auto& allowed, DecodePlan& plan, Plan& a) {
    const Device& device = request.device;
    for (const Choice& choice : choices) {
        if (!allowed(choice)) continue;
        a.tile = choice.tile;
        plan.stages = choice.stages;
        plan.warps = choice.warps;
        a.keep(plan);
        const int room = device.shared_bytes / choice.resident - 1024 * (choice.resident - 1) - decode_static_bytes;
        const DecodeArgs args = args_of(a);
        if (DecodeLayout(args).total(args) > room) continue;
        a.least_tiles = choice.least_tiles;
        a.n_split = decode_parts(a, request.capacity, device.n_multiprocessors * choice.resident);
        if (reads_apart(a)) share_out_parts(a, device.n_multiprocessors * choice.resident);
        return true;
    }
    return false;
}

// Whether K in blocks of tokens lies as the kernel reads it: a group is one segment, whose codes and numbers lie on as many bytes as it
// loads at once.
bool is_one_block(const std::vector<Chunk>& chunks) {
    const int width = static_cast<int>(chunks.size()) * chunk_width;
    const auto format = static_cast<Format>(chunks.front().kind);
    if (!format_in_token_blocks(format)) return true;
    const int numbers_at = with_token_block_format(format, [=](auto f) { return decltype(f)::numbers_at(width); });
    for (int i = 0; i < width / chunk_width; i++) {
        const Chunk& chunk = chunks[static_cast<size_t>(i)];
        if (chunk.affine != width || chunk.odd != chunk_width * i || chunk.codes % 8 != 0 ||
            (chunk.codes + numbers_at) % std::min(16, width / 8) != 0) {
            return false;
        }
    }
    return true;
}

// Rows of one side beside blocks of K: f16 rows are read where they lie, the widest of the others is staged. 0: some have no code here.
int pitch_beside_blocks(const LatentAttnParams& p, RowLayout RegionView::* side, int blocks,
                        std::initializer_list<Format> formats) {
    int pitch = 16;
    bool has_code = true;
    for_groups(p, side, blocks, [&](int, const RowLayout&, const GroupTable& table, const auto& chunks) {
        if (table.kind == kind_f16_wide) return;
        has_code = has_code && std::ranges::count(formats, static_cast<Format>(table.kind)) > 0 && is_one_block(chunks);
        pitch = std::max(pitch, pitch_of(static_cast<int>(table.bytes)));
    });
    return has_code ? pitch : 0;
}

const char* take_blocks(const Request& request, Plan& a) {
    using enum Format;
    const int blocks = decode_blocks(a);
    if (a.rebuild != 0) return "K is rebuilt from blocks of tokens";
    if (a.k_blocks != blocks || a.v_blocks != blocks) return "K is in blocks of tokens, of groups that differ from V's";
    DecodePlan plan{};
    plan.k_pitch = pitch_beside_blocks(request.params, &RegionView::k, blocks, {c4, c3, c2});
    plan.v_pitch = pitch_beside_blocks(request.params, &RegionView::v, blocks, {q8, q6, q4, q3, q2});
    if (plan.k_pitch == 0 || plan.v_pitch == 0) return "K is in blocks of tokens beside rows of other formats";
    // a tile of a block takes longer than another: of a short cache a warp has one, and more thread blocks
    constexpr Choice choices[] = {{32, 3, 8, 2, n_warps}, {32, 2, 8, 2, n_warps}, {32, 3, 8, 1, n_warps},
                                  {32, 2, 8, 1, n_warps}, {32, 2, 4, 1, n_warps}, {32, 2, 2, 1, n_warps}};
    const auto allowed = [&](const Choice& choice) { return choice.resident == 1 || blocks <= 2; };
    return choose(request, choices, allowed, plan, a) ? nullptr : "no tile fits shared memory";
}

// Two thread blocks a multiprocessor where they fit.
const char* take(const Request& request, Plan& a) {
    const int blocks = std::max(a.k_blocks, a.v_blocks);
    const bool apart = reads_apart(a);
    const int rows = rows_of(a) / (apart ? a.n_tokens : 1);
    if (rows > (apart || a.in_blocks != 0 ? most_block_rows : decode_rows)) return "too many query rows";
    if (blocks > 4) return "groups are too wide";
    if (a.in_blocks != 0) return take_blocks(request, a);
    a.kind = decode_kind(a);
    DecodePlan plan{};
    plan.k_pitch = decode_reads_k_in_place(a.rebuild != 0, blocks, a.kind)
                       ? 0
                       : widest_pitch(request.params, &RegionView::k, a.k_blocks);
    plan.v_pitch = widest_pitch(request.params, &RegionView::v, a.v_blocks);
    plan.alike = a.rebuild == 0 && lie_alike(request.params, a) ? 1 : 0;
    // K rebuild from 64 channels: sixteen warps share one set of tables where they fit
    constexpr Choice choices[] = {{32, 2, 16, 1}, {32, 1, 16, 1}, {16, 2, 16, 1}, {16, 1, 16, 1}, {32, 3, 8, 2},
                                  {32, 2, 8, 2},  {16, 3, 8, 2},  {16, 2, 8, 2},  {32, 3, 8, 1},  {16, 4, 8, 1},
                                  {16, 3, 8, 1},  {16, 2, 8, 1},  {16, 1, 8, 1},  {16, 2, 4, 1}};
    const auto allowed = [&](const Choice& choice) {
        return !((choice.warps > n_warps && (a.rebuild == 0 || blocks > 1)) ||
                 (choice.warps < n_warps && !apart) ||      // many thread blocks at work make up for it
                 (choice.stages == 1 && a.rebuild == 0) ||  // a direct K is copied a tile ahead
                 // registers of one thread block fill the multiprocessor
                 (choice.resident == 2 && blocks > (a.rebuild != 0 ? 1 : 2)) ||
                 (choice.tile == 32 && ((blocks > 2 && a.rebuild != 0) || is_stock_kind(a.kind))));
    };
    return choose(request, choices, allowed, plan, a) ? nullptr : "no tile fits shared memory";
}

cudaError_t launch(const Plan& plan, cudaStream_t stream) {
    if (plan.apart != 0) return launch_decode_apart(args_of(plan), plan.items, stream);
    if (plan.in_blocks != 0) return launch_decode_blocks(args_of(plan), plan.items, stream);
    return plan.rebuild != 0 ? launch_decode_rebuild(args_of(plan), plan.items, stream)
                             : launch_decode(args_of(plan), plan.items, stream);
}

std::vector<uint32_t> pack(const KeyFactor& f) {
    return pack_k_b(f.k_b, f.n_kv, f.rank, f.head_dim, f.k_blocks, dims_by_plane(f.head_dim, f.n_rot, f.neox));
}

}  // namespace

namespace kernels {
extern const Kernel decode{
    .name = "decode", .takes = take, .launch = launch, .takes_blocks = true, .rotates = true, .pack_keys = pack};
}

}  // namespace lkv::cuda
