// Few of many steps: ops/cuda/choice against the estimates of its contract, in double, on the values that rows decode to.
#include <algorithm>
#include <cmath>
#include <set>

#include "cuda/attn/cases.h"
#include "ops/cuda/choice/choice.h"

namespace lkv::test {

namespace {

constexpr int steps_kept = 4;

struct Sought {
    const char* name;
    int n_kv, rep, group, rank, n_past;
    std::vector<SegmentSpec> segments;
    int n_seq = 1;
    bool permute = false;
    int always_last = 0;
    bool windows = false;  // weights of exact windows beside
    bool small = false;    // a device with 99 KB of shared memory a thread block
    int parts = 0;         // 0: as planned
    bool alike = false;    // all weights are
};

AttnShape shape_of(const Sought& of, unsigned seed) {
    AttnShape s;
    s.name = std::string("choice, ") + of.name;
    s.n_kv = of.n_kv;
    s.rep = of.rep;
    s.k_group = s.v_group = of.group;
    s.k_ranks = s.v_ranks = std::vector<int>(static_cast<size_t>(of.n_kv / of.group), of.rank);
    s.v_latent = true;
    s.k_segments = s.v_segments = of.segments;
    s.k_formats = s.v_formats = {Format::q4};
    s.uniform = true;
    s.n_seq = of.n_seq;
    s.n_past = of.n_past;
    s.permute = of.permute;
    s.seed = seed;
    return s;
}

// A row's channels of every group, as decoded.
std::vector<float> decoded(const RowLayout& k, const uint8_t* row) {
    std::vector<float> x(static_cast<size_t>(k.width));
    read_row(k, row, x.data());
    return x;
}

// What the device found, and the contract's weights of every step of every token: the largest, of any head, relative to the head's sum.
class Choosing {
public:
    explicit Choosing(const Sought& of, unsigned seed)
        : of_(of), case_(shape_of(of, seed)), device_(case_.params, limits(of), of.n_seq > 1), p_(case_.params) {
        const RegionView& region = p_.regions[0];
        n_steps_ = (region.n_slots + step_slots - 1) / step_slots;
        if (of.alike) case_.params.scale = device_.args.scale = 0.0F;
        average();
        run();
    }

    void check(const std::string& name) const {
        for (int t = 0; t < p_.n_tokens; t++) {
            const std::vector<double> weight = weights(t);
            const int n = ends_[static_cast<size_t>(t)];
            const int seen =
                static_cast<int>(std::count_if(weight.begin(), weight.end(), [](double w) { return w > -INFINITY; }));
            const int n_always = static_cast<int>(std::count(weight.begin(), weight.end(), INFINITY));
            CHECK_MSG(n == std::min(seen, std::max(steps_kept, n_always)) || (n == steps_kept && n_always > steps_kept),
                      name + ": " + std::to_string(n) + " steps of " + std::to_string(seen));
            const int32_t* const list = &steps_[static_cast<size_t>(t) * static_cast<size_t>(capacity())];
            CHECK_MSG(std::is_sorted(list, list + n) && std::adjacent_find(list, list + n) == list + n,
                      name + ": no ascending list");
            const std::set<int32_t> chosen(list, list + n);
            double least = INFINITY;
            double most = -INFINITY;
            for (int s = 0; s < n_steps_; s++) {
                const double w = weight[static_cast<size_t>(s)];
                if (chosen.contains(s)) {
                    least = std::min(least, w);
                } else {
                    most = std::max(most, w);
                }
            }
            CHECK_MSG(least > -INFINITY, name + ": a step that the token does not see");
            CHECK_MSG(least >= most - 0.02,
                      name + ": a step of weight 2^" + std::to_string(least) + " for one of 2^" + std::to_string(most));
        }
        const uint64_t want = static_cast<uint64_t>(std::accumulate(ends_.begin(), ends_.end(), 0)) * step_slots;
        CHECK_MSG(n_read_ == want, name + ": another number of slots read");
    }
    // Attention over the lists is the contract's over their slots alone.
    void check_attention(const std::string& name) {
        if (p_.n_tokens != 1 || of_.small || of_.alike) return;
        DeviceCase few(p_, device_limits(), true);
        CHECK_MSG(few.args.apart > 0, name + ": no kernel reads lists");
        few.args.own = {nullptr, few.keep(ends_), few.keep(steps_), capacity()};
        std::vector<uint64_t> seq(p_.regions[0].seq, p_.regions[0].seq + p_.regions[0].n_slots);
        const std::set<int32_t> chosen(steps_.begin(), steps_.begin() + ends_[0]);
        for (size_t i = 0; i < seq.size(); i++) {
            if (!chosen.contains(static_cast<int32_t>(i) / step_slots)) seq[i] = 0;
        }
        const std::vector<float> got = few.run();
        case_.params.regions[0].seq = seq.data();
        const double error = relative_error(got, case_.oracle());
        CHECK_MSG(error <= rounded_tolerance,
                  name + ": attention over the chosen, relative error " + std::to_string(error));
    }

private:
    static cuda::Device limits(const Sought& of) {
        cuda::Device device = device_limits();
        if (of.small) device.shared_bytes = 99 * 1024;
        return device;
    }
    int capacity() const { return n_steps_ + 3; }
    bool sees(int t, int slot) const {
        const RegionView& region = p_.regions[0];
        return (region.seq[slot] >> p_.q_seq[t] & 1) != 0 && region.pos[slot] >= 0 && region.pos[slot] <= p_.q_pos[t];
    }

