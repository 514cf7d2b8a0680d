// Two functions of the fast path by themselves, in place of the kernels' entry. request: what, how many cases, then
// each as offset in the data and length; result: one number a case.
#include "../../worker/engine/cpu/model.h"

NI void whole_step(void* const* all) { (void)all; }

#include "../../worker/engine/cpu/fast_path.h"

void __attribute__((visibility("default"))) entry(void* request, void* data, void* sums, void* result) {
  const i64* r = request;
  for (i64 i = 0; i < r[1]; i++) {
    const i64 at = r[2 + 2 * i], n = r[3 + 2 * i];
    ((i64*)result)[i] = r[0] ? most_likely((const float*)data + at, n) : (i64)crc32_of(sums, (const u8*)data + at, n);
  }
}
