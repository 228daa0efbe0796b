// Manifests: the ordered tensors of a model, and the content id that names them. tests/vectors/manifests.json.
#pragma once

#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "sha256.hpp"

namespace weightplane {

class ManifestError : public std::runtime_error {
public:
    using std::runtime_error::runtime_error;
};

// Bytes of one stored element. Throws for a dtype that may not travel.
inline std::uint64_t dtype_bytes(const std::string &dtype) {
    static const std::map<std::string, std::uint64_t> sizes = {
        {"bool", 1},          {"uint8", 1},           {"int8", 1},       {"uint16", 2},          {"int16", 2},
        {"uint32", 4},        {"int32", 4},           {"uint64", 8},     {"int64", 8},           {"float16", 2},
        {"bfloat16", 2},      {"float32", 4},         {"float64", 8},    {"complex32", 4},       {"complex64", 8},
        {"complex128", 16},   {"float8_e4m3fn", 1},   {"float8_e5m2", 1}, {"float8_e4m3fnuz", 1}, {"float8_e5m2fnuz", 1},
        {"float8_e8m0fnu", 1}, {"float4_e2m1fn_x2", 1}};
    const auto found = sizes.find(dtype);
    if (found == sizes.end())
        throw ManifestError("dtype '" + dtype + "' cannot travel");
    return found->second;
}

struct TensorMeta {
    std::string name;
    std::string dtype;
    std::vector<std::int64_t> shape;
    std::string alias_of; // empty = its own bytes

    std::uint64_t numel() const {
        std::uint64_t n = 1;
        for (const auto d : shape)
            n *= static_cast<std::uint64_t>(d);
        return n;
    }
    std::uint64_t nbytes() const { return numel() * dtype_bytes(dtype); }
};

// A JSON string as every language here writes it: UTF-8 as it is, control characters escaped.
inline std::string json_string(std::string_view text) {
    static const char digits[] = "0123456789abcdef";
    std::string out = "\"";
    for (const char c : text) {
        switch (c) {
        case '"': out += "\\\""; break;
        case '\\': out += "\\\\"; break;
        case '\b': out += "\\b"; break;
        case '\f': out += "\\f"; break;
        case '\n': out += "\\n"; break;
        case '\r': out += "\\r"; break;
        case '\t': out += "\\t"; break;
        default:
            if (static_cast<unsigned char>(c) < 0x20) {
                out += "\\u00";
                out += digits[c >> 4 & 15];
                out += digits[c & 15];
            } else {
                out += c;
            }
        }
    }
    return out += '"';
}

struct Manifest {
    std::vector<TensorMeta> tensors;

    // What a full copy takes on the wire: aliases cost nothing.
    std::uint64_t nbytes() const {
        std::uint64_t sum = 0;
        for (const auto &t : tensors)
            sum += t.alias_of.empty() ? t.nbytes() : 0;
        return sum;
    }

    std::string id() const {
        std::string text = "[";
        for (const auto &t : tensors) {
            text += text.size() > 1 ? ",[" : "[";
            text += json_string(t.name) + "," + json_string(t.dtype) + ",[";
            for (std::size_t i = 0; i < t.shape.size(); ++i)
                text += (i > 0 ? "," : "") + std::to_string(t.shape[i]);
            text += "]," + json_string(t.alias_of) + "]";
        }
        return "m-" + sha256_128(text + "]");
    }
};

} // namespace weightplane
