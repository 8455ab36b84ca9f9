// Lossless compression of floating-point states: byte planes, with entropy coding of the predictable ones.
//
// Only the exponents of weights and moments (and the sign of a second moment) are predictable; mantissa bits are noise.
// So the exponent has a plane of bytes of its own, and a plane that would not shrink is stored uncompressed.
//
// The format. Integers are little-endian; offsets are in bytes from the start of the encoding.
//
//   header      0   8 bytes  "MTPLANES"
//               8   u32      version, 1
//              12   u32      dtype: 1 FP32, 2 BF16
//              16   u64      count of elements
//              24   u64      elements in a chunk, 65536; the last chunk may have fewer
//              32   u64      checksum of the 32 bytes above and of the directory
//   directory  40   for each chunk: u64 offset of its end, u64 checksum of its elements
//   chunks          one after another; a chunk starts where the one before it (or the directory) ends, and the end of
//                   the last is the end of the encoding
//
// A chunk holds its planes in order. Plane 0 is the exponent, plane 1 the sign above the top 7 bits of the mantissa;
// FP32 has two more, the next 8 bits of the mantissa and the lowest 8. A plane of n bytes is
//
//   u32         payload bytes, with the mode in the top 8 bits
//   mode 0      payload: one byte, equal in all n positions
//   mode 1      payload: the n bytes
//   mode 2      payload: a Huffman code, and the n bytes in it
//                 u8       first symbol that occurs
//                 u8       last symbol that occurs
//                 4 bits   length of the code of every symbol from the first to the last, the lower half of a byte
//                          first; 0: does not occur. None is longer than 11 bits, and the code is complete.
//                          A half that is left over is 0, and so are the bits left over in the last byte of a lane.
//                 3 × u16  bytes of the first three lanes
//                 4 lanes  lane k has the codes of the symbols from k * ceil(n / 4) on, each from its bit of least
//                          weight, filling bytes from their bit of least weight
//               Codes are canonical: by length, then by symbol, counting up from 0 in the usual bit order, and
//               written with their bits reversed.
//
// A checksum is four sums over words of 8 bytes, which start as the number of bytes, 1, 2 and 3. A step is
// mix(sum, word) = ((sum xor word) * 0x9e3779b97f4a7c15) rotated left by 29 bits. Each full 32 bytes put a word into
// each sum; words that remain, the last filled with zeros, go into the first. Then x = mix(mix(mix(first, second),
// third), fourth), and the checksum is (x xor (x >> 32)) * 0x9e3779b97f4a7c15. That of the header is
// mix(checksum of its 32 bytes, checksum of the directory).
//
// Chunks are independent, so threads process them in parallel, and damage to one does not affect others. The lanes of a
// plane are independent too, so that one core decodes all four at once.
#include "lossless.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <memory>
#include <new>

#include "parallel.h"

#if defined(__x86_64__) && !defined(__clang__)  // clang does not clone templates
#define MT_EVERY_ISA __attribute__((target_clones("default", "arch=x86-64-v3")))
#else
#define MT_EVERY_ISA
#endif

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the format is read and written in memory order");

