#include <cmath>
#include <string>

#include "check.h"
#include "cuda/session/calls.h"
#include "cuda/session/families.h"

namespace lkv::test {

namespace {

constexpr int n_kept = 512;

// A session that counts what it reads by choice.
class Reader : public Talk {
public:
    using Talk::Talk;

    // Slots, from here on.
    uint64_t read() {
        const uint64_t before = read_;
        read_ = session.rows_read();
        return read_ - before;
    }

private:
    uint64_t read_ = 0;
};

struct Asked {
    const Shape& shape;
    lkv::SessionOptions options;
    std::string name;
};

lkv::SessionOptions with_all(const Asked& of) {
    lkv::SessionOptions options = of.options;
    options.kv_read = 0;
    return options;
}

// Up to as many compressed tokens as may be read nothing is chosen, nor paid; behind it every layer reads as many of them as it was told.
void counts(const Asked& of, const File& file) {
    Reader few(file, of.options);
    Reader all(file, with_all(of));
    const int exact = few.session.cache().options().window(of.options.n_ctx);
    few.run(400);
    all.run(400);
    CHECK_MSG(few.run(1) == all.run(1), of.name + ": another result below the room");
    CHECK(few.read() == 0);
    few.run(n_kept + exact + 200 - 400);
    CHECK_MSG(few.read() == 0, of.name + ": a prompt chooses");
    all.run(n_kept + exact + 200 - 400);
    const auto layers = static_cast<uint64_t>(of.shape.n_layer);
    for (int i = 0; i < 3; i++) {
        const double error = relative_error(few.run(1), all.run(1));
        CHECK_MSG(error > 1e-7 && error < 1.0, of.name + ": from all rows, " + std::to_string(error));
        CHECK_MSG(few.read() == layers * n_kept, of.name + ": another number of rows");
    }
    few.run(5);
    CHECK_MSG(few.read() == layers * 5 * n_kept, of.name + ": five tokens at once");
    CHECK(all.session.rows_read() == 0);
}

// Sequences that are short read all that is theirs, whatever others hold.
void short_sequences(const Asked& of, const File& file) {
    Reader few(file, of.options);
    Reader all(file, with_all(of));
    for (Reader* const each : {&few, &all}) {
        for (const int s : {0, 1, 2}) each->run(300, {s});
    }
    for (int i = 0; i < 2; i++) {
        const double error = relative_error(few.run(3, {0, 1, 2}), all.run(3, {0, 1, 2}));
        CHECK_MSG(error < 1e-3, of.name + ": three sequences, relative error " + std::to_string(error));
        CHECK(few.read() > 0);
    }
}

// What was removed is as if it had never been there, and a state brings rows whose means are computed again.
void goes_on(const Asked& of, const File& file) {
    Reader talk(file, of.options);
    talk.run(n_kept + 300);
    for (int i = 0; i < 3; i++) talk.run(1);
    const std::vector<uint8_t> state = talk.session.state();
    const std::vector<float> want = talk.run(1);
    talk.run(70);
    CHECK(talk.session.cache().remove(0, {talk.length[0] - 71}));
    talk.length[0] -= 71;
    const std::vector<float> again = talk.run(1);
    Reader restored(file, of.options);
    restored.session.set_state(state);
    restored.length[0] = talk.length[0] - 1;
    const double error = relative_error(restored.run(1), want);
    CHECK_MSG(error < 1e-4, of.name + ": from a state, relative error " + std::to_string(error));
    CHECK(restored.read() == static_cast<uint64_t>(of.shape.n_layer) * n_kept);
    if (of.options.recent == 0) {  // else tokens that were pushed out of the exact window stay compressed
        const double after = relative_error(again, want);
        CHECK_MSG(after < 1e-4, of.name + ": behind a removed tail, relative error " + std::to_string(after));
    }
}

std::string refusal(const File& file, const lkv::SessionOptions& options, int n_gpu_layers = 99) {
    try {
        lkv::Session session(open(file, on_gpu(n_gpu_layers)), options);
    } catch (const std::exception& e) {
        return e.what();
    }
    return "";
}

void refusals(const Asked& of, const File& file) {
    const auto refused = [&](lkv::SessionOptions options, int n_gpu_layers = 99) {
        const std::string said = refusal(file, options, n_gpu_layers);
        CHECK_MSG(said.starts_with("[kv_read] expected ") && said.find('\n') == std::string::npos,
                  of.name + ": said '" + said + "'");
    };
    refused(of.options, 0);
    lkv::SessionOptions asked = of.options;
    asked.kv_read = 100;
    refused(asked);
    asked.kv_read = -1;
    refused(asked);
    asked = of.options;
    asked.evict = "h2o";
    asked.keep_tokens = "200";
    refused(asked);
}

}  // namespace

int choices(Arguments) {
    const auto options = [](int window, const char* kv = "") {
        lkv::SessionOptions options;
        options.n_ctx = 1536;
        options.n_seq_max = 4;
        options.n_threads = 1;
        options.n_ubatch = 512;
        options.sink = options.recent = window;
        options.fixed_window = window > 0;
        options.kv = kv;
        options.kv_read = n_kept;
        return options;
    };
    const Asked subjects[] = {
        {shapes.back(), options(20), "encoded latents"},
        {shapes[50], options(16), "encoded latents, wide heads"},
        {shapes[8], options(0, "q4"), "latents without windows"},
    };
    for (const Asked& of : subjects) {
        const File file(of.shape, 1);
        counts(of, file);
        short_sequences(of, file);
        goes_on(of, file);
        refusals(of, file);
    }
    for (const size_t other : {size_t{1}, size_t{7}, size_t{51}}) {
        const File file(shapes[other], 1);
        const std::string said = refusal(file, options(0));
        CHECK_MSG(said.starts_with("[kv_read] expected latents of K"),
                  "rows that cannot be chosen from: said '" + said + "'");
    }
    return report("gpu_choices");
}

}  // namespace lkv::test
