// Random inputs for latent_attn from a short description, and what it has to compute: the contract of
// ops/latent_attn.h, slot by slot in double, on the values that the rows decode to.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "cache/evict/gumbel.h"
#include "cache/formats.h"
#include "ops/attn_mass.h"
#include "ops/cpu/codes/code_scores.h"
#include "ops/latent_attn.h"

namespace lkv::test {

struct AttnShape {
    std::string name;
    bool k_rebuild = false;      // K: rebuild, else direct
    std::vector<int> k_ranks{};  // per K group; empty: head_dim (full)
    bool v_latent = false;
    std::vector<int> v_ranks{};  // per V group; empty: head_dim (full)
    int n_kv = 2;
    int rep = 1;
    int head_dim = 64;
    int k_group = 1;
    int v_group = 1;
    std::vector<Format> k_formats{Format::f16};  // one per region
    std::vector<Format> v_formats{Format::f16};
    bool uniform = false;  // a latent group is one segment, else two of different formats where its width allows
    int dropped = 0;       // channels that the last region drops from latent groups, down to 16; a narrower group whole
    std::vector<SegmentSpec> k_segments{};  // of every latent group in the last region; empty: by format
    std::vector<SegmentSpec> v_segments{};
    int n_past = 100;  // tokens in the cache before the batch, per sequence
    int n_tokens = 1;  // queries, per sequence
    int n_seq = 1;
    bool permute = false;  // slots in any order, with holes that hold garbage
    int window = 0;
    bool alibi = false;
    bool sinks = false;
    float softcap = 0.0f;
    bool bias = false;
    bool norm = false;
    bool rope = true;
    bool neox = true;
    int n_rot = 0;  // 0: head_dim
    double rope_base = 10000.0;
    int first_pos = 0;
    bool empty_first = false;  // region 0 holds nothing
    // Rows given segment by segment: per region and group, in place of formats and `dropped`; empty: none.
    std::vector<std::vector<std::vector<SegmentSpec>>> k_rows{};
    std::vector<std::vector<std::vector<SegmentSpec>>> v_rows{};
    std::vector<int> region_tokens{};  // the first that are region 0's, the latest that are region 1's; empty: 4 and 20
    std::vector<bool> absent{};        // regions of no capacity, their tokens in the last one; empty: none
    int key_only = 0;                  // above 0: K and V are one row, of which V is what is behind so many channels
    bool any_query = false;            // also queries that lose something as the bytes in which codes are met
    unsigned seed = 1;
};

// Which term of the contract the oracle computes 1 % wrong, to show that the comparison sees it.
enum class Perturb { nothing, score, value };

class AttnCase {
public:
    explicit AttnCase(const AttnShape& shape) : shape_(shape), random_(shape.seed) {
        make_heads();
        make_tokens();
        make_regions();
        if (!shape_.k_rebuild && !shape_.any_query) round_queries();
        make_factors();
        params.out = nullptr;
        if (shape.empty_first) params.regions[0].n_slots = 0;
    }

    LatentAttnParams params{};

    int64_t n_out() const { return int64_t{params.n_tokens} * params.n_head * params.head_dim; }

    // [n_tokens, n_head, head_dim]. log_sums: if not null, of every row the logarithm of its scores' exponentials' sum
    std::vector<double> oracle(Perturb perturb = Perturb::nothing, std::vector<double>* log_sums = nullptr) const {
        const LatentAttnParams& p = params;
        if (log_sums != nullptr) log_sums->assign(static_cast<size_t>(int64_t{p.n_tokens} * p.n_head), -INFINITY);
        const int rep = p.n_head / p.n_kv;
        std::vector<double> out(static_cast<size_t>(n_out()), 0.0);
        for (int j = 0; j < p.n_kv; j++) {
            std::vector<Slot> slots = read_slots(j);
            for (int t = 0; t < p.n_tokens; t++) {
                for (int r = 0; r < rep; r++) {
                    const int h = j * rep + r;
                    const auto row = static_cast<size_t>(int64_t{t} * p.n_head + h);
                    const double sum = attend(slots, t, h, perturb, &out[row * static_cast<size_t>(p.head_dim)]);
                    if (log_sums != nullptr) (*log_sums)[row] = sum;
                }
            }
        }
        return out;
    }

