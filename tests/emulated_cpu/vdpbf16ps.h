// vdpbf16ps in software, to the bit as Intel documents it, except for the payload of a NaN.
#pragma once

namespace ember::bf16_dot {

inline float flush(float x) { return __builtin_fabsf(x) < 0x1p-126f ? __builtin_copysignf(0.0f, x) : x; }

inline float odd_element(uint32_t pair) { return flush(widen(bf16{uint16_t(pair >> 16)})); }
inline float even_element(uint32_t pair) { return flush(widen(bf16{uint16_t(pair)})); }

inline Vec add_products(Vec sum, Pairs columns, Pairs inputs) {
    float total[kLanes];
    store(total, sum);
    for (int i = 0; i < kLanes; i++) {
        float first = flush(__builtin_fmaf(odd_element(columns[i]), odd_element(inputs[i]), flush(total[i])));
        total[i] = flush(__builtin_fmaf(even_element(columns[i]), even_element(inputs[i]), first));
    }
    return load(total);
}

}  // namespace ember::bf16_dot
