// The arithmetic of one element. Part of kernels.inl; the order of operations defines the bits.

// ---- bits

inline float as_float(uint32_t bits) { return __builtin_bit_cast(float, bits); }
inline uint32_t as_bits(float value) { return __builtin_bit_cast(uint32_t, value); }
inline bool is_nan(uint32_t bits) { return (bits & 0x7fffffffu) > 0x7f800000u; }
inline uint32_t without_nan(uint32_t bits) { return is_nan(bits) ? 0x7fc00000u : bits; }

// ---- random bits (store/random.py)

inline uint64_t mix64(uint64_t value) {
    value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9u;
    value = (value ^ (value >> 27)) * 0x94d049bb133111ebu;
    return value ^ (value >> 31);
}

// The key of a group: the low half is for moments, the high half for the weight.
inline uint64_t key_of(uint64_t seed, uint64_t group) { return mix64(seed + (group + 1) * 0x9e3779b97f4a7c15u); }

// An element's counter is its group's key plus its index times kStride; loops increment it by kStride.
constexpr uint32_t kStride = 0x9e3779b9u;
inline uint32_t counter_of(uint32_t key, int lane) { return key + static_cast<uint32_t>(lane) * kStride; }

inline uint32_t drawn(uint32_t value) {
    value = (value ^ (value >> 16)) * 0x85ebca6bu;
    value = (value ^ (value >> 13)) * 0xc2b2ae35u;
    return value ^ (value >> 16);
}

// ---- BF16 and the master in two halves (store/formats.py, store/split.py)

inline float widened(uint16_t high) { return as_float(static_cast<uint32_t>(high) << 16); }

inline float rounded_to_nearest(float value) {
    const uint32_t bits = as_bits(value);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u;
    return as_float(is_nan(bits) ? 0x7fc00000u : rounded);
}

// Stochastic rounding; `draw` has 16 random bits.
inline uint16_t rounded_at_random(float value, uint32_t draw) {
    const uint32_t bits = as_bits(value);
    const bool special = (bits & 0x7f800000u) == 0x7f800000u;
    return static_cast<uint16_t>((special ? without_nan(bits) : bits + draw) >> 16);
}

inline float joined(uint16_t high, int16_t low) {
    return as_float((static_cast<uint32_t>(high) << 16) + static_cast<uint32_t>(static_cast<int32_t>(low)));
}

// ---- codes (store/formats.py)

template <class Format>
inline float decoded(uint32_t code, float scale) {
    const uint32_t magnitude = code & (Format::kLevels - 1);
    float level = as_float((magnitude + Format::kBase) << Format::kShift);
    if (!Format::kSigned) return level * scale;
    level = magnitude == 0 ? 0.0f : level;
    const uint32_t sign = (code >> (Format::kBits - 1)) << 31;
    return as_float(as_bits(level * scale) | sign);
}

// No upper clamp is needed: a share is at most 1, and a draw cannot carry beyond it.
template <class Format>
inline uint32_t encoded(float value, float inverse, uint32_t draw) {
    constexpr uint32_t kOne = 0x3f800000u;
    const uint32_t bits = as_bits(value);
    const float share = as_float(bits & 0x7fffffffu) * inverse;
    const uint32_t bounded = as_bits(share) < kOne ? as_bits(share) : kOne;
    const uint32_t level = (bounded + (draw << (Format::kShift - 16))) >> Format::kShift;
    const int32_t code = static_cast<int32_t>(level) - Format::kBase;
    if (!Format::kSigned) return static_cast<uint32_t>(code > 0 ? code : 0);
    // Between zero and level 1. `draw < trunc(small)` in integers equals `draw + 1 <= small` in floats, both exact; NaN
    // becomes zero, as in the reference.
    const float small = share * Format::kBelow;
    const uint32_t first = static_cast<float>(static_cast<int32_t>(draw + 1)) <= small ? 1u : 0u;
    const uint32_t magnitude = small >= 65536.0f ? static_cast<uint32_t>(code) : first;
    return magnitude | ((bits >> (32 - Format::kBits)) & Format::kLevels);
}

// The scale of a block, clamped to normal numbers, so that its inverse is finite.
template <int block>
inline float largest(const float* values) {
    int32_t most = 0x00800000;
    for (int i = 0; i < block; ++i) {
        const int32_t magnitude = static_cast<int32_t>(as_bits(values[i]) & 0x7fffffffu);
        most = magnitude > most ? magnitude : most;
    }
    return as_float(static_cast<uint32_t>(most < 0x7f7fffff ? most : 0x7f7fffff));
}

// ---- rules (optim/rules.py), with scalars in the same order

template <int rule>
struct Scalars;

template <>
struct Scalars<MT_RULE_ADAMW> {
    float clip, beta1, one_minus_beta1, beta2, one_minus_beta2, root_correction, eps, decay, step_size;

    explicit Scalars(const float* s)
        : clip(s[0]), beta1(s[1]), one_minus_beta1(s[2]), beta2(s[3]), one_minus_beta2(s[4]), root_correction(s[5]),
          eps(s[6]), decay(s[7]), step_size(s[8]) {}

    void apply(float& w, float& m, float& v, float g) const {
        const float x = g * clip;
        m = m * beta1 + x * one_minus_beta1;
        v = v * beta2 + (x * one_minus_beta2) * x;
        const float denominator = __builtin_sqrtf(v) / root_correction + eps;
        w = w * decay - (m * step_size) / denominator;
    }
};

template <>
struct Scalars<MT_RULE_LION> {
    float clip, beta1, one_minus_beta1, beta2, one_minus_beta2, decay, lr;

    explicit Scalars(const float* s)
        : clip(s[0]), beta1(s[1]), one_minus_beta1(s[2]), beta2(s[3]), one_minus_beta2(s[4]), decay(s[5]), lr(s[6]) {}

    void apply(float& w, float& m, float&, float g) const {
        const float x = g * clip;
        const float blend = m * beta1 + x * one_minus_beta1;
        m = m * beta2 + x * one_minus_beta2;
        const float direction = (blend > 0.0f ? 1.0f : 0.0f) - (blend < 0.0f ? 1.0f : 0.0f);
        w = w * decay - direction * lr;
    }
};

template <>
struct Scalars<MT_RULE_SGD> {
    float clip, momentum, weight_decay, lr;

    explicit Scalars(const float* s) : clip(s[0]), momentum(s[1]), weight_decay(s[2]), lr(s[3]) {}

    void apply(float& w, float& m, float&, float g) const {
        m = m * momentum + (g * clip + w * weight_decay);
        w = w - m * lr;
    }
};
