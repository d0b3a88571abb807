// NEON twins of scalar.cpp and fused.cpp. Every AArch64 processor has it, so nothing asks whether it is there.
// Multiplication and addition stay separate on purpose (see kernels.h), but for add_codes.
#include "active.h"
#include "fused.h"

#include <arm_neon.h>

namespace gguf_flash {

namespace {

constexpr size_t lanes = 4;

void step(float * y, float32x4_t a, float32x4_t w) {
    vst1q_f32(y, vaddq_f32(vld1q_f32(y), vmulq_f32(a, w)));
}

void axpy_f32(const void * w, float a, float * y, size_t n) {
    const float * row = static_cast<const float *>(w);
    const float32x4_t va = vdupq_n_f32(a);
    const size_t body = n / lanes * lanes;
    for (size_t i = 0; i < body; i += lanes) {
        step(y + i, va, vld1q_f32(row + i));
    }
    scalar_kernels.axpy_f32(row + body, a, y + body, n - body);
}

void axpy_f16(const void * w, float a, float * y, size_t n) {
    const uint16_t * row = static_cast<const uint16_t *>(w);
    const float32x4_t va = vdupq_n_f32(a);
    const size_t body = n / 8 * 8;
    for (size_t i = 0; i < body; i += 8) {
        const float16x8_t halves = vreinterpretq_f16_u16(vld1q_u16(row + i));
        step(y + i, va, vcvt_f32_f16(vget_low_f16(halves)));
        step(y + i + 4, va, vcvt_high_f32_f16(halves));
    }
    scalar_kernels.axpy_f16(row + body, a, y + body, n - body);
}

void axpy_bf16(const void * w, float a, float * y, size_t n) {
    const uint16_t * row = static_cast<const uint16_t *>(w);
    const float32x4_t va = vdupq_n_f32(a);
    const size_t body = n / 8 * 8;
    for (size_t i = 0; i < body; i += 8) {
        const uint16x8_t halves = vld1q_u16(row + i);
        step(y + i, va, vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(halves), 16)));
        step(y + i + 4, va, vreinterpretq_f32_u32(vshll_high_n_u16(halves, 16)));
    }
    scalar_kernels.axpy_bf16(row + body, a, y + body, n - body);
}

// y[0..16) += a * (q * d)
void step_sixteen(float * y, float32x4_t a, int8x16_t q, float d) {
    const int16x8_t low = vmovl_s8(vget_low_s8(q)), high = vmovl_high_s8(q);
    step(y, a, vmulq_n_f32(vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))), d));
    step(y + 4, a, vmulq_n_f32(vcvtq_f32_s32(vmovl_high_s16(low)), d));
    step(y + 8, a, vmulq_n_f32(vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))), d));
    step(y + 12, a, vmulq_n_f32(vcvtq_f32_s32(vmovl_high_s16(high)), d));
}

void axpy_q8_0(const void * w, float a, float * y, size_t n) {
    const unsigned char * block = static_cast<const unsigned char *>(w);
    const float32x4_t va = vdupq_n_f32(a);
    for (size_t b = 0; b < n; b += block_values, block += q8_0_bytes) {
        const float d = code_scale(block);
        const int8_t * q = code_values(block);
        step_sixteen(y + b, va, vld1q_s8(q), d);
        step_sixteen(y + b + 16, va, vld1q_s8(q + 16), d);
    }
}

void axpy_q4_0(const void * w, float a, float * y, size_t n) {
    const unsigned char * block = static_cast<const unsigned char *>(w);
    const float32x4_t va = vdupq_n_f32(a);
    const int8x16_t eight = vdupq_n_s8(8);
    for (size_t b = 0; b < n; b += block_values, block += q4_0_bytes) {
        const float d = code_scale(block);
        const uint8x16_t packed = vld1q_u8(block + 2);
        const uint8x16_t low = vandq_u8(packed, vdupq_n_u8(15)), high = vshrq_n_u8(packed, 4);
        step_sixteen(y + b, va, vsubq_s8(vreinterpretq_s8_u8(low), eight), d);
        step_sixteen(y + b + 16, va, vsubq_s8(vreinterpretq_s8_u8(high), eight), d);
    }
}

