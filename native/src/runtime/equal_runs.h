// How a batch is cut where layers are recurrent: they take as many tokens of each sequence, sequence by sequence.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace lkv {

struct EqualRuns {
    size_t n_tokens = 0;
    int n_seqs = 1;
    // Whether later prompts may go on from here: at a prompt's end, and a little before it, as the next prompt of a conversation often
    // differs there (templates write the beginning of an answer in another way than a whole answer).
    bool ends_prompt = false;

    size_t n_each() const { return n_tokens / static_cast<size_t>(n_seqs); }
};

// The first ubatch of these tokens, at most `limit` of them. output: which results are wanted.
EqualRuns first_equal_runs(std::span<const int32_t> seq, std::span<const uint8_t> output, size_t limit);

// The most guesses (flags, none given: none) that end a run behind one that is none.
int guesses_of_runs(std::span<const uint8_t> guessed, const EqualRuns& runs);

}  // namespace lkv
