#include "mapped_file.hpp"

#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "errors.hpp"

namespace {

[[noreturn]] void refuse(const std::string &path, const char *what) {
    throw Error(Exit::usage, "INVALID_ARGUMENT", path + ": " + what + ": " + std::strerror(errno));
}

struct Descriptor {
    explicit Descriptor(const std::string &path) : fd(open(path.c_str(), O_RDONLY | O_CLOEXEC)) {
        if (fd < 0)
            refuse(path, "cannot be opened");
    }
    ~Descriptor() { close(fd); }
    Descriptor(const Descriptor &) = delete;
    Descriptor &operator=(const Descriptor &) = delete;
    const int fd;
};

} // namespace

MappedFile::MappedFile(const std::string &path) {
    const Descriptor file(path);
    struct stat facts {};
    if (fstat(file.fd, &facts) != 0)
        refuse(path, "cannot be read");
    if (!S_ISREG(facts.st_mode))
        throw Error(Exit::usage, "INVALID_ARGUMENT", path + " is not a file");
    size_ = static_cast<std::size_t>(facts.st_size);
    if (size_ == 0)
        return;
    void *at = mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, file.fd, 0);
    if (at == MAP_FAILED)
        refuse(path, "cannot be mapped");
    data_ = static_cast<const std::uint8_t *>(at);
}

MappedFile::~MappedFile() {
    if (data_ != nullptr)
        munmap(const_cast<std::uint8_t *>(data_), size_);
}
