#include "piece.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "xxh64.h"

namespace megatrain {
namespace {

constexpr size_t round_up(size_t bytes) { return (bytes + MT_DISK_ALIGN - 1) / MT_DISK_ALIGN * MT_DISK_ALIGN; }

bool is_coded(const mt_disk_piece& piece) { return piece.stored < piece.length; }

// The bytes of a piece that are on the disk.
size_t extent(const mt_disk_piece& piece) { return is_coded(piece) ? round_up(piece.stored) : piece.length; }

size_t elements(const mt_disk_piece& piece) { return piece.length / (piece.dtype == MT_LOSSLESS_FP32 ? 4 : 2); }

}  // namespace

Scratch::~Scratch() {
    if (memory_ != nullptr) munmap(memory_, size_);
}

unsigned char* Scratch::get(size_t bytes) {
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

int PieceMove::prepare() {
    bytes = memory;
    length = 0;
    if (write) {
        if (const int failure = encode()) return failure;
        length = extent(*piece);
        piece->checksum = xxh64(bytes, length);
        // Also if the write fails: then no piece of this checksum is on the disk, and reading it reports that.
        piece->written = 1;
        return 0;
    }
    if (!piece->written) {
        std::memset(memory, 0, piece->length);
        return 0;
    }
    if (is_coded(*piece)) bytes = scratch_.get(extent(*piece));
    if (bytes == nullptr) return ENOMEM;
    length = extent(*piece);
    return 0;
}

ssize_t PieceMove::attempt(size_t done) const {
    const off_t at = static_cast<off_t>(piece->offset + done);
    const ssize_t moved = write ? pwrite(piece->file, bytes + done, length - done, at)
                                : pread(piece->file, bytes + done, length - done, at);
    return moved < 0 ? -errno : moved;
}

int PieceMove::finish(ssize_t moved) {
    if (const int failure = transfer(moved)) return failure;
    if (const int failure = leave_cache()) return failure;
    if (write) return 0;
    if (xxh64(bytes, length) != piece->checksum) return EBADMSG;
    return is_coded(*piece) ? decode() : 0;
}

int PieceMove::transfer(ssize_t moved) const {
    for (size_t done = 0;; moved = attempt(done)) {
        if (moved == -EINTR) continue;
        // Direct I/O cannot continue inside a block.
        if (moved < 0) return moved == -EINVAL && done % MT_DISK_ALIGN != 0 ? EIO : static_cast<int>(-moved);
        if (moved == 0) return write ? EIO : ENODATA;
        const size_t reached = done + static_cast<size_t>(moved);
        if (reached == length) return 0;
        // After a short transfer, the block that was begun is transferred again, once.
        const size_t aligned = reached / MT_DISK_ALIGN * MT_DISK_ALIGN;
        done = aligned > done ? aligned : reached;
    }
}

// Without direct I/O, pages of these files would fill the page cache. Only clean ones can be dropped, so a write waits for
// the drive, as it does with direct I/O; that also reports its errors.
int PieceMove::leave_cache() const {
    if ((fcntl(piece->file, F_GETFL) & O_DIRECT) != 0) return 0;
    const off_t offset = static_cast<off_t>(piece->offset), size = static_cast<off_t>(length);
    constexpr unsigned whole = SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER;
    const int failure = write && sync_file_range(piece->file, offset, size, whole) != 0 ? errno : 0;
    posix_fadvise(piece->file, offset, size, POSIX_FADV_DONTNEED);
    return failure == EIO || failure == ENOSPC || failure == EDQUOT ? failure : 0;
}

// Codes a piece into scratch memory, and points `bytes` there if that saves something.
int PieceMove::encode() {
    piece->stored = piece->length;
    if (piece->dtype == 0 || piece->length % MT_DISK_ALIGN != 0 || piece->length <= MT_DISK_ALIGN) return 0;
    const size_t capacity = piece->length - MT_DISK_ALIGN;
    unsigned char* const coded = scratch_.get(capacity);
    if (coded == nullptr) return ENOMEM;
    size_t used = 0;
    const int failure = mt_lossless_encode(bytes, elements(*piece), piece->dtype, coded, capacity, &used, 1);
    if (failure == ENOSPC) return 0;
    if (failure != 0) return failure;
    std::memset(coded + used, 0, round_up(used) - used);
    piece->stored = used;
    bytes = coded;
    return 0;
}

int PieceMove::decode() const {
    size_t bad_chunk;
    const int failure =
        mt_lossless_decode(bytes, piece->stored, memory, elements(*piece), piece->dtype, 1, &bad_chunk);
    return failure == EMSGSIZE ? EBADMSG : failure;
}

}  // namespace megatrain