    void average() {
        const RegionView& region = p_.regions[0];
        const auto row_bytes = static_cast<size_t>(region.k.row_bytes);
        const DeviceBuffer means(static_cast<size_t>(n_steps_) * row_bytes + 64);
        int n_segments = 0;
        for (int g = 0; g < region.k.n_groups; g++) n_segments += region.k.groups[g].n_segments;
        cuda::AveragedRows rows{};
        const cuda::RegionArgs& on_device = device_.args.regions[0];
        rows.rows.k_rows = const_cast<uint8_t*>(on_device.k_rows);
        rows.rows.k_page = on_device.k_page;
        rows.rows.k_row_bytes = region.k.row_bytes;
        rows.rows.k_segments =
            device_.keep(std::vector<SegmentLayout>(region.k.segments, region.k.segments + n_segments));
        rows.rows.n_k_segments = n_segments;
        std::vector<uint64_t> seq(region.seq, region.seq + region.n_slots);
        seq.resize(static_cast<size_t>(n_steps_ * step_slots), 0);
        rows.seq = device_.keep(seq);
        rows.means = means.as<uint8_t>();
        rows.width = region.k.width;
        std::vector<int32_t> steps(static_cast<size_t>(n_steps_));
        std::iota(steps.begin(), steps.end(), 0);
        // the first slot in use is to be written yet
        const int unwritten =
            static_cast<int>(std::find_if(seq.begin(), seq.end(), [](uint64_t s) { return s != 0; }) - seq.begin());
        const cuda::BatchRowsAt batch{device_.keep(std::vector<int32_t>{2, 1}),
                                      device_.keep(std::vector<int32_t>{5, unwritten}), 2, 1};
        cuda_check(cuda::average_steps(device_.keep(std::vector{rows}), 1, region.k.width, device_.keep(steps),
                                       n_steps_, batch, nullptr),
                   "means");
        cuda_check(cudaDeviceSynchronize(), "means");
        stored_ = means.download<uint8_t>();
        for (int s = 0; s < n_steps_; s++) {
            std::vector<double> sum(static_cast<size_t>(region.k.width), 0.0);
            int n = 0;
            for (int slot = s * step_slots; slot < std::min((s + 1) * step_slots, region.n_slots); slot++) {
                if (seq[static_cast<size_t>(slot)] == 0 || slot == unwritten) continue;
                n++;
                const std::vector<float> x = decoded(region.k, region.k_row(slot));
                for (size_t c = 0; c < x.size(); c++) sum[c] += double{x[c]};
            }
            std::vector<float> want(sum.size());
            for (size_t c = 0; c < sum.size(); c++) want[c] = n > 0 ? static_cast<float>(sum[c] / n) : 0.0F;
            std::vector<uint8_t> row(row_bytes);
            write_row(region.k, want.data(), row.data());
            const double error = relative_error(mean(s), decoded(region.k, row.data()));
            CHECK_MSG(n == 0 || error < 2e-2, std::string(of_.name) + ": mean of step " + std::to_string(s) +
                                                  " is off by " + std::to_string(error));
        }
        means_ = device_.keep(stored_);
    }
    std::vector<float> mean(int step) const {
        const RowLayout& k = p_.regions[0].k;
        return decoded(k, stored_.data() + static_cast<size_t>(step) * static_cast<size_t>(k.row_bytes));
    }

