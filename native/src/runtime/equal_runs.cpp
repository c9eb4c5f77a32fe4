#include "runtime/equal_runs.h"

#include <algorithm>

#include "cache/placement/sequences.h"

namespace lkv {
namespace {

constexpr size_t prompt_tail = 16;  // tokens after the snapshot before a prompt's end

size_t run_length(std::span<const int32_t> seq) {
    const auto end = std::find_if(seq.begin(), seq.end(), [&](int32_t s) { return s != seq.front(); });
    return static_cast<size_t>(end - seq.begin());
}

}  // namespace

EqualRuns first_equal_runs(std::span<const int32_t> seq, std::span<const uint8_t> output, size_t limit) {
    const size_t whole = run_length(seq);
    size_t each = std::min(whole, limit);
    // of a prompt the last result is wanted, and no other; a few tokens are no prompt, but guesses that came true
    const bool is_prompt = whole >= prompt_tail && output[whole - 1] != 0 && output[0] == 0;
    if (is_prompt && whole == each && each > 2 * prompt_tail) return {each - prompt_tail, 1, true};
    EqualRuns runs{each, 1, is_prompt && whole == each};
    if (each < whole) return runs;
    uint64_t seen = bit(seq.front());
    for (size_t n = each; n < seq.size() && n + each <= limit; n += each) {
        const std::span<const int32_t> rest = seq.subspan(n);
        if ((seen & bit(rest.front())) != 0 || run_length(rest) != each) break;
        seen |= bit(rest.front());
        runs.n_tokens += each;
        runs.n_seqs++;
    }
    return runs;
}

int guesses_of_runs(std::span<const uint8_t> guessed, const EqualRuns& runs) {
    ptrdiff_t most = 0;
    for (size_t end = runs.n_each(); end <= guessed.size(); end += runs.n_each()) {
        const std::span<const uint8_t> run = guessed.subspan(end - runs.n_each(), runs.n_each());
        const ptrdiff_t n = std::count_if(run.begin(), run.end(), [](uint8_t flag) { return flag != 0; });
        if (n < std::ssize(run)) most = std::max(most, n);
    }
    return static_cast<int>(most);
}

}  // namespace lkv