    // [slots of all regions]: the contract of ops/attn_mass.h for this problem alone.
    std::vector<double> masses(const std::vector<QueryWeight>& weights, bool has_noise, int layer,
                               Perturb perturb = Perturb::nothing) const {
        const LatentAttnParams& p = params;
        int n_slots = 0;
        for (int r = 0; r < p.n_regions; r++) n_slots += p.regions[r].n_slots;
        std::vector<double> out(static_cast<size_t>(n_slots), 0.0);
        for (int h = 0; h < p.n_head; h++) {
            const std::vector<Slot> slots = read_slots(h / (p.n_head / p.n_kv));
            for (int t = 0; t < p.n_tokens; t++) {
                const QueryWeight& query = weights[static_cast<size_t>(t)];
                if (query.weight == 0.0f) continue;
                std::vector<double> score = scores(slots, t, h, perturb);
                for (size_t i = 0; i < slots.size(); i++) {
                    if (has_noise) score[i] += double{gumbel(noise_seed(layer, h, p.q_pos[t]), slots[i].pos)};
                    score[i] /= double{query.temperature};
                }
                const double sink = p.sinks == nullptr ? -INFINITY : double{p.sinks[h]} / double{query.temperature};
                double max = sink;
                for (const double s : score) max = std::max(max, s);
                if (max == -INFINITY) continue;
                double sum = std::exp(sink - max);
                for (const double s : score) sum += std::exp(s - max);
                for (size_t i = 0; i < slots.size(); i++) {
                    out[static_cast<size_t>(slots[i].index)] += double{query.weight} * std::exp(score[i] - max) / sum *
                                                                (perturb == Perturb::value ? 1.01 : 1.0);
                }
            }
        }
        return out;
    }

private:
    struct Slot {
        int32_t pos;
        uint64_t seq;
        std::vector<double> k;  // what q is multiplied with: latent (direct) or head (rebuild)
        std::vector<double> v;  // after B_v
        int index;              // counted over all regions
    };

    struct Region {
        RowPlan k_plan;
        RowPlan v_plan;
        std::vector<uint8_t> k_rows;  // whole pages
        std::vector<uint8_t> v_rows;
        uint8_t* k_first = nullptr;  // slot 0
        uint8_t* v_first = nullptr;
        int64_t k_page = 0;
        int64_t v_page = 0;
        std::vector<int32_t> pos;
        std::vector<uint64_t> seq;
        GroupLayout values{};  // of a row that is K and V
    };

    float normal() { return normal_(random_); }

    std::vector<float> normals(int64_t n, double deviation) {
        std::vector<float> x(static_cast<size_t>(n));
        for (float& v : x) v = static_cast<float>(deviation) * normal();
        return x;
    }

    int k_width(int g) const {
        return shape_.k_ranks.empty() ? shape_.head_dim : shape_.k_ranks[static_cast<size_t>(g)];
    }
    int v_width(int g) const {
        return shape_.v_ranks.empty() ? shape_.head_dim : shape_.v_ranks[static_cast<size_t>(g)];
    }

    static int largest(const std::vector<int>& ranks, int otherwise) {
        return ranks.empty() ? otherwise : *std::max_element(ranks.begin(), ranks.end());
    }

