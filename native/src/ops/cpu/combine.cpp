#include <algorithm>
#include <cmath>

#include "ops/cpu/gemm.h"
#include "ops/cpu/latent_attn.h"
#include "ops/cpu/scratch.h"
#include "ops/cpu/softmax.h"

namespace lkv {

namespace {

// A problem's sums, where its threads left them.
struct Summed {
    const LatentAttnParams& p;
    const LatentAttnPlan& plan;
    PartialSums partial;
};

Summed summed(const PartialAttn& attn) {
    Arena arena(const_cast<float*>(attn.scratch));  // only read
    return {attn.params, attn.plan, PartialSums(arena, attn.params, attn.plan)};
}

// Merges the splits of some rows, of one problem or two, and multiplies with B_v where a sum is still latent.
class Combiner {
public:
    static constexpr int block_rows = 24;

    explicit Combiner(std::span<const Summed> problems)
        : problems_(problems), p_(problems.front().p), rep_(p_.n_head / p_.n_kv) {}

    int n_blocks() const { return (p_.n_tokens * rep_ + block_rows - 1) / block_rows; }

    // Query rows block·24 … of KV head j, counted token by token, then over the head's query heads.
    void run(int head, int block) {
        const int begin = block * block_rows;
        const int n = std::min(block_rows, p_.n_tokens * rep_ - begin);
        for (int i = 0; i < n; i++) {
            const int token = (begin + i) / rep_;
            row_[i] = int64_t{token} * p_.n_head + head * rep_ + (begin + i) % rep_;
            out_[i] = p_.out + row_[i] * p_.head_dim;
            merge_row(i);
        }
        for (const Summed& problem : problems_) {
            add(problem, n, head, &problem != problems_.data());
        }
        if (p_.sinks == nullptr || p_.sink_values == nullptr) return;
        const float* const value = p_.sink_values + ptrdiff_t{head} * p_.head_dim;
        for (int i = 0; i < n; i++) {
            const float weight = std::exp(p_.sinks[row_[i] % p_.n_head] - max_[i]) * inverse_[i];
            for (int d = 0; d < p_.head_dim; d++) out_[i][d] += weight * value[d];
        }
    }

private:
    static constexpr int chunk = 64;  // channels merged at a time

    void merge_row(int i) {
        SoftmaxState total;
        if (p_.sinks != nullptr) total = {p_.sinks[row_[i] % p_.n_head], 1.0f};
        for (const Summed& problem : problems_) {
            for (int s = 0; s < problem.plan.n_split; s++) total = merge(total, problem.partial.state(s, row_[i]));
        }
        max_[i] = total.max;
        inverse_[i] = normaliser(total);
    }

    // more: onto what is there.
    void add(const Summed& problem, int n, int head, bool more) {
        const int head_dim = p_.head_dim;
        if (problem.p.v_b == nullptr || problem.plan.v_rebuild) {
            for (int c = 0; c < head_dim; c += chunk) {
                const int width = std::min(chunk, head_dim - c);
                sum_chunk(problem, n, c, std::min(chunk, problem.plan.acc_width - c));
                for (int i = 0; i < n; i++) {
                    for (int d = 0; d < width; d++) out_[i][c + d] = merged_[i][d] + (more ? out_[i][c + d] : 0.0f);
                }
            }
            return;
        }
        const float* b = problem.p.v_b + ptrdiff_t{head} * problem.p.v_rank_max * head_dim;
        const float* a[block_rows];
        for (int i = 0; i < n; i++) a[i] = merged_[i];
        for (int c = 0; c == 0 || c < problem.plan.v_kept; c += chunk) {
            const int width = std::min(chunk, problem.plan.v_kept - c);
            sum_chunk(problem, n, c, std::min(chunk, problem.plan.acc_width - c));
            multiply(n, head_dim, width, a, 1, {b + ptrdiff_t{c} * head_dim, head_dim, panel_width}, out_, panel_width,
                     more || c > 0);
        }
    }

    // merged_[i][0 … width) = channels first … of row i, all splits, normalised.
    void sum_chunk(const Summed& problem, int n, int first, int width) {
        for (int i = 0; i < n; i++) {
            f32x8 acc[chunk / lanes] = {};
            for (int s = 0; s < problem.plan.n_split; s++) {
                const f32x8 factor = splat(rebase(problem.partial.state(s, row_[i]), max_[i]) * inverse_[i]);
                const float* sum = problem.partial.sum(s, row_[i]) + first;
                for (int v = 0; v < width / lanes; v++) acc[v] = fma8(load8(sum + v * lanes), factor, acc[v]);
            }
            for (int v = 0; v < width / lanes; v++) store8(merged_[i] + v * lanes, acc[v]);
        }
    }

    std::span<const Summed> problems_;
    const LatentAttnParams& p_;
    const int rep_;
    int64_t row_[block_rows];
    float* out_[block_rows];
    float max_[block_rows];
    float inverse_[block_rows];
    float merged_[block_rows][chunk];
};

}  // namespace

void latent_attn_combine(std::span<const PartialAttn> problems, int ith, int nth) {
    const Summed both[] = {summed(problems.front()), summed(problems.back())};
    Combiner combiner(std::span(both, problems.size()));
    const int n_kv = problems.front().params.n_kv;
    const int n_items = n_kv * combiner.n_blocks();
    for (int item = ith; item < n_items; item += nth) combiner.run(item % n_kv, item / n_kv);
}

}  // namespace lkv
