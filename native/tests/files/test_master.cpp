// The tables of a master file: read as written, or refused in one line. Another plan in place of a file's.
#include "cache/spec/master.h"

#include <limits>

#include "cache/spec/cache_spec.h"
#include "files/gguf_bytes.h"
#include "files/gguf_check.h"

using namespace lkv::test;
using lkv::Format;
using lkv::GgufFile;

namespace {

constexpr int k_widths[] = {32, 32};
constexpr int v_widths[] = {64};
constexpr float not_a_number = std::numeric_limits<float>::quiet_NaN();
constexpr float infinity = std::numeric_limits<float>::infinity();

struct Tables {
    std::vector<std::string> formats = {"f16", "q4", "none"};
    uint32_t context = 32768;
    float penalty = 3;
    std::vector<float> k = {0, 1, 2, 0, 0.5, 1};
    std::vector<float> v = {0, 1, 4};
    std::vector<float> predicted = {1, 2};
    std::vector<float> kld = {1.5, 5};
    std::vector<std::string> exact_formats = {"f16", "q8"};
    std::vector<float> exact_kld = {0, 0.25};
    bool whole = true;

    Bytes bytes() const {
        GgufBytes file;
        file.strings(std::string(lkv::key::budget_formats), formats)
            .value<uint32_t>(lkv::key::budget_context, GgufType::u32, context)
            .value<float>(lkv::key::budget_drop_penalty, GgufType::f32, penalty)
            .array<float>(lkv::key::k_segment_distortions, GgufType::f32, k)
            .array<float>(lkv::key::budget_predicted, GgufType::f32, predicted)
            .array<float>(lkv::key::budget_kld, GgufType::f32, kld)
            .strings(std::string(lkv::key::budget_exact_formats), exact_formats)
            .array<float>(lkv::key::budget_exact_kld, GgufType::f32, exact_kld);
        if (whole) {
            file.array<float>(lkv::key::v_segment_distortions, GgufType::f32, v);
        }
        return file.bytes();
    }
};

void reads_what_is_there() {
    const Bytes bytes = Tables().bytes();
    const auto master = lkv::read_master(GgufFile(bytes), k_widths, v_widths);
    CHECK(master.has_value());
    CHECK((master->formats == std::vector<Format>{Format::f16, Format::q4, Format::none}));
    CHECK(master->context == 32768 && master->drop_penalty == 3.0F);
    CHECK((master->k == Tables().k && master->v == Tables().v));
    CHECK((master->predicted == Tables().predicted && master->kld == Tables().kld));
    CHECK((master->exact_formats == std::vector<Format>{Format::f16, Format::q8}));
    CHECK((master->exact_kld == Tables().exact_kld));
    const Bytes other = GgufBytes().bytes();
    CHECK(!lkv::read_master(GgufFile(other), k_widths, v_widths));
}

template <typename Edit>
void refused(const char* part, const Edit& edit) {
    Tables tables;
    edit(tables);
    const Bytes bytes = tables.bytes();
    CHECK_REFUSED(part, lkv::read_master(GgufFile(bytes), k_widths, v_widths));
}

void refusals() {
    refused("[latentkv.k.segment_distortions] expected an array of 6 entries; got 5", [](auto& t) { t.k.pop_back(); });
    refused("[latentkv.v.segment_distortions] expected an array of 3 entries; got 0", [](auto& t) { t.v.clear(); });
    refused("expected finite numbers from 0; got nan", [](auto& t) { t.k[2] = not_a_number; });
    refused("expected finite numbers from 0; got inf", [](auto& t) { t.v[0] = infinity; });
    refused("expected finite numbers from 0; got -1", [](auto& t) { t.v[1] = -1; });
    refused(
        "[latentkv.budget.formats] expected formats n8 … n1, which make rows of their own kind, or none of them; got "
        "n4 and f16",
        [](auto& t) { t.formats[1] = "n4"; });
    refused("[latentkv.budget.formats] expected known row formats", [](auto& t) { t.formats[1] = "q9"; });
    refused("each once; got 'f16'", [](auto& t) { t.formats[1] = "f16"; });
    refused("then none; got 3 formats without none", [](auto& t) { t.formats[2] = "q2"; });
    refused("then none; got 3 formats", [](auto& t) { t.formats = {"f16", "none", "q4"}; });
    refused("then none; got 1 formats", [](auto& t) { t.formats = {"none"}; });
    refused("from 1 to 268435456; got 0", [](auto& t) { t.context = 0; });
    refused("[latentkv.budget.drop_penalty] expected a finite factor from 1; got 0.5",
            [](auto& t) { t.penalty = 0.5; });
    refused("got nan", [](auto& t) { t.penalty = not_a_number; });
    refused("[latentkv.budget.kld] expected an array of 2 entries; got 1", [](auto& t) { t.kld.pop_back(); });
    refused("[latentkv.budget.predicted] expected an array of 1 entries; got 0", [](auto& t) {
        t.predicted.clear();
        t.kld.clear();
    });
    refused("from the best to the worst", [](auto& t) { t.predicted[1] = 1; });
    refused("from the best to the worst", [](auto& t) { t.kld[1] = 1; });
    refused("measured plans above 0", [](auto& t) { t.predicted[0] = 0; });
    refused("[latentkv.budget.exact_formats] expected known row formats", [](auto& t) { t.exact_formats[0] = "q9"; });
    refused("each once; got 'q8'", [](auto& t) { t.exact_formats[0] = "q8"; });
    refused("that store single tokens; got none", [](auto& t) { t.exact_formats[1] = "none"; });
    refused("that store single tokens; got c4", [](auto& t) { t.exact_formats[1] = "c4"; });
    refused("[latentkv.budget.exact_formats] expected one row format or more; got none",
            [](auto& t) { t.exact_formats.clear(); });
    refused("[latentkv.budget.exact_kld] expected an array of 2 entries; got 1",
            [](auto& t) { t.exact_kld.pop_back(); });
    refused("expected the key latentkv.v.segment_distortions beside", [](auto& t) { t.whole = false; });
    constexpr int odd[] = {32, 40};
    const Bytes bytes = Tables().bytes();
    CHECK_REFUSED("expected k segments in multiples of 16 channels for q4; got 40",
                  lkv::read_master(GgufFile(bytes), odd, v_widths));
}

void plans() {
    lkv::CacheSpec spec;
    spec.layers.resize(2);
    for (lkv::LayerCacheSpec& layer : spec.layers) {
        layer.k.segments = {{32, 16}, {48}};
    }
    const std::vector<Format> plan = {Format::q4, Format::none, Format::q2, Format::f16, Format::q8, Format::none};
    CHECK((spec.widths(&lkv::LayerCacheSpec::k) == std::vector<int>{32, 16, 48, 32, 16, 48}));
    spec.set_formats(&lkv::LayerCacheSpec::k, plan, "k_plan");
    CHECK((*spec.layers[1].k.formats == std::vector<std::vector<Format>>{{Format::f16, Format::q8}, {Format::none}}));
    CHECK_REFUSED("[k_plan] expected an array of 6 entries; got 5",
                  spec.set_formats(&lkv::LayerCacheSpec::k, std::span(plan).first(5), "k_plan"));
    const std::vector<Format> gap = {Format::none, Format::q4, Format::q2, Format::f16, Format::q8, Format::none};
    CHECK_REFUSED("[k_plan] expected only trailing segments dropped; got q4 after none",
                  spec.set_formats(&lkv::LayerCacheSpec::k, gap, "k_plan"));
    const std::vector<Format> wide = {Format::q8_0, Format::q8_0, Format::q2, Format::f16, Format::q8, Format::none};
    CHECK_REFUSED("[k_plan] expected q8_0 segments in multiples of 32 channels; got 16",
                  spec.set_formats(&lkv::LayerCacheSpec::k, wide, "k_plan"));
}

}  // namespace

int main() {
    reads_what_is_there();
    refusals();
    plans();
    return report("master");
}