    void make_heads() {
        LatentAttnParams& p = params;
        p.n_kv = shape_.n_kv;
        p.n_head = shape_.n_kv * shape_.rep;
        p.head_dim = shape_.head_dim;
        p.k_group = shape_.k_group;
        p.v_group = shape_.v_group;
        p.scale = 1.0f / std::sqrt(static_cast<float>(shape_.head_dim));
        p.window = shape_.window;
        p.softcap = shape_.softcap;
        if (shape_.alibi) {
            for (int h = 0; h < p.n_head; h++) slopes_.push_back(0.05f * static_cast<float>(h + 1));
            p.alibi_slopes = slopes_.data();
        }
        if (shape_.sinks) {
            for (int h = 0; h < p.n_head; h++) sinks_.push_back(2.0f * static_cast<float>(h % 4));
            p.sinks = sinks_.data();
            sink_values_ = normals(int64_t{p.n_kv} * p.head_dim, 1.0);
            p.sink_values = sink_values_.data();
        }
        p.k_rank_max = largest(shape_.k_ranks, shape_.head_dim);
        p.v_rank_max = largest(shape_.v_ranks, shape_.head_dim);
        p.q_width = shape_.k_rebuild ? shape_.head_dim : p.k_rank_max;
    }

    // Every sequence has its own length, so that a batch mixes positions.
    void make_tokens() {
        LatentAttnParams& p = params;
        for (int s = 0; s < shape_.n_seq; s++) {
            const int past = shape_.n_past - 7 * s;
            for (int t = 0; t < past + shape_.n_tokens; t++) {
                token_seq_.push_back(s);
                token_pos_.push_back(shape_.first_pos + t);
                if (t >= past) {
                    q_seq_.push_back(s);
                    q_pos_.push_back(shape_.first_pos + t);
                }
            }
        }
        p.n_tokens = static_cast<int32_t>(q_seq_.size());
        // Scores of standard deviation 3: softmax is far from uniform, so an error in a score shows.
        const double deviation =
            shape_.k_rebuild ? 3.0 : 3.0 * std::sqrt(static_cast<double>(shape_.head_dim) / p.q_width);
        q_ = normals(int64_t{p.n_tokens} * p.n_head * p.q_width, deviation);
        if (!shape_.k_rebuild) {  // a group's q is zero past its rank
            for (int64_t row = 0; row < int64_t{p.n_tokens} * p.n_head; row++) {
                const int g = static_cast<int>(row % p.n_head) / shape_.rep / shape_.k_group;
                std::fill(q_.begin() + row * p.q_width + k_width(g), q_.begin() + (row + 1) * p.q_width, 0.0f);
            }
        }
        p.q = q_.data();
        p.q_pos = q_pos_.data();
        p.q_seq = q_seq_.data();
    }

    // Where a row of K has codes of fewer than 8 bits the CPU rounds queries to bytes (ops/cpu/codes/code_scores.h): these are such already.
    void round_queries() {
        const LatentAttnParams& p = params;
        const double most = lkv::byte_query;
        for (int64_t row = 0; row < int64_t{p.n_tokens} * p.n_head; row++) {
            float* const q = q_.data() + row * p.q_width;
            const int g = static_cast<int>(row % p.n_head) / shape_.rep / shape_.k_group;
            std::vector<int> starts;
            for (int r = 0; r < p.n_regions; r++) {
                const GroupLayout& group = p.regions[r].k.groups[g];
                if (!is_coded(p.regions[r].k, group)) continue;
                for (const SegmentLayout& segment : segments_of(p.regions[r].k, group)) {
                    if (static_cast<Format>(segment.format) != Format::q8)
                        starts.push_back(segment.column - group.column);
                }
            }
            if (starts.empty()) continue;
            const int width = k_width(g);
            double reach = 0.0;
            for (int c = 0; c < width; c++) reach = std::max(reach, std::fabs(double{q[c]}));
            const double step = std::exp2(std::round(std::log2(reach / most)));  // no rounding of its own
            for (int c = 0; c < width; c++) {
                q[c] = static_cast<float>(step * std::clamp(std::round(double{q[c]} / step), -most, most));
            }
            for (const int c : starts) q[c] = static_cast<float>(q[c] < 0.0f ? -most * step : most * step);
        }
    }

