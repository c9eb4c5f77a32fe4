#include <algorithm>

#include "cache/formats.h"
#include "ops/cuda/kernels/mla/layout.h"
#include "ops/cuda/routes.h"
#include "ops/cuda/rows/tables.h"

namespace lkv::cuda {

namespace {

// Merging twice as many parts takes longer than the second half of a tile of up to 16 query rows: 8B in two groups, 13.8 us a layer at 2048
// tokens and 15.6 at 4096 with 64 parts, 11.3 and 13.6 with 32.
constexpr int few_parts = 32;

// Whether all of a group's rows are what the MLA kernel reads: units of 32 channels within a segment, all of f16 rows or none. blocks: ggml's
// too
bool has_units(const std::vector<Chunk>& chunks, bool& f16, bool blocks = false) {
    const auto taken = [blocks](uint8_t kind) {
        using enum Format;
        constexpr Format formats[] = {q8, q4, q2, q1, n8, n6, n4, n3, n2, n1};
        const bool stock = blocks && (kind == static_cast<uint8_t>(q8_0) || kind == static_cast<uint8_t>(q4_0));
        return stock || kind == kind_f16_wide || std::ranges::count(formats, static_cast<Format>(kind)) > 0;
    };
    f16 = !chunks.empty() && chunks[0].kind == kind_f16_wide;
    for (auto chunk = chunks.begin(); chunk != chunks.end(); chunk += 2) {
        if (chunk->kind == kind_none) continue;
        const ChunkIterator other = chunk + 1;
        if (!taken(chunk->kind) || (chunk->kind == kind_f16_wide) != f16 || other->kind != chunk->kind ||
            other->affine != chunk->affine) {
            return false;
        }
    }
    return true;
}

// Where K and V are one row tiles are staged whole, those of f16 beside others as small ones.
void stage_all(const LatentAttnParams& p, int blocks, MlaPlan& plan) {
    const bool all_f16 = plan.small_tiles == (1 << p.n_regions) - 1;
    if (all_f16) plan.small_tiles = 0;
    plan.k_pitch = plan.v_pitch = 0;
    for (int r = 0; r < p.n_regions; r++) {
        const RowLayout& row = p.regions[r].k;
        std::vector<Chunk> chunks;
        const GroupTable table = group_table(row, row.groups[0], blocks, chunks);
        const int pitch = mla_pitch(table.bytes, table.first, static_cast<uint32_t>(row.row_bytes));
        int& widest = (plan.small_tiles >> r & 1) != 0 ? plan.small_pitch : plan.k_pitch;
        widest = std::max(widest, pitch);
    }
    plan.v_pitch = plan.k_pitch;
}

}  // namespace

bool side_has_units(const LatentAttnParams& p, RowLayout RegionView::* side, int blocks) {
    if (blocks > most_units / 2) return false;
    bool all = true;
    for_groups(p, side, blocks, [&](int, const RowLayout&, const GroupTable&, const std::vector<Chunk>& chunks) {
        bool f16 = false;
        all = all && has_units(chunks, f16);
    });
    return all;
}

const char* plan_mla_rows(const Request& request, Plan& a, MlaPlan& plan) {
    const LatentAttnParams& p = request.params;
    const bool apart = a.own.ends != nullptr && a.rebuild == 0 && p.n_regions == 1;
    const int rows = (apart ? 1 : a.n_tokens) * a.unit * (a.n_head / a.n_kv);
    const bool values = plan.keys.as == MlaK::values;
    if (p.v_b == nullptr && !values) return "V is no latent";
    const bool takes_many = apart || (a.rebuild == 0 && !values &&
                                      multiplies_latents(a.n_tokens, a.n_tokens * (a.n_head / a.n_kv), a.head_dim));
    if (a.n_tokens > (takes_many ? most_direct_tokens : most_counted_tokens)) return "too many tokens";
    if (a.v_blocks > most_units / 2 || (a.rebuild == 0 && a.k_blocks > most_units / 2)) return "latents are too wide";
    plan.rows = rows <= 8 ? 8 : (rows <= 16 ? 16 : 32);
    const bool scores = plan.keys.as == MlaK::scores;
    plan.k_units = scores ? 0 : (a.rebuild != 0 ? a.unit * a.head_dim / unit_channels : 2 * a.k_blocks);
    bool all = true;
    const auto add_side = [&](RowLayout RegionView::* side, int blocks, int32_t& pitch) {
        for_groups(p, side, blocks, [&](int r, const RowLayout& row, const GroupTable& table, const auto& chunks) {
            bool f16 = false;
            all = all && has_units(chunks, f16, values);
            if (f16) {
                plan.small_tiles |= 1 << r;
            } else {
                const auto row_bytes = static_cast<uint32_t>(row.row_bytes);
                pitch = std::max(pitch, mla_pitch(table.bytes, table.first, row_bytes));
            }
        });
    };
    if (a.rebuild == 0) add_side(&RegionView::k, a.k_blocks, plan.k_pitch);  // else full rows are read where they lie
    add_side(&RegionView::v, a.v_blocks, plan.v_pitch);
    if (!all) return "rows are not in units of 32 channels";
    for (int r = 0; r < p.n_regions; r++)
        plan.scaled |= has_group_scales(values ? p.regions[r].k : p.regions[r].v) ? 1 : 0;
    if (scores) plan.k_pitch = plan.v_pitch;
    if (values) stage_all(p, a.k_blocks, plan);
    const Device& device = request.device;
    const auto fits = [&] { return MlaLayout(plan, p.n_regions).total() <= device.shared_bytes - mla_fixed; };
    // where little shared memory is left for tiles, thread blocks share the query rows
    for (; plan.rows >= 8; plan.rows /= 2) {
        plan.tile = most_tile;
        while (plan.tile > least_tile && !fits()) plan.tile /= 2;
        if (!fits()) continue;
        // A thread block takes a whole multiprocessor; those that the warm-up holds are left to it: 8B at 14 %, 299, 269, 243 tokens/s at
        // depth 0, 4096, 16384 with a part for every multiprocessor and merging behind the warm-up, 305, 273, 244 without merging,
        // 309, 276, 255 with six parts less. What another kernel holds at first goes to late parts.
        const int row_blocks = (rows + plan.rows - 1) / plan.rows;
        const int items = a.n_kv / a.unit;
        const int others = std::max(items_of_group(a) * a.n_regions, request.beside);
        const auto parts = [&](int multiprocessors) {
            return std::clamp(multiprocessors / row_blocks / items, 1, most_parts);
        };
        if (apart) {  // see ApartShares; beside full rows the last ones wait
            a.n_split = a.apart = parts(device.n_multiprocessors);
            // a token of many may not have all parts, whose sums all have room for
            if (a.n_tokens > most_counted_tokens) {
                a.n_split = most_parts_of_token(a.apart, a.n_tokens);
            }
            return nullptr;
        }
        const int early = parts(device.n_multiprocessors - others);
        a.n_split = request.beside > 0 && a.rebuild == 0 ? parts(device.n_multiprocessors) : early;
        plan.late_parts = a.n_split - early;
        plan.few_parts = plan.rows <= 16 && a.n_split < 3 * few_parts ? few_parts : 0;
        return nullptr;
    }
    return "no tile fits shared memory";
}

// Parts in f16, and results of 64 channels where there are no clusters.
size_t mla_parts_floats(const Plan& a) {
    const size_t rows =
        static_cast<size_t>(a.n_tokens) * static_cast<size_t>(a.n_head) * static_cast<size_t>(a.v_blocks);
    return rows * (static_cast<size_t>(a.n_split) * 32 + static_cast<size_t>(a.head_dim));
}

namespace {

const char* take(const Request& request, Plan& plan) {
    if (plan.rebuild != 0) return "K is rebuilt";
    MlaPlan mla{};
    if (plan.v_b == nullptr && request.params.v_b == nullptr && is_one_row(request.params)) mla.keys.as = MlaK::values;
    if (mla.keys.as != MlaK::values && plan.head_dim > most_decoded_head) return "heads are too wide";
    if (mla.keys.as == MlaK::values && 2 * plan.v_blocks > mla_warps) return "values are too wide";
    if (const char* const reason = plan_mla_rows(request, plan, mla)) return reason;
    plan.keep(mla);
    return nullptr;
}

MlaArgs args_of(const Plan& plan) { return {plan, plan.as<MlaPlan>()}; }

cudaError_t launch(const Plan& plan, cudaStream_t stream) { return launch_mla(args_of(plan), plan.items, stream); }

cudaError_t finish(const Plan& plan, const CutProblem* full, cudaStream_t stream) {
    return merge_mla(args_of(plan), full, stream);
}

// Nothing merges its parts: that would be set up while it runs, and keep multiprocessors from the real one (8B, joint latents: 330 tokens/s at
// depth 0 without it, 320 with it).
std::optional<Plan> warm_up(const Plan& plan) {
    MlaPlan mla = plan.as<MlaPlan>();
    Plan of = warm_up_plan(plan, items_of_group(plan), plan.n_regions);
    mla.late_parts = 0;
    of.keep(mla);
    of.leaves = Leaves::parts;
    return of;
}

}  // namespace

namespace kernels {
extern const Kernel mla{.name = "mla",
                        .takes = take,
                        .launch = launch,
                        .widest_head = most_head_dim,
                        .finish = finish,
                        .sums_floats = mla_parts_floats,
                        .warm_up = warm_up};
}

}  // namespace lkv::cuda
