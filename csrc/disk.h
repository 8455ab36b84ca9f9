// The C ABI of disk I/O: pieces of files, read and written by a pool of threads or by io_uring. Python declares the same in
// src/megatrain/native/disk.py.
//
// As in megatrain.h: functions that can fail return 0 or an errno value, and nothing throws. Nothing is synced: these
// files are scratch.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "lossless.h"
#include "megatrain.h"

#define MT_DISK_ALIGN 4096  // direct I/O at multiples of this

#ifdef __cplusplus
extern "C" {
#endif

// The unit of a transfer and of a checksum. A write sets `written`, `stored` and `checksum`; a read verifies the checksum
// of what it reads, and decodes that if it is coded. A piece that was never written reads as zeros, without I/O. For
// direct I/O, `offset` and `length` are multiples of what mt_disk_describe reports.
//
// If `dtype` is one of mt_lossless_dtype and `length` a multiple of MT_DISK_ALIGN, a write codes the piece if that saves
// a multiple of MT_DISK_ALIGN. `stored` is then the size of the encoding; what is written is rounded up with zeros.
struct mt_disk_piece {
    int32_t file;  // descriptor
    int32_t written;
    uint64_t offset, length;
    uint64_t checksum;  // of what is on the disk
    uint64_t stored;    // `length`: as it is in memory; less: coded
    int32_t dtype;      // 0: not coded
};

// The end of a transfer: its first failure, and the bytes that were read from or written to files. `code` is an errno
// value, EBADMSG for a wrong checksum or an encoding that is not one, ENODATA for the end of the file.
struct mt_disk_outcome {
    int32_t code;
    int32_t file;
    uint64_t offset;
    uint64_t moved;
};

struct mt_disk_file {
    uint64_t magic;         // f_type of statfs
    uint32_t memory_align;  // of direct I/O, from STATX_DIOALIGN; 0: not known or not supported
    uint32_t offset_align;
    int32_t align_known;    // whether the kernel reported the two
};

struct mt_disk;
struct mt_disk_transfer;

MT_API int mt_disk_describe(int file, struct mt_disk_file* found);

// How pieces are transferred. Threads checksum and code them either way.
enum mt_disk_backend {
    MT_DISK_THREADS = 0,  // a thread for each piece under way, by pread and pwrite
    MT_DISK_URING = 1,    // by io_uring, with a thread for each CPU
};

// 0 if io_uring can be used here, else an errno value: ENOSYS (no such system call, or too old), EPERM or EACCES (not
// allowed), ENOMEM (RLIMIT_MEMLOCK, before Linux 5.12).
MT_API int mt_disk_uring(void);

// A pool that has `depth` pieces under way. It must be used by the process that started it only.
MT_API int mt_disk_start(int depth, int backend, struct mt_disk** pool);

// Cancels pieces that were not started (ECANCELED) and ends the threads. ETIMEDOUT: some pieces are still under way after
// `milliseconds`; its files and the memory of its transfers must then stay valid.
MT_API int mt_disk_stop(struct mt_disk* pool, int milliseconds);

// Reads `count` pieces into consecutive memory, or writes them from it. Transfers that are submitted together take turns,
// piece by piece. Pieces and memory must stay valid until the transfer is done.
MT_API int mt_disk_submit(struct mt_disk* pool, struct mt_disk_piece* pieces, size_t count, void* memory, int write,
                          struct mt_disk_transfer** transfer);

// Waits until all pieces are done; frees the transfer and sets `outcome`, if it returns anything but ETIMEDOUT. Returns
// the outcome's code.
MT_API int mt_disk_wait(struct mt_disk_transfer* transfer, int milliseconds, struct mt_disk_outcome* outcome);

// XXH64, the checksum of a piece, with seed 0.
MT_API uint64_t mt_disk_checksum(const void* bytes, size_t count);

#ifdef __cplusplus
}
#endif
