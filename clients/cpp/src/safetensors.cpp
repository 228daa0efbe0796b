#include "safetensors.hpp"

#include <algorithm>
#include <cstring>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "errors.hpp"

namespace {

using nlohmann::json;

constexpr std::uint64_t kHeaderLimit = 100'000'000; // the format's own

const std::map<std::string, std::string> kDtypes = {
    {"BOOL", "bool"},       {"U8", "uint8"},       {"I8", "int8"},       {"U16", "uint16"},
    {"I16", "int16"},       {"U32", "uint32"},     {"I32", "int32"},     {"U64", "uint64"},
    {"I64", "int64"},       {"F16", "float16"},    {"BF16", "bfloat16"}, {"F32", "float32"},
    {"F64", "float64"},     {"C64", "complex64"},  {"F8_E4M3", "float8_e4m3fn"},
    {"F8_E4M3FNUZ", "float8_e4m3fnuz"},            {"F8_E5M2", "float8_e5m2"},
    {"F8_E5M2FNUZ", "float8_e5m2fnuz"},            {"F8_E8M0", "float8_e8m0fnu"}};

struct Entry {
    weightplane::TensorMeta meta;
    std::uint64_t start = 0, stop = 0;
};

[[noreturn]] void refuse(const std::string &path, const std::string &text) {
    throw Error(Exit::usage, "INVALID_ARGUMENT", path + ": " + text);
}

std::string shown(const json &value) { return value.dump(-1, ' ', false, json::error_handler_t::replace).substr(0, 80); }

std::uint64_t number(const json &value) {
    if (!value.is_number_unsigned() || value.get<std::uint64_t>() > (std::uint64_t{1} << 62))
        throw std::invalid_argument("expected a whole number, found " + shown(value));
    return value.get<std::uint64_t>();
}

// numel × size, or nothing where it is more than any file holds.
std::uint64_t expected_bytes(const weightplane::TensorMeta &meta, std::uint64_t limit) {
    if (std::find(meta.shape.begin(), meta.shape.end(), 0) != meta.shape.end())
        return 0;
    std::uint64_t n = weightplane::dtype_bytes(meta.dtype);
    for (const auto d : meta.shape) {
        if (static_cast<std::uint64_t>(d) > limit / n)
            throw std::invalid_argument("its shape takes more than the " + std::to_string(limit) +
                                        " bytes that the file has for tensors");
        n *= static_cast<std::uint64_t>(d);
    }
    return n;
}

Entry entry_of(const std::string &name, const json &row, std::uint64_t body) {
    for (const char *key : {"dtype", "shape", "data_offsets"})
        if (!row.is_object() || row.count(key) == 0)
            throw std::invalid_argument(std::string("its entry has no ") + key);
    Entry e;
    e.meta.name = name;
    if (!row.at("dtype").is_string())
        throw std::invalid_argument("expected a dtype's name, found " + shown(row.at("dtype")));
    const auto &dtype = row.at("dtype").get_ref<const std::string &>();
    const auto found = kDtypes.find(dtype);
    if (found == kDtypes.end())
        throw std::invalid_argument("its dtype " + dtype + " is not known");
    e.meta.dtype = found->second;
    if (!row.at("shape").is_array())
        throw std::invalid_argument("expected a list as its shape, found " + shown(row.at("shape")));
    for (const auto &d : row.at("shape"))
        e.meta.shape.push_back(static_cast<std::int64_t>(number(d)));
    const auto &offsets = row.at("data_offsets");
    if (!offsets.is_array() || offsets.size() != 2)
        throw std::invalid_argument("expected two numbers as its data_offsets, found " + shown(offsets));
    e.start = number(offsets.at(0));
    e.stop = number(offsets.at(1));
    const auto expected = expected_bytes(e.meta, body);
    if (e.start > e.stop || e.stop > body || e.stop - e.start != expected)
        throw std::invalid_argument("it lies at bytes " + std::to_string(e.start) + ".." + std::to_string(e.stop) +
                                    " of " + std::to_string(body) + ": expected " + std::to_string(expected) +
                                    " bytes inside the file");
    return e;
}

json header_of(const std::string &path, const std::uint8_t *at, std::uint64_t length) {
    std::set<std::string> names;
    const auto unique = [&](int depth, json::parse_event_t event, json &value) {
        if (depth == 1 && event == json::parse_event_t::key && !names.insert(value.get<std::string>()).second)
            refuse(path, "tensor '" + value.get<std::string>() + "' is there twice");
        return true;
    };
    try {
        auto header = json::parse(at, at + length, unique);
        if (!header.is_object())
            refuse(path, "the header is not a JSON object");
        header.erase("__metadata__");
        return header;
    } catch (const json::exception &e) {
        refuse(path, std::string("the header is not JSON: ") + e.what());
    }
}

} // namespace

Safetensors::Safetensors(const std::string &path) : file_(path) {
    std::uint64_t length = 0;
    if (file_.size() >= 8)
        std::memcpy(&length, file_.data(), 8);
    if (file_.size() < 8 || length > std::min<std::uint64_t>(file_.size() - 8, kHeaderLimit))
        refuse(path, "the header claims " + std::to_string(length) + " bytes of a file of " +
                         std::to_string(file_.size()) + "; not a safetensors file");
    const auto *body = file_.data() + 8 + length;
    const std::uint64_t size = file_.size() - 8 - length;
    std::vector<Entry> entries;
    const auto header = header_of(path, file_.data() + 8, length);
    if (header.empty())
        refuse(path, "no tensor is in it");
    for (const auto &[name, row] : header.items()) {
        try {
            if (name.empty())
                throw std::invalid_argument("a name is needed");
            entries.push_back(entry_of(name, row, size));
        } catch (const json::exception &e) {
            refuse(path, "tensor '" + name + "' has a malformed entry: " + e.what());
        } catch (const std::invalid_argument &e) {
            refuse(path, "tensor '" + name + "': " + e.what());
        }
    }
    std::stable_sort(entries.begin(), entries.end(), [](const Entry &a, const Entry &b) {
        return std::make_pair(a.start, a.stop) < std::make_pair(b.start, b.stop);
    });
    std::uint64_t end = 0;
    for (auto &e : entries) {
        if (e.start != end)
            refuse(path, "tensor '" + e.meta.name + "' begins at byte " + std::to_string(e.start) + ", expected " +
                             std::to_string(end) + ": no gaps or overlaps");
        end = e.stop;
        at_.push_back(body + e.start);
        manifest_.tensors.push_back(std::move(e.meta));
    }
    if (end != size)
        refuse(path, "tensors end at byte " + std::to_string(end) + " of " + std::to_string(size));
}
