// Copies of a GPU's recurrent states in pinned memory of the host, made while the host and the GPU go on. A prompt leaves two; of a model
// of 27B they are 150 MB each, which took a fifth of a prompt of 2048 tokens where they were read at once.
#pragma once

#include <algorithm>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/log.h"
#include "graph/recurrent/state_tensors.h"
#include "ops/cuda/gpu/device_memory.h"

namespace lkv::cuda {

class HostCopies {
public:
    // Memory of copies that will come. Pinning 150 MB takes 60 ms, in which a prompt would wait.
    void reserve(size_t n, size_t bytes) {
        spares_->most = std::max(spares_->most, n);
        try {
            while (spares_->kept.size() < n) spares_->kept.push_back({bytes, std::make_unique<PinnedMemory>(bytes)});
        } catch (const Error&) {
            log(LogLevel::warning, "[memory] expected ", (n * bytes) >> 20, " MiB of pinned memory for snapshots; got ",
                (spares_->kept.size() * bytes) >> 20, " MiB; prompts may fail");
        }
    }

    // Behind what was launched on the stream. The copy may not outlive the stream.
    std::shared_ptr<const StateCopy> copy(std::span<const StateTensors::Piece> pieces, int device,
                                          cudaStream_t stream) {
        size_t bytes = 0;
        for (const auto& [from, n] : pieces) bytes += n;
        auto made = std::make_shared<Copy>(*this, take(bytes), bytes, device, stream);
        auto* to = made->memory->as<uint8_t>();
        for (const auto& [from, n] : pieces) {
            check(cudaMemcpyAsync(to, from, n, cudaMemcpyDeviceToHost, stream), "a copy of a state");
            to += n;
        }
        return made;
    }

private:
    // Memory of copies that nobody wants any more is kept: pinning takes longer than copying.
    struct Spare {
        size_t bytes;
        std::unique_ptr<PinnedMemory> memory;
    };
    struct Spares {
        std::vector<Spare> kept;
        size_t most = 2;
    };

    struct Copy : StateCopy {
        Copy(const HostCopies& by, std::unique_ptr<PinnedMemory> in, size_t n, int on, cudaStream_t behind)
            : spares(by.spares_), memory(std::move(in)), size(n), device(on), stream(behind) {}
        ~Copy() override {
            // a copy that is still under way comes before whatever the stream copies here next
            if (spares->kept.size() < spares->most) spares->kept.push_back({size, std::move(memory)});
        }
        const uint8_t* bytes() const override {
            if (!is_there) {
                enter(device);
                check(cudaStreamSynchronize(stream), "a copy of a state");
                is_there = true;
            }
            return memory->as<uint8_t>();
        }

        std::shared_ptr<Spares> spares;
        std::unique_ptr<PinnedMemory> memory;
        size_t size;
        int device;
        cudaStream_t stream;
        mutable bool is_there = false;
    };

    std::unique_ptr<PinnedMemory> take(size_t bytes) {
        while (!spares_->kept.empty()) {
            Spare last = std::move(spares_->kept.back());
            spares_->kept.pop_back();
            if (last.bytes == bytes) return std::move(last.memory);
        }
        return std::make_unique<PinnedMemory>(bytes);
    }

    std::shared_ptr<Spares> spares_ = std::make_shared<Spares>();
};

}  // namespace lkv::cuda
