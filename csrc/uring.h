// io_uring by its system calls: reads and writes that the kernel does while threads do other work.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <mutex>

namespace megatrain {

class Uring {
   public:
    Uring() = default;
    Uring(const Uring&) = delete;
    Uring& operator=(const Uring&) = delete;
    ~Uring();

    // For at most `depth` operations at once. Returns 0, or an error code if io_uring cannot be used here.
    int open(unsigned depth);

    // Starts a read or a write, from any thread. False: the kernel did not take it. That thread must not end before the
    // operation does, since the kernel then cancels it.
    bool submit(int file, unsigned char* bytes, size_t length, uint64_t offset, bool write, void* tag);

    // Blocks until an operation is complete, unless a signal interrupts that. Only one thread may call this and next().
    void wait();

    // Takes a complete operation: its tag, and what it returned (bytes or a negative error code; -EINTR: it did not take
    // place). False: there is none.
    bool next(void*& tag, ssize_t& result);

   private:
    int file_ = -1;
    unsigned char* rings_ = nullptr;
    size_t rings_size_ = 0;
    void* entries_ = nullptr;  // io_uring_sqe
    size_t entries_size_ = 0;
    unsigned *submitted_head_ = nullptr, *submitted_tail_ = nullptr, *completed_head_ = nullptr,
             *completed_tail_ = nullptr;
    unsigned submitted_mask_ = 0, completed_mask_ = 0;
    const void* completed_ = nullptr;  // io_uring_cqe
    std::mutex mutex_;                 // of submissions
};

}  // namespace megatrain