    RowPlan plan(int n_groups, const std::vector<int>& ranks, Format format, int dropped) const {
        std::vector<std::vector<SegmentSpec>> groups;
        for (int g = 0; g < n_groups; g++) {
            const int width = ranks.empty() ? shape_.head_dim : ranks[static_cast<size_t>(g)];
            if (ranks.empty()) {
                groups.push_back({{format, width}});
                continue;
            }
            // Two segments where the width allows, the first a format apart: rows mix formats.
            std::vector<SegmentSpec> segments;
            const int kept = dropped >= width ? 0 : std::max(16, width - dropped);
            const int first = kept / 32 * 16;
            if (!shape_.uniform && first > 0 && kept - first > 0 && format_width_multiple(format) <= 16) {
                segments.push_back({format_scaled_by_group(format) ? Format::n8 : Format::q8, first});
                segments.push_back({format, kept - first});
            } else if (kept > 0) {
                segments.push_back({format, kept});
            }
            if (width > kept) segments.push_back({Format::none, width - kept});
            groups.push_back(segments);
        }
        return RowPlan(groups);
    }

    // Tokens go to regions in turn by age: the first to region 0, the last to the last region but one, and so on.
    void make_regions() {
        LatentAttnParams& p = params;
        const int n_regions = static_cast<int>(shape_.k_formats.size());
        p.n_regions = n_regions;
        const int n = static_cast<int>(token_pos_.size());
        std::vector<std::vector<int>> members(static_cast<size_t>(n_regions));
        for (int i = 0; i < n; i++) {
            const int age = token_pos_[static_cast<size_t>(i)] - shape_.first_pos;
            const int length = shape_.n_past + shape_.n_tokens;
            const auto [first, latest] = shape_.region_tokens.empty()
                                             ? std::pair{4, 20}
                                             : std::pair{shape_.region_tokens[0], shape_.region_tokens[1]};
            int r = n_regions - 1;
            if (n_regions > 1 && age < first) r = 0;
            if (n_regions > 2 && age >= length - latest) r = 1;
            if (!shape_.absent.empty() && shape_.absent[static_cast<size_t>(r)]) r = n_regions - 1;
            members[static_cast<size_t>(r)].push_back(i);
        }
        for (int r = 0; r < n_regions; r++) {
            std::vector<int> slots = members[static_cast<size_t>(r)];
            if (shape_.permute && (shape_.absent.empty() || !shape_.absent[static_cast<size_t>(r)])) {
                slots.resize(slots.size() + slots.size() / 4 + 3, -1);
                std::shuffle(slots.begin(), slots.end(), random_);
            }
            regions_.push_back(make_region(r, slots));
        }
        for (int r = 0; r < n_regions; r++) {
            const Region& region = *regions_[static_cast<size_t>(r)];
            p.regions[r] = {region.k_first,
                            region.v_first,
                            region.k_page,
                            region.v_page,
                            region.pos.data(),
                            region.seq.data(),
                            static_cast<int32_t>(region.pos.size()),
                            region.k_plan.view(),
                            region.v_plan.view()};
            if (shape_.key_only == 0) continue;
            p.regions[r].v_rows = p.regions[r].k_rows;
            p.regions[r].v_page = p.regions[r].k_page;
            p.regions[r].v = p.regions[r].k;
            p.regions[r].v.groups = &region.values;
        }
    }

