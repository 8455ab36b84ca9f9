// The pool of disk I/O: transfers that take turns, the threads that work on their pieces, and how it ends.
#include "disk.h"

#include <pthread.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>

#include "piece.h"
#include "pool.h"
#include "uring.h"
#include "xxh64.h"

struct mt_disk_transfer {
    mt_disk* pool;
    mt_disk_piece* pieces;
    size_t count;
    unsigned char* memory;
    bool write;
    size_t taken = 0, done = 0;  // guarded by the pool's mutex, as is what follows
    mt_disk_outcome outcome{};
    mt_disk_transfer* next = nullptr;

    // Only the first failure counts.
    void fail(int code, int file, uint64_t offset) {
        if (outcome.code == 0) outcome.code = code, outcome.file = file, outcome.offset = offset;
    }
};

namespace {

// A list through `next`, first in, first out.
template <typename Item>
class Queue {
   public:
    bool empty() const { return first_ == nullptr; }

    void append(Item* item) {
        item->next = nullptr;
        *last_ = item;
        last_ = &item->next;
    }

    Item* take() {
        Item* const taken = first_;
        first_ = taken->next;
        if (first_ == nullptr) last_ = &first_;
        return taken;
    }

   private:
    Item *first_ = nullptr, **last_ = &first_;
};

// A piece under way.
struct Slot : megatrain::PieceMove {
    mt_disk_transfer* transfer;
    ssize_t result;  // of the ring's attempt
    Slot* next;
};

}  // namespace

struct mt_disk {
    std::mutex mutex;
    std::condition_variable wake, wake_ring, finished, left;
    Queue<mt_disk_transfer> waiting;  // transfers with pieces that were not taken
    std::unique_ptr<Slot[]> slots;
    Slot* unused = nullptr;  // the slots without a piece
    int busy = 0;            // the number of those with one
    std::unique_ptr<megatrain::Uring> ring;  // null: threads transfer pieces themselves
    int in_ring = 0;                         // less than 0 while an operation ended before it was counted
    Queue<Slot> arrived;                     // the ring is done with them
    int threads = 0;
    size_t references = 1;  // the owner and every transfer
    bool stopping = false;

    int open(int depth, int backend) {
        slots.reset(new (std::nothrow) Slot[depth]);
        if (slots == nullptr) return ENOMEM;
        for (int number = 0; number < depth; ++number) release(&slots[number]);
        if (backend == MT_DISK_THREADS) return start_threads<&mt_disk::serve>(depth);
        ring.reset(new (std::nothrow) megatrain::Uring);
        if (ring == nullptr) return ENOMEM;
        if (const int failure = ring->open(depth)) return failure;
        if (const int failure = start_threads<&mt_disk::reap>(1)) return failure;
        return start_threads<&mt_disk::serve>(std::min(depth, megatrain::usable_cpus()));
    }

    void release(Slot* slot) {
        slot->next = unused;
        unused = slot;
    }

    void drop(std::unique_lock<std::mutex>& lock) {
        const bool unreferenced = --references == 0;
        lock.unlock();
        if (unreferenced) delete this;
    }

    bool can_begin() const { return !waiting.empty() && unused != nullptr; }

    bool has_ended() const { return stopping && busy == 0; }

    // What a thread does: new pieces first, so that the drive has work while checksums of others are computed.
    void serve() {
        std::unique_lock<std::mutex> lock(mutex);
        for (;;) {
            wake.wait(lock, [this] { return can_begin() || !arrived.empty() || has_ended(); });
            if (can_begin()) {
                begin(lock);
            } else if (!arrived.empty()) {
                Slot* const slot = arrived.take();
                lock.unlock();
                const int failure = slot->finish(slot->result);
                lock.lock();
                settle(slot, failure);
            } else {
                break;
            }
        }
        leave();
    }

    void begin(std::unique_lock<std::mutex>& lock) {
        mt_disk_transfer* const transfer = waiting.take();
        Slot* const slot = unused;
        unused = slot->next;
        slot->transfer = transfer;
        slot->piece = &transfer->pieces[transfer->taken++];
        slot->memory = transfer->memory;
        slot->write = transfer->write;
        slot->length = 0;
        ++busy;
        transfer->memory += slot->piece->length;
        if (transfer->taken < transfer->count) waiting.append(transfer);
        if (transfer->outcome.code != 0) return settle(slot, 0);
        lock.unlock();
        int failure = slot->prepare();
        if (failure == 0 && slot->length > 0) {
            if (ring != nullptr && ring->submit(slot->piece->file, slot->bytes, slot->length, slot->piece->offset,
                                                slot->write, slot)) {
                lock.lock();
                ++in_ring;
                wake_ring.notify_one();
                return;
            }
            failure = slot->finish(slot->attempt());
        }
        lock.lock();
        settle(slot, failure);
    }

    void settle(Slot* slot, int failure) {
        mt_disk_transfer* const transfer = slot->transfer;
        if (failure != 0) {
            transfer->fail(failure, slot->piece->file, slot->piece->offset);
        } else {
            transfer->outcome.moved += slot->length;
        }
        if (++transfer->done == transfer->count) finished.notify_all();
        release(slot);
        --busy;
        // Otherwise this thread goes on with the slot itself.
        if (stopping) {
            wake.notify_all();
            wake_ring.notify_all();
        }
    }

