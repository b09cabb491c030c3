# The jobs of .ci/run that compile the sources without running them, and that check their format;
# and a compiler for its tests. .ci/run includes this file. It sets $work, a temporary folder, and
# $checks, which is `all` if the other compilers are wanted.

folders=(kernels tests/project/third_problem/kernels)
problems=(kernels/relu kernels/linear tests/project/third_problem/kernels/gelu)
include_flags=(-I. "${folders[@]/#/-I}")  # an -I before each folder

PATH+=:$work/tools/bin
install_tools() {
  python3 -m venv "$work/tools"
  "$work/tools/bin/pip" install -r .ci/requirements.txt
  if [ "$checks" = all ] && ! type clang++ && [ "$(id -u)" -eq 0 ] && type apt-get; then
    # If the installation fails, has_clang returns false, and the checks with clang are skipped.
    { apt-get update && apt-get install -y clang libomp-dev; } || true
  fi &>"$work/apt"
}

has_clang() {
  echo '#include <omp.h>' | clang++ -fopenmp -fsyntax-only -xc++ - 2>/dev/null
}

check_format() {
  ruff check .
  ruff format --check .
  find kernels problems tests -regextype posix-extended -regex '.*\.(cuh?|h|cpp)' |
    xargs clang-format --dry-run --Werror
}

# Print a file that includes all sources with a suffix in some folders. Users' builds compile a
# problem as such a file.
one_file() {  # suffix, folders
  local suffix=$1
  shift
  find "$@" -name "*.$suffix" -printf '#include "%p"\n' | sort
}

