// A file mapped into memory, read-only. The program ends with Exit::usage and says why where one that was cut short
// meanwhile is read; where gRPC or the kernel read it, its bytes cannot be sent.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <sys/stat.h>

class MappedFile {
public:
    // Throws Error with Exit::usage.
    explicit MappedFile(const std::string &path);
    ~MappedFile();
    MappedFile(const MappedFile &) = delete;
    MappedFile &operator=(const MappedFile &) = delete;

    const std::uint8_t *data() const { return data_; }
    std::size_t size() const { return size_; }
    // Throws Error with Exit::usage if the file was written to since it was opened.
    void check_unchanged() const;

private:
    const std::string path_;
    const int fd_;
    struct stat facts_ {};
    const std::uint8_t *data_ = nullptr;
    std::size_t size_ = 0;
};
