// Seeded mutations of files, for fuzz programs that run without libFuzzer:
//
//     PROGRAM [iterations] [seed] [corpus folder] [folder for what is found]
//
// Every refusal that was not seen before joins what is mutated. The last folder gets one short input for each that the corpus
// does not have, and the input that ended the program, as `crash`.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace lkv::test {

using Rng = std::mt19937_64;
using Bytes = std::vector<uint8_t>;

inline size_t below(Rng& rng, size_t n) { return n == 0 ? 0 : rng() % n; }

// Numbers at which length arithmetic breaks.
inline uint64_t edge(Rng& rng) {
    static constexpr uint64_t edges[] = {0,
                                         1,
                                         7,
                                         8,
                                         9,
                                         31,
                                         32,
                                         33,
                                         63,
                                         64,
                                         255,
                                         256,
                                         65535,
                                         65536,
                                         0x7fffffff,
                                         0x80000000,
                                         0xffffffff,
                                         0x7fffffffffffffff,
                                         0x8000000000000000,
                                         ~uint64_t{0}};
    return edges[below(rng, std::size(edges))] + below(rng, 3) - 1;
}

inline void mutate(Bytes& bytes, Rng& rng) {
    const size_t at = below(rng, bytes.size());
    switch (below(rng, 6)) {
        case 0:  // one bit
            if (!bytes.empty()) bytes[at] ^= static_cast<uint8_t>(1u << below(rng, 8));
            break;
        case 1:  // a 32- or 64-bit number
            for (size_t i = 0, n = below(rng, 2) ? 4 : 8, v = edge(rng); i < n && at + i < bytes.size(); ++i) {
                bytes[at + i] = static_cast<uint8_t>(v >> (8 * i));
            }
            break;
        case 2:  // a shorter file
            bytes.resize(at);
            break;
        case 3: {  // a piece again, elsewhere
            const Bytes piece(
                bytes.begin() + static_cast<ptrdiff_t>(at),
                bytes.begin() + static_cast<ptrdiff_t>(at + below(rng, std::min<size_t>(64, bytes.size() - at))));
            bytes.insert(bytes.begin() + static_cast<ptrdiff_t>(below(rng, bytes.size())), piece.begin(), piece.end());
            break;
        }
        case 4:  // a hole
            bytes.erase(
                bytes.begin() + static_cast<ptrdiff_t>(at),
                bytes.begin() + static_cast<ptrdiff_t>(at + below(rng, std::min<size_t>(16, bytes.size() - at))));
            break;
        default:  // noise
            if (!bytes.empty()) bytes[at] = static_cast<uint8_t>(rng());
            break;
    }
}

// A refusal up to what it quotes and without its numbers: what is told apart.
inline std::string shape(const std::string& text) {
    std::string kept;
    for (const char c : text.substr(0, text.find('\''))) {
        const bool number = std::isdigit(static_cast<unsigned char>(c)) != 0;
        if (!(number && !kept.empty() && kept.back() == '#')) kept += number ? '#' : c;
    }
    return kept;
}

// The input that is being read, for a handler of signals.
struct Reading {
    const uint8_t* data = nullptr;
    size_t size = 0;
    std::string path;  // where it goes when the program ends; empty: nowhere
};
inline Reading reading;

inline void keep_crash(int signal) {
    const int file = reading.path.empty() ? -1 : ::open(reading.path.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0644);
    if (file >= 0) {
        const ssize_t written = ::write(file, reading.data, reading.size);
        if (written == static_cast<ssize_t>(reading.size)) ::close(file);
    }
    std::signal(signal, SIG_DFL);
    std::raise(signal);
}

struct Fuzz {
    const char* name;
    std::vector<Bytes> files;                       // to mutate, beside those of the corpus
    std::function<std::string(const Bytes&)> read;  // why a file is refused; empty: it is not
    size_t fixed = 0;                               // bytes at the head that stay: they choose what the rest is for
    // beside mutate(), of a file without its fixed head
    std::function<void(Bytes&, Rng&)> mutate_parts = {};
    std::function<std::vector<Bytes>(const Bytes&)> less = {};  // the same file, without one part of it
};

class FuzzRun {
public:
    explicit FuzzRun(Fuzz fuzz) : fuzz_(std::move(fuzz)), n_given_(fuzz_.files.size()) {}

    void read_corpus(const std::filesystem::path& folder) {
        std::vector<std::filesystem::path> paths;  // in one order everywhere
        for (const auto& entry : std::filesystem::directory_iterator(folder)) paths.push_back(entry.path());
        std::sort(paths.begin(), paths.end());
        for (const auto& path : paths) {
            std::ifstream in(path, std::ios::binary);
            fuzz_.files.emplace_back(std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>());
        }
    }

