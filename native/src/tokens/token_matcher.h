// What an answer has to match, token by token: a grammar, or a JSON schema.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "llama.h"

namespace lkv {

// Errors of all: Error, where the matcher itself meets a limit.
class TokenMatcher {
public:
    virtual ~TokenMatcher() = default;

    // Whether the token may come next; the end of the answer is a token too.
    virtual bool allows(int32_t token) = 0;

    // Leaves the candidates that may come next, in their order.
    virtual void restrict(std::vector<llama_token_data>& candidates) = 0;

    // Goes on after a token that may come.
    virtual void accept(int32_t token) = 0;

    // Back to the begin of the answer.
    virtual void reset() = 0;

    // Another one in the same state.
    virtual std::unique_ptr<TokenMatcher> clone() const = 0;
};

}  // namespace lkv
