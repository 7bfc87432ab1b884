/* ggml's scale searches, restated: a few densities around "largest value on the largest quant", each followed by a
 * least-squares refit. Single precision and the order of summation are theirs, so that on blocks without an exact
 * representation the candidate they yield is the one that ggml's encoder would write, and the result is never worse.
 */
#include "kq_classic.h"

#include <math.h>

static const float tiny = 1e-15f; /* below it ggml takes a group for all zero */

/* Nearest integer of value in low..high, ties to even; NaN becomes low. */
static float nearest(float value, float low, float high) {
    const float shift = 12582912.0f; /* 1.5 * 2^23 */
    value = value > low ? value : low;
    value = value < high ? value : high;
    return (value + shift) - shift;
}

float kq_classic_scale(int n, int levels, const float *x, const float *w, int8_t *q) {
    float extreme = 0;
    for (int i = 0; q && i < n; ++i) q[i] = 0;
    for (int i = 0; i < n; ++i) {
        if (fabsf(x[i]) > fabsf(extreme)) extreme = x[i];
    }
    if (fabsf(extreme) < tiny) return 0;
    float scale = 0, best = 0, chosen = 0;
    for (int order = 0; order < 19; ++order) {
        int step = order == 0 ? 0 : order <= 9 ? order - 10 : order - 9;
        float density = -((float)levels + 0.1f * (float)step) / extreme;
        float lx = 0, ll = 0;
        for (int i = 0; i < n; ++i) {
            float l = nearest(density * x[i], (float)-levels, (float)(levels - 1));
            float weight = w ? w[i] : x[i] * x[i];
            lx += weight * x[i] * l;
            ll += weight * l * l;
        }
        if (order == 0) {
            scale = ll != 0 ? lx / ll : 0;
            best = scale * lx;
            chosen = density;
        } else if (ll > 0 && lx * lx > best * ll) {
            scale = lx / ll;
            best = scale * lx;
            chosen = density;
        }
    }
    for (int i = 0; q && i < n; ++i) q[i] = (int8_t)nearest(chosen * x[i], -levels, levels - 1);
    return scale;
}

float kq_classic_scale_stepwise(int n, int levels, const float *x) {
    float extreme = 0, l[16], lx = 0, ll = 0;
    for (int i = 0; i < n; ++i) {
        if (fabsf(x[i]) > fabsf(extreme)) extreme = x[i];
    }
    if (fabsf(extreme) < tiny) return 0;
    for (int i = 0; i < n; ++i) {
        float w = x[i] * x[i];
        l[i] = (float)nearest(-(float)levels / extreme * x[i], -levels, levels - 1);
        lx += w * x[i] * l[i];
        ll += w * l[i] * l[i];
    }
    for (int round = 0; round < 5; ++round) {
        int changed = 0;
        for (int i = 0; i < n; ++i) {
            float w = x[i] * x[i], other_lx = lx - w * x[i] * l[i];
            if (!(other_lx > 0)) continue;
            float other_ll = ll - w * l[i] * l[i];
            float next = (float)nearest(x[i] * other_ll / other_lx, -levels, levels - 1);
            if (next == l[i]) continue;
            other_lx += w * x[i] * next;
            other_ll += w * next * next;
            if (other_ll > 0 && other_lx * other_lx * ll > lx * lx * other_ll) {
                l[i] = next;
                lx = other_lx;
                ll = other_ll;
                changed = 1;
            }
        }
        if (!changed) break;
    }
    return ll > 0 ? lx / ll : 0;
}

static float measure(float diff, int magnitudes) {
    return magnitudes ? fabsf(diff) : diff * diff;
}

