// A checkpoint in the safetensors format: a length, a JSON header, the bytes. Every offset is checked.
#pragma once

#include <string>
#include <vector>

#include "mapped_file.hpp"
#include "weightplane/manifest.hpp"

class Safetensors {
public:
    // Throws Error with Exit::usage naming file and tensor.
    explicit Safetensors(const std::string &path);

    // In the order of the bytes. The format has no ties, so there are no aliases.
    const weightplane::Manifest &manifest() const { return manifest_; }
    // First byte of a tensor.
    const std::uint8_t *bytes(std::size_t tensor) const { return at_[tensor]; }
    // Throws Error if the file was written to since it was opened: what was read may be of two versions.
    void check_unchanged() const { file_.check_unchanged(); }

private:
    MappedFile file_;
    weightplane::Manifest manifest_;
    std::vector<const std::uint8_t *> at_;
};
