#include "uring.h"

#include <cerrno>

#if __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>
#endif
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

namespace megatrain {

// Headers of Linux 5.6 and newer describe all that is used here.
#if defined(IORING_FEAT_RW_CUR_POS) && defined(SYS_io_uring_setup) && defined(SYS_io_uring_enter)

namespace {

constexpr unsigned kFeatures = IORING_FEAT_SINGLE_MMAP | IORING_FEAT_NODROP | IORING_FEAT_RW_CUR_POS;
constexpr size_t kLongest = 1 << 30;  // bytes of one operation

unsigned load(const unsigned* at) { return __atomic_load_n(at, __ATOMIC_ACQUIRE); }
void store(unsigned* at, unsigned value) { __atomic_store_n(at, value, __ATOMIC_RELEASE); }

int enter(int file, unsigned submit, unsigned complete, unsigned flags) {
    return static_cast<int>(syscall(SYS_io_uring_enter, file, submit, complete, flags, nullptr, 0));
}

// A forked child must not have these.
void* map_shared(int file, size_t bytes, off_t what) {
    void* const made = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, file, what);
    if (made != MAP_FAILED && madvise(made, bytes, MADV_DONTFORK) == 0) return made;
    const int failure = errno;
    if (made != MAP_FAILED) munmap(made, bytes);
    errno = failure;
    return nullptr;
}

}  // namespace

Uring::~Uring() {
    if (entries_ != nullptr) munmap(entries_, entries_size_);
    if (rings_ != nullptr) munmap(rings_, rings_size_);
    if (file_ >= 0) close(file_);
}

int Uring::open(unsigned depth) {
    io_uring_params made{};
    file_ = static_cast<int>(syscall(SYS_io_uring_setup, depth, &made));
    if (file_ < 0) return errno;
    if ((made.features & kFeatures) != kFeatures) return ENOSYS;
    rings_size_ = std::max(made.sq_off.array + made.sq_entries * sizeof(unsigned),
                           made.cq_off.cqes + made.cq_entries * sizeof(io_uring_cqe));
    entries_size_ = made.sq_entries * sizeof(io_uring_sqe);
    rings_ = static_cast<unsigned char*>(map_shared(file_, rings_size_, IORING_OFF_SQ_RING));
    if (rings_ == nullptr) return errno;
    entries_ = map_shared(file_, entries_size_, IORING_OFF_SQES);
    if (entries_ == nullptr) return errno;
    const auto field = [this](unsigned offset) { return reinterpret_cast<unsigned*>(rings_ + offset); };
    submitted_head_ = field(made.sq_off.head);
    submitted_tail_ = field(made.sq_off.tail);
    submitted_mask_ = *field(made.sq_off.ring_mask);
    completed_head_ = field(made.cq_off.head);
    completed_tail_ = field(made.cq_off.tail);
    completed_mask_ = *field(made.cq_off.ring_mask);
    completed_ = rings_ + made.cq_off.cqes;
    // Entry i of the queue is always in place i.
    for (unsigned number = 0; number < made.sq_entries; ++number) field(made.sq_off.array)[number] = number;
    // A filter of system calls may allow to set up a ring and not to use it.
    return enter(file_, 0, 0, IORING_ENTER_GETEVENTS) < 0 ? errno : 0;
}

bool Uring::submit(int file, unsigned char* bytes, size_t length, uint64_t offset, bool write, void* tag) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const unsigned tail = *submitted_tail_;
    io_uring_sqe entry{};
    entry.opcode = write ? IORING_OP_WRITE : IORING_OP_READ;
    entry.fd = file;
    entry.addr = reinterpret_cast<uintptr_t>(bytes);
    entry.len = static_cast<unsigned>(std::min(length, kLongest));
    entry.off = offset;
    entry.user_data = reinterpret_cast<uintptr_t>(tag);
    static_cast<io_uring_sqe*>(entries_)[tail & submitted_mask_] = entry;
    store(submitted_tail_, tail + 1);
    if (enter(file_, 1, 0, 0) == 1 || load(submitted_head_) == tail + 1) return true;
    // The kernel reads the queue during system calls only, so the entry can be taken back.
    store(submitted_tail_, tail);
    return false;
}

void Uring::wait() { enter(file_, 0, 1, IORING_ENTER_GETEVENTS); }

bool Uring::next(void*& tag, ssize_t& result) {
    const unsigned head = *completed_head_;
    if (head == load(completed_tail_)) return false;
    const io_uring_cqe& entry = static_cast<const io_uring_cqe*>(completed_)[head & completed_mask_];
    tag = reinterpret_cast<void*>(static_cast<uintptr_t>(entry.user_data));
    result = entry.res == -EAGAIN || entry.res == -ECANCELED ? -EINTR : entry.res;
    store(completed_head_, head + 1);
    return true;
}

#else

Uring::~Uring() = default;
int Uring::open(unsigned) { return ENOSYS; }
bool Uring::submit(int, unsigned char*, size_t, uint64_t, bool, void*) { return false; }
void Uring::wait() {}
bool Uring::next(void*&, ssize_t&) { return false; }

#endif

}  // namespace megatrain
