// Disk I/O: a pool of threads that read and write pieces of files, each with a checksum.
#include "disk.h"

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <new>

namespace {

// ---- XXH64 (https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md)

constexpr uint64_t kPrime1 = 0x9E3779B185EBCA87, kPrime2 = 0xC2B2AE3D27D4EB4F, kPrime3 = 0x165667B19E3779F9,
                   kPrime4 = 0x85EBCA77C2B2AE63, kPrime5 = 0x27D4EB2F165667C5;

inline uint64_t rotate(uint64_t value, int bits) { return value << bits | value >> (64 - bits); }

template <typename Word>
inline uint64_t load(const unsigned char* at) {
    Word word;
    std::memcpy(&word, at, sizeof word);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    word = sizeof word == 8 ? __builtin_bswap64(word) : __builtin_bswap32(word);
#endif
    return word;
}

inline uint64_t round(uint64_t sum, uint64_t word) { return rotate(sum + word * kPrime2, 31) * kPrime1; }

inline uint64_t merge(uint64_t hash, uint64_t sum) { return (hash ^ round(0, sum)) * kPrime1 + kPrime4; }

uint64_t xxh64(const unsigned char* at, size_t count) {
    const unsigned char* const end = at + count;
    uint64_t hash = kPrime5;
    if (count >= 32) {
        uint64_t a = kPrime1 + kPrime2, b = kPrime2, c = 0, d = 0 - kPrime1;
        for (; end - at >= 32; at += 32) {
            a = round(a, load<uint64_t>(at));
            b = round(b, load<uint64_t>(at + 8));
            c = round(c, load<uint64_t>(at + 16));
            d = round(d, load<uint64_t>(at + 24));
        }
        hash = rotate(a, 1) + rotate(b, 7) + rotate(c, 12) + rotate(d, 18);
        hash = merge(merge(merge(merge(hash, a), b), c), d);
    }
    hash += count;
    for (; end - at >= 8; at += 8) hash = rotate(hash ^ round(0, load<uint64_t>(at)), 27) * kPrime1 + kPrime4;
    for (; end - at >= 4; at += 4) hash = rotate(hash ^ load<uint32_t>(at) * kPrime1, 23) * kPrime2 + kPrime3;
    for (; at < end; ++at) hash = rotate(hash ^ *at * kPrime5, 11) * kPrime1;
    hash = (hash ^ hash >> 33) * kPrime2;
    hash = (hash ^ hash >> 29) * kPrime3;
    return hash ^ hash >> 32;
}

// ---- transfers

// After a partial transfer, direct I/O continues at a multiple of this.
constexpr size_t kAlign = 4096;

// Returns 0 or an error code.
int move(const mt_disk_piece& piece, unsigned char* memory, bool write) {
    size_t done = 0;
    while (done < piece.length) {
        const size_t left = piece.length - done;
        const off_t at = static_cast<off_t>(piece.offset + done);
        const ssize_t moved =
            write ? pwrite(piece.file, memory + done, left, at) : pread(piece.file, memory + done, left, at);
        if (moved < 0 && errno == EINTR) continue;
        // Direct I/O cannot continue inside a block.
        if (moved < 0) return errno == EINVAL && done % kAlign != 0 ? EIO : errno;
        if (moved == 0) return write ? EIO : ENODATA;
        const size_t reached = done + static_cast<size_t>(moved);
        // After a short transfer, the block that was begun is transferred again, once.
        const size_t aligned = reached == piece.length ? reached : reached / kAlign * kAlign;
        done = aligned > done ? aligned : reached;
    }
    return 0;
}

// Without direct I/O, pages of these files would fill the page cache. Starts writing them back, and drops clean ones.
void leave_cache(const mt_disk_piece& piece, bool write) {
    if ((fcntl(piece.file, F_GETFL) & O_DIRECT) != 0) return;
    const off_t offset = static_cast<off_t>(piece.offset), length = static_cast<off_t>(piece.length);
    if (write) sync_file_range(piece.file, offset, length, SYNC_FILE_RANGE_WRITE);
    posix_fadvise(piece.file, offset, length, POSIX_FADV_DONTNEED);
}

int read_piece(const mt_disk_piece& piece, unsigned char* memory) {
    if (!piece.written) {
        std::memset(memory, 0, piece.length);
        return 0;
    }
    if (const int failure = move(piece, memory, false)) return failure;
    leave_cache(piece, false);
    return xxh64(memory, piece.length) == piece.checksum ? 0 : EBADMSG;
}

int write_piece(mt_disk_piece& piece, unsigned char* memory) {
    piece.checksum = xxh64(memory, piece.length);
    // Also if the write fails: then no piece of this checksum is on the disk, and reading it reports that.
    piece.written = 1;
    if (const int failure = move(piece, memory, true)) return failure;
    leave_cache(piece, true);
    return 0;
}

}  // namespace

