// The command line.
#pragma once

#include <cstdint>
#include <string>

#include "identity.hpp"

struct Options {
    std::string address = "127.0.0.1:7450";
    std::string group, file, transport = "auto", trainer_id = "publish_checkpoint";
    Identity identity;
    std::int64_t step = 0, replicas = 1;
    int device = 0; // the GPU
    bool takeover = false, help = false;
    double timeout = 120, wait = 30;
};

extern const char kUsage[];

// Throws Error with Exit::usage.
Options parse(int argc, char **argv);