    void run() {
        const auto n = static_cast<size_t>(p_.n_tokens);
        const auto heads = static_cast<size_t>(p_.n_head);
        const auto steps = n * static_cast<size_t>(capacity());
        CHECK_MSG(cuda::refuses_choice(p_, limits(of_)) == nullptr, std::string(of_.name) + ": refused");
        cuda::ChoiceArgs args{};
        static_cast<cuda::Problem&>(args) = device_.args;
        args.means = means_;
        args.units = units_ = cuda::scored_units(p_);
        args.always_first = 0;
        args.always_last = of_.always_last;
        args.n_keep = steps_kept;
        args.capacity = capacity();
        args.n_parts = of_.parts != 0 ? of_.parts : cuda::parts_of_choice(args, limits(of_));
        args.estimates = device_.keep(std::vector<float>(steps * heads, NAN));
        args.sums = device_.keep(std::vector<float2>(n * cuda::most_parts * heads, float2{NAN, NAN}));
        args.weights = device_.keep(std::vector<float>(steps, NAN));
        const DeviceBuffer counted(std::vector<uint32_t>(n, 0));
        args.done = counted.as<uint32_t>();
        const DeviceBuffer ends(std::vector<int32_t>(n, -1));
        const DeviceBuffer list(std::vector<int32_t>(steps, -1));
        const DeviceBuffer read(std::vector<uint64_t>{0});
        args.ends = ends.as<int32_t>();
        args.steps = list.as<int32_t>();
        args.rows_read = read.as<uint64_t>();
        cuda::CutProblem windows = device_.args;
        windows.apart = 0;
        windows.n_split = 1;
        windows.shrinks = 0;
        std::vector<float> beside;
        for (size_t i = 0; i < n * heads; i++)
            beside.insert(beside.end(), {3.0F + static_cast<float>(i % 5) * 2.0F, 1.0F});
        windows.partial_ml = device_.keep(beside);
        if (of_.windows) windows_ = beside;
        cuda_check(cuda::score_steps(args, limits(of_), nullptr), "scores");
        cuda_check(cuda::choose_steps(args, of_.windows ? &windows : nullptr, nullptr), "a choice");
        cuda_check(cudaDeviceSynchronize(), "a choice");
        ends_ = ends.download<int32_t>();
        steps_ = list.download<int32_t>();
        n_read_ = read.download<uint64_t>()[0];
        for (const uint32_t done : counted.download<uint32_t>()) CHECK(done == 0);
    }

