#include "library.hpp"

#include <dlfcn.h>

#include "errors.hpp"

Library::Library(const std::vector<std::string> &names, std::string advice) : advice_(std::move(advice)) {
    std::string why;
    for (const auto &name : names) {
        handle_ = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
        if (handle_ != nullptr) {
            name_ = name;
            return;
        }
        why += (why.empty() ? "" : "; ") + std::string(dlerror());
    }
    throw Error(Exit::failed, "TRANSPORT", why + ": " + advice_);
}

void *Library::symbol(const char *name) const {
    void *found = dlsym(handle_, name);
    if (found == nullptr)
        throw Error(Exit::failed, "TRANSPORT", name_ + " has no " + name + ": " + advice_);
    return found;
}
