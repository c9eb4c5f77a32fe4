#include "base/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <new>

#include "base/error.h"
#include "base/log.h"

namespace lkv {
namespace {

constexpr std::align_val_t heap_alignment{64};

class Descriptor {
public:
    // O_NONBLOCK: a pipe is opened, and refused, without waiting for its writer
    explicit Descriptor(const std::string& path) : fd_(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)) {}
    ~Descriptor() {
        if (fd_ >= 0) {
            ::close(fd_);
        }
    }
    Descriptor(const Descriptor&) = delete;
    Descriptor& operator=(const Descriptor&) = delete;

    int get() const { return fd_; }

private:
    int fd_;
};

[[noreturn]] void refuse(const std::string& path, const std::string& reason) {
    fail("file", "expected a readable file; got ", quoted_path(path), ": ", reason);
}

void read_all(int fd, uint8_t* to, size_t size, const std::string& path) {
    size_t done = 0;
    while (done < size) {
        const ssize_t n = ::read(fd, to + done, size - done);
        if (n > 0) {
            done += static_cast<size_t>(n);
        } else if (n == 0) {
            fail("file", "expected ", size, " bytes in ", quoted_path(path), "; got ", done);
        } else if (errno != EINTR) {
            refuse(path, std::strerror(errno));
        }
    }
}

}  // namespace

void MappedFile::Release::operator()(const uint8_t* data) const {
    auto* bytes = const_cast<uint8_t*>(data);  // munmap and delete take a pointer to non-const
    if (mapped_size > 0) {
        ::munmap(bytes, mapped_size);
    } else {
        ::operator delete(bytes, heap_alignment);
    }
}

MappedFile::MappedFile(const std::string& path, bool use_mmap) {
    const Descriptor file(path);
    struct stat status{};
    if (file.get() < 0 || ::fstat(file.get(), &status) != 0) {
        refuse(path, std::strerror(errno));
    }
    if (!S_ISREG(status.st_mode)) {
        refuse(path, S_ISDIR(status.st_mode) ? "is a directory" : "is not a regular file");
    }
    size_ = static_cast<size_t>(status.st_size);
    if (size_ == 0) {
        return;
    }
    if (use_mmap) {
        void* const address = ::mmap(nullptr, size_, PROT_READ, MAP_SHARED, file.get(), 0);
        if (address != MAP_FAILED) {
            data_ = {static_cast<const uint8_t*>(address), Release{size_}};
            return;
        }
        log(LogLevel::info, "file system cannot map ", quoted_path(path), " (", std::strerror(errno),
            "): reading it into memory");
    }
    auto* const heap = static_cast<uint8_t*>(::operator new(size_, heap_alignment));
    data_ = {heap, Release{0}};
    read_all(file.get(), heap, size_, path);
}

}  // namespace lkv