    std::unique_ptr<Region> make_region(int r, const std::vector<int>& slots) {
        auto region = std::make_unique<Region>();
        const bool is_last = r == static_cast<int>(shape_.k_formats.size()) - 1;
        const int dropped = is_last ? shape_.dropped : 0;
        const auto index = static_cast<size_t>(r);
        region->k_plan = shape_.k_rows.empty()
                             ? plan(shape_.n_kv / shape_.k_group, shape_.k_ranks, shape_.k_formats[index], dropped)
                             : RowPlan(shape_.k_rows[index]);
        region->v_plan = shape_.v_rows.empty()
                             ? plan(shape_.n_kv / shape_.v_group, shape_.v_ranks, shape_.v_formats[index], dropped)
                             : RowPlan(shape_.v_rows[index]);
        const auto planned = [&](const std::vector<SegmentSpec>& segments, int group, RowPlan& to) {
            if (is_last && !segments.empty())
                to = RowPlan(std::vector(static_cast<size_t>(shape_.n_kv / group), segments));
        };
        planned(shape_.k_segments, shape_.k_group, region->k_plan);
        planned(shape_.v_segments, shape_.v_group, region->v_plan);
        const RowLayout k = region->k_plan.view();
        const RowLayout v = region->v_plan.view();
        place_pages(r, slots.size(), k, region->k_rows, region->k_first, region->k_page);
        place_pages(r, slots.size(), v, region->v_rows, region->v_first, region->v_page);
        const auto k_at = [&](size_t i) {
            return region->k_first + row_offset(static_cast<int64_t>(i), region->k_page, k.row_bytes);
        };
        const auto v_at = [&](size_t i) {
            return region->v_first + row_offset(static_cast<int64_t>(i), region->v_page, v.row_bytes);
        };
        for (size_t i = 0; i < slots.size(); i++) {
            const bool used = slots[i] >= 0;
            region->pos.push_back(used ? token_pos_[static_cast<size_t>(slots[i])] : (i % 2 ? -1 : 3));
            region->seq.push_back(used ? uint64_t{1} << token_seq_[static_cast<size_t>(slots[i])] : 0);
            if (!used) continue;
            if (!in_token_blocks(k)) {
                write_row(k, normals(k.width, 1.0).data(), k_at(i));
            }
            write_row(v, normals(v.width, 1.0).data(), v_at(i));
        }
        if (in_token_blocks(k)) write_token_blocks(k, slots.size(), k_at);
        GroupLayout& values = region->values;
        values = k.groups[0];
        values.column += shape_.key_only;
        values.width -= shape_.key_only;
        values.kept -= shape_.key_only;
        while (values.n_segments > 0 && k.segments[values.first_segment].column < values.column) {
            values.first_segment++;
            values.n_segments--;
        }
        return region;
    }

    // Something lies between a region's pages, and those of the region before the last come from the end of its memory back.
    void place_pages(int r, size_t n_slots, const RowLayout& row, std::vector<uint8_t>& rows, uint8_t*& first,
                     int64_t& page) const {
        const auto n_pages = static_cast<int64_t>((n_slots + page_slots - 1) / page_slots);
        page = bytes_of_page(row.row_bytes) + 256 * (r + 1);
        rows.assign(static_cast<size_t>(n_pages * page), 0xff);  // 0xffff is a NaN in f16
        const bool back = r + 2 == static_cast<int>(shape_.k_formats.size()) && n_pages > 0;
        first = rows.data() + (back ? (n_pages - 1) * page : 0);
        page = back ? -page : page;
    }

    // Whole blocks, as the cache writes them; slots that hold no token once did. Channels differ in spread and mean.
    template <typename At>
    void write_token_blocks(const RowLayout& k, size_t n_slots, At&& at) {
        const size_t n_blocks = (n_slots + token_block_slots - 1) / token_block_slots;
        for (size_t b = 0; b < n_blocks; b++) {
            std::vector<float> x = normals(int64_t{token_block_slots} * k.width, 1.0);
            for (size_t i = 0; i < x.size(); i++) {
                const auto c = static_cast<float>(i % static_cast<size_t>(k.width) % 7);
                x[i] = 0.2f * (c + 1.0f) * x[i] + 0.3f * (c - 3.0f);
            }
            write_token_block(k, x.data(), at(b * token_block_slots));
        }
    }

