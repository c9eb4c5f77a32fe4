// How a router chooses experts and weighs their results.
#pragma once

#include "gguf/reader.h"

namespace lkv {

struct ExpertRouting {
    // A score is the softmax of the router's output over all experts or over the chosen ones alone, or its sigmoid.
    enum class Scores { softmax, softmax_of_chosen, sigmoid };

    Scores scores = Scores::softmax;
    // With groups, tokens only have experts of the n_groups_used best ones: of the largest score, with sigmoid of the largest two.
    int n_groups = 1;
    int n_groups_used = 1;
    float scale = 1.0F;  // factor of the weights
};

// From the stock keys `<architecture>.expert_*`. n_expert: of a layer. has_bias: some layer adds numbers to scores before it chooses,
// which files that name no scores have beside sigmoid.
// Errors: Error for scores or groups that no model has.
ExpertRouting read_routing(const GgufFile& file, const std::string& architecture, int n_expert, bool has_bias);

}  // namespace lkv
