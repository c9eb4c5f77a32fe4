#include "chain.h"

#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "device.h"

namespace emulated {

namespace {

constexpr int none = -1;

// An allocation, and which of its pages the chain has written.
struct Pages {
    size_t bytes;
    int device;
    std::vector<bool> written;
};

// One that the chain has written.
struct Written {
    char* at = nullptr;
    bool read = false;  // while it showed old bytes
    std::unique_ptr<char[]> old = std::make_unique_for_overwrite<char[]>(page_bytes());
    std::unique_ptr<char[]> present = std::make_unique_for_overwrite<char[]>(page_bytes());
};

std::mutex mutex;  // no thread holds it while it writes a device's memory
std::map<char*, Pages, std::greater<>> all;
std::vector<Written> written;  // the first n_written; the others' memory is kept
size_t n_written = 0;
int chain = none;  // its device
bool shows_old = false;

// Whether to name who reads bytes early that have changed since: some do so in vain, and read them again.
const bool tells = std::getenv("EMULATED_EARLY") != nullptr;

void allow(char* at, size_t bytes, int access) {
    if (mprotect(at, bytes, access) != 0) fail("memory whose protection may change");
}

void allow_all(int access) {
    for (const auto& [begin, pages] : all) {
        if (pages.device == chain) allow(begin, pages.bytes, access);
    }
}

// The pages that hold an address of the chain's device; all.end(): none do.
auto pages_of(const char* at) {
    const auto found = all.lower_bound(const_cast<char*>(at));
    const bool inside = found != all.end() && at < found->first + found->second.bytes;
    return inside && found->second.device == chain ? found : all.end();
}

// Whether it was a read too early, which may go on.
bool is_read(const char* at) {
    const auto holds = [&](const Written& page) { return at >= page.at && at < page.at + page_bytes(); };
    const auto end = written.begin() + static_cast<std::ptrdiff_t>(n_written);
    const auto page = std::find_if(written.begin(), end, holds);
    if (page == end || page->read) return false;
    page->read = true;
    allow(page->at, page_bytes(), PROT_READ);
    const auto offset = static_cast<size_t>(at - page->at);
    const size_t n = std::min(size_t{4}, page_bytes() - offset);
    if (std::memcmp(&page->old[offset], &page->present[offset], n) != 0) tell("an early read of what has changed");
    return true;
}

// A page's first write keeps what was there.
void on_fault(int signal, siginfo_t* info, void*) {
    const std::lock_guard held(mutex);
    const auto* const at = static_cast<const char*>(info->si_addr);
    const auto found = pages_of(at);
    if (found == all.end()) {  // comes again, and stops the program
        ::signal(signal, SIG_DFL);
        return;
    }
    if (shows_old && tells && is_read(at)) return;
    if (shows_old) fail("no write of a device's memory before cudaGridDependencySynchronize()");
    auto& [begin, pages] = *found;
    const size_t index = static_cast<size_t>(at - begin) / page_bytes();
    if (pages.written[index]) return;  // by another thread just now
    pages.written[index] = true;
    if (n_written == written.size()) written.emplace_back();
    Written& page = written[n_written++];
    page.at = begin + index * page_bytes();
    std::memcpy(page.old.get(), page.at, page_bytes());
    allow(page.at, page_bytes(), PROT_READ | PROT_WRITE);
}

void catch_faults() {
    struct sigaction action{};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO;
    sigaction(SIGSEGV, &action, nullptr);
}

void leave_chain() {
    if (chain == none) return;
    allow_all(PROT_READ | PROT_WRITE);
    for (size_t i = 0; i < n_written; i++) {
        auto& [begin, pages] = *pages_of(written[i].at);
        pages.written[static_cast<size_t>(written[i].at - begin) / page_bytes()] = false;
    }
    n_written = 0;
    chain = none;
}

// Calls run(begin, bytes) with pages that the chain has written and that lie side by side.
template <class Run>
void for_written(Run&& run) {
    for (size_t i = 0; i < n_written;) {
        char* const begin = written[i].at;
        char* end = begin;
        for (; i < n_written && written[i].at == end; i++) end += page_bytes();
        run(begin, static_cast<size_t>(end - begin));
    }
}

}  // namespace

size_t page_bytes() {
    static const auto bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    return bytes;
}

void add_pages(char* begin, size_t bytes, int device) {
    const std::lock_guard held(mutex);
    all.emplace(begin, Pages{bytes, device, std::vector<bool>(bytes / page_bytes())});
    if (device == chain) allow(begin, bytes, PROT_READ);
}

void remove_pages(char* begin) {
    const std::lock_guard held(mutex);
    leave_chain();
    all.erase(begin);
}

void continue_chain(int device) {
    const std::lock_guard held(mutex);
    if (chain == device) return;
    static std::once_flag catches;
    std::call_once(catches, catch_faults);
    leave_chain();
    chain = device;
    allow_all(PROT_READ);
}

void end_chain() {
    const std::lock_guard held(mutex);
    leave_chain();
}

void end_chain_of_others(int device) {
    const std::lock_guard held(mutex);
    if (chain != device) leave_chain();
}

void show_old() {
    const std::lock_guard held(mutex);
    std::sort(written.begin(), written.begin() + static_cast<std::ptrdiff_t>(n_written),
              [](const Written& a, const Written& b) { return a.at < b.at; });
    for (size_t i = 0; i < n_written; i++) {
        Written& page = written[i];
        page.read = false;
        std::memcpy(page.present.get(), page.at, page_bytes());
        std::memcpy(page.at, page.old.get(), page_bytes());
    }
    for_written([](char* begin, size_t bytes) { allow(begin, bytes, tells ? PROT_NONE : PROT_READ); });
    shows_old = true;
}

void show_present() {
    const std::lock_guard held(mutex);
    shows_old = false;
    for_written([](char* begin, size_t bytes) { allow(begin, bytes, PROT_READ | PROT_WRITE); });
    for (size_t i = 0; i < n_written; i++) std::memcpy(written[i].at, written[i].present.get(), page_bytes());
}

}  // namespace emulated