# Compile every kernel for every architecture. Each file is also compiled alone, for it must include
# what it needs. KERNELS_ALL_PATHS adds the kernel of sm80/, which users' builds have for compute
# capability 8.0 only.
check_cuda() {
  local source problem
  for source in $(find "${folders[@]}" -name '*.cu' | sort); do
    compile_kernels 80 "$source" -c -DKERNELS_ALL_PATHS
  done
  for problem in "${problems[@]}"; do
    source=$work/${problem##*/}.cu
    one_file cu "$problem" >"$source"
    compile_kernels 100 "$source" -cubin -DKERNELS_ALL_PATHS
    compile_kernels 120 "$source" -cubin -DKERNELS_ALL_PATHS
    compile_kernels 90a "$source" -c
    # Code for Hopper must not have the kernel of the namespace sm80, which is mangled to 4sm80.
    if grep "4sm80.*gemm_fp16x3_sm80_kernel" "$work/kernel.o"; then
      echo "$problem: code for Hopper has the kernel of compute capability 8.0"
      exit 1
    fi
  done
}

# Compile without warnings, and require that no kernel spills registers.
compile_kernels() {  # architecture, source, options of nvcc
  local architecture=$1 source=$2 log
  shift 2
  log=$(nice nvcc -std=c++17 "${include_flags[@]}" -Werror all-warnings -Xptxas -v \
    "-gencode=arch=compute_$architecture,code=sm_$architecture" "$@" "$source" \
    -o "$work/kernel.o" 2>&1) || { echo "$log"; exit 1; }
  if grep 'spill' <<<"$log" | grep -v ' 0 bytes spill stores, 0 bytes spill loads'; then
    echo "$source spills on sm_$architecture"
    exit 1
  fi
  # With this warning, ptxas makes each wgmma instruction wait for the one before.
  if grep 'Potential Performance Loss' <<<"$log"; then
    echo "$source: wgmma instructions wait for each other on sm_$architecture"
    exit 1
  fi
  echo "$source sm_$architecture: $(grep -c 'Used' <<<"$log") kernels, no spills"
}

# Require that the CPU's kernels and the operators (all .cpp files) give no warnings, with and
# without CUDA. Torch's headers take most of the time. So each problem is compiled alone once, as in
# users' builds, and all other compilations have the problems in one file.
check_operators() {
  local problem
  find_system_includes
  for problem in "${problems[@]}"; do
    one_file cpp kernels/cpu "$problem" >"$work/main.cpp"
    check_warnings c++ 17 -DKERNELS_WITH_CUDA
  done
  one_file cpp kernels/cpu "${problems[@]}" >"$work/main.cpp"
  check_warnings c++ 20
}

# Require the same of other compilers, for .ci/run all.
check_other_compilers() {
  local compiler compilers=() source
  find_system_includes
  if type g++-11 &>/dev/null; then
    compilers+=(g++-11)
  fi
  if has_clang; then
    compilers+=(clang++)
  fi
  one_file cpp kernels/cpu "${problems[@]}" >"$work/main.cpp"
  for compiler in "${compilers[@]}"; do
    check_warnings "$compiler" 17
    check_warnings "$compiler" 17 -DKERNELS_WITH_CUDA
  done
  # The emulator compiles CUDA kernels as C++, so clang can check these too.
  if has_clang; then
    for source in tests/emulator/*.cpp; do
      nice clang++ -std=c++17 -fsyntax-only -Itests/emulator -Ikernels \
        "${system_includes[@]}" -Werror -Wcomma -Wno-attributes "$source"
    done
  fi
}

# Set `system_includes`: flags with the folders of torch's and CUDA's headers.
find_system_includes() {
  local toolkit
  toolkit=$(nvcc --dryrun x.cu 2>&1 | sed -n 's/^#\$ TOP=//p')  # it prints "#$ TOP=<its folder>"
  # A torch for the CPU has all its headers but this one, which its CUDA build generates.
  mkdir -p "$work/stub/c10/cuda/impl"
  echo '#define C10_CUDA_BUILD_SHARED_LIBS' >"$work/stub/c10/cuda/impl/cuda_cmake_macros.h"
  mapfile -t system_includes < <(python - <<'PYTHON'
import logging
logging.disable()
from torch.utils.cpp_extension import include_paths
for path in include_paths("cpu"):
    print(f"-isystem{path}")
PYTHON
  )
  system_includes+=("-isystem$work/stub" "-isystem$toolkit/include")
}

# Require that $work/main.cpp gives no warnings.
check_warnings() {  # compiler, C++ standard, options
  local compiler=$1 standard=$2
  local warnings=(-Wall -Wextra -Werror)
  shift 2
  if [ "$compiler" = clang++ ]; then
    warnings+=(-Wcomma)  # rejects the comma operator
  fi
  nice "$compiler" "-std=c++$standard" "${include_flags[@]}" -fsyntax-only -fopenmp \
    "${warnings[@]}" -DAT_PER_OPERATOR_HEADERS "${system_includes[@]}" "$@" "$work/main.cpp"
}

# Write $quick_compiler: a C++ compiler that builds our kernels in half the time or less, for tests
# that do not depend on their speed. It has torch's headers precompiled, and optimizes little.
quick_compiler=$work/quick-g++
make_quick_compiler() {
  local flags header=$work/torch.h
  # The flags of a finished build, without the macros that differ from build to build.
  flags=$(sed -n 's/^cflags = //p' "$TORCH_EXTENSIONS_DIR"/kernels-*/kernels_relu_*/build.ninja |
    sed -E 's/-D(TORCH_EXTENSION_NAME|KERNELS_NAMESPACE)=[^ ]*//g')
  grep -rhE '^#include <(ATen|torch|c10/core|c10/util)/' kernels --include='*.cpp' \
    --include='*.h' | sort -u >"$header"
  c++ $flags -O1 -x c++-header "$header" -o "$header.gch"
  cat >"$quick_compiler" <<SCRIPT
#!/bin/sh
case "\$*" in
*-DKERNELS_NAMESPACE=*" -c "*) exec c++ -include "$header" "\$@" -O1 ;;
*) exec c++ "\$@" ;;
esac
SCRIPT
  chmod +x "$quick_compiler"
}