float kq_classic_scale_min(int n, int top, const float *x, const float *w, float first, float step, int steps,
                           int magnitudes, float *minimum) {
    float low = x[0], high = x[0], sum_w = w[0], sum_x = w[0] * x[0];
    for (int i = 1; i < n; ++i) {
        low = x[i] < low ? x[i] : low;
        high = x[i] > high ? x[i] : high;
        sum_w += w[i];
        sum_x += w[i] * x[i];
    }
    if (low > 0) low = 0;
    *minimum = -low;
    if (!(high > low)) return 0;
    float ceiling = (float)top, base = low, plain = ceiling / (high - low), best_scale = 1 / plain, best = 0;
    for (int i = 0; i < n; ++i) {
        float diff = best_scale * nearest(plain * (x[i] - low), 0, ceiling) + low - x[i];
        best += w[i] * measure(diff, magnitudes);
    }
    for (int s = 0; s <= steps; ++s) {
        /* Lattices span from the best minimum so far, as in the original. */
        float density = (first + step * (float)s + ceiling) / (high - base);
        float l[32], l_sum = 0, ll_sum = 0, lx_sum = 0;
        for (int i = 0; i < n; ++i) l[i] = nearest(density * (x[i] - base), 0, ceiling);
        for (int i = 0; i < n; ++i) {
            l_sum += w[i] * l[i];
            ll_sum += w[i] * l[i] * l[i];
            lx_sum += w[i] * l[i] * x[i];
        }
        float determinant = sum_w * ll_sum - l_sum * l_sum;
        if (!(determinant > 0)) continue;
        float this_scale = (sum_w * lx_sum - sum_x * l_sum) / determinant;
        float this_low = (ll_sum * sum_x - l_sum * lx_sum) / determinant;
        if (this_low > 0) {
            this_low = 0;
            this_scale = lx_sum / ll_sum;
        }
        float error = 0;
        for (int i = 0; i < n; ++i) {
            float diff = this_scale * l[i] + this_low - x[i];
            error += w[i] * measure(diff, magnitudes);
        }
        if (error < best) {
            best = error;
            best_scale = this_scale;
            base = this_low;
            *minimum = -this_low;
        }
    }
    return best_scale;
}

float kq_classic_positive(int n, int top, const float *x, const float *w, uint8_t *q) {
    float high = 0;
    for (int i = 0; i < n; ++i) high = x[i] > high ? x[i] : high;
    for (int i = 0; i < n; ++i) q[i] = 0;
    if (high < tiny) return 0;
    float density = (float)top / high, best = 0;
    for (int step = -5; step <= 4; ++step) {
        /* The first pass measures the plain density, the others those around it. */
        float candidate = step == -5 ? density : (0.1f * (float)step + (float)top) / high;
        if (step == 0) continue;
        float error = 0;
        for (int i = 0; i < n; ++i) {
            float diff = x[i] - 1 / candidate * nearest(candidate * x[i], 0, (float)top);
            error += w[i] * diff * diff;
        }
        if (step == -5 || error < best) {
            best = error;
            density = candidate;
        }
    }
    float lx = 0, ll = 0;
    for (int i = 0; i < n; ++i) {
        q[i] = (uint8_t)nearest(density * x[i], 0, (float)top);
        lx += w[i] * x[i] * q[i];
        ll += w[i] * q[i] * q[i];
    }
    for (int round = 0; round < 5; ++round) {
        int changed = 0;
        for (int i = 0; i < n; ++i) {
            float other_lx = lx - w[i] * x[i] * q[i], other_ll = ll - w[i] * q[i] * q[i];
            if (!(other_lx > 0 && other_ll > 0)) continue;
            float l = nearest(x[i] * other_ll / other_lx, 0, (float)top);
            if (l == (float)q[i]) continue;
            other_lx += w[i] * x[i] * l;
            other_ll += w[i] * l * l;
            if (other_lx * other_lx * ll > lx * lx * other_ll) {
                q[i] = (uint8_t)l;
                lx = other_lx;
                ll = other_ll;
                changed = 1;
            }
        }
        if (!changed) break;
    }
    return ll > 0 ? lx / ll : 0;
}