    std::vector<double> weights(int t) const {
        const RegionView& region = p_.regions[0];
        std::vector<double> most(static_cast<size_t>(n_steps_), -INFINITY);
        const int rep = p_.n_head / p_.n_kv;
        for (int h = 0; h < p_.n_head; h++) {
            const int g = h / rep / p_.k_group;
            const GroupLayout& group = region.k.groups[g];
            const float* const q = p_.q + (int64_t{t} * p_.n_head + h) * p_.q_width;
            const auto product = [&](const std::vector<float>& x, int from, int end) {
                double sum = 0.0;
                for (int c = from; c < std::min(end, group.kept); c++)
                    sum += double{q[c]} * double{x[static_cast<size_t>(group.column + c)]};
                return sum * double{p_.scale} / std::log(2.0);
            };
            const int lead = 32 * units_.lead;
            std::vector<double> estimate(static_cast<size_t>(n_steps_), -INFINITY);
            double sum = 0.0;
            for (int s = 0; s < n_steps_; s++) {
                double of_step = 0.0;
                for (int slot = s * step_slots; slot < std::min((s + 1) * step_slots, region.n_slots); slot++) {
                    if (sees(t, slot)) of_step += std::exp2(product(decoded(region.k, region.k_row(slot)), 0, lead));
                }
                if (of_step == 0.0) continue;
                estimate[static_cast<size_t>(s)] = std::log2(of_step) + product(mean(s), lead, group.kept);
                sum += std::exp2(estimate[static_cast<size_t>(s)]);
            }
            if (!windows_.empty()) {
                const size_t at =
                    2 * (static_cast<size_t>(t) * static_cast<size_t>(p_.n_head) + static_cast<size_t>(h));
                sum += std::exp2(double{windows_[at]}) * double{windows_[at + 1]};
            }
            for (size_t s = 0; s < most.size(); s++) most[s] = std::max(most[s], estimate[s] - std::log2(sum));
        }
        for (int slot = 0; slot < region.n_slots; slot++) {
            if (sees(t, slot) && p_.q_pos[t] - region.pos[slot] < of_.always_last)
                most[static_cast<size_t>(slot / step_slots)] = INFINITY;
        }
        return most;
    }

    Sought of_;
    AttnCase case_;
    DeviceCase device_;
    const LatentAttnParams& p_;
    int n_steps_ = 0;
    cuda::ScoredUnits units_{};
    std::vector<uint8_t> stored_;
    const uint8_t* means_ = nullptr;
    std::vector<float> windows_;
    std::vector<int32_t> ends_, steps_;
    uint64_t n_read_ = 0;
};

void choice() {
    using enum Format;
    const std::vector<SegmentSpec> falling = {{q8, 32}, {q4, 64}, {q2, 96}, {q1, 64}};
    const std::vector<SegmentSpec> scaled = {{n6, 64}, {n4, 64}, {n2, 64}, {n1, 64}};
    const Sought all[] = {
        {"eight heads", 4, 2, 4, 256, 700, falling},
        {"32 heads of one group", 8, 4, 8, 256, 900, scaled},
        {"40 heads, two blocks", 4, 10, 4, 256, 500, scaled},
        {"two groups, any order", 4, 3, 2, 256, 600, scaled, 1, true},
        {"fewer steps than are kept", 2, 2, 2, 256, 90, falling},
        {"beside windows", 4, 4, 4, 256, 700, scaled, 1, false, 0, true},
        {"the latest anyway", 4, 2, 4, 256, 700, falling, 1, false, 60},
        {"three sequences", 4, 2, 4, 256, 300, falling, 3, true},
        {"little shared memory", 4, 4, 4, 256, 700, falling, 1, false, 0, false, true},
        {"in one part, which takes two passes", 4, 2, 4, 256, 1200, scaled, 1, false, 0, false, false, 1},
        {"in many parts", 4, 2, 4, 256, 700, falling, 1, false, 0, false, false, 40},
        {"all alike", 4, 2, 4, 256, 700, falling, 1, false, 0, false, false, 0, true},
        {"no unit for the means", 4, 4, 4, 128, 700, {{q8, 32}}},
    };
    // wider than shared memory
    AttnCase wide(shape_of({"", 8, 1, 8, 1024, 40, {{q8, 1024}}}, 4099));
    cuda::Device small = device_limits();
    small.shared_bytes = 64 * 1024;
    const char* const said = cuda::refuses_choice(wide.params, small);
    CHECK(said != nullptr && std::string(said).find("too wide") != std::string::npos);
    unsigned seed = 4100;
    for (const Sought& of : all) {
        Choosing found(of, seed++);
        found.check(of.name);
        found.check_attention(of.name);
    }
}

}  // namespace

Cases choice_cases() { return {{"choice", choice}}; }

}  // namespace lkv::test
