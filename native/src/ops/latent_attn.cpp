#include "ops/latent_attn.h"

#include <stdexcept>
#include <string>

namespace lkv {

namespace {

void require(bool holds, const std::string& expected, const std::string& got) {
    if (!holds) throw std::invalid_argument("[latent_attn] expected " + expected + "; got " + got);
}

void check_rows(const RowLayout& layout, int n_groups, int max_width, const char* name) {
    require(layout.n_groups == n_groups, std::to_string(n_groups) + " groups in a " + name + " row",
            std::to_string(layout.n_groups));
    for (int g = 0; g < n_groups; g++) {
        require(layout.groups[g].kept <= max_width,
                "at most " + std::to_string(max_width) + " channels in a group of a " + name + " row",
                std::to_string(layout.groups[g].kept));
    }
}

}  // namespace

void check_latent_attn(const LatentAttnParams& p) {
    require(p.n_tokens > 0, "at least one token", std::to_string(p.n_tokens));
    require(p.n_kv > 0 && p.n_head % p.n_kv == 0, "n_head divisible by n_kv",
            std::to_string(p.n_head) + " and " + std::to_string(p.n_kv));
    require(p.k_group > 0 && p.n_kv % p.k_group == 0, "a k_group that divides n_kv = " + std::to_string(p.n_kv),
            std::to_string(p.k_group));
    require(p.v_group > 0 && p.n_kv % p.v_group == 0, "a v_group that divides n_kv = " + std::to_string(p.n_kv),
            std::to_string(p.v_group));
    require(p.n_regions > 0 && p.n_regions <= max_regions, "1 … " + std::to_string(max_regions) + " regions",
            std::to_string(p.n_regions));
    if (p.rebuilds()) {
        require(p.q_width == p.head_dim, "q_width = head_dim = " + std::to_string(p.head_dim) + " on the rebuild path",
                std::to_string(p.q_width));
        require(p.rope_freqs == nullptr || (p.n_rot > 0 && p.n_rot % 2 == 0 && p.n_rot <= p.head_dim),
                "an even n_rot up to head_dim = " + std::to_string(p.head_dim), std::to_string(p.n_rot));
    }
    for (int r = 0; r < p.n_regions; r++) {
        check_rows(p.regions[r].k, p.n_kv / p.k_group, p.rebuilds() ? p.k_rank_max : p.q_width, "K");
        check_rows(p.regions[r].v, p.n_kv / p.v_group, p.v_b != nullptr ? p.v_rank_max : p.head_dim, "V");
        require(!in_token_blocks(p.regions[r].v), "single rows of V", "blocks");
    }
}

}  // namespace lkv
