// What a session is asked for. Zero, -1 and empty words leave the choice to the model's file.
#pragma once

#include <string>
#include <vector>

namespace lkv {

struct SessionOptions {
    int n_ctx = 0;     // 0: the model's training context
    int n_ubatch = 0;  // 0: as Ubatches chooses
    int n_batch = 0;   // tokens of a call, which no ubatch is longer than; 0: any number
    int n_seq_max = 1;
    int n_guesses = 0;        // that recurrent layers take back without computing anew; each holds a state
    int n_threads = 0;        // 0: every usable core
    int n_threads_batch = 0;  // 0: n_threads
    std::string kv;           // row format of K and V; empty: the file's plan, else f16
    std::string kv_k;
    std::string kv_v;
    std::vector<std::string> k_plan;  // a row format per segment in place of the file's plan; empty: the file's
    std::vector<std::string> v_plan;
    std::string kv_sink;  // row format of a region; empty: the file's, else f16
    std::string kv_recent;
    bool kv_rotate = true;  // Hadamard for quantized `full` rows
    int sink = -1;          // -1: the file's default
    int recent = -1;        // a count or a ratio replaces the file's window, whichever it is
    double recent_ratio = -1;
    bool fixed_window = false;  // recent tokens are as few as these say, also while there is room for more exact ones
    int kv_read = 0;            // compressed tokens that a layer reads for a decoded token, on a GPU; 0: all
    bool mtp = false;           // layers that guess further tokens are used (runtime/mtp/guesser.h):
    std::string mtp_path;       // those of this file, or empty: of the model's
    std::string evict;          // a policy of cache/evict/policies.h; empty or none: every token stays
    std::string keep_tokens;  // beside it: tokens that a layer keeps of a sequence, as a number or "50%" of its context
    std::string prefill;      // eager, lazy; empty: the file's default
    std::string implementation = "fused";  // or reference: the stock-ggml expression
    bool require_fused = false;            // on the device that the model was asked to run on

    bool evicts() const { return !evict.empty() && evict != "none"; }
};

}  // namespace lkv
