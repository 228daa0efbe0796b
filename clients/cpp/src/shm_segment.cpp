#include "shm_segment.hpp"

#include <cerrno>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <dirent.h>
#include <fcntl.h>
#include <fstream>
#include <linux/futex.h>
#include <memory>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "weightplane/blake2b.hpp"

namespace {

constexpr char kPrefix[] = "weightplane-";
constexpr char kMagic[8] = {'W', 'P', 'S', 'H', 'M', 0, 0, 1};
constexpr std::uint64_t kBell = 128, kState = 136; // and of a receiver's block:
constexpr std::uint64_t kRState = 48, kRRead = 64, kRSkipped = 72, kRArms = 80, kRFence = 96, kRCount = 128,
                        kRQueue = 144;

std::uint64_t get(const std::uint64_t *at) { return __atomic_load_n(at, __ATOMIC_ACQUIRE); }
void put(std::uint64_t *at, std::uint64_t value) { __atomic_store_n(at, value, __ATOMIC_RELEASE); }

void futex_wait(std::uint64_t *at, std::uint64_t seen) { // woken, timed out or changed: the caller looks again anyway
    const timespec slice{0, 50'000'000};
    syscall(SYS_futex, at, FUTEX_WAIT, static_cast<std::uint32_t>(seen), &slice, nullptr, 0);
}

void futex_wake(std::uint64_t *at) { syscall(SYS_futex, at, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0); }

std::string hash(const std::string &key, std::size_t size, const std::vector<std::string> &parts) {
    std::string text;
    for (const auto &part : parts) {
        const std::uint64_t n = part.size();
        text.append(reinterpret_cast<const char *>(&n), 8);
        text += part;
    }
    return weightplane::blake2b(text, key, size);
}

flock lock_of(short kind, off_t byte) {
    flock lock{};
    lock.l_type = kind;
    lock.l_whence = SEEK_SET;
    lock.l_start = byte;
    lock.l_len = 1;
    return lock;
}

bool lock_is_free(int fd, off_t byte) {
    auto lock = lock_of(F_WRLCK, byte);
    return fcntl(fd, F_OFD_GETLK, &lock) == 0 && lock.l_type == F_UNLCK;
}

[[noreturn]] void fail(const std::string &where, const std::string &what) {
    throw Error(Exit::failed, "TRANSPORT", where + ": " + what + ": " + std::strerror(errno));
}

std::uint64_t pid_namespace() {
    struct stat facts {};
    return stat("/proc/self/ns/pid", &facts) == 0 ? facts.st_ino : 0;
}

// Unlinks our user's segments whose sender is dead.
void sweep(const std::string &directory) {
    const std::unique_ptr<DIR, int (*)(DIR *)> listing(opendir(directory.c_str()), closedir);
    while (const dirent *entry = listing ? readdir(listing.get()) : nullptr) {
        if (std::strncmp(entry->d_name, kPrefix, sizeof kPrefix - 1) != 0)
            continue;
        const std::string path = directory + "/" + entry->d_name;
        const int fd = ::open(path.c_str(), O_RDWR | O_NOFOLLOW | O_CLOEXEC);
        if (fd < 0)
            continue; // another user's, or gone by now
        struct stat facts {};
        if (fstat(fd, &facts) == 0 && facts.st_uid == geteuid() && lock_is_free(fd, 0))
            unlink(path.c_str());
        ::close(fd);
    }
}

} // namespace

void check_shm_room() {
    const auto directory = shm_directory();
    constexpr auto size = ShmSegment::kSlots * ShmSegment::kSlotBytes;
    const int fd = ::open(directory.c_str(), O_RDWR | O_TMPFILE | O_CLOEXEC, 0600);
    if (fd < 0)
        fail(directory, "no shared memory can be made (set WEIGHTPLANE_SHM_DIR, or use grpc)");
    const int why = posix_fallocate(fd, 0, static_cast<off_t>(size));
    ::close(fd);
    errno = why;
    if (why != 0)
        fail(directory, std::to_string(size >> 10) + " KiB of shared memory are needed (make room, or use grpc)");
}

std::string shm_directory() {
    const char *given = std::getenv("WEIGHTPLANE_SHM_DIR");
    return given == nullptr ? "/dev/shm" : given;
}

std::string shm_host() {
    std::string boot;
    std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
    struct stat facts {};
    if (stat(shm_directory().c_str(), &facts) != 0)
        return boot;
    char text[64];
    std::snprintf(text, sizeof text, "/%lx.%lx/%u", static_cast<unsigned long>(facts.st_dev),
                  static_cast<unsigned long>(facts.st_ino), static_cast<unsigned>(geteuid()));
    return boot + text;
}

std::string shm_name(const std::string &channel_id, const std::string &sender) {
    static const char digits[] = "0123456789abcdef";
    std::string out = kPrefix;
    for (const char c : hash("", 16, {channel_id, sender})) {
        out += digits[c >> 4 & 15];
        out += digits[c & 15];
    }
    return out;
}

std::string shm_fence(const std::string &update_id, std::int64_t epoch, std::int64_t generation) {
    return hash("", 16, {update_id, std::to_string(epoch), std::to_string(generation)});
}

