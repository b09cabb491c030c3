// Prints the path that choose_path takes for each product on standard input. A product is a line of
// ten numbers, in the order in which `main` reads them; truth values are 0 and 1.

#include <cstdio>

#include "linear/operator/choose_path.h"

int main() {
  using namespace kernels;
  int bits;  // of the dtype: 16, 32 or 64
  int is_highest, is_forward, weight_has_vector_rows, x_is_transposed;
  long long m, n, k;
  Gpu gpu;
  while (scanf("%d %d %lld %lld %lld %d %d %d %d %d", &bits, &is_highest, &m, &n, &k, &is_forward,
               &weight_has_vector_rows, &x_is_transposed, &gpu.capability,
               &gpu.multiprocessors) == 10) {
    Product product{};
    product.dtype = DType::kFloat16;
    if (bits == 32) product.dtype = DType::kFloat32;
    if (bits == 64) product.dtype = DType::kFloat64;
    product.precision = Precision::kOfDtype;
    if (bits == 32) product.precision = is_highest ? Precision::kHighest : Precision::kHigh;
    product.is_forward = is_forward;
    product.m = m;
    product.n = n;
    product.k = k;
    product.x_is_transposed = x_is_transposed;
    product.weight_has_vector_rows = weight_has_vector_rows;
    puts(name_of(choose_path(product, gpu)));
  }
}
