// Where the states of recurrent layers live, on one device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace lkv {

// One device's part of a state, in the host's memory.
class StateCopy {
public:
    virtual ~StateCopy() = default;
    virtual const uint8_t* bytes() const = 0;  // [StateMemory::slot_bytes()]; waits until they are there
};

class StateBytes : public StateCopy {
public:
    explicit StateBytes(size_t n) : bytes_(n) {}
    explicit StateBytes(std::span<const uint8_t> from) : bytes_(from.begin(), from.end()) {}
    const uint8_t* bytes() const override { return bytes_.data(); }
    uint8_t* data() { return bytes_.data(); }

private:
    std::vector<uint8_t> bytes_;
};

// Slots of equal size. A slot holds one sequence's state in every recurrent layer of the device.
class StateMemory {
public:
    virtual ~StateMemory() = default;
    virtual size_t slot_bytes() const = 0;
    virtual void read(int slot, uint8_t* to) const = 0;  // [slot_bytes()]
    virtual void write(int slot, const uint8_t* from) = 0;
    virtual void clear(int slot) = 0;  // the state of a sequence without tokens

    // What the slot has now, whatever is written into it later.
    virtual std::shared_ptr<const StateCopy> copy(int slot) const {
        auto made = std::make_shared<StateBytes>(slot_bytes());
        read(slot, made->data());
        return made;
    }
};

}  // namespace lkv
