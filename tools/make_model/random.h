// Seeded random numbers that are the same on every machine and run. A stream is named by a seed and a text (or number),
// so tensors and rows can be made in any order and by any thread.
#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <string_view>

namespace sluice::make_model {

// Spreads every bit of `value` over the whole result.
constexpr uint64_t mix_bits(uint64_t value) {
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9U;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebU;
  return value ^ (value >> 31);
}

constexpr uint64_t stream_key(uint64_t seed, std::string_view name) {
  uint64_t key = mix_bits(seed + 0x9e3779b97f4a7c15U);
  for (const char c : name) key = mix_bits(key ^ static_cast<unsigned char>(c)) + 0x9e3779b97f4a7c15U;
  return key;
}

// xoshiro256++ by Blackman and Vigna.
class Random {
 public:
  explicit Random(uint64_t key) {
    for (uint64_t& word : state_) word = mix_bits(key += 0x9e3779b97f4a7c15U);
  }
  Random(uint64_t seed, std::string_view name) : Random(stream_key(seed, name)) {}

  uint64_t next() {
    const uint64_t result = std::rotl(state_[0] + state_[3], 23) + state_[0];
    const uint64_t shifted = state_[1] << 17;
    state_[2] ^= state_[0];
    state_[3] ^= state_[1];
    state_[1] ^= state_[2];
    state_[0] ^= state_[3];
    state_[2] ^= shifted;
    state_[3] = std::rotl(state_[3], 45);
    return result;
  }

  // 0 <= number < bound.
  uint64_t below(uint32_t bound) { return ((next() >> 32) * bound) >> 32; }

  // [0, 1)
  float uniform() { return static_cast<float>(next() >> 40) * 0x1p-24F; }

  // Mean 0, deviation 1: the sum of four 16-bit numbers, near enough to a normal one and much cheaper.
  float normal() {
    const uint64_t bits = next();
    const auto sum =
        static_cast<int32_t>((bits & 0xffff) + ((bits >> 16) & 0xffff) + ((bits >> 32) & 0xffff) + (bits >> 48));
    constexpr float kDeviation = 37837.22F;  // of the sum: 65536 * sqrt(4 / 12)
    return (static_cast<float>(sum) - 131070.0F) / kDeviation;
  }

 private:
  std::array<uint64_t, 4> state_{};
};

}  // namespace sluice::make_model
