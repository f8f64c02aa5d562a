// Polynomials over GF(2) are held reflected, as the CRC is: bit 31 is the coefficient of x^0, bit 0 that of x^31.
//
// The processor's instruction takes 8 bytes with a latency of three cycles but can start one each cycle, so long inputs
// are cut into three lanes that are computed at once and then joined: crc(A B) = crc(A) * x^(8 |B|) + crc(B) mod P.
//
// Where there are carry-less products of 512 bits, an input is folded instead: V. Gopal and others, "Fast CRC
// Computation for Generic Polynomials Using PCLMULQDQ Instruction", Intel, 2009. 128 bits that stand D bits before
// others are worth as much as their halves times x^(D+64) and x^D mod P, added to those; so four registers run over the
// input, each folded onto what lies 256 bytes further, and the 64 bytes that are left have the CRC of all that was
// folded.
#include "base/crc32c.h"

#include <array>
#include <bit>
#include <cstring>

#include "base/crc32c_parts.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_acle.h>
#include <sys/auxv.h>
#endif

namespace unbroken {
namespace crc32c_parts {
namespace {

constexpr std::uint32_t kPolynomial = 0x82F63B78;
constexpr std::uint32_t kOne = 0x80000000;

// --- Portable: eight tables, 8 bytes a step ---

using Tables = std::array<std::array<std::uint32_t, 256>, 8>;

constexpr Tables make_tables() {
  Tables tables{};
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    std::uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? kPolynomial : 0);
    tables[0][byte] = crc;
  }
  for (std::size_t t = 1; t < 8; ++t) {
    for (std::size_t byte = 0; byte < 256; ++byte) {
      const std::uint32_t before = tables[t - 1][byte];
      tables[t][byte] = (before >> 8) ^ tables[0][before & 0xFF];
    }
  }
  return tables;
}

constexpr Tables kTables = make_tables();

std::uint64_t load_little(const std::byte* data) {
  std::uint64_t word = 0;
  std::memcpy(&word, data, sizeof word);
  if constexpr (std::endian::native == std::endian::big) word = __builtin_bswap64(word);
  return word;
}

std::uint32_t portable(std::uint32_t state, const std::byte* data, std::size_t size) {
  for (; size >= 8; data += 8, size -= 8) {
    const std::uint64_t word = load_little(data) ^ state;
    state = 0;
    for (std::size_t i = 0; i < 8; ++i) state ^= kTables[7 - i][(word >> (8 * i)) & 0xFF];
  }
  for (; size > 0; ++data, --size) {
    state = (state >> 8) ^ kTables[0][(state ^ std::to_integer<std::uint32_t>(*data)) & 0xFF];
  }
  return state;
}

// --- Joining lanes ---

constexpr std::uint32_t multiply(std::uint32_t a, std::uint32_t b) {
  std::uint32_t product = 0;
  for (std::uint32_t bit = kOne; bit != 0; bit >>= 1) {
    if ((a & bit) != 0) product ^= b;
    b = (b >> 1) ^ ((b & 1) != 0 ? kPolynomial : 0);
  }
  return product;
}

// x^exponent mod P.
constexpr std::uint32_t power_of_x(std::uint64_t exponent) {
  std::uint32_t result = kOne;
  std::uint32_t square = kOne >> 1;  // x
  for (; exponent != 0; exponent >>= 1) {
    if ((exponent & 1) != 0) result = multiply(result, square);
    square = multiply(square, square);
  }
  return result;
}

#if defined(__x86_64__) || defined(__aarch64__)
// Lanes' lengths in bytes. Long ones keep the prefetcher of main memory busy (23 GB/s instead of 12 with 4 KiB).
constexpr std::size_t kLongLane = 65536;
constexpr std::size_t kMiddleLane = 4096;
#endif

#if defined(__x86_64__)

// A product of two reflected 32-bit polynomials sits in 64 bits one place too low, and the instruction multiplies what
// it is given by x^32: together x^33, which the constant leaves out.
template <std::size_t kBytes>
inline constexpr std::uint32_t kShift = power_of_x(8 * kBytes - 33);

__attribute__((target("sse4.2,pclmul"))) inline std::uint32_t shift(std::uint32_t crc, std::uint32_t constant) {
  const __m128i product =
      _mm_clmulepi64_si128(_mm_cvtsi32_si128(static_cast<int>(crc)), _mm_cvtsi32_si128(static_cast<int>(constant)), 0);
  return static_cast<std::uint32_t>(_mm_crc32_u64(0, static_cast<std::uint64_t>(_mm_cvtsi128_si64(product))));
}

template <std::size_t kLane>
__attribute__((target("sse4.2,pclmul"))) std::uint32_t three_lanes(std::uint32_t state, const std::byte* data) {
  std::uint64_t a = state;
  std::uint64_t b = 0;
  std::uint64_t c = 0;
  for (std::size_t i = 0; i < kLane; i += 8) {
    a = _mm_crc32_u64(a, load_little(data + i));
    b = _mm_crc32_u64(b, load_little(data + kLane + i));
    c = _mm_crc32_u64(c, load_little(data + 2 * kLane + i));
  }
  return shift(static_cast<std::uint32_t>(a), kShift<2 * kLane>) ^ shift(static_cast<std::uint32_t>(b), kShift<kLane>) ^
         static_cast<std::uint32_t>(c);
}

// Takes what fills three lanes off the front.
template <std::size_t kLane>
std::uint32_t in_lanes(std::uint32_t state, const std::byte*& data, std::size_t& size) {
  for (; size >= 3 * kLane; data += 3 * kLane, size -= 3 * kLane) state = three_lanes<kLane>(state, data);
  return state;
}

__attribute__((target("sse4.2,pclmul"))) std::uint32_t sse42(std::uint32_t state, const std::byte* data,
                                                             std::size_t size) {
  constexpr std::size_t kShortLane = 256;
  state = in_lanes<kLongLane>(state, data, size);
  state = in_lanes<kMiddleLane>(state, data, size);
  state = in_lanes<kShortLane>(state, data, size);
  for (; size >= 8; data += 8, size -= 8) {
    state = static_cast<std::uint32_t>(_mm_crc32_u64(state, load_little(data)));
  }
  for (; size > 0; ++data, --size) state = _mm_crc32_u8(state, std::to_integer<std::uint8_t>(*data));
  return state;
}

// A constant stands in the low half of 64 reflected bits, which is a factor x^32, and the product sits one place too
// low.
template <std::size_t kBits>
inline constexpr std::int64_t kFirstHalf = std::int64_t{power_of_x(kBits + 32)} << 1;
template <std::size_t kBits>
inline constexpr std::int64_t kSecondHalf = std::int64_t{power_of_x(kBits - 32)} << 1;

template <std::size_t kBits>
__attribute__((target("avx512f,vpclmulqdq"))) inline __m512i fold(__m512i from, __m512i onto) {
  constexpr std::int64_t kFirst = kFirstHalf<kBits>;
  constexpr std::int64_t kSecond = kSecondHalf<kBits>;
  const __m512i constants = _mm512_set_epi64(kSecond, kFirst, kSecond, kFirst, kSecond, kFirst, kSecond, kFirst);
  constexpr int kXor = 0x96;
  return _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(from, constants, 0x00),
                                   _mm512_clmulepi64_epi128(from, constants, 0x11), onto, kXor);
}