// Eight vectors of y stay in registers while the rows pass.
void accumulate(const float * w, size_t ld, const float * a, size_t n_rows, float * y, size_t n) {
    constexpr size_t n_vectors = 8, tile = n_vectors * lanes;
    const size_t body = n / tile * tile;
    for_active(ld, a, n_rows, [&](const size_t * list, const float * factors, size_t n_active) {
        for (size_t i = 0; i < body; i += tile) {
            float32x4_t sum[n_vectors];
            GGUF_FLASH_UNROLL
            for (size_t v = 0; v < n_vectors; ++v) {
                sum[v] = vld1q_f32(y + i + v * lanes);
            }
            for (size_t r = 0; r < n_active; ++r) {
                const float32x4_t va = vdupq_n_f32(factors[r]);
                GGUF_FLASH_UNROLL
                for (size_t v = 0; v < n_vectors; ++v) {
                    sum[v] = vaddq_f32(sum[v], vmulq_f32(va, vld1q_f32(w + list[r] + i + v * lanes)));
                }
            }
            GGUF_FLASH_UNROLL
            for (size_t v = 0; v < n_vectors; ++v) {
                vst1q_f32(y + i + v * lanes, sum[v]);
            }
        }
    });
    scalar_kernels.accumulate(w + body, ld, a, n_rows, y + body, n - body);
}

// Two products of signed bytes, one factor being more than -128, fit 16 bits; four need 32.
void add_lane_neon(const int8_t * const * rows, const int8_t * q, const float * ds, float * acc, size_t n) {
    const size_t body = n / 8 * 8;
    for (size_t i = 0; i < body; i += 8) {
        const int16x8_t a =
            vmlal_s8(vmull_s8(vld1_s8(rows[0] + i), vdup_n_s8(q[0])), vld1_s8(rows[1] + i), vdup_n_s8(q[1]));
        const int16x8_t b =
            vmlal_s8(vmull_s8(vld1_s8(rows[2] + i), vdup_n_s8(q[2])), vld1_s8(rows[3] + i), vdup_n_s8(q[3]));
        const float32x4_t low = vcvtq_f32_s32(vaddl_s16(vget_low_s16(a), vget_low_s16(b)));
        const float32x4_t high = vcvtq_f32_s32(vaddl_high_s16(a, b));
        vst1q_f32(acc + i, vfmaq_f32(vld1q_f32(acc + i), vld1q_f32(ds + i), low));
        vst1q_f32(acc + i + 4, vfmaq_f32(vld1q_f32(acc + i + 4), vld1q_f32(ds + i + 4), high));
    }
    add_lane(rows, q, ds, acc, body, n);
}

void scale_tile(const uint16_t * scale, float d, float * ds, size_t n) {
    const size_t body = n / lanes * lanes;
    for (size_t i = 0; i < body; i += lanes) {
        vst1q_f32(ds + i, vmulq_n_f32(vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(scale + i))), d));
    }
    for (size_t i = body; i < n; ++i) {
        ds[i] = code_scale(reinterpret_cast<const uint8_t *>(scale + i)) * d;
    }
}

void add_codes(const CodeBlock & block, float * acc, size_t ld, size_t n) {
    add_tiles(block, acc, ld, n, scale_tile, add_lane_neon);
}

} // namespace

const Kernels neon_kernels = { "neon",    axpy_f32,           axpy_f16,    axpy_bf16, axpy_q8_0, axpy_q4_0, accumulate,
                               add_codes, scalar_list_marked, scalar_silu, nullptr,   nullptr,   nullptr };

} // namespace gguf_flash
