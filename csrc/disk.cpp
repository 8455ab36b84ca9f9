// Disk I/O: a pool of threads that read and write pieces of files, each with a checksum, some of them coded.
#include "disk.h"

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
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

// ---- memory for encodings

constexpr size_t round_up(size_t bytes) { return (bytes + MT_DISK_ALIGN - 1) / MT_DISK_ALIGN * MT_DISK_ALIGN; }

// Page-aligned memory of one thread, kept between pieces.
class Scratch {
   public:
    Scratch() = default;
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;
    ~Scratch() {
        if (memory_ != nullptr) munmap(memory_, size_);
    }

    // At least `bytes` bytes, with any content; null if there is no memory.
    unsigned char* get(size_t bytes) {
        if (bytes <= size_) return memory_;
        void* const made = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (made == MAP_FAILED) return nullptr;
        // A fork during a direct read could leave this process with a copy of the page that is not read into.
        if (madvise(made, bytes, MADV_DONTFORK) != 0) {
            munmap(made, bytes);
            return nullptr;
        }
        if (memory_ != nullptr) munmap(memory_, size_);
        memory_ = static_cast<unsigned char*>(made);
        size_ = bytes;
        return memory_;
    }

   private:
    unsigned char* memory_ = nullptr;
    size_t size_ = 0;
};

// ---- transfers

// What of a piece is on the disk.
struct Extent {
    int file;
    size_t offset, length;
};

Extent extent(const mt_disk_piece& piece) {
    return {piece.file, piece.offset, piece.stored < piece.length ? round_up(piece.stored) : piece.length};
}

// Returns 0 or an error code.
int move(const Extent& extent, unsigned char* memory, bool write) {
    size_t done = 0;
    while (done < extent.length) {
        const size_t left = extent.length - done;
        const off_t at = static_cast<off_t>(extent.offset + done);
        const ssize_t moved =
            write ? pwrite(extent.file, memory + done, left, at) : pread(extent.file, memory + done, left, at);
        if (moved < 0 && errno == EINTR) continue;
        // Direct I/O cannot continue inside a block.
        if (moved < 0) return errno == EINVAL && done % MT_DISK_ALIGN != 0 ? EIO : errno;
        if (moved == 0) return write ? EIO : ENODATA;
        const size_t reached = done + static_cast<size_t>(moved);
        // After a short transfer, the block that was begun is transferred again, once.
        const size_t aligned = reached == extent.length ? reached : reached / MT_DISK_ALIGN * MT_DISK_ALIGN;
        done = aligned > done ? aligned : reached;
    }
    return 0;
}

// Without direct I/O, pages of these files would fill the page cache. Starts writing them back, and drops clean ones.
void leave_cache(const Extent& extent, bool write) {
    if ((fcntl(extent.file, F_GETFL) & O_DIRECT) != 0) return;
    const off_t offset = static_cast<off_t>(extent.offset), length = static_cast<off_t>(extent.length);
    if (write) sync_file_range(extent.file, offset, length, SYNC_FILE_RANGE_WRITE);
    posix_fadvise(extent.file, offset, length, POSIX_FADV_DONTNEED);
}

size_t elements(const mt_disk_piece& piece) { return piece.length / (piece.dtype == MT_LOSSLESS_FP32 ? 4 : 2); }

// Codes a piece into scratch memory, and sets `bytes` to what is to be written: the encoding, or the piece itself if
// coding it saves nothing.
int encode(mt_disk_piece& piece, unsigned char*& bytes, Scratch& scratch) {
    piece.stored = piece.length;
    if (piece.dtype == 0 || piece.length % MT_DISK_ALIGN != 0 || piece.length <= MT_DISK_ALIGN) return 0;
    const size_t capacity = piece.length - MT_DISK_ALIGN;
    unsigned char* const coded = scratch.get(capacity);
    if (coded == nullptr) return ENOMEM;
    size_t used = 0;
    const int failure = mt_lossless_encode(bytes, elements(piece), piece.dtype, coded, capacity, &used, 1);
    if (failure == ENOSPC) return 0;
    if (failure != 0) return failure;
    std::memset(coded + used, 0, round_up(used) - used);
    piece.stored = used;
    bytes = coded;
    return 0;
}

int decode(const mt_disk_piece& piece, const unsigned char* coded, unsigned char* memory) {
    size_t bad_chunk;
    const int failure =
        mt_lossless_decode(coded, piece.stored, memory, elements(piece), piece.dtype, 1, &bad_chunk);
    return failure == EMSGSIZE ? EBADMSG : failure;
}

int read_piece(const mt_disk_piece& piece, unsigned char* memory, Scratch& scratch) {
    if (!piece.written) {
        std::memset(memory, 0, piece.length);
        return 0;
    }
    const Extent stored = extent(piece);
    const bool coded = piece.stored < piece.length;
    unsigned char* const bytes = coded ? scratch.get(stored.length) : memory;
    if (bytes == nullptr) return ENOMEM;
    if (const int failure = move(stored, bytes, false)) return failure;
    leave_cache(stored, false);
    if (xxh64(bytes, stored.length) != piece.checksum) return EBADMSG;
    return coded ? decode(piece, bytes, memory) : 0;
}

int write_piece(mt_disk_piece& piece, unsigned char* memory, Scratch& scratch) {
    unsigned char* bytes = memory;
    if (const int failure = encode(piece, bytes, scratch)) return failure;
    const Extent stored = extent(piece);
    piece.checksum = xxh64(bytes, stored.length);
    // Also if the write fails: then no piece of this checksum is on the disk, and reading it reports that.
    piece.written = 1;
    if (const int failure = move(stored, bytes, true)) return failure;
    leave_cache(stored, true);
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
    mt_disk_outcome outcome{};
    mt_disk_transfer* next = nullptr;

    // Only the first failure counts.
    void fail(int code, int file, uint64_t offset) {
        if (outcome.code == 0) outcome.code = code, outcome.file = file, outcome.offset = offset;
    }
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
        Scratch scratch;
        std::unique_lock<std::mutex> lock(mutex);
        for (;;) {
            wake.wait(lock, [this] { return stopping || first != nullptr; });
            if (stopping) break;
            mt_disk_transfer* const transfer = take();
            mt_disk_piece& piece = transfer->pieces[transfer->taken++];
            unsigned char* const memory = transfer->memory;
            transfer->memory += piece.length;
            if (transfer->taken < transfer->count) append(transfer);
            if (transfer->outcome.code == 0) {
                lock.unlock();
                const bool empty = !transfer->write && !piece.written;
                const int failure =
                    transfer->write ? write_piece(piece, memory, scratch) : read_piece(piece, memory, scratch);
                const size_t moved = empty || failure != 0 ? 0 : extent(piece).length;
                lock.lock();
                transfer->outcome.moved += moved;
                if (failure != 0) transfer->fail(failure, piece.file, piece.offset);
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
        transfer->fail(ECANCELED, transfer->pieces[transfer->taken].file, 0);
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