namespace {

constexpr char kMagic[8] = {'M', 'T', 'P', 'L', 'A', 'N', 'E', 'S'};
constexpr uint32_t kVersion = 1;
constexpr size_t kHeader = 40, kHeaderSummed = 32, kEntry = 16;
constexpr size_t kChunk = size_t{1} << 16;
constexpr size_t kMaxPlanes = 4;
constexpr size_t kPlaneHead = 4;
constexpr int kLanes = 4;
constexpr int kCodeBits = 11;
constexpr size_t kTable = size_t{1} << kCodeBits;
constexpr uint32_t kConstant = 0, kRaw = 1, kHuffman = 2;

template <typename T>
inline T load(const uint8_t* at) {
    T value;
    std::memcpy(&value, at, sizeof value);
    return value;
}

template <typename T>
inline void store(uint8_t* at, T value) {
    std::memcpy(at, &value, sizeof value);
}

inline uint64_t rotate(uint64_t value, int by) { return value << by | value >> (64 - by); }

constexpr uint64_t kMix = 0x9e3779b97f4a7c15u;

inline uint64_t mix(uint64_t sum, uint64_t word) { return rotate((sum ^ word) * kMix, 29); }

// Every step is a bijection of the sum, so a single wrong word is always detected. Four sums hide the latency of the
// multiplication.
uint64_t checksum(const uint8_t* bytes, size_t size) {
    uint64_t a = size, b = 1, c = 2, d = 3;
    size_t at = 0;
    for (; at + 32 <= size; at += 32) {
        a = mix(a, load<uint64_t>(bytes + at));
        b = mix(b, load<uint64_t>(bytes + at + 8));
        c = mix(c, load<uint64_t>(bytes + at + 16));
        d = mix(d, load<uint64_t>(bytes + at + 24));
    }
    for (; at < size; at += 8) {
        uint64_t word = 0;
        std::memcpy(&word, bytes + at, std::min<size_t>(8, size - at));
        a = mix(a, word);
    }
    const uint64_t sum = mix(mix(mix(a, b), c), d);
    return (sum ^ sum >> 32) * kMix;
}

// ---- Elements and planes ----

// Elements are integers of 4 or 2 bytes, with as many planes. The top half of an FP32 number is a BF16 number.
template <typename Element>
constexpr int kTop = 8 * sizeof(Element) - 16;

template <int kPlane, typename Element>
inline uint8_t plane_of(Element x) {
    if (kPlane == 0) return static_cast<uint8_t>(x >> (kTop<Element> + 7));
    if (kPlane == 1) return static_cast<uint8_t>((x >> kTop<Element> & 0x7f) | (x >> (kTop<Element> + 8) & 0x80));
    return static_cast<uint8_t>(kPlane == 2 ? x >> 8 : x);
}

template <typename Element>
MT_EVERY_ISA void split(const Element* __restrict from, size_t count, uint8_t* __restrict p0, uint8_t* __restrict p1,
                        uint8_t* __restrict p2, uint8_t* __restrict p3) {
    for (size_t i = 0; i < count; ++i) {
        const Element x = from[i];
        p0[i] = plane_of<0>(x), p1[i] = plane_of<1>(x);
        if (sizeof(Element) == 4) p2[i] = plane_of<2>(x), p3[i] = plane_of<3>(x);
    }
}

template <typename Element>
MT_EVERY_ISA void merge(Element* __restrict to, size_t count, const uint8_t* __restrict p0,
                        const uint8_t* __restrict p1, const uint8_t* __restrict p2, const uint8_t* __restrict p3) {
    for (size_t i = 0; i < count; ++i) {
        const uint32_t exponent = p0[i], top = p1[i];
        uint32_t x = ((top & 0x80) << 8 | exponent << 7 | (top & 0x7f)) << kTop<Element>;
        if (sizeof(Element) == 4) x |= uint32_t{p2[i]} << 8 | p3[i];
        to[i] = static_cast<Element>(x);
    }
}

// The bits in which elements differ from the first.
template <typename Element>
MT_EVERY_ISA Element differing(const Element* __restrict elements, size_t count) {
    Element bits = 0;
    for (size_t i = 0; i < count; ++i) bits = static_cast<Element>(bits | (elements[i] ^ elements[0]));
    return bits;
}

// ---- Lanes ----

inline size_t lane_begin(size_t count, int lane) { return std::min(count, lane * ((count + kLanes - 1) / kLanes)); }

inline size_t lane_size(size_t count, int lane) { return lane_begin(count, lane + 1) - lane_begin(count, lane); }

// One element of every lane at a time: adjacent elements often have the same exponent, and counting them in one table
// would serialise on the store.
template <int kPlane, typename Element>
void count_plane(const Element* elements, size_t count, size_t stride, uint32_t counts[kLanes][256]) {
    std::memset(counts, 0, sizeof(uint32_t) * kLanes * 256);
    const size_t together = lane_size(count, kLanes - 1), apart = lane_begin(count, 1);
    for (size_t i = 0; i < together; i += stride) {
        for (int lane = 0; lane < kLanes; ++lane) ++counts[lane][plane_of<kPlane>(elements[lane * apart + i])];
    }
    for (int lane = 0; lane < kLanes; ++lane) {
        for (size_t i = lane_begin(count, lane) + together; i < lane_begin(count, lane + 1); i += stride) {
            ++counts[lane][plane_of<kPlane>(elements[i])];
        }
    }
}

// ---- Huffman codes ----

// Lengths of the optimal code of at most kCodeBits bits per symbol (package-merge), for at least two symbols.
void code_lengths(const uint32_t total[256], uint8_t lengths[256]) {
    uint8_t symbols[256];
    size_t n = 0;
    for (int s = 0; s < 256; ++s) {
        lengths[s] = 0;
        if (total[s] != 0) symbols[n++] = static_cast<uint8_t>(s);
    }
    // Ties are broken by symbol, so that the code is the same on every machine.
    std::sort(symbols, symbols + n, [&](uint8_t a, uint8_t b) {
        return total[a] != total[b] ? total[a] < total[b] : a < b;
    });

    // Each row merges the symbols with pairs of the previous row, by weight; is_symbol records which is which.
    bool is_symbol[kCodeBits][512];
    uint64_t rows[2][512];
    size_t before = 0;
    for (int bit = 0; bit < kCodeBits; ++bit) {
        const uint64_t* pairs = rows[bit & 1];
        uint64_t* row = rows[~bit & 1];
        const size_t size = n + before / 2;
        for (size_t at = 0, symbol = 0, pair = 0; at < size; ++at) {
            const bool any_pair = pair + 1 < before;
            const uint64_t weight = any_pair ? pairs[pair] + pairs[pair + 1] : 0;
            const bool take = symbol < n && (!any_pair || total[symbols[symbol]] <= weight);
            is_symbol[bit][at] = take;
            row[at] = take ? total[symbols[symbol]] : weight;
            take ? symbol += 1 : pair += 2;
        }
        before = size;
    }
    // The first 2n - 2 entries of the last row form the code: a symbol's length is the number of rows that include it.
    for (size_t bit = kCodeBits, taken = 2 * n - 2; bit-- > 0;) {
        size_t leaves = 0;
        for (size_t at = 0; at < taken; ++at) leaves += is_symbol[bit][at];
        for (size_t i = 0; i < leaves; ++i) ++lengths[symbols[i]];
        taken = 2 * (taken - leaves);
    }
}

// The code of every symbol, with bits reversed as written. False if the lengths do not form a complete code.
bool assign_codes(const uint8_t lengths[256], uint16_t codes[256]) {
    uint32_t of_length[kCodeBits + 1] = {}, next[kCodeBits + 1] = {};
    for (int s = 0; s < 256; ++s) ++of_length[lengths[s]];
    uint32_t first = 0;
    for (int length = 1; length <= kCodeBits; ++length) {
        next[length] = first;
        first = (first + of_length[length]) << 1;
    }
    if (first != uint32_t{2} << kCodeBits) return false;
    for (int s = 0; s < 256; ++s) {
        if (lengths[s] == 0) continue;
        const uint32_t code = next[lengths[s]]++;
        uint32_t reversed = 0;
        for (int bit = 0; bit < lengths[s]; ++bit) reversed |= (code >> bit & 1) << (lengths[s] - 1 - bit);
        codes[s] = static_cast<uint16_t>(reversed);
    }
    return true;
}

// ---- Encoding ----

struct PlanePlan {
    uint32_t mode, payload;
    uint32_t lane_bytes[kLanes];
    uint8_t first, last;
    uint8_t lengths[256];
};

struct ChunkPlan {
    uint64_t sum;
    PlanePlan planes[kMaxPlanes];
};

struct Totals {
    uint32_t of[256] = {};
    uint64_t all = 0, squares = 0;

