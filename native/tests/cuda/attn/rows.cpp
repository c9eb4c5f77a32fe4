// Rows and blocks of tokens as they are stored and moved, byte by byte as the CPU's: ops/cuda/rows.
#include <numeric>
#include <random>

#include "cuda/attn/cases.h"

namespace lkv::test {

namespace {

struct DevicePlan {
    DeviceBuffer segments;
    int n = 0;

    explicit DevicePlan(const RowLayout& row) {
        for (int g = 0; g < row.n_groups; g++) n += row.groups[g].n_segments;
        segments = DeviceBuffer(std::vector<SegmentLayout>(row.segments, row.segments + n));
    }
};

cuda::RowTarget target(const RowLayout& row, const DevicePlan& plan, const DeviceBuffer& k, const DeviceBuffer& v) {
    const auto* segments = plan.segments.as<SegmentLayout>();
    const int64_t page = bytes_of_page(row.row_bytes);
    return {0,    k.as<uint8_t>(), v.as<uint8_t>(), segments, segments, page,
            page, row.row_bytes,   row.row_bytes,   plan.n,   plan.n};
}

// Values as caches hold them: channels of different spread, outliers, offsets, an all-zero and a constant row.
std::vector<float> rows_of_values(int n, int width, std::mt19937& random) {
    std::normal_distribution<float> normal;
    std::vector<float> x(static_cast<size_t>(n * width));
    for (int i = 0; i < n; i++) {
        for (int d = 0; d < width; d++) {
            const float spread = std::exp(1.5f * std::sin(static_cast<float>(d)));
            float v = normal(random) * spread * (d % 37 == 5 ? 20.0f : 1.0f) + (d % 64 == 3 ? 4.0f : 0.0f);
            if (i == 0) v = 0.0f;
            if (i == 1) v = -2.75f;
            if (i == 2) v *= 1e-7f;
            if (i == 3) v *= 1e5f;
            x[static_cast<size_t>(i * width + d)] = v;
        }
    }
    return x;
}

// Latents of `values`, K's and V's alike, go to slots of the only region. region: zeros.
cuda::StoreArgs store_args(const DeviceBuffer& values, const RowLayout& row, const cuda::RowTarget& to,
                           const DeviceBuffer& slot, const DeviceBuffer& region) {
    cuda::StoreArgs args{};
    args.latents = {values.as<float>(), values.as<float>(), row.width, row.width};
    args.with_k = args.with_v = 1;
    args.region = region.as<int32_t>();
    args.slot = slot.as<int32_t>();
    args.targets[0] = to;
    return args;
}

// Rows become rows of another layout, as wide, in these slots.
cuda::MoveArgs move_args(const cuda::RowTarget& from, const DeviceBuffer& from_slot, const cuda::RowTarget& to,
                         const DeviceBuffer& to_slot, const RowLayout& row) {
    cuda::MoveArgs move{};
    move.from = from;
    move.to = to;
    move.from_slot = from_slot.as<int32_t>();
    move.to_slot = to_slot.as<int32_t>();
    move.k_width = move.v_width = row.width;
    return move;
}

void rows() {
    std::mt19937 random(11);
    constexpr int n = 64;
    int64_t differing = 0;
    int64_t total = 0;
    for (const Format format : all_formats) {
        if (format_in_token_blocks(format)) continue;  // see block_rows
        const Format first = format_scaled_by_group(format) ? Format::n8 : Format::q8;
        const RowPlan plan({{{first, 64}, {format, 96}, {Format::none, 32}}, {{format, 64}}, {{format, 256}}});
        const RowLayout row = plan.view();
        const std::vector<float> x = rows_of_values(n, row.width, random);
        const auto row_bytes = static_cast<size_t>(row.row_bytes);
        std::vector<uint8_t> want(n * row_bytes, 0xee);
        for (int i = 0; i < n; i++) {
            write_row(row, &x[static_cast<size_t>(i * row.width)], &want[static_cast<size_t>(n - 1 - i) * row_bytes]);
        }
        const DevicePlan device_plan(row);
        const DeviceBuffer values(x);
        const DeviceBuffer k(n * row_bytes);
        const DeviceBuffer v(n * row_bytes);
        std::vector<int32_t> slots;
        for (int i = 0; i < n; i++) slots.push_back(n - 1 - i);
        const DeviceBuffer slot(slots);
        const DeviceBuffer region(std::vector<int32_t>(n, 0));
        const auto args = store_args(values, row, target(row, device_plan, k, v), slot, region);
        if (static_cast<int>(format) % 2 == 0) {
            cuda_check(cuda::store_rows(args, n, nullptr), "store_rows");
        } else {
            cuda::StoreArgs alone = args;
            alone.with_v = 0;
            cuda_check(cuda::store_rows(alone, n, nullptr), "store_rows of K");
            alone = args;
            alone.with_k = 0;
            cuda_check(cuda::store_rows(alone, n, nullptr), "store_rows of V");
        }
        cuda_check(cudaDeviceSynchronize(), "storing");
        for (const DeviceBuffer* side : {&k, &v}) {
            const auto got = side->download<uint8_t>();
            int64_t wrong = 0;
            for (size_t i = 0; i < want.size(); i++) {
                if (got[i] != want[i] && wrong < 3) {
                    std::printf("%s: row %zu byte %zu: %02x instead of %02x\n", format_name(format),
                                n - 1 - i / row_bytes, i % row_bytes, got[i], want[i]);
                }
                wrong += got[i] != want[i];
            }
            differing += wrong;
            total += static_cast<int64_t>(want.size());
            CHECK_MSG(wrong == 0, std::string("rows of ") + format_name(format) + ": " + std::to_string(wrong) +
                                      " bytes of " + std::to_string(want.size()) + " differ from the CPU's");
        }

        // requantized from an exact region
        const RowPlan exact({{{Format::f16, 160}, {Format::f16, 32}}, {{Format::f16, 64}}, {{Format::f16, 256}}});
        const RowLayout from = exact.view();
        std::vector<uint8_t> source(n * static_cast<size_t>(from.row_bytes));
        for (int i = 0; i < n; i++) {
            write_row(from, &x[static_cast<size_t>(i * row.width)], &source[static_cast<size_t>(i * from.row_bytes)]);
        }
        move_rows(from, source.data(), row, want.data(), n);
        const DevicePlan from_plan(from);
        const DeviceBuffer source_rows(source);
        std::vector<int32_t> same(n);
        std::iota(same.begin(), same.end(), 0);
        const DeviceBuffer index(same);
        const auto move = move_args(target(from, from_plan, source_rows, source_rows), index,
                                    target(row, device_plan, k, v), index, row);
        cuda_check(cuda::move_rows(move, n, nullptr), "move_rows");
        cuda_check(cudaDeviceSynchronize(), "moving");
        const auto moved = v.download<uint8_t>();
        CHECK_MSG(moved == want, std::string("moved rows of ") + format_name(format) + " differ from the CPU's");
    }
    std::printf("row bytes that differ from the CPU's: %lld of %lld\n", static_cast<long long>(differing),
                static_cast<long long>(total));
}

// V that is stored times a Hadamard matrix, beside K that is not.
void rotated_rows() {
    struct Heads {
        int n_kv, head_dim, hadamard;
    };
    for (const Heads& h : {Heads{8, 128, 64}, Heads{3, 96, 32}, Heads{3, 80, 16}, Heads{40, 128, 64}}) {
        constexpr int n = 3;
        const RowPlan plan = RowPlan::uniform(h.n_kv, h.head_dim, Format::f32);
        const RowLayout row = plan.view();
        std::mt19937 random(12);
        const std::vector<float> x = rows_of_values(n, row.width, random);
        const DevicePlan device_plan(row);
        const DeviceBuffer values(x);
        const DeviceBuffer k(n * static_cast<size_t>(row.row_bytes));
        const DeviceBuffer v(n * static_cast<size_t>(row.row_bytes));
        const DeviceBuffer slot(std::vector<int32_t>{0, 1, 2});
        const DeviceBuffer region(std::vector<int32_t>(n, 0));
        auto args = store_args(values, row, target(row, device_plan, k, v), slot, region);
        args.latents.v_hadamard = h.hadamard;
        cuda_check(cuda::store_rows(args, n, nullptr), "store_rows");
        cuda_check(cudaDeviceSynchronize(), "storing");
        const std::vector<double> whole(x.begin(), x.end());
        for (const DeviceBuffer* side : {&k, &v}) {
            const auto bytes = side->download<uint8_t>();
            std::vector<float> got(x.size());
            for (int i = 0; i < n; i++) {
                read_row(row, bytes.data() + static_cast<ptrdiff_t>(i) * row.row_bytes,
                         got.data() + static_cast<ptrdiff_t>(i) * row.width);
            }
            const double error = relative_error(got, side == &v ? times_hadamard(whole, h.hadamard) : whole);
            CHECK_MSG(error < 1e-6, "rows of heads of " + std::to_string(h.head_dim) + ": " + std::to_string(error));
        }
    }
}

// Rows that begin with their scales, of more segments than a thread block has warps: stored, moved from exact ones, moved as they are.
void rows_with_scales() {
    std::mt19937 random(14);
    constexpr int n = 24;
    std::vector<std::vector<SegmentSpec>> groups;
    for (int g = 0; g < 9; g++) {
        groups.push_back(
            {{Format::n8, 16}, {Format::n4, 16 * (1 + g % 3)}, {Format::n3, 16}, {Format::n2, 32}, {Format::n1, 16}});
    }
    const RowPlan plan(groups);
    for (auto& group : groups) {
        for (auto& segment : group) segment.format = Format::f16;
    }
    const RowPlan exact(groups);
    const RowLayout row = plan.view();
    const RowLayout from = exact.view();
    const auto row_bytes = static_cast<size_t>(row.row_bytes);
    const std::vector<float> x = rows_of_values(n, row.width, random);
    std::vector<uint8_t> want(n * row_bytes);
    std::vector<uint8_t> source(n * static_cast<size_t>(from.row_bytes));
    for (int i = 0; i < n; i++) {
        write_row(row, &x[static_cast<size_t>(i * row.width)], &want[static_cast<size_t>(i) * row_bytes]);
        write_row(from, &x[static_cast<size_t>(i * row.width)],
                  &source[static_cast<size_t>(i) * static_cast<size_t>(from.row_bytes)]);
    }
    const DevicePlan device_plan(row);
    const DevicePlan from_plan(from);
    const DeviceBuffer values(x);
    const DeviceBuffer k(want.size());
    const DeviceBuffer v(want.size());
    std::vector<int32_t> slots(n);
    std::iota(slots.begin(), slots.end(), 0);
    const DeviceBuffer slot(slots);
    const DeviceBuffer region(std::vector<int32_t>(n, 0));
    const auto stored = target(row, device_plan, k, v);
    const auto args = store_args(values, row, stored, slot, region);
    cuda_check(cuda::store_rows(args, n, nullptr), "store_rows");
    cuda_check(cudaDeviceSynchronize(), "storing");
    CHECK(k.download<uint8_t>() == want && v.download<uint8_t>() == want);

    const DeviceBuffer source_rows(source);
    auto move = move_args(target(from, from_plan, source_rows, source_rows), slot, stored, slot, row);
    cuda_check(cuda::move_rows(move, n, nullptr), "move_rows");
    cuda_check(cudaDeviceSynchronize(), "moving");
    move_rows(from, source.data(), row, want.data(), n);
    CHECK(k.download<uint8_t>() == want && v.download<uint8_t>() == want);

    const DeviceBuffer to(want.size());
    move = move_args(stored, slot, target(row, device_plan, to, to), slot, row);
    cuda_check(cuda::move_rows(move, n, nullptr), "move_rows of one layout");
    cuda_check(cudaDeviceSynchronize(), "moving");
    CHECK(to.download<uint8_t>() == want);
}

// K in blocks of tokens, beside segments of single rows: from an exact region, and from latents as they are made.
void block_rows() {
    std::mt19937 random(13);
    constexpr int n = 3 * token_block_slots;
    constexpr int blocks[] = {2, 0, 1};  // where they go
    std::vector<int32_t> from_slots;
    std::vector<int32_t> to_slots;
    for (int i = 0; i < n; i++) {
        from_slots.push_back(n - 1 - i);
        to_slots.push_back(blocks[i / token_block_slots] * token_block_slots + i % token_block_slots);
    }
    for (const Format format : {Format::c8, Format::c4, Format::c3, Format::c2}) {
        const RowPlan plan({{{Format::q4, 64}, {format, 96}, {Format::none, 32}}, {{format, 64}}, {{format, 272}}});
        const RowPlan exact({{{Format::f16, 160}, {Format::f16, 32}}, {{Format::f16, 64}}, {{Format::f16, 272}}});
        const RowLayout row = plan.view();
        const RowLayout from = exact.view();
        const auto width = static_cast<size_t>(row.width);
        std::vector<float> x = rows_of_values(n, row.width, random);
        std::vector<uint8_t> source(n * static_cast<size_t>(from.row_bytes));
        for (size_t i = 0; i < n; i++) write_row(from, &x[i * width], &source[i * static_cast<size_t>(from.row_bytes)]);
        std::vector<uint8_t> moved(n * static_cast<size_t>(row.row_bytes), 0xee);
        std::vector<uint8_t> written = moved;
        for (size_t b = 0; b < std::size(blocks); b++) {
            const uint8_t* rows[token_block_slots];
            for (size_t i = 0; i < token_block_slots; i++) {
                rows[i] = &source[static_cast<size_t>(from_slots[b * token_block_slots + i] * from.row_bytes)];
            }
            const auto at = static_cast<size_t>(blocks[b] * token_block_slots * row.row_bytes);
            move_token_block(from, rows, row, &moved[at]);
            write_token_block(row, &x[b * token_block_slots * width], &written[at]);
        }
        const DevicePlan to_plan(row);
        const DevicePlan from_plan(from);
        const DeviceBuffer values(x);
        const DeviceBuffer source_rows(source);
        const DeviceBuffer k(moved.size());
        const DeviceBuffer v(moved.size());
        const DeviceBuffer from_slot(from_slots);
        const DeviceBuffer to_slot(to_slots);
        const auto check = [&](const std::vector<uint8_t>& want, const char* what) {
            cuda_check(cudaDeviceSynchronize(), "blocks");
            const auto got = k.download<uint8_t>();
            size_t wrong = 0;
            for (size_t i = 0; i < want.size(); i++) wrong += got[i] != want[i] ? 1 : 0;
            CHECK_MSG(wrong == 0, std::string("blocks of ") + format_name(format) + ", " + what + ": " +
                                      std::to_string(wrong) + " bytes differ from the CPU's");
        };
        const auto move = move_args(target(from, from_plan, source_rows, source_rows), from_slot,
                                    target(row, to_plan, k, v), to_slot, row);
        cuda::BlockArgs args{};
        args.rows = source_rows.as<uint8_t>();
        args.page = bytes_of_page(from.row_bytes);
        args.row_bytes = from.row_bytes;
        args.segments = move.from.k_segments;
        args.n_segments = move.from.n_k_segments;
        args.from_slot = move.from_slot;
        args.to = move.to;
        args.to_slot = move.to_slot;
        cuda_check(cuda::move_rows(move, n, nullptr), "move_rows");
        cuda_check(cuda::store_blocks(args, n, nullptr), "store_blocks");
        check(moved, "moved");

        const DeviceBuffer region(std::vector<int32_t>(n, 0));
        auto store = store_args(values, row, args.to, to_slot, region);
        store.with_v = 0;
        args.rows = values.as<uint8_t>();
        args.row_bytes = static_cast<int64_t>(width * sizeof(float));
        args.page = bytes_of_page(args.row_bytes);
        args.segments = nullptr;
        args.from_slot = nullptr;
        cuda_check(cuda::store_rows(store, n, nullptr), "store_rows");
        cuda_check(cuda::store_blocks(args, n, nullptr), "store_blocks");
        check(written, "stored");
    }
}

// One wide segment a row, as a latent of all heads has it.
void rows_of_one_segment() {
    std::mt19937 random(12);
    constexpr int n = 40;
    for (const Format format : all_formats) {
        if (format_in_token_blocks(format)) continue;
        for (const int width : {240, 256, 272, 512, 1040, 2048, 2064}) {
            if (width % format_width_multiple(format) != 0) continue;
            const RowPlan plan({{{format, width}}});
            const RowLayout row = plan.view();
            const std::vector<float> x = rows_of_values(n, width, random);
            const auto row_bytes = static_cast<size_t>(row.row_bytes);
            std::vector<uint8_t> want(n * row_bytes);
            for (size_t i = 0; i < n; i++) {
                write_row(row, &x[i * static_cast<size_t>(width)], &want[i * row_bytes]);
            }
            const DevicePlan device_plan(row);
            const DeviceBuffer values(x);
            const DeviceBuffer k(want.size());
            const DeviceBuffer v(want.size());
            std::vector<int32_t> slots(n);
            std::iota(slots.begin(), slots.end(), 0);
            const DeviceBuffer slot(slots);
            const DeviceBuffer region(std::vector<int32_t>(n, 0));
            cuda::StoreArgs args{};
            args.latents = {values.as<float>(), values.as<float>(), width, width};
            args.with_k = args.with_v = 1;
            args.region = region.as<int32_t>();
            args.slot = slot.as<int32_t>();
            args.targets[0] = target(row, device_plan, k, v);
            cuda_check(cuda::store_rows(args, n, nullptr), "store_rows");
            cuda_check(cudaDeviceSynchronize(), "storing");
            CHECK_MSG(k.download<uint8_t>() == want && v.download<uint8_t>() == want,
                      std::string("rows of ") + std::to_string(width) + " channels of " + format_name(format) +
                          " differ from the CPU's");
        }
    }
}

}  // namespace

Cases rows_cases() {
    return {{"rows", rows},
            {"rotated_rows", rotated_rows},
            {"rows_with_scales", rows_with_scales},
            {"block_rows", block_rows},
            {"rows_of_one_segment", rows_of_one_segment}};
}

}  // namespace lkv::test
