// One channel of transport `nccl`: this program is rank 0, its receivers are the others, in the channel's order.
#pragma once

#include <memory>

#include "device_copy.hpp"
#include "nccl.hpp"
#include "sender.hpp"

// A GPU with the file on it, and the library: for as long as the program runs.
struct Card {
    Card(int device, const Safetensors &source) : cuda(device), copy(cuda, source) {}
    Cuda cuda;
    Nccl nccl;
    DeviceCopy copy;
};

std::unique_ptr<Sender> nccl_sender(const Shipment &shipment, const Card &card);
