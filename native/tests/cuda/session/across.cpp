#include <cstdlib>
#include <string>

#include "base/error.h"
#include "check.h"
#include "cuda/session/calls.h"
#include "cuda/session/families.h"

namespace lkv::test {

namespace {

// How much logits may differ between two GPUs and one. cuBLAS may choose otherwise for other addresses, and multiplies in TF32; the emulated GPU does not.
double most_across = 1e-3;

// Layers on two GPUs, or all on the second one, say what they say on the first one, behind a layer on the CPU, too.
class Across {
public:
    // steps: single tokens at the end, which are a recorded graph's
    Across(Shape shape, unsigned seed, int steps)
        : shape_([&] {
              shape.n_layer = 3;
              return shape;
          }()),
          file_(shape_, seed),
          steps_(steps) {
        options_.n_ctx = 1024;
        options_.n_seq_max = 2;
        options_.n_threads = 1;
        options_.kv = "q4";
    }
    void two_and_one() const { same(on_gpu(99), {99, {2, 1}}, 40, "two layers and one"); }
    void all_on_second() const { same(on_gpu(99), on_gpu(99, 1), 40, "all on the second GPU"); }
    void behind_the_cpu() const { same(on_gpu(2), {2, {1, 1}}, 40, "the CPU and two GPUs"); }
    void long_ubatches() {
        options_.fixed_window = true;  // of two devices the one with less room says how many tokens are exact
        same(on_gpu(99), {99, {1, 2}}, 129, "long ubatches, one layer and two");
        options_.fixed_window = false;
    }
    void lazily() {
        options_.prefill = "lazy";
        same(on_gpu(99), on_gpu(99, 1), 40, "lazily, all on the second GPU");
        refused({99, {1, 1}},
                "[prefill] expected all layers on one device for lazy; got layers 0 to 1 on GPU 0, 2 to 2");
        refused(on_gpu(2),
                "[prefill] expected all layers on one device for lazy; got layers 0 to 0 on the CPU, 1 to 2");
        options_.prefill = "";
    }
    void evicting() {
        options_.evict = "h2o";
        options_.keep_tokens = "256";
        refused({99, {1, 1}}, "[evict] expected all layers on one device; got layers 0 to 1 on GPU 0, 2 to 2 on GPU 1");
        options_.evict = options_.keep_tokens = "";
    }

private:
    void same(const lkv::GpuOptions& one, const lkv::GpuOptions& other, int prompt, const char* what) const {
        const std::vector<float> want = decode(file_, options_, one, prompt, steps_);
        const double error = relative_error(decode(file_, options_, other, prompt, steps_), want);
        CHECK_MSG(error <= most_across, std::string(shape_.k_path) + "/" + shape_.v_path + ", " + what +
                                            ": relative error " + std::to_string(error));
    }
    void refused(const lkv::GpuOptions& gpu, const std::string& with) const {
        std::string said = "nothing";
        try {
            const lkv::Session session(open(file_, gpu), options_);
        } catch (const lkv::Error& e) {
            said = e.what();
        }
        CHECK_MSG(said.starts_with(with), said);
    }

    Shape shape_;
    File file_;
    int steps_;
    lkv::SessionOptions options_;
};

}  // namespace

int across(Arguments arguments) {
    if (!arguments.empty()) most_across = std::atof(arguments[0]);
    const bool thorough = most_across > 0.0;  // every shape in every place, where a GPU computes
    if (n_gpus() < 2) {
        std::printf("gpu_across: skipped: one GPU\n");
        return 77;
    }
    const int steps = thorough ? 12 : 2;
    Across encoded(shapes[2], 1, steps);
    Across full(shapes[7], 2, steps);
    Across ring(shapes[27], 3, steps);
    Across hybrid(first_hybrid(), 4, steps);
    Across mla(first_mla(), 5, steps);
    mla.two_and_one();
    ring.two_and_one();
    ring.evicting();
    full.behind_the_cpu();
    full.lazily();
    encoded.long_ubatches();
    hybrid.two_and_one();
    hybrid.behind_the_cpu();
    for (Across* of : {&encoded, &full, &ring, &hybrid, &mla}) {
        if (!thorough) break;
        of->two_and_one();
        of->all_on_second();
        of->behind_the_cpu();
        of->long_ubatches();
    }
    return report("gpu_across");
}

}  // namespace lkv::test
