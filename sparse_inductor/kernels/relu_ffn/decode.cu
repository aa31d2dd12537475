// The down projection of one token, see decode.py. Each warp finds active neurons with a warp vote, so that it can load
// their weights without waiting for other warps.
//
// Constants: WARPS and OUTPUTS per block; IS_BF16, bfloat16 or fp16; HAS_BIAS; HAS_RESIDUAL; PDL.

#include "device.cuh"

using u16 = unsigned short;

constexpr u32 SLOTS = 16 / OUTPUTS;  // slots per word, each with a lane per output

// Sum over the slots of each output, in a fixed order.
__device__ float across_slots(float sum) {
    for (u32 apart = OUTPUTS; apart < 32; apart *= 2) sum += __shfl_xor_sync(ALL, sum, apart);
    return sum;
}

// A block computes OUTPUTS outputs: sums of hidden activations times the weights of a row, over the non-zero activations in
// groups of 8. An inactive neuron adds nothing, even if its weight is inf or NaN.
//
// A warp processes two words of groups at a time, and then the next two after the words of all warps. A bit of a word is
// set if its group has a non-zero activation. Slot s takes the s-th of these groups, with one lane per output, until none
// is left. Sums are taken in a fixed order.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
    down_projection(const uint4* hidden, const u16* down, const u16* bias, const u16* residual, u16* out, u32 groups,
                    u32 word, u32 D, u32 stride, u32 residual_stride, void*, void*) {
    __shared__ float sums[WARPS * OUTPUTS];
    wait_for_previous();
    const u32 lane = lane_id(), output = blockIdx.x * OUTPUTS + lane % OUTPUTS, slot = lane / OUTPUTS % SLOTS;
    const bool second = lane >= 16;
    const uint4* row = reinterpret_cast<const uint4*>(down + u64(min(output, D - 1)) * stride);
    const float b = HAS_BIAS && output < D ? to_float<IS_BF16>(bias[output]) : 0;
    const float r = HAS_RESIDUAL && output < D ? to_float<IS_BF16>(residual[output * residual_stride]) : 0;
    float even = 0, odd = 0;
    for (u32 first = threadIdx.x / 32 * 2 * word; first < groups; first += WARPS * 2 * word) {
        uint4 h[2] = {};
        u32 rest[2];
        for (u32 w = 0; w < 2; w++) {
            const u32 group = first + w * word + lane;
            if (lane < word && group < groups) h[w] = hidden[group];
        }
        for (u32 w = 0; w < 2; w++) rest[w] = __ballot_sync(ALL, (h[w].x | h[w].y | h[w].z | h[w].w) & 0x7fff7fff);
        do {
            u32 mine = second ? rest[1] : rest[0];
#pragma unroll
            for (u32 ahead = 0; ahead < SLOTS - 1; ahead++)
                if (slot > ahead) mine &= mine - 1;
            const bool some = mine;
            const u32 group = first + (second ? word : 0) + highest(mine & -mine);
            uint4 weights, values;
            if (some) weights = row[group], values = hidden[group];
            mine &= mine - 1;
            rest[0] = __shfl_sync(ALL, mine, 15);
            rest[1] = __shfl_sync(ALL, mine, 31);
            if (!some) continue;
            const u32 v[] = {values.x, values.y, values.z, values.w};
            const u32 w[] = {weights.x, weights.y, weights.z, weights.w};
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const u32 active = w[i] & nonzero<IS_BF16>(v[i]);
                even = fmaf(to_float<IS_BF16>(v[i]), to_float<IS_BF16>(active), even);
                odd = fmaf(to_float<IS_BF16>(v[i] >> 16), to_float<IS_BF16>(active >> 16), odd);
            }
        } while (rest[0] | rest[1]);
    }
    const float sum = across_slots(even + odd);
    if (lane < OUTPUTS) sums[threadIdx.x / 32 * OUTPUTS + lane] = sum;
    __syncthreads();
    if (threadIdx.x >= 32) return;
    float y = sums[lane];
    for (u32 at = lane + 32; at < WARPS * OUTPUTS; at += 32) y += sums[at];
    y = across_slots(y) + b;
    if (HAS_RESIDUAL) y = to_float<IS_BF16>(from_float<IS_BF16>(y)) + r;  // round as the linear does
    if (lane < OUTPUTS && output < D) out[output] = from_float<IS_BF16>(y);
}
