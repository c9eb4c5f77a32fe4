// A model file of a shape, with random weights.
#pragma once

#include <filesystem>
#include <string>

#include "cuda/session/shapes.h"

namespace lkv::test {

class File {
public:
    // rounding: relative deviation of every weight, of random number `twin`
    File(const Shape& shape, unsigned seed, float rounding = 0.0F, unsigned twin = 0);
    File(const File&) = delete;
    File& operator=(const File&) = delete;
    ~File() { std::filesystem::remove(path_); }

    std::string path() const { return path_.string(); }
    File twin(float rounding, unsigned number) const { return {shape_, seed_, rounding, number}; }

private:
    Shape shape_;
    unsigned seed_;
    std::filesystem::path path_;
};

}  // namespace lkv::test
