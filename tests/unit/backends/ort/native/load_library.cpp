// Loads the library of kernels as ONNX Runtime and Python do, and prints its levels.
#include <dlfcn.h>

#include <cstdio>

int main(int, char** arguments) {
  void* library = dlopen(arguments[1], RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    std::fprintf(stderr, "%s\n", dlerror());
    return 1;
  }
  if (dlsym(library, "RegisterCustomOps") == nullptr) return 1;
  using Levels = const char* (*)();
  const auto levels = reinterpret_cast<Levels>(dlsym(library, "edgespec_levels"));
  if (levels == nullptr) return 1;
  std::printf("levels: %s\n", levels());
  return 0;
}