    // What the thread of the ring does. It waits in the kernel only while an operation is there.
    void reap() {
        std::unique_lock<std::mutex> lock(mutex);
        for (;;) {
            wake_ring.wait(lock, [this] { return in_ring > 0 || has_ended(); });
            if (in_ring <= 0) break;
            lock.unlock();
            ring->wait();
            lock.lock();
            void* slot;
            ssize_t result;
            while (ring->next(slot, result)) {
                static_cast<Slot*>(slot)->result = result;
                arrived.append(static_cast<Slot*>(slot));
                --in_ring;
                wake.notify_one();
            }
        }
        leave();
    }

    void leave() {
        --threads;
        left.notify_all();
    }

    template <void (mt_disk::*work)()>
    int start_threads(int count) {
        // These threads must not receive the program's signals.
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        int failure = 0;
        for (; count > 0 && failure == 0; --count) {
            const std::lock_guard<std::mutex> lock(mutex);
            pthread_t thread;
            const auto enter = [](void* pool) -> void* {
                (static_cast<mt_disk*>(pool)->*work)();
                return nullptr;
            };
            failure = pthread_create(&thread, nullptr, enter, this);
            if (failure != 0) break;
            pthread_setname_np(thread, "megatrain-disk");
            pthread_detach(thread);
            ++threads;
        }
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
        return failure;
    }
};

uint64_t mt_disk_checksum(const void* bytes, size_t count) {
    return megatrain::xxh64(static_cast<const unsigned char*>(bytes), count);
}

int mt_disk_describe(int file, mt_disk_file* found) {
    struct statfs system;
    if (fstatfs(file, &system) != 0) return errno;
    *found = {};
    found->magic = static_cast<uint64_t>(static_cast<uint32_t>(system.f_type));
    // Headers older than the kernel lack these fields of struct statx: 256 bytes, the mask at 0 and the alignments at 152.
    constexpr unsigned kEmptyPath = 0x1000, kDioAlign = 0x2000;
    alignas(8) unsigned char fields[256] = {};
    if (syscall(SYS_statx, file, "", kEmptyPath, kDioAlign, fields) != 0) return 0;
    uint32_t mask, aligns[2];
    std::memcpy(&mask, fields, sizeof mask);
    if ((mask & kDioAlign) == 0) return 0;
    std::memcpy(aligns, fields + 152, sizeof aligns);
    found->memory_align = aligns[0];
    found->offset_align = aligns[1];
    found->align_known = 1;
    return 0;
}

int mt_disk_uring(void) {
    megatrain::Uring ring;
    return ring.open(1);
}

int mt_disk_start(int depth, int backend, mt_disk** pool) {
    if (depth < 1 || (backend != MT_DISK_THREADS && backend != MT_DISK_URING)) return EINVAL;
    mt_disk* const made = new (std::nothrow) mt_disk;
    if (made == nullptr) return ENOMEM;
    if (const int failure = made->open(depth, backend)) {
        mt_disk_stop(made, 1000);
        return failure;
    }
    *pool = made;
    return 0;
}

int mt_disk_stop(mt_disk* pool, int milliseconds) {
    std::unique_lock<std::mutex> lock(pool->mutex);
    pool->stopping = true;
    while (!pool->waiting.empty()) {
        mt_disk_transfer* const transfer = pool->waiting.take();
        transfer->fail(ECANCELED, transfer->pieces[transfer->taken].file, 0);
        transfer->done += transfer->count - transfer->taken;
        transfer->taken = transfer->count;
    }
    pool->wake.notify_all();
    pool->wake_ring.notify_all();
    pool->finished.notify_all();
    const auto ended = [pool] { return pool->threads == 0; };
    if (!pool->left.wait_for(lock, std::chrono::milliseconds(milliseconds), ended)) return ETIMEDOUT;
    pool->drop(lock);
    return 0;
}

int mt_disk_submit(mt_disk* pool, mt_disk_piece* pieces, size_t count, void* memory, int write,
                   mt_disk_transfer** transfer) {
    auto* const made = new (std::nothrow)
        mt_disk_transfer{pool, pieces, count, static_cast<unsigned char*>(memory), write != 0};
    if (made == nullptr) return ENOMEM;
    const std::lock_guard<std::mutex> lock(pool->mutex);
    if (pool->stopping) {
        delete made;
        return ECANCELED;
    }
    ++pool->references;
    if (count > 0) {
        pool->waiting.append(made);
        pool->wake.notify_all();
    }
    *transfer = made;
    return 0;
}

int mt_disk_wait(mt_disk_transfer* transfer, int milliseconds, mt_disk_outcome* outcome) {
    mt_disk* const pool = transfer->pool;
    std::unique_lock<std::mutex> lock(pool->mutex);
    const auto complete = [transfer] { return transfer->done == transfer->count; };
    if (!pool->finished.wait_for(lock, std::chrono::milliseconds(milliseconds), complete)) return ETIMEDOUT;
    *outcome = transfer->outcome;
    delete transfer;
    pool->drop(lock);
    return outcome->code;
}
