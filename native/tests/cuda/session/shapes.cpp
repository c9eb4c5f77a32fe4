#include "cuda/session/shapes.h"

#include <algorithm>
#include <iterator>

namespace lkv::test {

namespace {

constexpr Shape all[] = {
    {"rotated", "latent", 128, 2, 256, 4, Shape::identity},
    {"rebuild", "latent", 128, 2, 256, 4, Shape::identity},
    {"rotated", "latent", 64, 2, 96, 6, Shape::random},
    {"rebuild", "latent", 128, 2, 128, 4, Shape::random},
    {"rebuild", "latent", 64, 1, 48, 3, Shape::random},
    {"rotated", "full", 64, 2, 64, 4, Shape::random},
    {"full", "latent", 64, 1, 32, 2, Shape::random},
    {"full", "full", 64, 1, 64, 1},
    {"rotated", "latent", 128, 2, 256, 4},
    {"rotated", "latent", 64, 1, 64, 2},
    {"rebuild", "latent", 128, 2, 128, 4},
    {"rebuild", "full", 64, 1, 64, 4},
    {"full", "latent", 128, 2, 192, 6},
    {"rotated", "latent", 64, 2, 128, 8},
    {"rotated", "latent", 64, 2, 96, 6, Shape::random, true},
    {"rebuild", "latent", 128, 2, 128, 4, Shape::random, true},
    {"rebuild", "latent", 64, 1, 64, 4, Shape::no, true},
    {"rotated", "latent", 256, 1, 64, 4, Shape::random, true},
    {"rebuild", "latent", 256, 1, 128, 4, Shape::random, true},
    {"full", "full", 256, 1, 256, 1, Shape::no, true},
    {"rotated", "latent", 64, 2, 96, 6, Shape::random, false, 3},
    {"rebuild", "full", 64, 1, 64, 4, Shape::no, true, 2},
    {"rotated", "latent", 64, 2, 96, 6, Shape::random, false, 0, true},
    {"rebuild", "latent", 128, 2, 128, 4, Shape::random, true, 0, true},
    {"rebuild", "full", 64, 1, 64, 4, Shape::no, false, 0, true},
    {"full", "full", 64, 1, 64, 1, Shape::no, true, 0, true},
    {"rotated", "latent", 256, 1, 64, 4, Shape::random, true, 0, false, 2.0F},
    {"rebuild", "latent", 64, 1, 48, 3, Shape::random, true, 0, true, 2.0F},
    {"full", "latent", 128, 2, 192, 6, Shape::no, false, 0, true},
    {"rotated", "latent", 128, 2, 256, 4, Shape::no, false, 0, true},
    {"rebuild", "latent", 128, 2, 128, 4, Shape::random, true, 0, false, 0.0F, true},
    {"rotated", "latent", 64, 2, 96, 6, Shape::random, true, 0, false, 0.0F, true},
    {"rebuild", "latent", 128, 2, 256, 4, Shape::identity, true, 0, false, 0.0F, true},
    {"full", "full", 64, 1, 64, 1, Shape::no, true, 0, false, 0.0F, true},
    {"rotated", "latent", 128, 2, 256, 4, Shape::identity, false, 0, false, 0.0F, false, 4, true},
    {"rebuild", "latent", 64, 1, 48, 3, Shape::random, false, 0, false, 0.0F, false, 4, true},
    {"full", "full", 256, 1, 256, 1, Shape::no, false, 0, false, 0.0F, false, 4, true},
    {"rotated", "latent", 256, 2, 96, 6, Shape::random, true, 0, false, 0.0F, false, 2, false, true},
    {"rebuild", "latent", 256, 1, 64, 4, Shape::random, true, 0, false, 0.0F, false, 2, false, true},
    {"full", "full", 256, 1, 256, 1, Shape::no, true, 0, false, 0.0F, false, 2, false, true},
    {"rebuild", "latent", 256, 1, 64, 4, Shape::random, true, 0, false, 0.0F, false, 2, false, true, true},
    {"rotated", "latent", 64, 2, 96, 6, Shape::random, true, 0, false, 2.0F, false, 2, false, true, true},
    {"rebuild", "latent", 64, 2, 96, 6, Shape::random, true, 0, true, 0.0F, false, 2, false, true, true},
    {"rotated", "latent", 64, 2, 96, 6, Shape::random, false, 0, false, 0.0F, false, 2, false, false, false, true},
    {"rebuild", "latent", 128, 2, 128, 4, Shape::random, true, 0, false, 0.0F, false, 2, false, false, false, true},
    {"full", "full", 64, 1, 64, 1, Shape::no, true, 0, false, 0.0F, false, 2, false, false, false, true},
    {"full", "full", 64, 1, 64, 1, Shape::no, true, 0, false, 0.0F, false, 4, false, false, false, false, true},
    {"full", "full", 256, 1, 256, 1, Shape::no, false, 0, false, 0.0F, false, 4, false, false, false, false, true},
    {"rotated", "latent", 64, 2, 96, 6, Shape::random, true, 0, false, 0.0F, false, 4, false, false, false, false,
     true},
    {"rebuild", "latent", 128, 2, 128, 4, Shape::random, true, 0, false, 0.0F, false, 4, false, false, false, false,
     true},
    {"rotated", "latent", 256, 2, 384, 4, Shape::random},
    {.k_path = "value", .v_path = "full", .head_dim = 160, .group = 1, .rank = 160, .n_segments = 1, .turned = 32},
    {.k_path = "value", .v_path = "latent", .head_dim = 160, .group = 1, .rank = 128, .n_segments = 4, .turned = 32},
    {.k_path = "value", .v_path = "latent", .head_dim = 112, .group = 1, .rank = 112, .n_segments = 3, .turned = 16},
    {.k_path = "rotated",
     .v_path = "latent",
     .head_dim = 64,
     .group = 2,
     .rank = 128,
     .n_segments = 4,
     .encoded = Shape::random,
     .n_layer = 1},
};

template <class Is>
const Shape& first(const Is& is) {
    return *std::find_if(std::begin(all), std::end(all), is);
}

}  // namespace

const std::span<const Shape> shapes(all);

const Shape* first_encoded(const char* k_path) {
    return &first([k_path](const Shape& s) { return s.k_path == std::string(k_path) && s.encoded == Shape::random; });
}

const Shape& first_hybrid() {
    return first([](const Shape& s) { return s.hybrid; });
}

const Shape& first_mla() {
    return first([](const Shape& s) { return s.turned > 0; });
}

bool splits(const Shape& shape) {
    const size_t index = number_of(shape);
    return index == 2 || index == 7 || index == 27 || shape.hybrid || shape.turned > 0;
}

bool is_full(const char* path) { return std::string(path) == "full"; }

}  // namespace lkv::test
