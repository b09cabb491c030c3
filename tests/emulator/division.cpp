// Tests the division by Divisor<float> (linear/epilogue.cuh) where it could round the wrong way.
//
// Divisor<float> divides x by the divisor's mantissa. docs/SPLIT-PROOF.md ("Division by other
// divisors") shows that the quotient can be wrong only if x / mantissa is very close to a midpoint
// between two floats. This program finds all such pairs of x and a mantissa, and compares with a
// true division. It prints the number of pairs and of wrong quotients.
//
// x and mantissa are in [1, 2). The integers X = x 2^23 and M = mantissa 2^23 have 24 bits:
//
//   x / mantissa = X / M               in [1, 2) if X >= M, else in [1/2, 1)
//   midpoints    = C / 2^K, C odd      K = 24 if X >= M, else 25
//   distance     = d / (M 2^K)         with d = X 2^K - C M
//
// The last line says that X 2^K and d are equal modulo M. So for each M and each small d, the
// program solves X 2^K = d modulo M. Even C are left out: C / 2^K is then a float.

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

// Compares the quotient of the floats x / 2^23 and m / 2^23 with a true division.
void check(const kernels::Divisor<float>& divisor, int64_t x, int64_t m) {
  const float numerator = static_cast<float>(x) / kOne;
  const float mantissa = static_cast<float>(m) / kOne;
  checked += 1;
  if (divisor.quotient(numerator) != numerator / mantissa) wrong += 1;
}

// Checks all X with begin <= X < end that are close to a midpoint for this M and K.
//
// Let M = odd * 2^j. X 2^K is a multiple of 2^j, so d must be one too. Divided by 2^j, the equation
// is X 2^(K - j) = d / 2^j modulo odd. Its solutions are the smallest one, and that one plus
// multiples of odd.
void check_range(int64_t m, int k, int64_t begin, int64_t end) {
  const int j = __builtin_ctzll(m);
  const int64_t odd = m >> j;
  const int64_t inverse_of_two = (odd + 1) / 2;               // modulo odd
  const int64_t inverse = power(inverse_of_two, k - j, odd);  // of 2^(K - j)
  const kernels::Divisor<float> divisor(static_cast<double>(m) / kOne);
  for (int64_t d = -kLargestDistance; d <= kLargestDistance; ++d) {
    if (d == 0 || d % (int64_t{1} << j) != 0) continue;
    const int64_t right_side = positive_remainder(d >> j, odd);
    const int64_t smallest = right_side * inverse % odd;
    const int64_t first = begin + positive_remainder(smallest - begin, odd);
    for (int64_t x = first; x < end; x += odd) {
      const int64_t c = ((x << k) - d) / m;
      const bool is_midpoint = c % 2 != 0;
      if (is_midpoint) check(divisor, x, m);
    }
  }
}

}  // namespace

int main() {
  for (int64_t m = kOne + 1; m < 2 * kOne; ++m) {  // 1.0 is a power of two: Divisor multiplies
    check_range(m, 24, m, 2 * kOne);
    check_range(m, 25, kOne, m);
  }
  std::printf("%lld pairs, %lld wrong\n", static_cast<long long>(checked),
              static_cast<long long>(wrong));
  return wrong == 0 ? 0 : 1;
}
