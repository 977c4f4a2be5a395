// Functions that a kernel must not call: what they keep in registers would go to memory.
#pragma once

// Checks of memory around all that is inlined would take a compiler a quarter of an hour.
#if defined(__SANITIZE_ADDRESS__)
#define EDGESPEC_INLINE inline
#else
#define EDGESPEC_INLINE inline __attribute__((always_inline))
#endif