    explicit Totals(const uint32_t counts[kLanes][256]) {
        for (int s = 0; s < 256; ++s) {
            for (int lane = 0; lane < kLanes; ++lane) of[s] += counts[lane][s];
            all += of[s];
            squares += uint64_t{of[s]} * of[s];
        }
    }

    // No code needs fewer bits per symbol than -log2 of the sum of squared frequencies: true if that is above 63/64 of
    // 8 bits. In integers, so that every machine decides the same. (1.090 is 2 to the power of an eighth.)
    bool flat() const { return squares * 256 * 1000 < all * all * 1090; }
};

template <int kPlane, typename Element>
PlanePlan plan_plane(const Element* elements, size_t count, Element differing) {
    PlanePlan plan{};
    if (plane_of<kPlane>(differing) == 0) {
        plan.mode = kConstant, plan.payload = 1, plan.first = plane_of<kPlane>(elements[0]);
        return plan;
    }
    plan.mode = kRaw, plan.payload = static_cast<uint32_t>(count);
    uint32_t counts[kLanes][256];
    // Most planes are noise, and a seventh of the elements shows it. (Not a power of two, as row lengths are.) A sample
    // looks less even than the plane, so a compressible plane is rarely missed.
    if (kPlane != 0) {
        count_plane<kPlane>(elements, count, 7, counts);
        if (Totals(counts).flat()) return plan;
    }
    count_plane<kPlane>(elements, count, 1, counts);
    const Totals totals(counts);
    if (totals.flat()) return plan;

    plan.last = 255;
    while (totals.of[plan.first] == 0) ++plan.first;
    while (totals.of[plan.last] == 0) --plan.last;
    code_lengths(totals.of, plan.lengths);
    uint64_t payload = 2 + (plan.last - plan.first + 2) / 2 + 2 * (kLanes - 1);
    for (int lane = 0; lane < kLanes; ++lane) {
        uint64_t bits = 0;
        for (int s = 0; s < 256; ++s) bits += uint64_t{counts[lane][s]} * plan.lengths[s];
        plan.lane_bytes[lane] = static_cast<uint32_t>((bits + 7) / 8);
        payload += plan.lane_bytes[lane];
    }
    // A code must save a 64th of the plane to be worth the time to decode it.
    if (payload < count - count / 64) plan.mode = kHuffman, plan.payload = static_cast<uint32_t>(payload);
    return plan;
}

// Writes one lane, never beyond its end, which may be another thread's memory. If the elements were changed after the
// codes were planned, they may need more bits; the lane is then wrong, which the checksum shows, but not longer.
MT_EVERY_ISA void encode_lane(const uint8_t* __restrict symbols, size_t count, const uint32_t* __restrict codes,
                              uint8_t* __restrict out, uint8_t* end) {
    uint64_t bits = 0;
    unsigned held = 0;
    size_t i = 0;
    // Five codes fit after 7 bits of an unfinished byte. They are joined before they are shifted into position, so that
    // only the last step depends on the previous five. Lengths are in the low 6 bits, where the sum of five does not
    // overflow; a shift uses only those bits, so entries are added as they are.
    for (; i + 5 <= count && end - out >= 8; i += 5) {
        const uint32_t a = codes[symbols[i]], b = codes[symbols[i + 1]], c = codes[symbols[i + 2]];
        const uint32_t d = codes[symbols[i + 3]], e = codes[symbols[i + 4]];
        const uint64_t ab = (a >> 8) | uint64_t{b >> 8} << (a & 63), cd = (c >> 8) | uint64_t{d >> 8} << (c & 63);
        const uint32_t two = a + b, four = two + c + d;
        bits |= (ab | cd << (two & 63) | uint64_t{e >> 8} << (four & 63)) << held;
        held += (four + e) & 63;
        store(out, bits);
        out += held / 8;
        bits >>= held & 56;
        held &= 7;
    }
    for (; i < count; ++i) {
        const uint32_t code = codes[symbols[i]];
        bits |= uint64_t{code >> 8} << held;
        held += code & 0xff;
        for (; held >= 8 && out != end; held -= 8, bits >>= 8) *out++ = static_cast<uint8_t>(bits);
        if (out == end) return;
    }
    if (held != 0) *out = static_cast<uint8_t>(bits);
}

void encode_huffman(const uint8_t* symbols, size_t count, const PlanePlan& plan, uint8_t* out) {
    *out++ = plan.first;
    *out++ = plan.last;
    for (int s = plan.first; s <= plan.last; s += 2) {
        const int high = s + 1 <= plan.last ? plan.lengths[s + 1] : 0;
        *out++ = static_cast<uint8_t>(plan.lengths[s] | high << 4);
    }
    for (int lane = 0; lane + 1 < kLanes; ++lane, out += 2) store(out, static_cast<uint16_t>(plan.lane_bytes[lane]));

    uint16_t codes[256];
    uint32_t with_length[256] = {};
    assign_codes(plan.lengths, codes);
    for (int s = 0; s < 256; ++s) {
        if (plan.lengths[s] != 0) with_length[s] = uint32_t{codes[s]} << 8 | plan.lengths[s];
    }
    for (int lane = 0; lane < kLanes; ++lane) {
        const size_t begin = lane_begin(count, lane);
        encode_lane(symbols + begin, lane_size(count, lane), with_length, out, out + plan.lane_bytes[lane]);
        out += plan.lane_bytes[lane];
    }
}

// ---- Decoding ----

// Tables indexed by the next kCodeBits bits. `one`: the first symbol, and above it its length in bits. `many`: up to
// six complete symbols; from the low byte up: their total length in bits, the symbols, their number.
struct Decoder {
    uint16_t one[kTable];
    uint64_t many[kTable];
};

constexpr unsigned kMostSymbols = 6;

bool build_decoder(const uint8_t lengths[256], Decoder& decoder) {
    uint16_t codes[256];
    if (!assign_codes(lengths, codes)) return false;
    for (int s = 0; s < 256; ++s) {
        if (lengths[s] == 0) continue;
        const auto entry = static_cast<uint16_t>(s | lengths[s] << 8);
        for (size_t at = codes[s]; at < kTable; at += size_t{1} << lengths[s]) decoder.one[at] = entry;
    }
    for (size_t at = 0; at < kTable; ++at) {
        uint64_t symbols = 0;
        unsigned taken = 0, number = 0;
        for (; number < kMostSymbols; ++number) {
            const unsigned entry = decoder.one[at >> taken];
            if (taken + (entry >> 8) > kCodeBits) break;
            symbols |= uint64_t{entry & 0xff} << (8 * number);
            taken += entry >> 8;
        }
        decoder.many[at] = uint64_t{number} << 56 | symbols << 8 | taken;
    }
    return true;
}

// Bits are consumed from the low end. A one is set on top when they are loaded; its position tells how many have been
// consumed.
struct Lane {
    const uint8_t* in;
    const uint8_t* in_end;
    uint8_t* out;
    uint8_t* out_end;
    uint64_t bits;

