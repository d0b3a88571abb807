// Random numbers that are the same on every machine: std's distributions are not.
#pragma once

#include <cstdint>
#include <vector>

class Random {
public:
    explicit Random(uint64_t seed) : state_(seed * 0x9E3779B97F4A7C15ull + 1) {}

    uint64_t bits() {
        state_ += 0x9E3779B97F4A7C15ull;
        uint64_t z = state_;
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
        z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
        return z ^ (z >> 31);
    }
    // In [0, n).
    uint32_t below(uint32_t n) { return uint32_t(bits() % n); }
    bool chance(uint32_t percent) { return below(100) < percent; }
    // Uniform in [-1, 1).
    float real() { return float(int64_t(bits()) >> 40) / float(1 << 23); }

    std::vector<float> reals(size_t n, float scale = 1.0f) {
        std::vector<float> out(n);
        for (float & v : out) {
            v = real() * scale;
        }
        return out;
    }
    template <typename T> const T & pick(const std::vector<T> & from) { return from[below(uint32_t(from.size()))]; }

private:
    uint64_t state_;
};
