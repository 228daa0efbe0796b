// Transport `shm`: CPU memory on one host, through a ring of slots. One copy serves all receivers of a bucket.
#pragma once

#include <memory>

#include "sender.hpp"

// Makes the segment, for receivers to find while they are armed. Throws Error: what the machine lacks, who is elsewhere.
std::unique_ptr<Sender> shm_sender(const Shipment &shipment);
