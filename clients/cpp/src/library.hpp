// A shared library that need not be here: looked for when it is first wanted, never linked.
#pragma once

#include <string>
#include <vector>

class Library {
public:
    // The first of these names that can be loaded. Throws Error with reason TRANSPORT: what is missing, and `advice`.
    Library(const std::vector<std::string> &names, std::string advice);
    Library(const Library &) = delete;
    Library &operator=(const Library &) = delete;

    // Throws Error naming the function if the library has none of that name.
    template <class F> void find(const char *name, F *&out) const { out = reinterpret_cast<F *>(symbol(name)); }

private:
    void *symbol(const char *name) const;

    void *handle_ = nullptr; // never closed: drivers leave threads behind
    std::string name_, advice_;
};