__attribute__((target("avx512f,vpclmulqdq"))) std::uint32_t avx512(std::uint32_t state, const std::byte* data,
                                                                   std::size_t size) {
  constexpr std::size_t kRegister = 64;
  constexpr std::size_t kRound = 4 * kRegister;
  if (size < 2 * kRound) return sse42(state, data, size);
  __m512i a = _mm512_loadu_si512(data);
  __m512i b = _mm512_loadu_si512(data + kRegister);
  __m512i c = _mm512_loadu_si512(data + 2 * kRegister);
  __m512i d = _mm512_loadu_si512(data + 3 * kRegister);
  a = _mm512_xor_si512(a, _mm512_zextsi128_si512(_mm_cvtsi32_si128(static_cast<int>(state))));
  for (data += kRound, size -= kRound; size >= kRound; data += kRound, size -= kRound) {
    a = fold<8 * kRound>(a, _mm512_loadu_si512(data));
    b = fold<8 * kRound>(b, _mm512_loadu_si512(data + kRegister));
    c = fold<8 * kRound>(c, _mm512_loadu_si512(data + 2 * kRegister));
    d = fold<8 * kRound>(d, _mm512_loadu_si512(data + 3 * kRegister));
  }
  b = fold<8 * kRegister>(a, b);
  c = fold<8 * kRegister>(b, c);
  d = fold<8 * kRegister>(c, d);
  alignas(kRegister) std::array<std::byte, kRegister> rest;
  _mm512_store_si512(rest.data(), d);
  return sse42(sse42(0, rest.data(), rest.size()), data, size);
}

