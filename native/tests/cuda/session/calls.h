// The same calls of sessions on a GPU and on the CPU.
#pragma once

#include <memory>
#include <vector>

#include "cuda/session/file.h"
#include "cuda/session/options.h"
#include "runtime/session.h"

namespace lkv::test {

int n_gpus();

// So many of the last layers on one GPU.
lkv::GpuOptions on_gpu(int n_gpu_layers, int gpu = 0);
std::shared_ptr<const lkv::Model> open(const File& file, const lkv::GpuOptions& gpu);

// Slots of the layers with a window.
int ring_slots(const File& file, const lkv::SessionOptions& options);

// n tokens that follow, of these sequences in turn. length: of every sequence, which grow
struct Tokens {
    std::vector<int32_t> tokens, pos, seq;
};
Tokens next_tokens(int n, const std::vector<int32_t>& of, std::vector<int32_t>& length);

// Calls of a session, of which each leaves the logits of its last token.
class Talk {
public:
    Talk(const File& file, const lkv::SessionOptions& options, int n_gpu_layers = 99)
        : session(open(file, on_gpu(n_gpu_layers)), options), length(static_cast<size_t>(options.n_seq_max), 0) {}

    // n tokens of each of these sequences, of which the call's last n_guessed are guesses.
    std::vector<float> run(int n, const std::vector<int32_t>& of = {0}, int n_guessed = 0);

    lkv::Session session;
    std::vector<int32_t> length;  // of the sequences
};

// Logits of each call's last token, and of all tokens of steps of all sequences. steps: tokens one by one, at the end
std::vector<float> decode(const File& file, const lkv::SessionOptions& options, const lkv::GpuOptions& gpu, int prompt,
                          int steps = 0);

// The share of the formats' error that GPU and CPU may differ by. ggml-cuda multiplies f32 in TF32; where products are f32 (the emulated GPU),
// a third of it is enough.
inline double share_of_formats = 0.6;

// Whether the combination is a legal one.
bool compare(const File& file, const Combination& c, int n_gpu_layers = 99);

}  // namespace lkv::test
