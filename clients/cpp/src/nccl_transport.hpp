// Transport `nccl`: replicas on GPUs of their own, on this host or others.
#pragma once

#include <memory>

#include "transport.hpp"

// `device`: as CUDA_VISIBLE_DEVICES numbers them. The file is copied there by the first offer, which says what is missing.
std::unique_ptr<Transport> nccl(int device, const Safetensors &source);
