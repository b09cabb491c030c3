// Tests the division by Divisor<float> (linear/epilogue.cuh) where it could round the wrong way.
//
// Divisor<float> divides a numerator by the divisor's mantissa. docs/SPLIT-PROOF.md ("Division by
// other divisors") shows that the quotient can be wrong only if numerator / mantissa is very close
// to a midpoint between two floats. This program finds all such pairs of a numerator and a
// mantissa, and compares with a true division. It prints the number of pairs and of wrong
// quotients.
//
// Numerator and mantissa are in [1, 2). The integers a = numerator 2^23 and b = mantissa 2^23 have
// 24 bits:
//
//   numerator / mantissa = a / b                  in [1, 2) if a >= b, else in [1/2, 1)
//   midpoints            = h / 2^shift, h odd     shift = 24 if a >= b, else 25
//   distance             = d / (b 2^shift)        with d = a 2^shift - h b
//
// The last line says that a 2^shift and d are equal modulo b. So for each b and each small d, the
// program solves a 2^shift = d modulo b. Even h are left out: h / 2^shift is then a float.

#include <cstdint>
#include <cstdio>

#include "linear/epilogue.cuh"

namespace {

constexpr int kLargestDistance = 8;  // of |d|; docs/SPLIT-PROOF.md needs 5
constexpr int64_t kOne = 1 << 23;    // the integer of 1.0

int64_t checked = 0;
int64_t wrong = 0;

// Returns base^exponent modulo an odd number.
int64_t power(int64_t base, int exponent, int64_t modulus) {
  int64_t result = 1;
  for (int i = 0; i < exponent; ++i) result = result * base % modulus;
  return result;
}

// Returns `value` modulo `modulus`, in [0, modulus).
int64_t positive_remainder(int64_t value, int64_t modulus) {
  const int64_t remainder = value % modulus;
  return remainder < 0 ? remainder + modulus : remainder;
}

// Compares the quotient of the floats a / 2^23 and b / 2^23 with a true division.
void check(const kernels::Divisor<float>& divisor, int64_t a, int64_t b) {
  const float numerator = static_cast<float>(a) / kOne;
  const float mantissa = static_cast<float>(b) / kOne;
  checked += 1;
  if (divisor.quotient(numerator) != numerator / mantissa) wrong += 1;
}

// Checks all a with begin <= a < end that are close to a midpoint for this b and shift.
//
// Let b = odd * 2^j. a 2^shift is a multiple of 2^j, so d must be one too. Divided by 2^j, the
// equation is a 2^(shift - j) = d / 2^j modulo odd. Its solutions are the smallest one, and that
// one plus multiples of odd.
void check_range(int64_t b, int shift, int64_t begin, int64_t end) {
  const int j = __builtin_ctzll(b);
  const int64_t odd = b >> j;
  const int64_t inverse_of_two = (odd + 1) / 2;                   // modulo odd
  const int64_t inverse = power(inverse_of_two, shift - j, odd);  // of 2^(shift - j)
  const kernels::Divisor<float> divisor(static_cast<double>(b) / kOne);
  for (int64_t d = -kLargestDistance; d <= kLargestDistance; ++d) {
    if (d == 0 || d % (int64_t{1} << j) != 0) continue;
    const int64_t right_side = positive_remainder(d >> j, odd);
    const int64_t smallest = right_side * inverse % odd;
    const int64_t first = begin + positive_remainder(smallest - begin, odd);
    for (int64_t a = first; a < end; a += odd) {
      const int64_t h = ((a << shift) - d) / b;
      const bool is_midpoint = h % 2 != 0;
      if (is_midpoint) check(divisor, a, b);
    }
  }
}

}  // namespace

int main() {
  for (int64_t b = kOne + 1; b < 2 * kOne; ++b) {  // 1.0 is a power of two: Divisor multiplies
    check_range(b, 24, b, 2 * kOne);
    check_range(b, 25, kOne, b);
  }
  std::printf("%lld pairs, %lld wrong\n", static_cast<long long>(checked),
              static_cast<long long>(wrong));
  return wrong == 0 ? 0 : 1;
}
