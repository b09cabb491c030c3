// Divides all pairs of floats x and mantissa whose quotient is close to a midpoint between two
// floats, and compares with a true division. docs/SPLIT.md (division by other divisors) shows that
// no other pair can be rounded the wrong way. Prints the number of pairs and of wrong quotients.
//
// x and the mantissa are 1 to 2. As integers X and M of 24 bits, both are multiples of 2^-23:
//
//   x / mantissa = X / M               in [1, 2) if X >= M, else in [1/2, 1)
//   midpoints    = C / 2^K, C odd      K = 24 if X >= M, else 25
//   distance     = d / (M 2^K)         with d = X 2^K - C M
//
// For even C, C / 2^K is a float. So the X that are close to a midpoint or to a float solve
// X 2^K = d modulo M, for a small d. Only the midpoints are checked.

#include <cstdint>
#include <cstdio>

#include "linear/epilogue.cuh"

namespace {

constexpr int kLargestDistance = 8;  // SPLIT.md needs 5
constexpr int64_t kOne = 1 << 23;    // the integer of 1.0

int64_t checked = 0;
int64_t wrong = 0;

// Returns base^exponent modulo an odd number.
int64_t power(int64_t base, int exponent, int64_t modulus) {
  int64_t result = 1;
  for (int i = 0; i < exponent; ++i) result = result * base % modulus;
  return result;
}

void check(const kernels::Divisor<float>& divisor, int64_t x, int64_t m) {
  const float numerator = static_cast<float>(x) / kOne;
  const float mantissa = static_cast<float>(m) / kOne;
  checked += 1;
  if (divisor.quotient(numerator) != numerator / mantissa) wrong += 1;
}

// Checks all X from begin to end that solve X 2^K = d modulo M, for each small d. If M = odd * 2^j,
// both sides are divided by 2^j: there is no solution unless d is a multiple of it.
void check_range(int64_t m, int k, int64_t begin, int64_t end) {
  const int j = __builtin_ctzll(m);
  const int64_t odd = m >> j;
  const int64_t inverse_of_two = (odd + 1) / 2;
  const int64_t inverse = power(inverse_of_two, k - j, odd);  // of 2^(K - j)
  const kernels::Divisor<float> divisor(static_cast<double>(m) / kOne);
  for (int64_t d = -kLargestDistance; d <= kLargestDistance; ++d) {
    if (d == 0 || d % (int64_t{1} << j) != 0) continue;
    const int64_t right_side = ((d >> j) % odd + odd) % odd;
    const int64_t solution = right_side * inverse % odd;  // the smallest one
    const int64_t skipped = solution < begin ? (begin - solution + odd - 1) / odd : 0;
    for (int64_t x = solution + skipped * odd; x < end; x += odd) {
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
