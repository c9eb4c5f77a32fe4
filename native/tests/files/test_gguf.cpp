// The GGUF reader: what it reads, what it refuses, and that no byte of a hostile file leads it astray.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>

#include "files/gguf_bytes.h"
#include "files/gguf_check.h"
#include "gguf/reader.h"

using namespace lkv::test;
using lkv::GgufFile;

namespace {

void test_reads() {
    const Bytes bytes = sample_file().bytes();
    const GgufFile file(bytes);

    CHECK(file.version() == 3);
    CHECK(file.values().size() == 18);
    CHECK(file.values()[0].key == "general.architecture");
    CHECK(file.get_string("general.architecture") == "llama");
    CHECK(file.get_u32("t.u8") == 200);
    CHECK(file.get_i32("t.i8") == -5);
    CHECK(file.get_u32("t.u16") == 60000);
    CHECK(file.get_i32("t.i16") == -300);
    CHECK(file.get_u32("t.u32") == 4000000000u);
    CHECK(file.get_i32("t.i32") == -70000);
    CHECK(file.get_u64("t.u64") == uint64_t{1} << 63);
    CHECK(file.find("t.i64")->is_negative());
    CHECK(static_cast<int64_t>(file.find("t.i64")->integer_bits()) == -(int64_t{1} << 40));
    CHECK(file.get_f32("t.f32") == 1.5f);
    CHECK(file.get_f32("t.f64") == 0.1f);
    CHECK(file.find("t.f64")->number() == 0.1);
    CHECK(file.get_bool("t.bool"));
    CHECK((file.get_u32_array("t.ranks") == std::vector<uint32_t>{16, 32, 48}));
    CHECK((file.get_i32_array("t.ranks") == std::vector<int32_t>{16, 32, 48}));
    CHECK((file.get_f32_array("t.energy") == std::vector<float>{0.5f, 0.25f}));
    CHECK((file.get_bool_array("t.flags") == std::vector<bool>{true, false, true}));
    CHECK(file.get_u32_array("t.empty").empty());
    CHECK((file.get_string_array("t.words") == std::vector<std::string_view>{"full", "", "rebuild"}));
    CHECK(!file.has("t.none") && !file.find_u32("t.none") && !file.find_string_array("t.none"));
    CHECK(file.find_u32("t.u8") == 200u);

    const auto& a = file.tensor("blk.0.attn_k_a.weight");
    CHECK(file.tensors().size() == 4 && &a == &file.tensors()[1]);
    CHECK(a.type == GGML_TYPE_Q8_0 && a.n_dims == 3 && a.ne[0] == 64 && a.ne[1] == 2 && a.ne[2] == 2 && a.ne[3] == 1);
    CHECK(a.offset == 384 && a.bytes == 4 * 2 * 34);
    CHECK(file.tensors().back().data + file.tensors().back().bytes == bytes.data() + bytes.size());
    CHECK(file.find_tensor("nope") == nullptr);

    Bytes entries;  // raw entries, one after another, are the stored bytes
    for (const auto& value : file.values()) entries.insert(entries.end(), value.raw.begin(), value.raw.end());
    CHECK(entries == sample_file().values);

    GgufBytes old = sample_file();
    old.version = 2;
    CHECK(GgufFile(old.bytes()).version() == 2);
    CHECK(GgufFile(GgufBytes{}.bytes()).values().empty());
}

void test_getters_refuse() {
    const Bytes bytes = sample_file().bytes();
    const GgufFile file(bytes, "x.gguf");
    CHECK_REFUSED("[gguf] expected the key 't.none'; got none of that name among 18 in 'x.gguf'",
                  file.get_u32("t.none"));
    CHECK_REFUSED("0 to 2^32 - 1 in 't.i8'; got -5", file.get_u32("t.i8"));
    CHECK_REFUSED("got 9223372036854775808", file.get_u32("t.u64"));
    CHECK_REFUSED("got 4000000000", file.get_i32("t.u32"));
    CHECK_REFUSED("got -1099511627776", file.get_i32("t.i64"));
    CHECK_REFUSED("got -1099511627776", file.get_u64("t.i64"));
    CHECK_REFUSED("expected a string", file.get_string("t.u8"));
    CHECK_REFUSED("expected a float", file.get_f32("t.u8"));
    CHECK_REFUSED("expected a boolean", file.get_bool("t.u8"));
    CHECK_REFUSED("got an array of 3", file.get_u32("t.ranks"));
    CHECK_REFUSED("expected an array", file.get_u32_array("t.u8"));
    CHECK_REFUSED("in 't.words'[0]; got a value of type string", file.get_u32_array("t.words"));
    CHECK_REFUSED("expected the tensor 'nope'", file.tensor("nope"));
}

// Messages are valid UTF-8 on one line, whatever the file says.
void test_quoted() {
    const auto quoted = [](std::string_view text) { return lkv::quoted(text); };
    CHECK(quoted("a\n\x1f\x7f") == "'a\\x0a\\x1f\\x7f'");
    CHECK(quoted("k\xff.b\x80") == "'k\\xff.b\\x80'");
    CHECK(quoted("é → \U0001f600") == "'é → \U0001f600'");
    CHECK(quoted("\xc3") == "'\\xc3'");                                      // cut short
    CHECK(quoted("\xc0\xaf\xe0\x80\xaf") == "'\\xc0\\xaf\\xe0\\x80\\xaf'");  // overlong
    CHECK(quoted("\xed\xa0\x80") == "'\\xed\\xa0\\x80'");                    // a surrogate
    CHECK(quoted("\xf4\x90\x80\x80") == "'\\xf4\\x90\\x80\\x80'");           // beyond U+10FFFF
    CHECK(lkv::quoted_path("a/\n.gguf") == "'a/\\x0a.gguf'");
    CHECK(lkv::quoted_path(std::string(80, 'a')) == "'" + std::string(80, 'a') + "'");
    CHECK(lkv::quoted_path("b" + std::string(80, 'a')) == "'…" + std::string(80, 'a') + "'");
    CHECK(lkv::quoted_path("é" + std::string(79, 'a')) == "'…" + std::string(79, 'a') + "'");  // no half of a character
    CHECK(quoted(std::string(80, 'a')) == "'" + std::string(80, 'a') + "'");
    CHECK(quoted(std::string(81, 'a')) == "'" + std::string(80, 'a') + "…'");
    CHECK(quoted(std::string(79, 'a') + "é") == "'" + std::string(79, 'a') + "…'");  // whole characters

    GgufBytes file;
    file.value<uint32_t>("k\xff", GgufType::u32, 1);
    file.value<uint32_t>("k\xff", GgufType::u32, 1);
    CHECK_REFUSED("expected every key once; got 'k\\xff' twice", GgufFile(file.bytes()));
    CHECK_REFUSED("[a\\x0a\\xff] got b\\xfe", lkv::fail("a\n\xff", "got ", "b\xfe"));
}

using Edit = std::function<void(GgufBytes&)>;

void refused(const char* part, const Edit& edit) {
    GgufBytes file = sample_file();
    edit(file);
    CHECK_REFUSED(part, GgufFile(file.bytes()));
}

void test_refusals() {
    constexpr auto f32 = static_cast<uint32_t>(GGML_TYPE_F32);
    constexpr uint64_t huge = ~uint64_t{0};
    constexpr int64_t half = int64_t{1} << 62;

    CHECK_REFUSED("begins with GGUF; got 'GGML'", GgufFile(Bytes{'G', 'G', 'M', 'L', 3, 0, 0, 0}));
    CHECK_REFUSED("expected 4 bytes of 'magic' at offset 0; got a file of 0 bytes", GgufFile(Bytes{}));
    refused("version 2 or 3, little-endian; got 1", [](auto& f) { f.version = 1; });
    refused("version 2 or 3, little-endian; got 4", [](auto& f) { f.version = 4; });
    refused("(a big-endian file?)", [](auto& f) { f.version = 3u << 24; });
    refused("entries in 'key count'", [](auto& f) { f.n_values = huge; });
    refused("entries in 'tensor count'", [](auto& f) { f.n_tensors = huge; });

    refused("every key once; got 't.u8' twice", [](auto& f) { f.template value<uint8_t>("t.u8", GgufType::u8, 1); });
    refused("expected a key of 1 to 65535", [](auto& f) { f.template value<uint8_t>("", GgufType::u8, 1); });
    refused("without NUL", [](auto& f) { f.template value<uint8_t>({"a\0b", 3}, GgufType::u8, 1); });
    refused("expected a key of 1 to", [](auto& f) { f.string(std::string(65536, 'k'), ""); });
    refused("a value type of 0 to 12", [](auto& f) { f.template value<uint8_t>("k", static_cast<GgufType>(13), 1); });
    refused("array of arrays", [](auto& f) { f.begin_array("k", GgufType::array, 1); });
    refused("entries in 'k'", [](auto& f) { f.begin_array("k", GgufType::f64, huge / 8 + 2); });  // 8 n wraps to 8
    refused("entries in 'k'", [](auto& f) { f.begin_array("k", GgufType::string, uint64_t{1} << 32); });
    refused("booleans stored as 0 or 1 in 'k'; got 2",
            [](auto& f) { f.template value<uint8_t>("k", GgufType::boolean, 2); });
    refused("0 or 1 in 'k'", [](auto& f) { f.template array<uint8_t>("k", GgufType::boolean, {1, 0, 255}); });
    refused("expected 3 parts, as split.count says, NAME-00001-of-00003.gguf and so on; got 1",
            [](auto& f) { f.template value<uint16_t>("split.count", GgufType::u16, 3); });

    for (const uint32_t bad : {0u, 1u, 4u, 24u, 33u}) {
        GgufBytes file;
        file.value("general.alignment", GgufType::u32, bad);
        CHECK_REFUSED("a power of two and at least 8; got " + std::to_string(bad), GgufFile(file.bytes()));
    }
    GgufBytes wide;
    wide.alignment = 4096;
    wide.value("general.alignment", GgufType::u32, 4096u)
        .tensor("a", {2}, GGML_TYPE_F32)
        .tensor("b", {2}, GGML_TYPE_F32);
    CHECK(GgufFile(wide.bytes()).tensor("b").offset == 4096);

    refused("every tensor once; got 'output_norm.weight'", [](auto& f) { f.info("output_norm.weight", {1}, f32, 0); });
    refused("a tensor name of 1 to 63", [](auto& f) { f.info("", {1}, f32, 0); });
    refused("a tensor name of 1 to 63", [](auto& f) { f.info(std::string(64, 'n'), {1}, f32, 0); });
    refused("without NUL", [](auto& f) { f.info({"a\0b", 3}, {1}, f32, 0); });
    refused("1 to 4 dimensions in 'x'; got 0", [](auto& f) { f.info("x", {}, f32, 0); });
    refused("1 to 4 dimensions in 'x'; got 5", [](auto& f) { f.info("x", {1, 1, 1, 1, 1}, f32, 0); });
    refused("ne[1] of 'x'", [](auto& f) { f.info("x", {1, 0}, f32, 0); });
    refused("got -1", [](auto& f) { f.info("x", {-1, 4}, f32, 0); });
    refused("ne[1] of 'x'", [](auto& f) { f.info("x", {half, 4}, f32, 0); });               // elements wrap to 0
    refused("less than 2^63 bytes for 'x'", [](auto& f) { f.info("x", {half}, f32, 0); });  // bytes wrap to 0
    refused("a ggml type known", [](auto& f) { f.info("x", {1}, GGML_TYPE_COUNT, 0); });
    refused("a ggml type known", [](auto& f) { f.info("x", {1}, 4, 0); });  // Q4_2, gone from ggml
    refused("a ggml type known", [](auto& f) { f.info("x", {1}, 0xffffffffu, 0); });
    refused("a multiple of 32 (q4_0); got 33", [](auto& f) { f.info("x", {33}, GGML_TYPE_Q4_0, 0); });
    refused("offset of 'x' to be a multiple of 32; got 8", [](auto& f) { f.info("x", {1}, f32, 8); });
    refused("to end below 2^63", [](auto& f) { f.info("x", {1}, f32, huge - 31); });
    refused("'x' ends there", [](auto& f) { f.info("x", {1}, f32, 1 << 20); });
    refused("'x' ends there", [](auto& f) { f.info("x", {1 << 20}, f32, 0); });
    refused("do not overlap", [](auto& f) { f.info("x", {1}, f32, 0); });
    refused("do not overlap", [](auto& f) { f.info("x", {1}, f32, 32); });
}

void test_files() {
    namespace fs = std::filesystem;
    const fs::path path = fs::temp_directory_path() / ("lkv_test_gguf_" + std::to_string(::getpid()) + ".gguf");
    const auto write = [&](const Bytes& bytes) {
        std::ofstream(path, std::ios::binary)
            .write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
    };
    write(sample_file().bytes());
    const GgufFile mapped = GgufFile::open(path.string(), true);
    GgufFile read = GgufFile::open(path.string(), false);
    CHECK(mapped.mapped() && !read.mapped());
    CHECK(mapped.size_bytes() == fs::file_size(path));
    const GgufFile moved = std::move(read);  // views stay valid
    CHECK(touch(mapped) == touch(moved));
    CHECK(reinterpret_cast<uintptr_t>(moved.tensors()[0].data) % 32 == 0);

    write({});
    CHECK_REFUSED("got a file of 0 bytes", GgufFile::open(path.string()));
    fs::remove(path);
    CHECK_REFUSED("No such file or directory", GgufFile::open(path.string()));
    CHECK_REFUSED("is a directory", GgufFile::open(fs::temp_directory_path().string()));
}

// One tensor a part, in three of them; `no` and `count` are what the part says of itself.
Bytes part_bytes(const std::string& tensor, float number, int no, int count, int total = 3) {
    GgufBytes file;
    if (no == 0) file.string("general.name", "parts").value("split.tensors.count", GgufType::i32, total);
    file.value("split.no", GgufType::u16, static_cast<uint16_t>(no));
    file.value("split.count", GgufType::u16, static_cast<uint16_t>(count));
    file.tensor(tensor, {2}, GGML_TYPE_F32);
    std::memcpy(file.data.data(), &number, sizeof number);
    return file.bytes();
}

void test_parts() {
    namespace fs = std::filesystem;
    const fs::path folder = fs::temp_directory_path() / ("lkv_test_parts_" + std::to_string(::getpid()));
    fs::create_directories(folder);
    const auto path = [&](int number) {
        return (folder / ("m-0000" + std::to_string(number) + "-of-00003.gguf")).string();
    };
    const auto write = [&](int number, const Bytes& bytes) {
        std::ofstream(path(number), std::ios::binary)
            .write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
    };
    const auto all = [&](int total) {
        write(1, part_bytes("a", 1, 0, 3, total));
        write(2, part_bytes("b", 2, 1, 3));
        write(3, part_bytes("c", 3, 2, 3));
    };
    all(3);
    for (const int named : {1, 2, 3}) {
        const GgufFile file = GgufFile::open(path(named));
        CHECK(file.spans().size() == 3 && file.tensors().size() == 3 && file.get_string("general.name") == "parts");
        CHECK(file.size_bytes() == fs::file_size(path(1)) + fs::file_size(path(2)) + fs::file_size(path(3)));
        for (int i = 0; i < 3; i++) {
            const auto& tensor = file.tensor(std::string(1, static_cast<char>('a' + i)));
            CHECK(*reinterpret_cast<const float*>(tensor.data) == static_cast<float>(i + 1));
        }
    }
    all(4);
    CHECK_REFUSED("expected 4 tensors in all parts, as split.tensors.count says; got 3", GgufFile::open(path(1)));
    all(3);
    write(2, part_bytes("b", 2, 2, 3));
    CHECK_REFUSED("expected split.no 1; got 2", GgufFile::open(path(1)));
    write(2, part_bytes("b", 2, 1, 2));
    CHECK_REFUSED("expected 2 parts, as split.count says, NAME-00001-of-00002.gguf and so on; got 3",
                  GgufFile::open(path(1)));
    write(2, part_bytes("a", 2, 1, 3));
    CHECK_REFUSED("expected every tensor in one part; got 'a' again", GgufFile::open(path(1)));
    Bytes cut = part_bytes("b", 2, 1, 3);
    cut.resize(40);
    write(2, cut);
    CHECK_REFUSED("entries in 'tensor count' with 24 of 40 bytes left", GgufFile::open(path(1)));
    fs::remove(path(2));
    CHECK_REFUSED("expected all 3 parts of " + lkv::quoted_path(path(3)) + "; got no " + lkv::quoted_path(path(2)),
                  GgufFile::open(path(3)));
    fs::copy_file(path(1), folder / "alone.gguf");
    CHECK_REFUSED("expected 3 parts, as split.count says", GgufFile::open((folder / "alone.gguf").string()));
    write(3, sample_file().bytes());  // whole, whatever its name
    CHECK(GgufFile::open(path(3)).tensors().size() == GgufFile(sample_file().bytes()).tensors().size());
    write(1, part_bytes("a", 1, 0, 1, 1));
    CHECK(GgufFile::open(path(1)).tensors().size() == 1);
    CHECK_REFUSED("got no " + lkv::quoted_path(path(2)), GgufFile::open(path(2)));
    fs::remove_all(folder);
}

// Every shorter file is refused: a file ends with the last byte of its last tensor.
void test_truncation() {
    const Bytes whole = sample_file().bytes();
    int parsed = 0;
    for (size_t n = 0; n < whole.size(); ++n) {
        const GuardedBytes part({whole.data(), n});
        const std::string error = error_of([&] { GgufFile(part.all()); });
        const bool says_size = error.find("got a file of " + std::to_string(n) + " bytes") != std::string::npos ||
                               error.find(" of " + std::to_string(n) + " bytes left") != std::string::npos;
        parsed += !says_size;
    }
    CHECK(parsed == 0);
    const GuardedBytes full(whole);
    CHECK(touch(GgufFile(full.all())) > 0);
}

// Every value of every byte before the tensor data is refused, or read without leaving the file.
void test_byte_flips() {
    const GgufBytes file = sample_file();
    GuardedBytes bytes(file.bytes());
    const size_t header = bytes.all().size() - file.data.size();
    int refusals = 0;
    int accepted = 0;
    for (size_t at = 0; at < header; ++at) {
        const uint8_t original = bytes[at];
        for (int flip = 1; flip < 256; ++flip) {
            bytes[at] = static_cast<uint8_t>(original ^ flip);
            const std::string error = error_of([&] { accepted += touch(GgufFile(bytes.all())) > 0; });
            refusals += !error.empty();
        }
        bytes[at] = original;
    }
    CHECK(refusals + accepted == static_cast<int>(header) * 255);
    CHECK(refusals > 10000);  // lengths, counts, types, offsets
    CHECK(accepted > 10000);  // letters of keys, values
}

}  // namespace

int main() {
    test_reads();
    test_getters_refuse();
    test_quoted();
    test_refusals();
    test_files();
    test_parts();
    test_truncation();
    test_byte_flips();
    return report("test_gguf");
}
