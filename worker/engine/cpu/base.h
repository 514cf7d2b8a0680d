// Types, vectors and elementary functions. Freestanding C: no libc, no undefined symbol, one vector type per
// instruction set. Everything else in this folder is written once on top of it.
//
// A vector is as wide as the instruction set's registers (W bytes); a tile of 16 weight rows takes PARTS of them.
// -ffp-contract=off everywhere: a sum is rounded the same way in every specialisation of a loop, which is what
// makes logits bit-identical across chunk sizes, thread counts and stage counts (issue 3).
#ifndef SMQ_BASE_H
#define SMQ_BASE_H

typedef unsigned char u8;
typedef signed char i8;
typedef unsigned short u16;
typedef short i16;
typedef unsigned int u32;
typedef int i32;
typedef unsigned long long u64;
typedef long long i64;

#define AI static inline __attribute__((always_inline, unused))
#define NI static __attribute__((noinline, unused))

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VNNI__)
#define SMQ_AVX512 1
#define W 64
#include <immintrin.h>
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define SMQ_AVX2 1
#define W 32
#include <immintrin.h>
#elif defined(__aarch64__)
#define SMQ_NEON 1
#define W 16
#include <arm_neon.h>
#else
#define W 16
#endif

// Before a loop whose bounds are constants: without it gcc keeps arrays of vectors in memory.
#ifdef __clang__
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

#define ROWS 16          // rows of a weight tile, positions of a key tile
#define VL (W / 4)       // 32-bit lanes of a vector
#define PARTS (ROWS / VL)

typedef float nf __attribute__((vector_size(W)));
typedef i32 ni __attribute__((vector_size(W)));
typedef u32 nu __attribute__((vector_size(W)));
typedef i16 nh __attribute__((vector_size(W)));
typedef u16 nuh __attribute__((vector_size(W)));
typedef u8 nb __attribute__((vector_size(W)));
typedef float nf_u __attribute__((vector_size(W), aligned(1), may_alias));
typedef u8 nb_u __attribute__((vector_size(W), aligned(1), may_alias));
typedef i32 i32_u __attribute__((aligned(1), may_alias));
typedef u32 u32_u __attribute__((aligned(1), may_alias));
typedef u16 u16_u __attribute__((aligned(1), may_alias));

AI nf load(const float* p) { return *(const nf_u*)p; }
AI void store(float* p, nf v) { *(nf_u*)p = v; }
AI nb load_bytes(const u8* p) { return *(const nb_u*)p; }
AI nf bcast(float x) {
#if SMQ_AVX512
  return (nf)_mm512_set1_ps(x);
#elif SMQ_AVX2
  return (nf)_mm256_set1_ps(x);
#elif SMQ_NEON
  return (nf)vdupq_n_f32(x);
#else
  return (nf){x, x, x, x};
#endif
}
AI ni bcast_i(i32 x) { return (ni){0} + x; }
AI nf select_f(ni mask, nf a, nf b) { return (nf)(((ni)a & mask) | ((ni)b & ~mask)); }

AI nf fma_v(nf a, nf b, nf c) {
#if SMQ_AVX512
  return (nf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif SMQ_AVX2
  return (nf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif SMQ_NEON
  return (nf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

AI nf max_v(nf a, nf b) {
#if SMQ_AVX512
  return (nf)_mm512_max_ps((__m512)a, (__m512)b);
#elif SMQ_AVX2
  return (nf)_mm256_max_ps((__m256)a, (__m256)b);
#elif SMQ_NEON
  return (nf)vmaxq_f32((float32x4_t)a, (float32x4_t)b);
#else
  return select_f(a > b, a, b);
#endif
}

AI nf abs_v(nf a) { return (nf)((ni)a & 0x7fffffff); }

AI nf to_float(ni a) {
#if SMQ_AVX512
  return (nf)_mm512_cvtepi32_ps((__m512i)a);
#elif SMQ_AVX2
  return (nf)_mm256_cvtepi32_ps((__m256i)a);
#elif SMQ_NEON
  return (nf)vcvtq_f32_s32((int32x4_t)a);
#else
  return __builtin_convertvector(a, nf);
#endif
}

// Horizontal results fold halves onto each other: one fixed order per instruction set.
AI float sum_v(nf a) {
#if SMQ_AVX512
  return _mm512_reduce_add_ps((__m512)a);
#elif SMQ_AVX2
  __m128 h = _mm_add_ps(_mm256_castps256_ps128((__m256)a), _mm256_extractf128_ps((__m256)a, 1));
  h = _mm_add_ps(h, _mm_movehl_ps(h, h));
  return _mm_cvtss_f32(_mm_add_ss(h, _mm_shuffle_ps(h, h, 1)));
#else
  float t[VL];
  store(t, a);
  for (int n = VL / 2; n > 0; n /= 2)
    for (int i = 0; i < n; i++) t[i] += t[i + n];
  return t[0];
#endif
}
AI float max_of(nf a) {
#if SMQ_AVX512
  return _mm512_reduce_max_ps((__m512)a);
#elif SMQ_AVX2
  __m128 h = _mm_max_ps(_mm256_castps256_ps128((__m256)a), _mm256_extractf128_ps((__m256)a, 1));
  h = _mm_max_ps(h, _mm_movehl_ps(h, h));
  return _mm_cvtss_f32(_mm_max_ss(h, _mm_shuffle_ps(h, h, 1)));
#else
  float t[VL];
  store(t, a);
  for (int n = VL / 2; n > 0; n /= 2)
    for (int i = 0; i < n; i++) t[i] = t[i] > t[i + n] ? t[i] : t[i + n];
  return t[0];
#endif
}
AI i32 sum_i(ni a) {
#if SMQ_AVX512
  return _mm512_reduce_add_epi32((__m512i)a);
#elif SMQ_AVX2
  __m128i h = _mm_add_epi32(_mm256_castsi256_si128((__m256i)a), _mm256_extracti128_si256((__m256i)a, 1));
  h = _mm_add_epi32(h, _mm_shuffle_epi32(h, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(h, _mm_shuffle_epi32(h, 0xb1)));
#else
  i32 s = 0;
  for (int i = 0; i < VL; i++) s += a[i];
  return s;
#endif
}

// 16 numbers that fit, as bytes.
AI void store_bytes(i8* p, const ni* v) {
#if SMQ_AVX512
  _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8((__m512i)v[0]));
#elif SMQ_AVX2
  __m256i pairs = _mm256_permute4x64_epi64(_mm256_packs_epi32((__m256i)v[0], (__m256i)v[1]), 0xd8);
  _mm_storeu_si128((__m128i*)p, _mm_packs_epi16(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1)));
#elif SMQ_NEON
  int16x8_t a = vcombine_s16(vmovn_s32((int32x4_t)v[0]), vmovn_s32((int32x4_t)v[1]));
  int16x8_t b = vcombine_s16(vmovn_s32((int32x4_t)v[2]), vmovn_s32((int32x4_t)v[3]));
  vst1q_s8(p, vcombine_s8(vmovn_s16(a), vmovn_s16(b)));
#else
  for (int i = 0; i < ROWS; i++) p[i] = (i8)v[i / VL][i % VL];
#endif
}

AI float root(float x) {
#if SMQ_AVX512 || SMQ_AVX2
  return _mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss(x)));
#else
  return __builtin_sqrtf(x);
#endif
}

// VL float16 values as float32; infinities are not kept apart from 65536 in the plain C version.
AI nf load_half(const void* at) {
#if SMQ_AVX512
  return (nf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)at));