    // A turn consumes at most 62 bits and writes at most 5 × 6 bytes, the last as a word of 8. For this many turns,
    // input and output stay within the lane for any bits.
    size_t safe_turns() const {
        const size_t input = in_end - in;
        return input < 8 ? 0 : std::min<size_t>((input - 8) / 7, (out_end - out) / 32);
    }
};

constexpr uint64_t kMark = uint64_t{1} << 63;
constexpr int kLookups = 5;  // 7 bits of a partial byte, the mark, and 5 codes of 11 bits fit in 64

inline __attribute__((always_inline)) void refill(Lane& lane) {
    const int gone = __builtin_clzll(lane.bits);
    lane.in += gone >> 3;
    lane.bits = (load<uint64_t>(lane.in) | kMark) >> (gone & 7);
}

inline __attribute__((always_inline)) void look_up(Lane& lane, const uint64_t* __restrict many) {
    const uint64_t entry = many[lane.bits & (kTable - 1)];
    lane.bits >>= entry & 63;
    store(lane.out, entry >> 8);
    lane.out += entry >> 56;
}

// Decodes all lanes at once while each has enough input left.
template <int kCount>
MT_EVERY_ISA void decode_lanes(Lane* given, const uint64_t* many) {
    Lane lanes[kCount];
    std::copy(given, given + kCount, lanes);
    for (;;) {
        size_t turns = SIZE_MAX;
        for (const Lane& lane : lanes) turns = std::min(turns, lane.safe_turns());
        if (turns == 0) break;
        do {
            for (Lane& lane : lanes) refill(lane);
            for (int i = 0; i < kLookups; ++i) {
                for (Lane& lane : lanes) look_up(lane, many);
            }
        } while (--turns != 0);
    }
    std::copy(lanes, lanes + kCount, given);
}

// Decodes the last symbols of a lane one at a time. False unless they end in its last byte, padded with zeros.
bool decode_rest(const Lane& lane, const uint16_t* one) {
    const size_t size = lane.in_end - lane.in;
    size_t gone = __builtin_clzll(lane.bits);
    for (uint8_t* out = lane.out; out != lane.out_end; ++out) {
        const size_t at = gone / 8;
        if (at >= size) return false;
        uint32_t window = 0;
        std::memcpy(&window, lane.in + at, std::min<size_t>(4, size - at));
        const uint32_t entry = one[window >> (gone & 7) & (kTable - 1)];
        *out = static_cast<uint8_t>(entry);
        gone += entry >> 8;
    }
    if ((gone + 7) / 8 != size) return false;
    return gone % 8 == 0 || lane.in[size - 1] >> gone % 8 == 0;
}

bool decode_huffman(const uint8_t* payload, size_t size, uint8_t* out, size_t count, Decoder& decoder) {
    if (size < 2) return false;
    const int first = payload[0], last = payload[1];
    const size_t packed = first < last ? (last - first + 2) / 2 : 0;
    const size_t head = 2 + packed + 2 * (kLanes - 1);
    if (packed == 0 || size < head) return false;
    uint8_t lengths[256] = {};
    for (int s = first; s <= last; ++s) {
        const int from_first = s - first;
        lengths[s] = payload[2 + from_first / 2] >> (from_first % 2 * 4) & 15;
        if (lengths[s] > kCodeBits) return false;
    }
    // Unused bits must be zero, so that no change goes unnoticed.
    const bool half_left = (last - first) % 2 == 0;
    if (lengths[first] == 0 || lengths[last] == 0 || (half_left && payload[1 + packed] >> 4 != 0)) return false;
    if (!build_decoder(lengths, decoder)) return false;

    Lane lanes[kLanes];
    const uint8_t* in = payload + head;
    const uint8_t* const end = payload + size;
    for (int lane = 0; lane < kLanes; ++lane) {
        const bool is_last = lane + 1 == kLanes;
        const size_t left = end - in;
        const size_t bytes = is_last ? left : load<uint16_t>(payload + 2 + packed + 2 * lane);
        if (bytes > left) return false;
        uint8_t* const begin = out + lane_begin(count, lane);
        lanes[lane] = {in, in + bytes, begin, begin + lane_size(count, lane), kMark};
        in += bytes;
    }
    decode_lanes<kLanes>(lanes, decoder.many);
    bool sound = true;
    for (Lane& lane : lanes) {
        decode_lanes<1>(&lane, decoder.many);
        sound = decode_rest(lane, decoder.one) && sound;
    }
    return sound;
}

// ---- Chunks ----

struct Scratch {
    uint8_t planes[kMaxPlanes][kChunk];
    Decoder decoder;
};

struct Layout {
    size_t planes, chunks, head, bytes_per_chunk;
};

int lay_out(size_t count, int dtype, Layout& layout) {
    if (dtype != MT_LOSSLESS_FP32 && dtype != MT_LOSSLESS_BF16) return EINVAL;
    if (count > SIZE_MAX / 16) return EOVERFLOW;
    layout.planes = dtype == MT_LOSSLESS_FP32 ? 4 : 2;
    layout.chunks = (count + kChunk - 1) / kChunk;
    layout.head = kHeader + layout.chunks * kEntry;
    layout.bytes_per_chunk = kChunk * layout.planes;
    return 0;
}

// Calls work(chunk, elements in it, scratch) for every chunk.
template <typename Work>
int for_each_chunk(const Layout& layout, size_t count, int threads, Work work) noexcept {
    // Ranges are in bytes of elements, so that a small tensor is not split; an origin that is a multiple of the grain
    // puts every split between chunks.
    const size_t grain = layout.bytes_per_chunk;
    return megatrain::in_parallel(grain, count * layout.planes, grain, threads, [=](size_t begin, size_t end) {
        const std::unique_ptr<Scratch> scratch(new Scratch);  // not zeroed, unlike make_unique
        for (size_t chunk = begin / grain; chunk * grain < end; ++chunk) {
            work(chunk, std::min(kChunk, count - chunk * kChunk), *scratch);
        }
    });
}

template <typename Element>
void plan_chunk(const uint8_t* bytes, size_t count, ChunkPlan& plan) {
    const auto* const elements = reinterpret_cast<const Element*>(bytes);
    const Element bits = differing(elements, count);
    plan.sum = checksum(bytes, count * sizeof(Element));
    plan.planes[0] = plan_plane<0>(elements, count, bits);
    plan.planes[1] = plan_plane<1>(elements, count, bits);
    if (sizeof(Element) == 2) return;
    plan.planes[2] = plan_plane<2>(elements, count, bits);
    plan.planes[3] = plan_plane<3>(elements, count, bits);
}

template <typename Element>
void encode_chunk(const uint8_t* bytes, size_t count, Scratch& scratch, const ChunkPlan& plan, uint8_t* out) {
    uint8_t* to[kMaxPlanes] = {};
    uint8_t* at = out;
    for (size_t p = 0; p < sizeof(Element); ++p) {
        const PlanePlan& plane = plan.planes[p];
        store(at, plane.mode << 24 | plane.payload);
        to[p] = plane.mode == kRaw ? at + kPlaneHead : scratch.planes[p];
        at += kPlaneHead + plane.payload;
    }
    split(reinterpret_cast<const Element*>(bytes), count, to[0], to[1], to[2], to[3]);
    at = out;
    for (size_t p = 0; p < sizeof(Element); ++p) {
        const PlanePlan& plane = plan.planes[p];
        at += kPlaneHead;
        if (plane.mode == kConstant) *at = plane.first;
        if (plane.mode == kHuffman) encode_huffman(to[p], count, plane, at);
        at += plane.payload;
    }
}

template <typename Element>
bool decode_chunk(const uint8_t* in, size_t size, uint64_t sum, uint8_t* bytes, size_t count, Scratch& scratch) {
    const uint8_t* from[kMaxPlanes] = {};
    for (size_t p = 0; p < sizeof(Element); ++p) {
        if (size < kPlaneHead) return false;
        const uint32_t mode = load<uint32_t>(in) >> 24, payload = load<uint32_t>(in) & 0xffffff;
        in += kPlaneHead, size -= kPlaneHead;
        if (payload > size) return false;
        from[p] = scratch.planes[p];
        if (mode == kConstant && payload == 1) {
            std::memset(scratch.planes[p], *in, count);
        } else if (mode == kRaw && payload == count) {
            from[p] = in;
        } else if (mode != kHuffman || !decode_huffman(in, payload, scratch.planes[p], count, scratch.decoder)) {
            return false;
        }
        in += payload, size -= payload;
    }
    if (size != 0) return false;
    merge(reinterpret_cast<Element*>(bytes), count, from[0], from[1], from[2], from[3]);
    return checksum(bytes, count * sizeof(Element)) == sum;
}

uint64_t head_sum(const uint8_t* head, size_t size) {
    return mix(checksum(head, kHeaderSummed), checksum(head + kHeader, size - kHeader));
}

}  // namespace