    void make_factors() {
        LatentAttnParams& p = params;
        if (shape_.k_rebuild) {
            k_b_ = normals(int64_t{p.n_kv} * p.k_rank_max * p.head_dim, 1.0 / std::sqrt(p.k_rank_max));
            p.k_b = k_b_.data();
            if (shape_.bias) {
                k_bias_ = normals(int64_t{p.n_kv} * p.head_dim, 0.3);
                p.k_bias = k_bias_.data();
            }
            if (shape_.norm) {
                k_norm_ = normals(p.head_dim, 0.2);
                for (float& w : k_norm_) w += 1.0f;
                p.k_norm = k_norm_.data();
                p.k_norm_eps = 1e-6f;
            }
            if (shape_.rope) {
                p.n_rot = shape_.n_rot > 0 ? shape_.n_rot : p.head_dim;
                for (int i = 0; i < p.n_rot / 2; i++) {
                    freqs_.push_back(static_cast<float>(std::pow(shape_.rope_base, -2.0 * i / p.n_rot)));
                }
                p.rope_freqs = freqs_.data();
                p.rope_mscale = 1.1f;
                p.rope_neox = shape_.neox;
            }
        }
        if (shape_.v_latent) {
            v_b_ = normals(int64_t{p.n_kv} * p.v_rank_max * p.head_dim, 1.0 / std::sqrt(p.v_rank_max));
            p.v_b = v_b_.data();
        }
    }

    std::vector<double> head_k(int j, int32_t pos, const float* z, int kept) const {
        const LatentAttnParams& p = params;
        if (!shape_.k_rebuild) return std::vector<double>(z, z + kept);
        std::vector<double> k(static_cast<size_t>(p.head_dim), 0.0);
        for (int d = 0; d < p.head_dim; d++) {
            double sum = p.k_bias != nullptr ? p.k_bias[j * p.head_dim + d] : 0.0;
            for (int c = 0; c < kept; c++) sum += double{p.k_b[(j * p.k_rank_max + c) * p.head_dim + d]} * double{z[c]};
            k[static_cast<size_t>(d)] = sum;
        }
        if (p.k_norm != nullptr) {
            double power = 0.0;
            for (double x : k) power += x * x;
            const double inverse = 1.0 / std::sqrt(power / p.head_dim + double{p.k_norm_eps});
            for (int d = 0; d < p.head_dim; d++) k[static_cast<size_t>(d)] *= inverse * double{p.k_norm[d]};
        }
        if (p.rope_freqs != nullptr) {
            for (int i = 0; i < p.n_rot / 2; i++) {
                double& x = k[static_cast<size_t>(p.rope_neox ? i : 2 * i)];
                double& y = k[static_cast<size_t>(p.rope_neox ? i + p.n_rot / 2 : 2 * i + 1)];
                const double angle = double{p.rope_freqs[i]} * pos;
                const double c = std::cos(angle) * double{p.rope_mscale};
                const double s = std::sin(angle) * double{p.rope_mscale};
                const double x0 = x;
                x = x0 * c - y * s;
                y = x0 * s + y * c;
            }
        }
        return k;
    }

    std::vector<double> head_v(int j, const float* z, int kept) const {
        const LatentAttnParams& p = params;
        if (p.v_b == nullptr) return std::vector<double>(z, z + kept);
        std::vector<double> v(static_cast<size_t>(p.head_dim), 0.0);
        for (int c = 0; c < kept; c++) {
            for (int d = 0; d < p.head_dim; d++) {
                v[static_cast<size_t>(d)] += double{z[c]} * double{p.v_b[(j * p.v_rank_max + c) * p.head_dim + d]};
            }
        }
        return v;
    }

    std::vector<Slot> read_slots(int j) const {
        std::vector<Slot> slots;
        int first = 0;
        for (int r = 0; r < params.n_regions; first += params.regions[r].n_slots, r++) {
            const RegionView& region = params.regions[r];
            const GroupLayout& kg = region.k.groups[j / params.k_group];
            const GroupLayout& vg = region.v.groups[j / params.v_group];
            std::vector<float> k(static_cast<size_t>(region.k.width));
            std::vector<float> v(static_cast<size_t>(region.v.width));
            for (int s = 0; s < region.n_slots; s++) {
                if (region.pos[s] < 0 || region.seq[s] == 0) continue;
                const int in_block = s % token_block_slots;
                read_slot(region.k, region.k_row(s - in_block), in_block, k.data());
                read_slot(region.v, region.v_row(s - in_block), in_block, v.data());
                slots.push_back({region.pos[s], region.seq[s], head_k(j, region.pos[s], k.data() + kg.column, kg.kept),
                                 head_v(j, v.data() + vg.column, vg.kept), first + s});
            }
        }
        return slots;
    }

