// What a session is opened with, drawn at random.
#pragma once

#include <random>
#include <string>

#include "cuda/session/shapes.h"
#include "runtime/session.h"

namespace lkv::test {

struct Combination {
    lkv::SessionOptions options;
    std::string name;
    int prompt = 40;  // tokens of the longest call
};

Combination combination(std::mt19937& random, const Shape& shape);

}  // namespace lkv::test