int mt_lossless_bound(size_t count, int dtype, size_t* bytes) {
    Layout layout;
    if (const int error = lay_out(count, dtype, layout)) return error;
    if (bytes == nullptr) return EFAULT;
    *bytes = layout.head + layout.chunks * layout.planes * kPlaneHead + count * layout.planes;
    return 0;
}

int mt_lossless_encode(const void* elements, size_t count, int dtype, void* encoded, size_t capacity, size_t* used,
                       int threads) {
    Layout layout;
    if (const int error = lay_out(count, dtype, layout)) return error;
    if (threads < 1) return EINVAL;
    if (encoded == nullptr || used == nullptr || (count != 0 && elements == nullptr)) return EFAULT;
    const auto* const from = static_cast<const uint8_t*>(elements);
    auto* const out = static_cast<uint8_t*>(encoded);

    // First the size of every chunk, then every chunk at its final offset: nothing is moved or shared.
    const std::unique_ptr<ChunkPlan[]> plans(new (std::nothrow) ChunkPlan[layout.chunks]);
    if (!plans) return ENOMEM;
    ChunkPlan* const plan = plans.get();
    const auto plan_any = dtype == MT_LOSSLESS_FP32 ? plan_chunk<uint32_t> : plan_chunk<uint16_t>;
    const auto plan_one = [=](size_t chunk, size_t size, Scratch&) {
        plan_any(from + chunk * layout.bytes_per_chunk, size, plan[chunk]);
    };
    if (const int error = for_each_chunk(layout, count, threads, plan_one)) return error;

    size_t end = layout.head;
    if (capacity < end) return ENOSPC;
    for (size_t chunk = 0; chunk < layout.chunks; ++chunk) {
        for (size_t p = 0; p < layout.planes; ++p) end += kPlaneHead + plan[chunk].planes[p].payload;
        store<uint64_t>(out + kHeader + chunk * kEntry, end);
        store<uint64_t>(out + kHeader + chunk * kEntry + 8, plan[chunk].sum);
    }
    if (capacity < end) return ENOSPC;
    std::memcpy(out, kMagic, sizeof kMagic);
    store<uint32_t>(out + 8, kVersion);
    store<uint32_t>(out + 12, static_cast<uint32_t>(dtype));
    store<uint64_t>(out + 16, count);
    store<uint64_t>(out + 24, kChunk);
    store<uint64_t>(out + 32, head_sum(out, layout.head));
    *used = end;

    const auto encode_any = dtype == MT_LOSSLESS_FP32 ? encode_chunk<uint32_t> : encode_chunk<uint16_t>;
    const auto encode_one = [=](size_t chunk, size_t size, Scratch& scratch) {
        const size_t begin = chunk == 0 ? layout.head : load<uint64_t>(out + kHeader + (chunk - 1) * kEntry);
        encode_any(from + chunk * layout.bytes_per_chunk, size, scratch, plan[chunk], out + begin);
    };
    return for_each_chunk(layout, count, threads, encode_one);
}