    // −∞ where a slot is not seen.
    std::vector<double> scores(const std::vector<Slot>& slots, int t, int h, Perturb perturb) const {
        const LatentAttnParams& p = params;
        const float* q = p.q + (int64_t{t} * p.n_head + h) * p.q_width;
        std::vector<double> score(slots.size(), -INFINITY);
        for (size_t i = 0; i < slots.size(); i++) {
            const Slot& slot = slots[i];
            const int64_t distance = int64_t{p.q_pos[t]} - slot.pos;
            if (!(slot.seq >> p.q_seq[t] & 1) || distance < 0 || (p.window > 0 && distance >= p.window)) continue;
            double product = 0.0;
            for (size_t c = 0; c < slot.k.size(); c++) product += double{q[c]} * slot.k[c];
            score[i] = double{p.scale} * product * (perturb == Perturb::score ? 1.01 : 1.0);
            if (p.softcap > 0.0f) score[i] = p.softcap * std::tanh(score[i] / double{p.softcap});
            if (p.alibi_slopes != nullptr) score[i] -= double{p.alibi_slopes[h]} * static_cast<double>(distance);
        }
        return score;
    }

    double attend(const std::vector<Slot>& slots, int t, int h, Perturb perturb, double* out) const {
        const LatentAttnParams& p = params;
        const std::vector<double> score = scores(slots, t, h, perturb);
        double max = -INFINITY;
        for (const double s : score) max = std::max(max, s);
        double sum = 0.0;
        if (p.sinks != nullptr) {
            max = std::max(max, double{p.sinks[h]});
            sum = std::exp(double{p.sinks[h]} - max);
            const float* const value = p.sink_values + int64_t{h / (p.n_head / p.n_kv)} * p.head_dim;
            for (int d = 0; d < p.head_dim; d++) out[d] += sum * double{value[d]};
        }
        for (size_t i = 0; i < slots.size(); i++) {
            if (score[i] == -INFINITY) continue;
            const double weight = std::exp(score[i] - max);
            sum += weight;
            for (size_t d = 0; d < slots[i].v.size(); d++) out[d] += weight * slots[i].v[d];
        }
        if (sum == 0.0) return -INFINITY;
        for (int d = 0; d < p.head_dim; d++) out[d] /= sum;
        for (int d = 0; perturb == Perturb::value && d < 4; d++) out[d] *= 1.01;
        return max + std::log(sum);
    }

    AttnShape shape_;
    std::mt19937 random_;
    std::normal_distribution<float> normal_;
    std::vector<float> q_, k_b_, v_b_, k_bias_, k_norm_, freqs_, slopes_, sinks_, sink_values_;
    std::vector<int32_t> q_pos_, q_seq_, token_pos_, token_seq_;
    std::vector<std::unique_ptr<Region>> regions_;
};

// Full rows of exact windows and latents, of the same queries: what one softmax over both gives.
struct Beside {
    AttnCase full;
    AttnCase latents;

