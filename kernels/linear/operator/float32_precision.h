// The precision that torch's settings ask of a float32 product on a GPU.

#pragma once

#include <ATen/Context.h>
#include <torch/version.h>

#include <cstdlib>
#include <string>

#include "launchers.h"

namespace kernels {

// The values of torch's setting fp32_precision.
enum class Float32Setting {
  kTf32,     // "tf32"
  kFloat32,  // "ieee" or "none"
  kOther,    // "bfx9": torch makes nine products of bfloat16
};

// Returns the fp32_precision that torch's product uses. It is the first of these that is set:
//
//   torch.backends.cuda.matmul.fp32_precision, which torch.set_float32_matmul_precision and
//                                              allow_tf32 write too
//   torch.backends.cudnn.fp32_precision
//   torch.backends.fp32_precision
//
// This function does not ask Context::allowTF32CuBLAS, which raises an error if a program has used
// both old and new setters.
inline Float32Setting float32_setting() {
#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 10
  const std::string setting = at::globalContext().float32Precision("cuda", "matmul");
  if (setting == "tf32") return Float32Setting::kTf32;
  if (setting == "ieee" || setting == "none") return Float32Setting::kFloat32;
#else
  using at::Float32Precision;
  const Float32Precision setting =
      at::globalContext().float32Precision(at::Float32Backend::CUDA, at::Float32Op::MATMUL);
  if (setting == Float32Precision::TF32) return Float32Setting::kTf32;
  if (setting == Float32Precision::IEEE || setting == Float32Precision::NONE) {
    return Float32Setting::kFloat32;
  }
#endif
  return Float32Setting::kOther;
}

// Returns the variable NVIDIA_TF32_OVERRIDE if it is a single character, otherwise '\0'.
inline char read_tf32_override() {
  const char* const value = std::getenv("NVIDIA_TF32_OVERRIDE");
  const bool is_one_character = value != nullptr && value[0] != '\0' && value[1] == '\0';
  return is_one_character ? value[0] : '\0';
}

// Returns kHigh if cuBLAS would round the operands of torch's product to TF32, otherwise kHighest.
// The first line that fits decides:
//
//   fp32_precision is "bfx9"                                    kHighest
//   the variable NVIDIA_TF32_OVERRIDE is 0                      kHighest
//   that variable is 1, or fp32_precision is "tf32"             kHigh
//   fp32_precision is "ieee" or "none"                          kHighest
inline Precision float32_precision() {
  static const char tf32_override = read_tf32_override();  // cuBLAS reads it once too
  const Float32Setting setting = float32_setting();
  if (setting == Float32Setting::kOther || tf32_override == '0') return Precision::kHighest;
  const bool rounds_to_tf32 = tf32_override == '1' || setting == Float32Setting::kTf32;
  return rounds_to_tf32 ? Precision::kHigh : Precision::kHighest;
}

}  // namespace kernels