#elif defined(__aarch64__)

template <std::size_t kBytes>
inline constexpr std::uint32_t kShift = power_of_x(8 * kBytes);

template <std::size_t kLane>
__attribute__((target("+crc"))) std::uint32_t three_lanes(std::uint32_t state, const std::byte* data) {
  std::uint32_t a = state;
  std::uint32_t b = 0;
  std::uint32_t c = 0;
  for (std::size_t i = 0; i < kLane; i += 8) {
    a = __crc32cd(a, load_little(data + i));
    b = __crc32cd(b, load_little(data + kLane + i));
    c = __crc32cd(c, load_little(data + 2 * kLane + i));
  }
  return multiply(a, kShift<2 * kLane>) ^ multiply(b, kShift<kLane>) ^ c;
}

// Takes what fills three lanes off the front.
template <std::size_t kLane>
std::uint32_t in_lanes(std::uint32_t state, const std::byte*& data, std::size_t& size) {
  for (; size >= 3 * kLane; data += 3 * kLane, size -= 3 * kLane) state = three_lanes<kLane>(state, data);
  return state;
}

// No short lanes here: joining by hand costs as much as they would save.
__attribute__((target("+crc"))) std::uint32_t arm_crc(std::uint32_t state, const std::byte* data, std::size_t size) {
  state = in_lanes<kLongLane>(state, data, size);
  state = in_lanes<kMiddleLane>(state, data, size);
  for (; size >= 8; data += 8, size -= 8) state = __crc32cd(state, load_little(data));
  for (; size > 0; ++data, --size) state = __crc32cb(state, std::to_integer<std::uint8_t>(*data));
  return state;
}

#endif

struct Found {
  std::array<Way, 3> ways{};
  std::size_t count = 0;
};

Found find_ways() {
  Found found;
  found.ways[found.count++] = {"portable", portable};
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("sse4.2") != 0 && __builtin_cpu_supports("pclmul") != 0) {
    found.ways[found.count++] = {"sse42", sse42};
    if (__builtin_cpu_supports("avx512f") != 0 && __builtin_cpu_supports("vpclmulqdq") != 0) {
      found.ways[found.count++] = {"avx512", avx512};
    }
  }
#elif defined(__aarch64__)
  constexpr unsigned long kHwcapCrc32 = 1UL << 7;
  if ((getauxval(AT_HWCAP) & kHwcapCrc32) != 0) found.ways[found.count++] = {"arm_crc", arm_crc};
#endif
  return found;
}

}  // namespace

std::span<const Way> ways() {
  static const Found found = find_ways();
  return std::span(found.ways).first(found.count);
}

}  // namespace crc32c_parts

std::uint32_t crc32c(std::span<const std::byte> bytes, std::uint32_t seed) {
  static const crc32c_parts::Function best = crc32c_parts::ways().back().function;
  return ~best(~seed, bytes.data(), bytes.size());
}

}  // namespace unbroken