#elif SMQ_AVX2
  return (nf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)at));
#elif SMQ_NEON
  return (nf)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16((const u16*)at)));
#else
  const u16_u* p = (const u16_u*)at;
  nu h = {0};
  for (int i = 0; i < VL; i++) h[i] = p[i];
  nf f = (nf)((h & 0x7fff) << 13) * 0x1p112f;
  return (nf)((nu)f | ((h & 0x8000) << 16));
#endif
}

AI void store_half(u16* p, nf v) {
#if SMQ_AVX512
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph((__m512)v, 0));
#elif SMQ_AVX2
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph((__m256)v, 0));
#elif SMQ_NEON
  vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)v)));
#else
  nu bits = (nu)v, sign = bits & 0x80000000u;
  nu a = bits ^ sign;
  nu small = (nu)((nf)a + 0.5f) - 0x3f000000u;                    // below 2^-14: the adder rounds to a denormal
  nu normal = (a + 0xc8000fffu + ((a >> 13) & 1)) >> 13;          // round to nearest even
  nu is_small = (nu)((ni)a < (113 << 23)), is_big = (nu)((ni)a >= 0x477ff000);
  nu h = (small & is_small) | (normal & ~is_small);
  h = ((h & ~is_big) | (0x7c00 & is_big)) | (sign >> 16);
  for (int i = 0; i < VL; i++) p[i] = (u16)h[i];
#endif
}

AI nf load_u8(const u8* p) {
#if SMQ_AVX512
  return (nf)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)));
#elif SMQ_AVX2
  return (nf)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)));
#else
  nf r = {0};
  for (int i = 0; i < VL; i++) r[i] = (float)p[i];
  return r;
#endif
}

AI nf load_i8(const u8* p) {
#if SMQ_AVX512
  return (nf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
#elif SMQ_AVX2
  return (nf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
#else
  nf r = {0};
  for (int i = 0; i < VL; i++) r[i] = (float)(i8)p[i];
  return r;
#endif
}

// e^x by 2^n times a polynomial; exactly 0 below -87, where float32's normal range ends.
AI nf exp_v(nf x) {
  nf low = bcast(-87.0f), high = bcast(88.0f);
  ni zero = x < low;
  x = select_f(x > high, high, select_f(zero, low, x));
  nf shifted = fma_v(x, bcast(1.44269504f), bcast(12582912.0f));
  ni n = (ni)shifted - 0x4b400000;
  nf whole = shifted - 12582912.0f;
  nf r = fma_v(whole, bcast(-0.693359375f), x);
  r = fma_v(whole, bcast(2.12194440e-4f), r);
  nf p = bcast(1.9875691500e-4f);
  p = fma_v(p, r, bcast(1.3981999507e-3f));
  p = fma_v(p, r, bcast(8.3334519073e-3f));
  p = fma_v(p, r, bcast(4.1665795894e-2f));
  p = fma_v(p, r, bcast(1.6666665459e-1f));
  p = fma_v(p, r, bcast(5.0000001201e-1f));
  p = fma_v(p, r * r, r + 1.0f);
  return (nf)(((ni)p + (n << 23)) & ~zero);
}

// 0: SiLU; 1: GELU in its tanh form, as x times a logistic function.
AI nf activate(nf x, int kind) {
  nf z = x;
  if (kind == 1) z = (x * 1.5957691216f) * fma_v(x * x, bcast(0.044715f), bcast(1.0f));
  return x / (exp_v(-z) + 1.0f);
}

#endif