std::string shm_proof(const std::string &key, const std::string &role, const std::string &channel_id,
                      const std::string &member) {
    return hash(key, 32, {role, channel_id, member});
}

ShmSegment::ShmSegment(const std::string &key, const std::string &channel_id, const std::string &sender,
                       const std::vector<std::string> &receivers)
    : directory_(shm_directory()), file_(shm_name(channel_id, sender)) {
    sweep(directory_);
    for (const auto &receiver : receivers)
        proofs_.push_back(shm_proof(key, "receiver", channel_id, receiver));
    first_ = kPage + kSlots * 64;
    data_ = (first_ + receivers.size() * kStride + kPage - 1) / kPage * kPage;
    size_ = data_ + kSlots * kSlotBytes;
    fd_ = ::open(directory_.c_str(), O_RDWR | O_TMPFILE | O_CLOEXEC, 0600);
    if (fd_ < 0)
        fail(directory_, "cannot make a file");
    try {
        errno = posix_fallocate(fd_, 0, static_cast<off_t>(size_));
        if (errno != 0)
            fail(directory_, std::to_string(size_ >> 10) + " KiB of shared memory are needed");
        void *at = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd_, 0);
        if (at == MAP_FAILED)
            fail(directory_, "cannot map a segment");
        base_ = static_cast<std::uint8_t *>(at);
        std::memcpy(base_, kMagic, 8);
        const std::uint64_t facts[] = {kSlots, kSlotBytes, receivers.size(), static_cast<std::uint64_t>(getpid()),
                                       pid_namespace()};
        std::memcpy(base_ + 8, facts, sizeof facts);
        const auto proof = shm_proof(key, "sender", channel_id, sender);
        std::memcpy(base_ + 64, proof.data(), 32);
        put(word(kState), open);
        auto lock = lock_of(F_WRLCK, 0);
        if (fcntl(fd_, F_OFD_SETLK, &lock) != 0)
            fail(directory_, "cannot lock a segment");
        const auto self = "/proc/self/fd/" + std::to_string(fd_);
        if (linkat(AT_FDCWD, self.c_str(), AT_FDCWD, (directory_ + "/" + file_).c_str(), AT_SYMLINK_FOLLOW) != 0)
            fail(directory_ + "/" + file_, "cannot name the segment");
    } catch (...) {
        if (base_ != nullptr)
            munmap(base_, size_);
        ::close(fd_);
        throw;
    }
}

ShmSegment::~ShmSegment() {
    unlink((directory_ + "/" + file_).c_str()); // the last receiver to attach may have done it
    munmap(base_, size_);
    ::close(fd_);
}

void ShmSegment::invalidate(std::uint64_t slot) {
    put(word(kPage + slot * 64), 0);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
}

void ShmSegment::write_header(std::uint64_t slot, std::uint64_t bucket, std::uint64_t offset, std::uint64_t nbytes,
                              const std::string &fence, std::uint64_t seq) {
    auto *at = base_ + kPage + slot * 64;
    const std::uint64_t facts[] = {bucket, offset, nbytes};
    std::memcpy(at + 8, facts, sizeof facts);
    std::memcpy(at + 32, fence.data(), 16);
    put(word(kPage + slot * 64), seq);
}

std::uint64_t ShmSegment::post(std::size_t rank, std::uint64_t seq) {
    const auto at = receiver_at(rank);
    const auto count = get(word(at + kRCount));
    put(word(at + kRQueue + count % kSlots * 8), seq);
    put(word(at + kRCount), count + 1);
    return count + 1;
}

void ShmSegment::ring(std::uint64_t seq) {
    put(word(kBell), seq);
    futex_wake(word(kBell));
}

void ShmSegment::set_state(State state) {
    put(word(kState), state);
    futex_wake(word(kBell));
}

ShmSegment::State ShmSegment::receiver_state(std::size_t rank) const {
    return static_cast<State>(get(word(receiver_at(rank) + kRState)));
}

bool ShmSegment::armed_for(std::size_t rank, const std::string &fence) const {
    return receiver_state(rank) != none && std::memcmp(base_ + receiver_at(rank) + kRFence, fence.data(), 16) == 0;
}

bool ShmSegment::knows_key(std::size_t rank) const {
    return std::memcmp(base_ + receiver_at(rank), proofs_[rank].data(), 32) == 0;
}

bool ShmSegment::dead(std::size_t rank) const { return lock_is_free(fd_, static_cast<off_t>(1 + rank)); }

std::uint64_t ShmSegment::read(std::size_t rank) const { return get(word(receiver_at(rank) + kRRead)); }
std::uint64_t ShmSegment::skipped(std::size_t rank) const { return get(word(receiver_at(rank) + kRSkipped)); }
std::uint64_t ShmSegment::arms(std::size_t rank) const { return get(word(receiver_at(rank) + kRArms)); }

void ShmSegment::wait_read(std::size_t rank, std::uint64_t seen) { futex_wait(word(receiver_at(rank) + kRRead), seen); }
void ShmSegment::wait_arm(std::size_t rank, std::uint64_t seen) { futex_wait(word(receiver_at(rank) + kRArms), seen); }

void ShmSegment::wake_receiver(std::size_t rank) {
    futex_wake(word(receiver_at(rank) + kRRead));
    futex_wake(word(receiver_at(rank) + kRArms));
}