struct mt_disk_transfer {
    mt_disk* pool;
    mt_disk_piece* pieces;
    size_t count;
    unsigned char* memory;
    bool write;
    size_t taken = 0, done = 0;  // guarded by the pool's mutex, as is what follows
    mt_disk_fault fault{};
    mt_disk_transfer* next = nullptr;
};

struct mt_disk {
    std::mutex mutex;
    std::condition_variable wake, finished, left;
    mt_disk_transfer *first = nullptr, **last = &first;  // transfers with pieces that were not taken
    int threads = 0;
    size_t references = 1;  // the owner and every transfer
    bool stopping = false;

    void append(mt_disk_transfer* transfer) {
        transfer->next = nullptr;
        *last = transfer;
        last = &transfer->next;
    }

    mt_disk_transfer* take() {
        mt_disk_transfer* const taken = first;
        first = taken->next;
        if (first == nullptr) last = &first;
        return taken;
    }

    void drop(std::unique_lock<std::mutex>& lock) {
        const bool unused = --references == 0;
        lock.unlock();
        if (unused) delete this;
    }

    void serve() {
        std::unique_lock<std::mutex> lock(mutex);
        for (;;) {
            wake.wait(lock, [this] { return stopping || first != nullptr; });
            if (stopping) break;
            mt_disk_transfer* const transfer = take();
            mt_disk_piece& piece = transfer->pieces[transfer->taken++];
            unsigned char* const memory = transfer->memory;
            transfer->memory += piece.length;
            if (transfer->taken < transfer->count) append(transfer);
            if (transfer->fault.code == 0) {
                lock.unlock();
                const int failure = transfer->write ? write_piece(piece, memory) : read_piece(piece, memory);
                lock.lock();
                if (failure != 0 && transfer->fault.code == 0) transfer->fault = {failure, piece.file, piece.offset};
            }
            if (++transfer->done == transfer->count) finished.notify_all();
        }
        --threads;
        left.notify_all();
    }

    static void* enter(void* pool) {
        static_cast<mt_disk*>(pool)->serve();
        return nullptr;
    }

    int start_thread() {
        // These threads must not receive the program's signals.
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        pthread_t thread;
        const int failure = pthread_create(&thread, nullptr, &mt_disk::enter, this);
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
        if (failure != 0) return failure;
        pthread_setname_np(thread, "megatrain-disk");
        pthread_detach(thread);
        const std::lock_guard<std::mutex> lock(mutex);
        ++threads;
        return 0;
    }
};

uint64_t mt_disk_checksum(const void* bytes, size_t count) {
    return xxh64(static_cast<const unsigned char*>(bytes), count);
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

int mt_disk_start(int threads, mt_disk** pool) {
    if (threads < 1) return EINVAL;
    mt_disk* const made = new (std::nothrow) mt_disk;
    if (made == nullptr) return ENOMEM;
    for (int number = 0; number < threads; ++number) {
        if (const int failure = made->start_thread()) {
            mt_disk_stop(made, 1000);
            return failure;
        }
    }
    *pool = made;
    return 0;
}

int mt_disk_stop(mt_disk* pool, int milliseconds) {
    std::unique_lock<std::mutex> lock(pool->mutex);
    pool->stopping = true;
    while (pool->first != nullptr) {
        mt_disk_transfer* const transfer = pool->take();
        if (transfer->fault.code == 0) transfer->fault = {ECANCELED, transfer->pieces[transfer->taken].file, 0};
        transfer->done += transfer->count - transfer->taken;
        transfer->taken = transfer->count;
    }
    pool->wake.notify_all();
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
        pool->append(made);
        pool->wake.notify_all();
    }
    *transfer = made;
    return 0;
}

int mt_disk_wait(mt_disk_transfer* transfer, int milliseconds, mt_disk_fault* fault) {
    mt_disk* const pool = transfer->pool;
    std::unique_lock<std::mutex> lock(pool->mutex);
    const auto complete = [transfer] { return transfer->done == transfer->count; };
    if (!pool->finished.wait_for(lock, std::chrono::milliseconds(milliseconds), complete)) return ETIMEDOUT;
    *fault = transfer->fault;
    delete transfer;
    pool->drop(lock);
    return fault->code;
}