    // Whether the file is refused.
    bool refuses(const Bytes& file) {
        const std::string key = shape(read(file));
        const auto [found, is_new] = seen_.emplace(key, file);
        if (is_new && running_) fuzz_.files.push_back(file);
        if (is_new && running_) found_.push_back(key);
        if (!is_new && file.size() < found->second.size()) found->second = file;
        return !key.empty();
    }

    void start() {
        const std::vector<Bytes> files = fuzz_.files;
        for (const Bytes& file : files) refuses(file);
        running_ = true;
    }

    Bytes next(Rng& rng) const {
        const Bytes& whole = fuzz_.files[below(rng, below(rng, 2) ? n_given_ : fuzz_.files.size())];
        const auto head = whole.begin() + static_cast<ptrdiff_t>(std::min(fuzz_.fixed, whole.size()));
        Bytes body(head, whole.end());
        const bool parts = fuzz_.mutate_parts && below(rng, 4) > 0;
        if (parts) fuzz_.mutate_parts(body, rng);
        for (size_t m = parts ? below(rng, 8) / 7 : 1 + below(rng, 4); m > 0; --m) mutate(body, rng);
        body.insert(body.begin(), whole.begin(), head);
        return body;
    }

    void keep_found(const std::filesystem::path& folder) {
        int number = 0;
        for (const std::string& key : found_) {
            const Bytes file = shorter(seen_.at(key), key);
            std::ofstream(folder / (std::string(fuzz_.name) + "-" + std::to_string(number++)), std::ios::binary)
                .write(reinterpret_cast<const char*>(file.data()), static_cast<std::streamsize>(file.size()));
        }
    }

    size_t n_seen() const { return seen_.size(); }

private:
    std::string read(const Bytes& file) {
        reading.data = file.data();
        reading.size = file.size();
        return fuzz_.read(file);
    }

    // Without the parts and pieces that the refusal does not need.
    Bytes shorter(Bytes file, const std::string& key) {
        const auto head = [&](Bytes part) {
            part.insert(part.begin(), file.begin(), file.begin() + static_cast<ptrdiff_t>(fuzz_.fixed));
            return part;
        };
        for (bool cut = static_cast<bool>(fuzz_.less); cut;) {
            cut = false;
            for (Bytes& part : fuzz_.less(Bytes(file.begin() + static_cast<ptrdiff_t>(fuzz_.fixed), file.end()))) {
                Bytes less = head(std::move(part));
                if (less.size() >= file.size() || shape(read(less)) != key) continue;
                file = std::move(less);
                cut = true;
                break;
            }
        }
        for (size_t piece = file.size() / 2; piece > file.size() / 512; piece /= 2) {
            for (size_t at = fuzz_.fixed; at + piece <= file.size();) {
                Bytes less = file;
                less.erase(less.begin() + static_cast<ptrdiff_t>(at),
                           less.begin() + static_cast<ptrdiff_t>(at + piece));
                if (shape(read(less)) == key) {
                    file = std::move(less);
                } else {
                    at += piece;
                }
            }
        }
        return file;
    }

    Fuzz fuzz_;
    size_t n_given_;  // files that are read, at the head of all
    bool running_ = false;
    std::map<std::string, Bytes> seen_;  // a short file for every refusal
    std::vector<std::string> found_;     // refusals that no given file has
};

// Exit status: 1 unless files were read and refused; a crash is the finding.
inline int fuzz(int argc, char** argv, Fuzz what) {
    const uint64_t n = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 20000;
    const uint64_t seed = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1;
    const char* const name = what.name;
    FuzzRun run(std::move(what));
    if (argc > 3) run.read_corpus(argv[3]);
    if (argc > 4) {
        reading.path =
            (std::filesystem::path(argv[4]) / (std::string(name) + "-" + std::to_string(seed) + "-crash")).string();
        for (const int signal : {SIGABRT, SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP}) std::signal(signal, keep_crash);
    }
    run.start();
    Rng rng(seed);
    uint64_t refused = 0;
    for (uint64_t i = 0; i < n; ++i) refused += run.refuses(run.next(rng));
    if (argc > 4) run.keep_found(argv[4]);
    std::printf("%s: %llu files, %llu refused for %zu reasons, seed %llu\n", name, static_cast<unsigned long long>(n),
                static_cast<unsigned long long>(refused), run.n_seen() - 1, static_cast<unsigned long long>(seed));
    return n < 1000 || (refused > n / 10 && refused < n) ? 0 : 1;  // both sides of the fence were visited
}

}  // namespace lkv::test
