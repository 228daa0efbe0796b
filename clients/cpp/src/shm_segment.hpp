// The shared-memory segment of one sender: a ring of slots that receivers read. The layout, and who may write what, is
// in transports/weightplane/transports/shm_ring.py.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "errors.hpp"

// Where segments are; the host as a receiver names it (boot, mount, user).
std::string shm_directory();
std::string shm_host();
// Throws Error with reason TRANSPORT where a segment cannot be made there, or does not fit.
void check_shm_room();

// File name of a sender's segment, and the 16 bytes that stand for an update in it.
std::string shm_name(const std::string &channel_id, const std::string &sender);
std::string shm_fence(const std::string &update_id, std::int64_t epoch, std::int64_t generation);
// What shows a member's knowledge of the channel's key; `role`: "sender" or "receiver".
std::string shm_proof(const std::string &key, const std::string &role, const std::string &channel_id,
                      const std::string &member);

class ShmSegment {
public:
    enum State : std::uint64_t { none = 0, open = 1, aborted = 2, closed = 3 };

    // Makes, prefaults, locks and names it. Throws Error with reason TRANSPORT.
    ShmSegment(const std::string &key, const std::string &channel_id, const std::string &sender,
               const std::vector<std::string> &receivers);
    ~ShmSegment(); // unmaps and unlinks
    ShmSegment(const ShmSegment &) = delete;
    ShmSegment &operator=(const ShmSegment &) = delete;

    static constexpr std::uint64_t kSlots = 16, kSlotBytes = 512 << 10;

    std::uint8_t *slot(std::uint64_t slot) { return base_ + data_ + slot * kSlotBytes; }
    // Before and after the bytes of a slot change.
    void invalidate(std::uint64_t slot);
    void write_header(std::uint64_t slot, std::uint64_t bucket, std::uint64_t offset, std::uint64_t nbytes,
                      const std::string &fence, std::uint64_t seq);
    // Announces slot number `seq` (from 1) to a receiver; its count of slots, to wait for. Then ring once for all.
    std::uint64_t post(std::size_t rank, std::uint64_t seq);
    void ring(std::uint64_t seq);

    void set_state(State state);
    State receiver_state(std::size_t rank) const;
    bool armed_for(std::size_t rank, const std::string &fence) const;
    bool knows_key(std::size_t rank) const; // of an attached receiver
    bool dead(std::size_t rank) const;      // of an attached receiver: its process died or closed its side
    std::uint64_t read(std::size_t rank) const;
    std::uint64_t skipped(std::size_t rank) const;
    std::uint64_t arms(std::size_t rank) const;
    // Sleep, at most 50 ms, unless the receiver has read more, or armed, since `seen`.
    void wait_read(std::size_t rank, std::uint64_t seen);
    void wait_arm(std::size_t rank, std::uint64_t seen);
    // Wakes whoever sleeps on these two.
    void wake_receiver(std::size_t rank);

private:
    std::uint64_t *word(std::uint64_t offset) const { return reinterpret_cast<std::uint64_t *>(base_ + offset); }
    std::uint64_t receiver_at(std::size_t rank) const { return first_ + rank * kStride; }

    static constexpr std::uint64_t kPage = 4096, kStride = (144 + 8 * kSlots + 63) / 64 * 64;

    const std::string directory_;
    const std::string file_;
    std::vector<std::string> proofs_; // of the receivers
    int fd_ = -1;
    std::uint64_t size_ = 0, first_ = 0, data_ = 0;
    std::uint8_t *base_ = nullptr;
};
