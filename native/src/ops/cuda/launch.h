// The CUDA kernels' entry points. Every call enqueues on the stream and returns the launch's error; nothing synchronises.
#pragma once

#include <cuda_runtime_api.h>

#include "ops/cuda/args.h"

namespace lkv::cuda {

cudaError_t claim_slots(const ClaimArgs& args, int n_tokens, cudaStream_t stream);
cudaError_t find_own_steps(const FindStepsArgs& args, int n_tokens, cudaStream_t stream);
cudaError_t store_rows(const StoreArgs& args, int n_tokens, cudaStream_t stream);
cudaError_t move_rows(const MoveArgs& args, int n_rows, cudaStream_t stream);
// n_rows: a multiple of 32
cudaError_t store_blocks(const BlockArgs& args, int n_rows, cudaStream_t stream);

// Attention and, where the sequence is split or V is latent, the combination of the parts.
cudaError_t attend(const AttnArgs& args, cudaStream_t stream);

// Latents beside full rows, which leave their parts (attend with Leaves::parts): one softmax over both. What needs no such part yet, on any
// stream; then the rest, behind it and the parts.
cudaError_t begin_beside(const AttnArgs& latents, cudaStream_t stream);
cudaError_t end_beside(const AttnArgs& latents, const AttnArgs& full, cudaStream_t stream);

// Logits [n_head] and values [n_kv, head_dim], or null: zeros; on the device.
struct Sinks {
    const float* logits;
    const float* values;
};
// Sinks join the first part of what `args` left. fresh: nothing is there, and the sinks are all of it.
cudaError_t add_sinks(const AttnArgs& args, const Sinks& sinks, bool fresh, cudaStream_t stream);
// A problem of one part, of the queries of `of`, that has no rows: of sinks alone.
AttnArgs only_sinks(const AttnArgs& of);

// Attention in a few thread blocks, before the real one of a decode step: a layer's weights displace the kernels' instructions from the
// caches. Some work items (rehearsed_items) in rehearsed_parts.
// Behind the specialized kernel and MLA nothing merges them: that would be set up while it runs, and keep multiprocessors from the real one (8B,
// 256 channels of four heads: 276 tokens/s at depth 4096 with it, 283 without; joint latents 330 and 320 at depth 0).
AttnArgs rehearsal(const AttnArgs& args);

// The current device, with what this build has for it.
cudaError_t describe_device(Device& device);

// A plain copy by a kernel: the ceiling that the others are measured against. bytes: a multiple of 16.
cudaError_t copy_bytes(void* dst, const void* src, size_t bytes, cudaStream_t stream);

}  // namespace lkv::cuda
