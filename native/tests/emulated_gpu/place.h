// Where to go on: fibers change from stack to stack.
#pragma once

#include <cstddef>

namespace emulated {

struct Place {
    void* words[5];
};

// Goes on at `to`; returns when somebody changes to `from`.
void change(Place& from, Place& to);
// Runs a function that does not return on a stack of its own; returns when somebody changes to `from`.
void begin(Place& from, char* stack, size_t bytes, void (*run)());

}  // namespace emulated
