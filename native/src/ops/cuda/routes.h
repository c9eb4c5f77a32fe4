// Which way a GPU takes through attention: what the graph draws, what the model keeps for it and what kernels take follow from these alone.
#pragma once

#include <cstdint>

namespace lkv {

// Tokens from which on full rows are made of wide latents before they are attended to (fewer are the MLA kernel's), and the widest head_dim.
constexpr int least_expanded_tokens = 9;
constexpr int most_expanded_head = 128;
// From so many tokens on full rows are made of narrower latents too, at least as wide as a head. Qwen2.5-Coder-1.5B, 2048 tokens behind 16384
// on an H200: 88 ms with 256 channels for two heads of 128, made full rows; as they are, 224 ms with 188 channels and 165 with 130. With
// 84 of 132 multiprocessors and no warpgroups rows of 256 channels take 53 ms to make, as long as 600 tokens take to multiply with 188.
constexpr int least_narrow_tokens = 512;
// Query rows of a KV head from which on the flash kernel takes them: it alone takes wider heads that are expanded, of 256 dimensions.
constexpr int least_flash_rows = 33;
// Up to so many tokens latents are multiplied as they are where tokens are of several sequences, which each read their own; those of one
// sequence as long as that is no more work than making head_dim channels of a KV head's key and value, for all its query rows at once.
constexpr int most_direct_tokens = 64;
constexpr bool multiplies_latents(int n_tokens, int rows_of_head, int head_dim) {
    return n_tokens < least_expanded_tokens || (n_tokens <= most_direct_tokens && 4 * rows_of_head <= 3 * head_dim);
}

// Whether the tokens of a step, which read all slots together, meet keys made of latents of `rank` channels instead of the latents.
constexpr bool expands_latents(int n_tokens, int rows_of_head, int head_dim, int rank) {
    if (multiplies_latents(n_tokens, rows_of_head, head_dim)) return false;
    if (head_dim > most_expanded_head) return rows_of_head >= least_flash_rows;
    return rank >= 2 * head_dim || n_tokens >= least_narrow_tokens;
}
// Whether any number of tokens ever does: the model keeps what makes keys. Wider heads have no other kernel that is fast on wider latents.
constexpr bool ever_expands(int64_t head_dim, int64_t rank, bool warpgroups) {
    if (head_dim > most_expanded_head) return rank > head_dim && head_dim == 2 * most_expanded_head && warpgroups;
    return rank >= head_dim;
}

// Whether a batch's tokens should read the slots of their own sequences alone, `seen` of all tokens. Together they read every slot in use, up
// to 32 query rows at a time: two tokens or more are about twice the work of one. Apart a token reads what it sees, and a little more.
constexpr bool less_work_apart(int64_t n_tokens, int64_t seen, int64_t in_use) {
    return n_tokens <= most_direct_tokens && 10 * seen < 9 * (n_tokens < 2 ? n_tokens : 2) * in_use;
}

}  // namespace lkv
