// Transport `cuda_ipc`: replicas of this host that read this process's GPU memory.
#pragma once

#include <memory>

#include "transport.hpp"

// `device`: as CUDA_VISIBLE_DEVICES numbers them. The file is copied there by the first offer, which says what is missing.
std::unique_ptr<Transport> cuda_ipc(int device, const Safetensors &source);
