#include "runtime/cuda/device_storage.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "ops/cuda/rows/ranges.h"

namespace lkv::cuda {

namespace {

constexpr size_t few_ranges = 64;
constexpr size_t stage_bytes = size_t{16} << 20;
constexpr size_t most_moved = size_t{64} << 10;  // by one thread block

// Bytes on the GPU and the host's of the same size, in which ranges lie one after the other.
class Stage {
public:
    Stage(uint8_t* storage, cudaStream_t stream, std::span<const ByteRange> ranges)
        : storage_(storage), stream_(stream), device_(stage_bytes), host_(stage_bytes) {
        Piece piece;
        for (ByteRange left : ranges) {
            while (left.begin < left.end) {
                if (piece.bytes == stage_bytes) {
                    pieces_.push_back(std::move(piece));
                    piece = {};
                }
                const size_t n = std::min({left.bytes(), most_moved, stage_bytes - piece.bytes});
                piece.moves.push_back({left.begin, piece.bytes, n});
                piece.bytes += n;
                left.begin += n;
            }
        }
        pieces_.push_back(std::move(piece));
    }

    void read(uint8_t* to) {
        for (const Piece& piece : pieces_) {
            const DeviceMemory moves = DeviceMemory::of(piece.moves);
            move(moves, piece, storage_, device_.as<uint8_t>());
            check(cudaMemcpyAsync(host_.data(), device_.as<void>(), piece.bytes, cudaMemcpyDeviceToHost, stream_),
                  "a copy of the cache");
            check(cudaStreamSynchronize(stream_), "a copy of the cache");
            for (const ByteMove& of : piece.moves) std::memcpy(to + of.from, host_.data() + of.to, of.bytes);
        }
    }

    void write(const uint8_t* from) {
        for (Piece& piece : pieces_) {
            for (ByteMove& of : piece.moves) {
                std::memcpy(host_.data() + of.to, from + of.from, of.bytes);
                std::swap(of.from, of.to);
            }
            const DeviceMemory moves = DeviceMemory::of(piece.moves);
            check(cudaMemcpyAsync(device_.as<void>(), host_.data(), piece.bytes, cudaMemcpyHostToDevice, stream_),
                  "a copy to the cache");
            move(moves, piece, device_.as<uint8_t>(), storage_);
            check(cudaStreamSynchronize(stream_), "a copy to the cache");
        }
    }

private:
    struct Piece {
        std::vector<ByteMove> moves;  // from the storage to the stage
        size_t bytes = 0;
    };

    void move(const DeviceMemory& moves, const Piece& piece, const uint8_t* from, uint8_t* to) const {
        check(move_bytes(moves.as<ByteMove>(), static_cast<int>(piece.moves.size()), from, to, stream_),
              "a copy of the cache's rows");
    }

    uint8_t* storage_;
    cudaStream_t stream_;
    DeviceMemory device_;
    std::vector<uint8_t> host_;
    std::vector<Piece> pieces_;
};

}  // namespace

DeviceStorage::DeviceStorage(size_t bytes, int device, cudaStream_t stream)
    : device_(device), memory_(bytes), stream_(stream) {
    check(cudaMemset(memory_.as<void>(), 0, bytes), "clearing the cache");
    settle("clearing the cache");
}

void DeviceStorage::read(std::span<const ByteRange> ranges, uint8_t* to) const {
    enter(device_);
    check(cudaStreamSynchronize(stream_), "the stream");
    if (ranges.size() > few_ranges) return Stage(at(0), stream_, ranges).read(to);
    for (const ByteRange& of : ranges) {
        check(cudaMemcpyAsync(to + of.begin, at(of.begin), of.bytes(), cudaMemcpyDeviceToHost, stream_),
              "a copy of the cache");
    }
    check(cudaStreamSynchronize(stream_), "a copy of the cache");
}

void DeviceStorage::write(std::span<const ByteRange> ranges, const uint8_t* from) {
    enter(device_);
    if (ranges.size() > few_ranges) return Stage(at(0), stream_, ranges).write(from);
    for (const ByteRange& of : ranges) {
        check(cudaMemcpyAsync(at(of.begin), from + of.begin, of.bytes(), cudaMemcpyHostToDevice, stream_),
              "a copy to the cache");
    }
    check(cudaStreamSynchronize(stream_), "a copy to the cache");
}

}  // namespace lkv::cuda
