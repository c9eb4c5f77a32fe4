// Which device has which layers.
#include <functional>
#include <vector>

#include "base/error.h"
#include "check.h"
#include "devices/layer_runs.h"

namespace {

using lkv::GpuOptions;
using lkv::SplitMode;

// Where each layer is: of `free` bytes on each GPU; c: the CPU, else the GPU's number.
std::string place(int n_layer, const GpuOptions& asked, const std::vector<size_t>& free) {
    std::string places;
    const auto n_gpus = static_cast<int>(free.size());
    for (const lkv::LayerRun& run :
         lkv::place_layers(n_layer, asked, n_gpus, [&](int gpu) { return free[static_cast<size_t>(gpu)]; })) {
        CHECK(static_cast<int>(places.size()) == run.first_layer);
        CHECK(run.first_layer < run.end_layer);
        places.append(static_cast<size_t>(run.end_layer - run.first_layer),
                      run.on_gpu() ? static_cast<char>('0' + run.gpu) : 'c');
    }
    return places;
}

std::string refusal(const GpuOptions& asked, const std::vector<size_t>& free) {
    try {
        return place(8, asked, free);
    } catch (const lkv::Error& e) {
        return e.what();
    }
}

void refused(const GpuOptions& asked, const std::vector<size_t>& free, const std::string& with) {
    const std::string said = refusal(asked, free);
    CHECK_MSG(said.starts_with(with), said);
}

}  // namespace

int main() {
    CHECK(place(8, {0, {}}, {5, 5}) == "cccccccc");
    CHECK(place(8, {99, {}}, {}) == "cccccccc");
    CHECK(place(8, {99, {}}, {5}) == "00000000");
    CHECK(place(8, {-1, {}}, {5, 5}) == "00001111");
    CHECK(place(8, {5, {}}, {5}) == "ccc00000");
    CHECK(place(8, {99, {}}, {10, 30}) == "00111111");  // by free memory
    CHECK(place(8, {99, {}}, {0, 30}) == "11111111");
    CHECK(place(8, {99, {3, 1}}, {1, 1}) == "00000011");
    CHECK(place(8, {99, {1, 0}}, {1, 1}) == "00000000");
    CHECK(place(8, {99, {0, 1}}, {1, 1}) == "11111111");
    CHECK(place(8, {99, {1}}, {1, 1}) == "00000000");  // the second has no share
    CHECK(place(8, {4, {1, 1}}, {1, 1}) == "cccc0011");
    CHECK(place(8, {99, {1, 1, 1}}, {1, 1, 1}) == "00011122");
    CHECK(place(2, {99, {1, 1, 1}}, {1, 1, 1}) == "01");  // more GPUs than layers
    CHECK(place(8, {99, {1, 0, 1}}, {1, 1, 1}) == "00002222");
    CHECK(place(8, {99, {}, 1, SplitMode::none}, {1, 1}) == "11111111");
    CHECK(place(8, {3, {}, 0, SplitMode::none}, {1, 1}) == "ccccc000");
    CHECK(lkv::runs_text(lkv::place_layers(8, {4, {3, 1}}, 2, {})) ==
          "layers 0 to 3 on the CPU, 4 to 6 on GPU 0, 7 to 7 on GPU 1");
    refused({99, {1, 1}}, {5}, "[tensor_split] expected at most 1 shares, one for each GPU; got 2");
    refused({99, {1, -1}}, {5, 5}, "[tensor_split] expected shares of 0 or more; got -1");
    refused({99, {0, 0}}, {5, 5}, "[tensor_split] expected a share above 0; got none");
    refused({0, {1, 1}}, {5, 5}, "[tensor_split] expected layers on a GPU beside it, -ngl / n_gpu_layers; got none");
    refused({99, {1, 1}, 0, SplitMode::none}, {5, 5}, "[tensor_split] expected split mode layer beside it; got none");
    refused({99, {}, 1}, {5, 5}, "[main_gpu] expected split mode none beside it");
    refused({99, {}, 2, SplitMode::none}, {5, 5}, "[main_gpu] expected one of 2 GPUs, counted from 0; got 2");
    refused({99, {}, -1, SplitMode::none}, {5, 5}, "[main_gpu] expected one of 2 GPUs, counted from 0; got -1");
    refused({99, {}}, {0, 0}, "[gpu] expected a GPU with free memory; got none");
    CHECK(lkv::parse_split_mode("none") == SplitMode::none);
    return lkv::test::report("layer_runs");
}
