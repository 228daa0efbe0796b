#include "mapped_file.hpp"

#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <fcntl.h>
#include <nlohmann/json.hpp>
#include <sys/mman.h>
#include <unistd.h>

#include "errors.hpp"

namespace {

[[noreturn]] void refuse(const std::string &path, const std::string &what) {
    throw Error(Exit::usage, "INVALID_ARGUMENT", path + ": " + what);
}

[[noreturn]] void failed(const std::string &path, const std::string &what) {
    refuse(path, what + ": " + std::strerror(errno));
}

// O_NONBLOCK: nobody may ever write to a pipe.
int opened(const std::string &path) {
    const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0)
        failed(path, "cannot be opened");
    return fd;
}

// What a signal handler says of the one file that is mapped: it may do little more than write.
struct Mapped {
    std::atomic<const std::uint8_t *> begin{nullptr}, end{nullptr};
    std::string told, line;
} mapped;

void on_bus_error(int, siginfo_t *info, void *) {
    const auto *at = static_cast<const std::uint8_t *>(info->si_addr);
    if (at < mapped.begin || at >= mapped.end) { // none of ours: it happens again, and ends us as it would have
        std::signal(SIGBUS, SIG_DFL);
        return;
    }
    if (write(STDERR_FILENO, mapped.told.data(), mapped.told.size()) < 0 ||
        write(STDOUT_FILENO, mapped.line.data(), mapped.line.size()) < 0) { // nobody listens: the status says it
    }
    _exit(static_cast<int>(Exit::usage));
}

void watch_over(const std::string &path, const std::uint8_t *begin, std::size_t size) {
    using nlohmann::json;
    const auto text = path + ": the file was cut short while it was sent: the update ends with this trainer's lease";
    const json line = {{"committed", false}, {"reason", "INVALID_ARGUMENT"}, {"message", text}};
    mapped.told = "publish_checkpoint: INVALID_ARGUMENT: " + text + "\n";
    mapped.line = line.dump(-1, ' ', false, json::error_handler_t::replace) + "\n";
    mapped.begin = begin;
    mapped.end = begin + size;
    struct sigaction action {};
    action.sa_sigaction = on_bus_error;
    action.sa_flags = SA_SIGINFO;
    sigaction(SIGBUS, &action, nullptr);
}

} // namespace

MappedFile::MappedFile(const std::string &path) : path_(path), fd_(opened(path)) {
    try {
        if (fstat(fd_, &facts_) != 0)
            failed(path, "cannot be read");
        if (!S_ISREG(facts_.st_mode))
            throw Error(Exit::usage, "INVALID_ARGUMENT", path + " is not a file");
        size_ = static_cast<std::size_t>(facts_.st_size);
        if (size_ == 0)
            return;
        void *at = mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, fd_, 0);
        if (at == MAP_FAILED)
            failed(path, "cannot be mapped");
        data_ = static_cast<const std::uint8_t *>(at);
        watch_over(path, data_, size_);
    } catch (...) {
        close(fd_);
        throw;
    }
}

MappedFile::~MappedFile() {
    if (data_ != nullptr) {
        mapped.begin = mapped.end = nullptr;
        munmap(const_cast<std::uint8_t *>(data_), size_);
    }
    close(fd_);
}

void MappedFile::check_unchanged() const {
    struct stat now {};
    if (fstat(fd_, &now) != 0)
        failed(path_, "cannot be looked at");
    if (now.st_size == facts_.st_size && now.st_mtim.tv_sec == facts_.st_mtim.tv_sec &&
        now.st_mtim.tv_nsec == facts_.st_mtim.tv_nsec)
        return;
    const std::string what = now.st_size < facts_.st_size ? "was cut short" : "was written to";
    refuse(path_, "the file " + what + " while it was sent: no replica took it; publish it once it is complete (write "
                                       "another file, then rename that)");
}
