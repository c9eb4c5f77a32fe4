#include "runtime/states.h"

#include <algorithm>

#include "base/error.h"
#include "base/log.h"
#include "cache/state/writer.h"
#include "graph/constants.h"

namespace lkv {
namespace {

// What a state lost on its way here. Who takes finer rows alone says so himself.
std::string told(std::string lost, Accept accept) {
    if (accept == Accept::any && !lost.empty()) {
        log(LogLevel::warning, "[state] expected the rows of this session; got others, coded anew: ", lost);
    }
    return lost;
}

}  // namespace

// A state belongs to weights, whatever file they are in. It also says which full rows are rotated: the same layout, other numbers.
std::vector<uint8_t> States::with_signature(std::vector<uint8_t> rows) const {
    const uint64_t print = fingerprint(rotated_);
    const auto* p = reinterpret_cast<const uint8_t*>(&print);
    rows.insert(rows.begin(), p, p + sizeof print);
    return rows;
}

// The rows of a state, and on which sides full ones are rotated otherwise than here.
std::pair<std::span<const uint8_t>, RowRotation> States::without_signature(std::span<const uint8_t> state) const {
    uint64_t print = 0;
    if (state.size() < sizeof print) {
        fail("state", "expected at least ", sizeof print, " bytes; got ", state.size());
    }
    std::copy_n(state.begin(), sizeof print, reinterpret_cast<uint8_t*>(&print));
    const HParams& h = model_.hparams();
    for (unsigned other = 0; other < 4; other++) {
        if (print == fingerprint(other)) {
            return {state.subspan(sizeof print),
                    {other ^ rotated_, {hadamard_block(h, false), hadamard_block(h, true)}}};
        }
    }
    fail("state", "expected a state of ", model_.path(), "; got one of another model");
}

std::vector<uint8_t> States::whole() const { return with_signature(StateWriter(cache_).all()); }

std::string States::set_whole(std::span<const uint8_t> state, Accept accept) {
    const auto [rows, rotation] = without_signature(state);
    return told(StateReader(cache_, accept, rotation).all(rows), accept);
}

std::vector<uint8_t> States::sequence(int seq) const {
    cache_.placement().check_seq(seq);
    return with_signature(StateWriter(cache_).sequence(seq));
}

std::vector<std::vector<uint8_t>> States::parts(int seq, std::span<const int32_t> cuts) const {
    cache_.placement().check_seq(seq);
    auto parts = StateWriter(cache_).sequence(seq, cuts);
    for (std::vector<uint8_t>& part : parts) part = with_signature(std::move(part));
    return parts;
}

std::string States::set_sequence(int seq, std::span<const std::span<const uint8_t>> parts, Accept accept) {
    cache_.placement().check_seq(seq);
    std::vector<std::span<const uint8_t>> rows;
    RowRotation rotation;
    for (const std::span<const uint8_t> part : parts) {
        const auto [of_part, rotation_of_part] = without_signature(part);
        rows.push_back(of_part);
        rotation.sides |= rotation_of_part.sides;
        std::copy_n(rotation_of_part.block, 2, rotation.block);
    }
    return told(StateReader(cache_, accept, rotation).sequence(seq, rows), accept);
}

}  // namespace lkv
