// A file mapped into memory, read-only. It must not be cut short while it is mapped.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

class MappedFile {
public:
    // Throws Error with Exit::usage.
    explicit MappedFile(const std::string &path);
    ~MappedFile();
    MappedFile(const MappedFile &) = delete;
    MappedFile &operator=(const MappedFile &) = delete;

    const std::uint8_t *data() const { return data_; }
    std::size_t size() const { return size_; }

private:
    const std::uint8_t *data_ = nullptr;
    std::size_t size_ = 0;
};
