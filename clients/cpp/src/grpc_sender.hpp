// Transport `grpc`: one TensorService stream per receiver, each at its own pace.
#pragma once

#include <memory>

#include "identity.hpp"
#include "sender.hpp"

// Throws Error if a receiver's offer is of no use.
std::unique_ptr<Sender> grpc_sender(const Shipment &shipment, const Identity &own);
