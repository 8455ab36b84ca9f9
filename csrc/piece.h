// A piece on its way between memory and a file: what is done before and after its transfer, and the transfer itself by
// system calls.
#pragma once

#include <sys/types.h>

#include <cstddef>

#include "disk.h"

namespace megatrain {

// Page-aligned memory that is kept between pieces.
class Scratch {
   public:
    Scratch() = default;
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;
    ~Scratch();

    // At least `bytes` bytes, with any content; null if there is no memory.
    unsigned char* get(size_t bytes);

   private:
    unsigned char* memory_ = nullptr;
    size_t size_ = 0;
};

// First prepare(), then finish(). Both return 0 or an error code of mt_disk_outcome.
struct PieceMove {
    mt_disk_piece* piece;
    unsigned char* memory;
    bool write;
    // Set by prepare(): what is transferred. No length: nothing is.
    unsigned char* bytes;
    size_t length;

    // Encodes and checksums what is to be written; finds memory for what is to be read.
    int prepare();

    // Attempts the transfer, from its start or after `done` bytes. Returns the bytes moved, or a negative error code.
    ssize_t attempt(size_t done = 0) const;

    // Continues after a first attempt that returned `moved`, until all is transferred; verifies and decodes what was read.
    // -EINTR: that attempt does not count.
    int finish(ssize_t moved);

   private:
    Scratch scratch_;

    int encode();
    int decode() const;
    int transfer(ssize_t moved) const;
    int leave_cache() const;
};

}  // namespace megatrain
