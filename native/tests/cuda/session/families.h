// The families of tests. Each takes the arguments behind its name, and is the executable's exit status.
#pragma once

#include <span>

namespace lkv::test {

using Arguments = std::span<char* const>;

// [files]: these in place of the shapes
int roles(Arguments arguments);
int evictions(Arguments arguments);
int memory(Arguments arguments);
int choices(Arguments arguments);
int guesses(Arguments arguments);
// [largest relative error]
int across(Arguments arguments);
// [rounds: combinations of every shape] [seed] [share of what formats cost] [first shape, from 0] [shapes]
int sessions(Arguments arguments);

}  // namespace lkv::test
