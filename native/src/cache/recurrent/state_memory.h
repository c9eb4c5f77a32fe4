// Where the states of recurrent layers live, on one device.
#pragma once

#include <cstddef>
#include <cstdint>

namespace lkv {

// Slots of equal size. A slot holds one sequence's state in every recurrent layer of the device.
class StateMemory {
public:
    virtual ~StateMemory() = default;
    virtual size_t slot_bytes() const = 0;
    virtual void read(int slot, uint8_t* to) const = 0;  // [slot_bytes()]
    virtual void write(int slot, const uint8_t* from) = 0;
    virtual void clear(int slot) = 0;  // the state of a sequence without tokens
};

}  // namespace lkv