    std::vector<double> oracle(Perturb perturb = Perturb::nothing) const {
        std::vector<double> sums[2];
        std::vector<double> out = full.oracle(Perturb::nothing, &sums[0]);
        const std::vector<double> other = latents.oracle(perturb, &sums[1]);
        const auto width = static_cast<size_t>(full.params.head_dim);
        for (size_t i = 0; i < out.size(); i++) {
            const double a = sums[0][i / width];
            const double b = sums[1][i / width];
            const double top = std::max(a, b);
            const double share = top == -INFINITY ? 0.0 : std::exp(b - top) / (std::exp(a - top) + std::exp(b - top));
            out[i] = (1.0 - share) * out[i] + share * other[i];
        }
        return out;
    }
};

// Such pairs: latents of both paths, few tokens and many, wide and narrow, and either side of them empty.
inline std::vector<std::pair<AttnShape, AttnShape>> shapes_beside() {
    struct Pair {
        const char* name;
        bool rebuild, v_latent;
        int head_dim, n_kv, rep, group, k_rank, v_rank;
        Format format;
        int n_tokens, n_full, n_past;
    };
    constexpr Pair all[] = {
        {"joint", false, true, 128, 8, 4, 8, 768, 768, Format::q4, 1, 130, 300},
        {"joint, three tokens", false, true, 64, 4, 2, 4, 256, 192, Format::q2, 3, 20, 200},
        {"joint, eight tokens", false, true, 64, 4, 4, 4, 192, 256, Format::q8, 8, 40, 90},
        {"joint, no latent yet", false, true, 64, 4, 2, 4, 256, 192, Format::q2, 1, 20, 0},
        {"joint, no exact token", false, true, 64, 4, 2, 4, 256, 192, Format::q4, 1, 0, 200},
        {"other formats", false, true, 64, 4, 2, 4, 96, 80, Format::q5, 1, 30, 100},
        {"per head", false, true, 64, 2, 4, 1, 32, 48, Format::q3, 2, 30, 100},
        {"full V", false, false, 64, 2, 2, 2, 64, 0, Format::q4, 1, 30, 100},
        {"full V, many tokens", false, false, 64, 2, 2, 2, 64, 0, Format::q4, 30, 30, 100},
        {"rebuilt", true, true, 64, 4, 4, 2, 64, 96, Format::q4, 1, 30, 100},
        {"rebuilt, wide", true, true, 64, 4, 4, 4, 320, 256, Format::q4, 2, 130, 300},
        {"rebuilt, a prompt", true, true, 64, 4, 2, 4, 192, 192, Format::q4, 20, 60, 200},
        {"wide heads", false, true, 256, 1, 4, 1, 192, 128, Format::q4, 1, 30, 100},
        {"joint, half is exact", false, true, 128, 2, 4, 2, 192, 128, Format::q4, 1, 1500, 1400},
        {"joint, most is exact", false, true, 64, 4, 2, 4, 256, 192, Format::q2, 1, 2100, 70},
        {"joint, little is exact", false, true, 64, 4, 2, 4, 256, 192, Format::q2, 1, 800, 3000},
        {"joint, eight tokens, half is exact", false, true, 64, 4, 4, 4, 192, 256, Format::q8, 8, 900, 800},
        {"full V, half is exact", false, false, 64, 2, 2, 2, 64, 0, Format::q4, 1, 1300, 1200},
    };
    std::vector<std::pair<AttnShape, AttnShape>> pairs;
    unsigned seed = 900;
    for (const Pair& of : all) {
        AttnShape full;
        full.name = std::string("beside full rows: ") + of.name;
        full.head_dim = of.head_dim;
        full.n_kv = of.n_kv;
        full.rep = of.rep;
        full.n_tokens = of.n_tokens;
        AttnShape latents = full;
        full.n_past = std::max(0, of.n_full);
        full.empty_first = of.n_full == 0;
        full.seed = seed++;
        latents.k_rebuild = of.rebuild;
        latents.v_latent = of.v_latent;
        latents.k_group = of.group;
        latents.k_ranks.assign(static_cast<size_t>(of.n_kv / of.group), of.k_rank);
        if (of.v_latent) {
            latents.v_group = of.group;
            latents.v_ranks.assign(static_cast<size_t>(of.n_kv / of.group), of.v_rank);
        }
        latents.k_formats = latents.v_formats = {of.format};
        latents.uniform = true;
        latents.n_past = of.n_past;
        latents.empty_first = of.n_past == 0;
        latents.seed = seed++;
        pairs.emplace_back(full, latents);
    }
    return pairs;
}

}  // namespace lkv::test