int mt_lossless_decode(const void* encoded, size_t bytes, void* elements, size_t count, int dtype, int threads,
                       size_t* bad_chunk) {
    Layout layout;
    if (const int error = lay_out(count, dtype, layout)) return error;
    if (threads < 1) return EINVAL;
    if (encoded == nullptr || bad_chunk == nullptr || (count != 0 && elements == nullptr)) return EFAULT;
    const auto* const in = static_cast<const uint8_t*>(encoded);
    auto* const to = static_cast<uint8_t*>(elements);

    *bad_chunk = SIZE_MAX;
    if (bytes < kHeader || std::memcmp(in, kMagic, sizeof kMagic) != 0 || load<uint32_t>(in + 8) != kVersion ||
        load<uint64_t>(in + 24) != kChunk) {
        return EBADMSG;
    }
    // The header's checksum distinguishes damage from an encoding of another tensor.
    const uint64_t its_count = load<uint64_t>(in + 16);
    const uint64_t its_chunks = its_count / kChunk + (its_count % kChunk != 0);
    if (its_chunks > (bytes - kHeader) / kEntry) return EBADMSG;
    if (head_sum(in, kHeader + its_chunks * kEntry) != load<uint64_t>(in + 32)) return EBADMSG;
    if (its_count != count || load<uint32_t>(in + 12) != static_cast<uint32_t>(dtype)) return EMSGSIZE;

    std::atomic<size_t> first_bad{SIZE_MAX};
    const auto end_of = [=](size_t chunk) { return load<uint64_t>(in + kHeader + chunk * kEntry); };
    const auto decode_any = dtype == MT_LOSSLESS_FP32 ? decode_chunk<uint32_t> : decode_chunk<uint16_t>;
    const auto decode_one = [=, &first_bad](size_t chunk, size_t size, Scratch& scratch) {
        const uint64_t begin = chunk == 0 ? layout.head : end_of(chunk - 1), end = end_of(chunk);
        // The last chunk must end at the end of the encoding, so that truncated or extra bytes are noticed.
        const bool placed = layout.head <= begin && begin <= end && end <= bytes &&
                            (chunk + 1 < layout.chunks || end == bytes);
        const uint64_t sum = load<uint64_t>(in + kHeader + chunk * kEntry + 8);
        uint8_t* const at = to + chunk * layout.bytes_per_chunk;
        if (placed && decode_any(in + begin, end - begin, sum, at, size, scratch)) return;
        for (size_t seen = first_bad; chunk < seen && !first_bad.compare_exchange_weak(seen, chunk);) {
        }
    };
    if (const int error = for_each_chunk(layout, count, threads, decode_one)) return error;
    *bad_chunk = first_bad;
    if (count == 0 && bytes != layout.head) return EBADMSG;
    return *bad_chunk == SIZE_MAX ? 0 : EBADMSG;
}
