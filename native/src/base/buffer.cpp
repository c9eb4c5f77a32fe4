#include "base/buffer.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstring>

#include "base/error.h"

namespace lkv {

Buffer::Buffer(size_t bytes) : size_(bytes) {
    if (bytes == 0) {
        return;
    }
    void* const p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) {
        fail("memory", "expected ", bytes, " bytes", "; got ", std::strerror(errno));
    }
    data_ = static_cast<uint8_t*>(p);
}

Buffer::~Buffer() {
    if (data_ != nullptr) {
        munmap(data_, size_);
    }
}

}  // namespace lkv
