// Large pages for results in fresh memory: 512 times fewer page faults, which take longer than what is written there.
#pragma once

#include <cstddef>
#include <cstdint>
#ifdef __linux__
#include <sys/mman.h>
#endif

namespace raggedmoe {

// Asks for large pages where the memory has not been touched yet. Nothing depends on whether the system grants it.
inline void prefer_large_pages(void* memory, size_t bytes) {
#ifdef __linux__
  constexpr uintptr_t PAGE = uintptr_t{1} << 21;
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(memory) + PAGE - 1) & ~(PAGE - 1);
  const uintptr_t end = (reinterpret_cast<uintptr_t>(memory) + bytes) & ~(PAGE - 1);
  if (memory != nullptr && begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#else
  (void)memory, (void)bytes;
#endif
}

}  // namespace raggedmoe
